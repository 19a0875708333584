"""ArviZ in its versions, and missing: what is imported when, and what is said."""

import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from pyro_sparsegp.families import SVGP

from .models import data, prepared, regression

pytest.importorskip("xarray")
diagnostics = pytest.importorskip("pyro_sparsegp.diagnostics")
weights = pytest.importorskip("pyro_sparsegp.diagnostics.weights")

ROOT = Path(__file__).parents[1]


@pytest.mark.parametrize("scale", [0.05, 1.0, 3.0])
def test_smoothing(scale):
    """log p − log q in; the wider log-normal weights are, the larger k-hat."""
    log_weights = scale * torch.randn(1000).numpy()
    found, khat = weights._smoothed(log_weights)
    assert abs(np.exp(found).sum() - 1) < 1e-6
    assert np.argmax(found) == np.argmax(log_weights)  # the largest stay the largest
    assert np.corrcoef(found, log_weights)[0, 1] > 0.95
    assert khat < 0.5 if scale < 1.5 else khat > 0.7


def test_what_is_missing_is_named_with_its_remedy(monkeypatch):
    x, y = data(num=30)
    guide = prepared(regression, SVGP(5), x, y)
    for module in ("arviz", "arviz_stats", "arviz_stats.base", "arviz_plots", "matplotlib"):
        monkeypatch.setitem(sys.modules, module, None)
    tree = diagnostics.to_datatree(regression, guide, x, y, num_samples=30, predict=x)
    # neither trees nor scores need ArviZ
    assert diagnostics.predictive_scores(regression, guide, x, y, num_samples=2).method == "gaussian"
    for module, call in (
        ("arviz_stats", lambda: diagnostics.psis(tree)),
        ("arviz_stats", lambda: diagnostics.loo(tree)),
        ("arviz_stats", lambda: diagnostics.compare({"a": tree})),
        ("matplotlib", lambda: diagnostics.plot_effects(guide.posterior(x)["f"])),
    ):
        with pytest.raises(ImportError, match=rf"needs {module}.*pip install \"pyro-sparsegp\[diagnostics\]\""):
            call()
    monkeypatch.setitem(sys.modules, "xarray", None)
    for call in (
        lambda: diagnostics.to_datatree(regression, guide, x, y, num_samples=30),
        lambda: diagnostics.prior_predictive(regression, x, num_samples=2),
    ):
        with pytest.raises(ImportError, match=r"needs xarray.*pip install \"pyro-sparsegp\[diagnostics\]\""):
            call()


IMPORTS = """
import compileall, sys, time
start = time.process_time()
import pyro
theirs, before = time.process_time() - start, set(sys.modules)
sys.pycache_prefix = sys.argv[1]  # compiled, as an installed package is
compileall.compile_dir("pyro_sparsegp", quiet=2)
start = time.process_time()
import pyro_sparsegp
ours, package = time.process_time() - start, set(sys.modules)
import pyro_sparsegp.diagnostics
print(ours / theirs)
print(*{m.split(".")[0] for m in package - before})
print(*{m.split(".")[0] for m in sys.modules})
"""


def test_importing_the_package_is_quick_and_leaves_arviz_alone(tmp_path):
    """Next to Pyro's own import, in the same process, so that a loaded machine says the same."""
    command = [sys.executable, "-c", IMPORTS, str(tmp_path)]
    out = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    ratio, package, everything = out.splitlines()
    assert set(package.split()) == {"pyro", "pyro_sparsegp"}  # nothing that Pyro has not imported, but for its own
    assert not {"arviz", "arviz_base", "arviz_stats", "xarray", "matplotlib", "pandas"} & set(everything.split())
    assert float(ratio) < 0.2  # about 0.05
