"""Every public name says what it is, and has a word for each of its arguments."""

import importlib
import inspect
import pkgutil
import re
import typing
from importlib.util import find_spec
from pathlib import Path

import pytest

import pyro_sparsegp

ROOT = Path(__file__).parent.parent


def public_packages():
    """The package, and each package within it that says what of it is public."""
    yield pyro_sparsegp
    for found in pkgutil.iter_modules(pyro_sparsegp.__path__, "pyro_sparsegp."):
        module = importlib.import_module(found.name) if found.ispkg else None
        if hasattr(module, "__all__"):
            yield module
    if find_spec("botorch"):
        yield importlib.import_module("pyro_sparsegp.interop.botorch")


# *args and **kwargs of a class are handed on to Pyro's base class; validate_args is that of every distribution.
HANDED_ON = {"self", "args", "kwargs", "validate_args"}


def public():
    """(name, object) of each public class and function, once."""
    seen = set()
    for module in public_packages():
        for name in module.__all__:
            value = getattr(module, name)
            if (inspect.isclass(value) or inspect.isroutine(value)) and id(value) not in seen:
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
HINTED = {"__init__", "__call__"}  # besides public methods
# For other modules of the package, not for users; and what Kernel.source tells of.
SILENT = {"site_modules", "source_inputs", "from_source"}


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
    silent = [method for method, _ in methods(value) if method not in SILENT and not _described(value, method)]
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


def test_packages():
    """What is walked here is what the reference has a page of."""
    names = {module.__name__.removeprefix("pyro_sparsegp.") for module in public_packages()} - {"guide"}
    pages = {page.stem for page in (ROOT / "docs" / "reference").glob("*.md")} - {"index"}
    assert {name.split(".")[0] for name in names} | {"interop"} == pages
    assert len(NAMES) > 100


def test_the_reference_has_every_name():
    page = (ROOT / "docs" / "reference" / "pyro_sparsegp.md").read_text()
    told = set(re.findall(r"^\.\. auto(?:class|function):: (\w+)", page, re.M))
    assert told == {name.removeprefix("pyro_sparsegp.") for name, _ in NAMES if name.count(".") == 1}


def described(value):
    """A function or class, and what of it has annotations of its own."""
    yield value
    for name, method in vars(value).items() if inspect.isclass(value) else ():
        method = inspect.unwrap(method.fget if isinstance(method, property) else getattr(method, "__func__", method))
        if inspect.isfunction(method) and (name in HINTED or not name.startswith("_")):
            yield method


@pytest.mark.parametrize(("name", "value"), [pytest.param(*pair, id=pair[0]) for pair in NAMES])
def test_type_hints(name, value):
    """Tools that read annotations, such as typing.get_type_hints, can resolve those of every public name."""
    if name.startswith("pyro_sparsegp.diagnostics"):
        pytest.importorskip("xarray")
        pytest.importorskip("arviz_plots")
    for part in described(value):
        hints = typing.get_type_hints(part)
        if name.startswith("pyro_sparsegp.diagnostics"):  # whose types are other libraries', and named all the same
            assert hints.get("return") is not typing.Any, part
