"""Several processes, each with its share of the data, against one with all of it."""

import os
import subprocess
import sys

import pytest
import torch

from . import ep_worker, svi_worker


def work(worker, world, mode, file):
    """Run the processes to their ends."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    workers = [
        subprocess.Popen(
            [sys.executable, worker.__file__, str(rank), str(world), str(file), mode],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        for rank in range(world)
    ]
    outputs = [worker.communicate(timeout=300)[0] for worker in workers]
    assert all(worker.returncode == 0 for worker in workers), outputs


@pytest.mark.parametrize(("world", "mode"), [(2, "matched"), (2, "exact"), (2, "batches"), (4, "matched")])
def test_expectation_propagation(world, mode, tmp_path):
    file = tmp_path / "meeting"
    work(ep_worker, world, mode, file)
    expected = ep_worker.run(*ep_worker.classes(), mode)
    for rank in range(world):
        found = torch.load(f"{file}.{rank}")
        torch.testing.assert_close(torch.tensor(found["losses"]), torch.tensor(expected["losses"]), atol=1e-8, rtol=0)
        for key in ("mean", "variance", "inputs", "length", "scale"):
            torch.testing.assert_close(found[key], expected[key], atol=1e-8, rtol=0)
        assert found["status"]["f"]["change"] == pytest.approx(expected["status"]["f"]["change"], abs=1e-8)


def test_a_group_needs_torch_distributed():
    import pyro

    from pyro_sparsegp import AutoSparseGP, ExpectationPropagation
    from pyro_sparsegp.families import SparseEP

    guide = AutoSparseGP(ep_worker.model, SparseEP(4))
    with pytest.raises(ValueError, match="torchrun"):
        ExpectationPropagation(ep_worker.model, guide, pyro.optim.Adam({"lr": 0.1}), group="world")


def test_svi(tmp_path):
    file, modes = tmp_path / "meeting", ("batches", "whole", "loop", "low rank", "gradients")
    work(svi_worker, 2, ",".join(modes), file)
    for mode in modes:
        expected = svi_worker.run(svi_worker.share(0, 1, mode), mode)
        for rank in range(2):
            for key, found in torch.load(f"{file}.{rank}.{mode}").items():
                if found.numel():
                    torch.testing.assert_close(found, expected[key], atol=1e-8, rtol=0, msg=f"{mode}: {key}")


def test_a_joined_batch_of_one_process_is_its_own():
    from pyro_sparsegp.inference.distributed import joined, sharing

    value = torch.rand(3)
    with sharing(None):
        assert joined(value)[0] is value
