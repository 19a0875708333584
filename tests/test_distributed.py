"""Several processes, each with its share of the data, against one with all of it."""

import multiprocessing

import pytest
import torch

from . import group_worker

FORK = multiprocessing.get_context("fork")  # processes that have imported what they need
EP = ("all", "batches")
SVI = ("batches", "whole", "low rank", "gradients")
JOBS = [*(f"ep-{mode}" for mode in EP), *(f"svi-{mode}" for mode in SVI)]


def work(world, jobs, file):
    """Run the processes to their ends; the first of them is this one."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # as a process that is forked needs it
    workers = [FORK.Process(target=group_worker.work, args=(rank, world, file, jobs)) for rank in range(1, world)]
    for worker in workers:
        worker.start()
    try:
        group_worker.work(0, world, file, jobs)
        for worker in workers:
            worker.join(300)
    finally:
        for worker in workers:
            worker.kill()
        torch.set_num_threads(threads)
    assert [worker.exitcode for worker in workers] == [0] * (world - 1)
    return file


@pytest.fixture(scope="module")
def of_two(tmp_path_factory):
    """What two processes have found, of all jobs in one go."""
    return work(2, JOBS, tmp_path_factory.mktemp("two") / "meeting")


def require_as_one_process(file, world, job):
    expected = group_worker.run(job)
    for rank in range(world):
        for key, found in torch.load(f"{file}.{rank}.{job}").items():
            if found.numel():
                torch.testing.assert_close(found, expected[key], atol=1e-8, rtol=0, msg=key)


@pytest.mark.parametrize("job", JOBS)
def test_two_processes_are_one(of_two, job):
    require_as_one_process(of_two, 2, job)


@pytest.mark.filterwarnings("ignore:latent site .e. has a value for each datum")
def test_latents_of_rows_are_refused(monkeypatch):
    import pyro
    import pyro.distributions as dist

    from pyro_sparsegp import AutoSparseGP, GaussianProcess, fit, kernels
    from pyro_sparsegp.families import SVGP

    def model(x, y=None, size=None):
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5), x))
        with pyro.plate("data", size or len(x), subsample=x):
            e = pyro.sample("e", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Poisson((f + e).exp()), obs=y)

    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda group: 2)
    monkeypatch.setattr("pyro_sparsegp.numerics.processes.Workers.sum", lambda self, *values: list(values))
    x, y = torch.rand(12, 1), torch.ones(12)
    with pytest.raises(ValueError, match="site 'e' has a value for each row"):
        fit(model, AutoSparseGP(model, SVGP(4)), (x, y), steps=2, group=object(), progress=False)
