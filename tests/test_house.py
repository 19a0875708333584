"""The house: rooms stand in one order, and the code stays small and plain. Budgets only ever go down."""

import ast
import functools
import importlib
import importlib.util
import re
from collections import Counter
from pathlib import Path

import pytest

import pyro_sparsegp

ROOT = Path(pyro_sparsegp.__file__).parent
ORDER = [
    {"_version", "modules", "warned"},
    {"numerics"},
    {"kernels", "outputs"},
    {"process", "gaussians"},
    {"bases"},
    {"posterior"},
    {"approximations"},
    {"families"},
    {"distributions"},
    {"program"},
    {"guide"},
    {"predict"},
    {"inference"},
    {"diagnostics"},
    {"interop"},
]
FLOOR = {room: floor for floor, rooms in enumerate(ORDER) for room in rooms}
MODULES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix(".__init__"): path
    for path in sorted(ROOT.rglob("*.py"))
    if path != ROOT / "__init__.py"
}


def imported(name: str, path: Path) -> set[str]:
    """The package's modules that a module imports, anywhere in it."""
    package = name.split(".") if path.name == "__init__.py" else name.split(".")[:-1]
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            found |= {
                alias.name.removeprefix("pyro_sparsegp.") for alias in node.names if "pyro_sparsegp" in alias.name
            }
        if not isinstance(node, ast.ImportFrom) or (
            not node.level and not (node.module or "").startswith("pyro_sparsegp")
        ):
            continue
        base = package[: len(package) - node.level + 1] if node.level else []
        base = [*base, *(node.module or "").split(".")] if node.module else base
        base = [part for part in base if part != "pyro_sparsegp"]
        for alias in node.names:
            full = ".".join([*base, alias.name])
            found.add(full if full in MODULES else ".".join(base))
    return found - {""}


@functools.cache  # not when tests are collected, which every worker does
def imports() -> dict[str, set[str]]:
    return {name: imported(name, path) for name, path in MODULES.items()}


def test_every_room_has_its_floor():
    assert {name.split(".")[0] for name in MODULES} == set(FLOOR)


@pytest.mark.parametrize("room", sorted(FLOOR))
def test_imports_go_down(room):
    wrong = [
        f"{name} imports {other}"
        for name, others in imports().items()
        for other in others
        if name.split(".")[0] == room != other.split(".")[0] and FLOOR[other.split(".")[0]] >= FLOOR[room]
    ]
    assert not wrong


def test_there_is_no_circle():
    # A package's own __init__ gathers its modules: those import each other, not the package.
    state: dict[str, int] = {}
    circles = []

    def visit(name: str, path: list[str]) -> None:
        state[name] = 1
        for other in sorted(imports().get(name, ())):
            if other == name:
                continue
            if state.get(other) == 1:
                circles.append(" -> ".join([*(path[path.index(other) :] if other in path else ()), name, other]))
            elif other not in state:
                visit(other, [*path, name])
        state[name] = 2

    for name in MODULES:
        if name not in state:
            visit(name, [])
    assert not circles


def test_the_root_is_small():
    assert len(list(ROOT.glob("*.py"))) <= 8


BRANCHES = (ast.If, ast.IfExp, ast.BoolOp, ast.For, ast.While, ast.Try)
ALL_LINES = 25100
# Branches per 1,000 statements, at most: a wide line is not a simple one. 150 are aimed at, and 180 in these rooms.
ALL_BRANCHES = 146
ROOM_BRANCHES = {"guide": 160, "inference": 166.5, "program": 166.3, "bases": 142, "gaussians": 104, "diagnostics": 160}
ANY = 190  # arguments without a type
FILE_LINES = 408
FUNCTION_BRANCHES = 14
TEST_LINES = 28151


@functools.cache
def sources() -> dict[Path, tuple[list[str], ast.Module]]:
    texts = {path: path.read_text() for path in sorted(ROOT.rglob("*.py"))}
    return {path: (text.splitlines(), ast.parse(text)) for path, text in texts.items()}


def counted(kinds, tree) -> int:
    return sum(isinstance(node, kinds) for node in ast.walk(tree))


def test_the_house_keeps_its_lines():
    assert sum(len(lines) for lines, _ in sources().values()) <= ALL_LINES


def test_branches_per_statement():
    branches, statements = Counter(), Counter()
    for path, (_, tree) in sources().items():
        first = path.relative_to(ROOT).parts[0]
        room = "root" if first.endswith(".py") else first
        branches[room] += counted(BRANCHES, tree)
        statements[room] += counted(ast.stmt, tree)
    found = {room: 1000 * branches[room] / statements[room] for room in ROOM_BRANCHES}
    assert {room: share for room, share in found.items() if share > ROOM_BRANCHES[room]} == {}
    assert 1000 * branches.total() / statements.total() <= ALL_BRANCHES


def test_arguments_have_types():
    nodes = [node for _, tree in sources().values() for node in ast.walk(tree) if isinstance(node, ast.arg)]
    assert sum(node.annotation is not None and ast.unparse(node.annotation) == "Any" for node in nodes) <= ANY


def test_files_and_functions_are_short():
    assert {str(path): len(lines) for path, (lines, _) in sources().items() if len(lines) > FILE_LINES} == {}
    functions = [
        (f"{path}:{node.lineno}", counted(BRANCHES, node))
        for path, (_, tree) in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.FunctionDef)
    ]
    assert [(where, num) for where, num in functions if num > FUNCTION_BRANCHES] == []


def is_truth(node) -> bool:
    """Whether an expression is a truth value: by its form, or by its name."""
    if isinstance(node, (ast.Call, ast.Attribute, ast.Name)):
        name = getattr(node, "func", node)
        return re.match(r"bool$|(is|has|are|can|or)_", getattr(name, "id", getattr(name, "attr", ""))) is not None
    return isinstance(node, (ast.Compare, ast.BoolOp)) or isinstance(getattr(node, "op", None), ast.Not)


def repeats(one, other) -> bool:
    """Whether ``one`` is a text, a list or a tuple, or any value, that a truth value ``other`` keeps or drops."""
    written = isinstance(one, (ast.List, ast.Tuple, ast.JoinedStr)) or isinstance(getattr(one, "value", 0), str)
    says_so = isinstance(getattr(other, "op", None), ast.Not) or getattr(getattr(other, "func", 0), "id", "") == "bool"
    return says_so or (written and is_truth(other))


def test_truth_values_are_no_factors():
    assert repeats(*(ast.parse(text, mode="eval").body for text in ("[name]", "jumps or flat")))
    products = [
        (f"{path}:{node.lineno}", node.left, node.right)
        for path, (_, tree) in sources().items()
        for node in ast.walk(tree)
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Mult)
    ]
    assert [where for where, a, b in products if repeats(a, b) or repeats(b, a)] == []


def test_nobody_walks_the_stack():
    walks = ("currentframe", "_getframe", "inspect.stack", "f_back", "walk_stack")
    found = [str(path) for path, (lines, _) in sources().items() if any(w in line for line in lines for w in walks)]
    assert found == []


def test_the_tests_that_comments_name_are_there():
    """Or a guard would stand with no reason that anyone could try."""
    trees = [ast.parse(path.read_text()) for path in (ROOT.parent / "tests").glob("*.py")]
    known = {
        node.name for tree in trees for node in ast.walk(tree) if isinstance(node, (ast.FunctionDef, ast.ClassDef))
    }
    named = {
        (str(path), name)
        for path, (lines, _) in sources().items()
        for line in lines
        for name in re.findall(r"\btest_\w+\b(?!\.py)", line)
    }
    assert {(path, name) for path, name in named if name not in known} == set()


def test_tests_and_benchmarks_keep_their_lines():
    assert sum(len(path.read_text().splitlines()) for path in (ROOT.parent / "tests").rglob("*.py")) <= TEST_LINES


def test_what_benchmarks_and_tutorials_import_is_there():
    """They are run now and then; a name that has moved shows at once."""
    root = ROOT.parent
    for path in [*(root / "tests" / "benchmarks").glob("*.py"), *(root / "tutorials").glob("*.py")]:
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.ImportFrom) and not node.level and (node.module or "").startswith("pyro_sparsegp"):
                module = importlib.import_module(node.module)
                absent = [a.name for a in node.names if not hasattr(module, a.name) and not _is_module(node, a.name)]
                assert not absent, f"{path.name}, line {node.lineno}: {absent} not in {node.module}"
    shared = ast.parse((root / "tests" / "benchmarks" / "bench.py").read_text()).body
    known = {node.name for node in shared if isinstance(node, (ast.FunctionDef, ast.ClassDef))} | {"HERE"}
    for path in (root / "tests" / "benchmarks").glob("*.py"):
        assert {*re.findall(r"\bbench\.(\w+)", path.read_text())} <= known | {"py", "import"}, path.name


def _is_module(node, name):
    return importlib.util.find_spec(f"{node.module}.{name}") is not None
