"""fit: what it trains on, when it stops, and that a fit that was cut off goes on as if it had not been."""

import os
import signal
import subprocess
import sys

import numpy as np
import pyro
import pytest
import torch

from . import fit_worker

CASES = ["tensors", "loader", "sites", "EP", "EP, batches"]


class Cut(Exception):
    pass


def cut_after(step):
    def rule(iterates):
        if len(iterates) == step:
            raise Cut
        return False

    return rule


def require_equal(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("case", CASES)
def test_resumed_as_if_never_cut_off(case, tmp_path):
    torch.manual_seed(0)
    result, expected = fit_worker.run(case)  # no checkpoints at all: to write them changes nothing
    assert result.steps == fit_worker.STEPS
    pyro.clear_param_store()
    file = tmp_path / "fit.pt"
    with pytest.raises(Cut):
        fit_worker.run(case, checkpoint=file, checkpoint_every=0.0, stopping=cut_after(14))
    pyro.clear_param_store()  # a new process
    again, found = fit_worker.run(case, checkpoint=file, resume=True)
    require_equal(found, expected)
    np.testing.assert_array_equal(again.losses, result.losses)
    assert [p.name for p in tmp_path.iterdir()] == ["fit.pt"]


def test_killed_and_resumed(tmp_path):
    file = tmp_path / "fit.pt"
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    command = [sys.executable, fit_worker.__file__, "tensors", str(file), "10"]
    process = subprocess.run(command, env=environment, capture_output=True, text=True, timeout=120)
    assert process.returncode == -signal.SIGKILL, process.stderr
    _, expected = fit_worker.run("tensors")
    pyro.clear_param_store()
    again, found = fit_worker.run("tensors", checkpoint=file, resume=True)
    assert again.steps == fit_worker.STEPS
    require_equal(found, expected)
