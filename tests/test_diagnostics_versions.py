"""ArviZ in its versions, and missing: what is imported when, and what is said."""

import importlib
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("pyro_sparsegp.diagnostics")

ROOT = Path(__file__).parents[1]


def test_what_is_missing_is_named_with_its_remedy(monkeypatch):
    for name in [name for name in sys.modules if name.startswith("pyro_sparsegp.diagnostics")]:
        monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, "arviz_stats", None)
    with pytest.raises(ImportError, match=r"needs arviz_stats.*pip install \"pyro-sparsegp\[diagnostics\]\""):
        importlib.import_module("pyro_sparsegp.diagnostics")


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
print(ours / theirs)
print(*{m.split(".")[0] for m in package - before})
"""


def test_importing_the_package_is_quick_and_leaves_arviz_alone(tmp_path):
    """Next to Pyro's own import, in the same process, so that a loaded machine says the same."""
    command = [sys.executable, "-c", IMPORTS, str(tmp_path)]
    out = subprocess.run(command, capture_output=True, text=True, check=True, cwd=ROOT).stdout
    ratio, package = out.splitlines()
    assert set(package.split()) == {"pyro", "pyro_sparsegp"}  # nothing that Pyro has not imported, but for its own
    assert float(ratio) < 0.2  # about 0.05
