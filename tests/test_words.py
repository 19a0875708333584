"""Plain words: phrases that make a reader read a sentence twice do not come back."""

import ast
import re
from pathlib import Path

import pyro_sparsegp

ROOT = Path(__file__).parent.parent
PHRASES = re.compile(
    r"\b(of|by|for|from|at|beside) (which|whose)\b|\bthose of\b|\bthe same of\b|\bas of\b|\bof theirs\b|\bas ever\b"
    r"|\b(is|are) told of\b|\basked for\b|\bin the place of\b|\bno part of\b|\b(is|are|too) dear\b|\bwants\b"
    r"|\bin hand\b|\bto be had\b|\bwhat there is\b|\bbesides\b|\bnothing else has to\b|\bdefault none\b|[^\w]say[.,;)]"
    r"|\bin the company of\b|\bthough there be\b|\bgo on alike\b|\) a (step|row|term|site)\b|\bbasis a\b|\bare asked\b"
    r"|\btells? (of|the plate)\b|\bgood_k = |\bno (matrix|number) of\b|\bas (the )?others are\b|\bnot arrived\b"
)
MADE = {"docs/changelog.md", "docs/contributing.md", "docs/benchmarks"}  # by a build of the site


def found(text):
    prose = re.sub(r"```.*?```|`[^`]*`", "`", text, flags=re.S)
    return [match[0] for match in PHRASES.finditer(re.sub(r"\s+", " ", prose))]


def pages():
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        where = page.relative_to(ROOT).as_posix()
        if where not in MADE and "/".join(where.split("/")[:2]) not in MADE:
            yield where, page.read_text()
    for tutorial in (ROOT / "tutorials").glob("*.py"):
        lines = tutorial.read_text().splitlines()
        yield tutorial.name, "\n".join(line[2:] for line in lines if line.startswith("# "))


def docstrings():
    """Everybody's, whether the reference shows them or not."""
    for path in Path(pyro_sparsegp.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, (ast.Module, ast.ClassDef, ast.FunctionDef)):
                name = getattr(node, "name", "")
                yield f"{path.name}: {name}", ast.get_docstring(node) or ""


def messages():
    """What warnings and errors say, wherever in the package."""
    for path in Path(pyro_sparsegp.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            name = ast.unparse(node.func).split(".")[-1] if isinstance(node, ast.Call) else ""
            if name.lower().startswith("warn") or name.endswith(("Error", "Warning")):
                parts = [part.value for part in ast.walk(node) if isinstance(part, ast.Constant)]
                yield f"{path.name}:{node.lineno}", " ".join(part for part in parts if isinstance(part, str))


def test_phrases_do_not_come_back():
    everything = [*pages(), *docstrings(), *messages()]
    wrong = {where: hits for where, text in everything if (hits := found(text))}
    assert not wrong, "\n".join(f"{where}: {', '.join(hits)}" for where, hits in wrong.items())


def sentences(text):
    """Sentences of prose; a list's items are apart, and code in a line counts as one word."""
    prose = re.sub(r"```.*?```", "\n\n", text, flags=re.S)
    prose = "\n".join(line for line in prose.splitlines() if not line.startswith(("|", "#", "!")))
    prose = re.sub(r"`[^`]*`", "x", re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", prose))
    for part in re.split(r"\n\s*\n|\n(?=\* )", prose):
        yield from (found for found in re.split(r"(?<=[.?!:;])\s+", part.strip()) if len(found.split()) > 2)


def test_sentences_of_how_to_pages_are_short():
    """17 words on average, on each page."""
    for page in (ROOT / "docs" / "how-to").glob("*.md"):
        lengths = [len(sentence.split()) for sentence in sentences(page.read_text())]
        assert sum(lengths) <= 17 * len(lengths), page.name


def test_code_is_shown_whole():
    """Lines of code on pages are at most 88 columns wide."""
    wide = []
    for where, text in pages():
        for block in re.findall(r"^```(?:python|py)\n(.*?)^```", text, re.M | re.S):
            wide += [f"{where}: {line}" for line in block.splitlines() if len(line) > 88]
    assert not wide, "\n".join(wide)
