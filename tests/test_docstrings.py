"""Every public name says what it is, and has a word for each of its arguments."""

import importlib
import inspect
import re
import typing
from importlib.util import find_spec

import pytest

MODULES = ("", ".families", ".kernels", ".bases", ".distributions", ".inference", ".diagnostics")
MODULES += (".interop.botorch",) if find_spec("botorch") else ()
# *args and **kwargs of a class are handed on to Pyro's base class; validate_args is that of every distribution.
HANDED_ON = {"self", "args", "kwargs", "validate_args"}


def public():
    """(name, object) of each public class and function, once."""
    seen = set()
    for suffix in MODULES:
        module = importlib.import_module(f"pyro_sparsegp{suffix}")
        for name in module.__all__:
            value = getattr(module, name)
            if callable(value) and id(value) not in seen:
                seen.add(id(value))
                yield f"{module.__name__}.{name}", value


def arguments(value):
    if inspect.isclass(value) and issubclass(value, Warning):  # whose signature is Python's own
        return {}
    found = inspect.signature(value).parameters
    return {name: one for name, one in found.items() if name not in HANDED_ON and not name.startswith("_")}


def methods(cls):
    """The public methods that a class of this package defines, whatever class of its own they are inherited from."""
    for name, method in inspect.getmembers(cls, inspect.isfunction):
        if not name.startswith("_") and method.__module__.startswith("pyro_sparsegp"):
            yield name, method


NAMES = list(public())
SILENT = {"AutoSparseGP": {"declared_families", "site_modules"}}  # for other modules of the package, not for users


@pytest.mark.parametrize(("name", "value"), [pytest.param(*pair, id=pair[0]) for pair in NAMES])
def test_arguments(name, value):
    text = value.__doc__ or ""
    assert text.strip(), f"{name} has no docstring"
    missing = [a for a in arguments(value) if not re.search(rf":param {re.escape(a)}:", text)]
    assert not missing, f"{name}'s docstring has no ':param ...:' for {missing}"
    told = re.findall(r":param (\w+):", text)
    unknown = {*told} - {*arguments(value), *HANDED_ON, *getattr(value, "__annotations__", ())}
    assert not unknown, f"{name}'s docstring tells of arguments that it does not have: {unknown}"
    assert len(told) == len(set(told)), f"{name}'s docstring has an argument twice"


@pytest.mark.parametrize(("name", "value"), [pytest.param(*p, id=p[0]) for p in NAMES if inspect.isclass(p[1])])
def test_methods(name, value):
    """A public method has a docstring, of its own or of the method that it implements."""
    known = SILENT.get(value.__name__, set())
    silent = [method for method, _ in methods(value) if method not in known and not _described(value, method)]
    assert not silent, f"{name} has public methods without a docstring: {silent}"


def _described(cls, method):
    return any(inspect.getdoc(base.__dict__[method]) for base in cls.__mro__ if method in base.__dict__)


def test_no_slang():
    """Papers go by their authors, in the package as in the documentation."""
    import pyro_sparsegp

    root = importlib.resources.files(pyro_sparsegp)
    found = [
        f"{path.name}:{number}: {line.strip()}"
        for path in sorted(root.rglob("*.py"))
        for number, line in enumerate(path.read_text().splitlines(), 1)
        if re.search(r"\bpaper [0-9]\b", line, re.I)
    ]
    assert not found, "\n".join(found)


# Which the diagnostics name in annotations, and do not import before they are used.
LATER = dict.fromkeys(["DataArray", "DataFrame", "DataTree", "ELPDData", "Figure", "PlotCollection"], object)


def test_type_hints():
    """Tools that read annotations, such as typing.get_type_hints, can resolve those of every public name."""
    for name, value in NAMES:
        own = LATER if name.startswith("pyro_sparsegp.diagnostics") else None
        assert typing.get_type_hints(value, localns=own) is not None
        if inspect.isclass(value):
            assert typing.get_type_hints(value.__init__, localns=own) is not None
