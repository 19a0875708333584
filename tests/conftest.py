import gc
import os

import pytest

# PyTorch and Pyro are imported where they are used: the process that hands tests to workers needs neither.

if "PYTEST_XDIST_WORKER" in os.environ:  # the workers share the cores; threads that spin for them cost dearly
    os.environ["OMP_NUM_THREADS"] = "1"


@pytest.hookimpl(tryfirst=True)  # -m chooses among the marks that are here
def pytest_collection_modifyitems(config, items):
    import torch

    chosen, unmet = config.getoption("-m"), {}
    for item in items:
        for mark in item.iter_markers("quick"):
            parts = {*" | ".join(mark.args).split(" | ")}
            met = {part for part in parts if f"-{part}-" in f"-{item.callspec.id}-"}
            unmet[item.function] = unmet.get(item.function, parts) - met
            if not met:
                item.add_marker("slow")
        if "slow" in item.keywords and "slow" not in chosen:
            item.add_marker(pytest.mark.skip(reason="slow: run with -m slow"))
        if "cuda" in item.keywords and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="no CUDA device"))
    if any(unmet.values()) and not any("::" in name for name in config.args):  # whole files
        raise pytest.UsageError(f"no member has these names: { {test.__name__: p for test, p in unmet.items() if p} }")


@pytest.hookimpl(wrapper=True)
def pytest_collect_file():
    """No file of tests has an example in a docstring to look for, and to look costs a second a worker."""
    return [found for found in (yield) if type(found).__name__ != "DoctestModule"]


def pytest_collection_finish():
    gc.collect()
    gc.freeze()  # what was imported is not looked through again at every collection
    gc.set_threshold(20_000, 10, 20)  # graphs have few cycles: the default looks for them every 700 objects


@pytest.fixture(autouse=True)
def fresh():
    """Every test starts in float64, seeded, with an empty parameter store."""
    import pyro
    import torch

    torch.set_default_dtype(torch.float64)
    pyro.set_rng_seed(0)
    pyro.clear_param_store()
    yield
    torch.set_default_dtype(torch.float32)


@pytest.fixture
def few_draws(monkeypatch):
    """A check by a third of its draws and searches, where it is not their number that a test asks about."""
    monkeypatch.setattr("pyro_sparsegp.guide.check.Compared.num_draws", (16, 4, 40))
    for name, few in {"check._STARTS": 2, "check._OWN": 40, "adaptive._FEWEST": 1, "bounds._BOUNDS": 16}.items():
        monkeypatch.setattr(f"pyro_sparsegp.guide.{name}", few)


@pytest.fixture(params=["cpu", pytest.param("cuda", marks=pytest.mark.cuda)])
def device(request):
    import torch

    return torch.device(request.param)
