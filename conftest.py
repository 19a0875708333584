"""Names that the docstrings' examples use."""

from importlib.util import find_spec

import pytest

collect_ignore = [] if find_spec("botorch") else ["pyro_sparsegp/interop/botorch.py"]


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config, log):
    """A file's tests go to one worker, so that what its fixtures make is made once."""
    from xdist.scheduler import LoadFileScheduling

    return LoadFileScheduling(config, log) if config.getvalue("dist") == "load" else None


@pytest.fixture(autouse=True)
def names(request):
    if request.node.__class__.__name__ == "DoctestItem":
        import pyro_sparsegp

        namespace = request.getfixturevalue("doctest_namespace")
        namespace.update({name: getattr(pyro_sparsegp, name) for name in pyro_sparsegp.__all__})
        namespace["RBF"] = pyro_sparsegp.kernels.RBF
