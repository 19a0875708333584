"""Names that the docstrings' examples use."""

import pytest


@pytest.fixture(autouse=True)
def names(request):
    if request.node.__class__.__name__ == "DoctestItem":
        import pyro_sparsegp

        namespace = request.getfixturevalue("doctest_namespace")
        namespace.update({name: getattr(pyro_sparsegp, name) for name in pyro_sparsegp.__all__})
        namespace["RBF"] = pyro_sparsegp.kernels.RBF
