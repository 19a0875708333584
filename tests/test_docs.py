"""The programs of README, the how-to pages and the pages of families run as they stand."""

import inspect
import json
import re
import runpy
import subprocess
import sys
import tomllib
from pathlib import Path

import pyro
import pytest
import torch

from pyro_sparsegp import families, kernels
from pyro_sparsegp.program.rules import RULES

ROOT = Path(__file__).parent.parent


def blocks(page):
    """The Python blocks of a page, each on its own lines, so that an error names the line of the page."""
    text = page.read_text()
    for found in re.finditer(r"^```python\n(.*?)^```", text, re.M | re.S):
        yield "\n" * text[: found.start(1)].count("\n") + found[1]


def short(program):
    """The program, on the same lines, with 2 steps, 50 draws, as plot_ppc_dist wants, 5 of a chain, and 50 points."""
    program = re.sub(r"(\bfit\(model, guide, \(x, y\))\)", r"\1, steps=2)", program)
    program = re.sub(r"(MCMC\(\w+, num_samples=)\d+", r"\g<1>5", program)
    program = re.sub(r"(\brange\(|steps=)(\d+)\b", lambda m: f"{m[1]}{min(2, int(m[2]))}", program)
    program = re.sub(r"\b(num_samples=|draws\()[1-9]\d\d+\b", r"\g<1>50", program)
    return re.sub(r"(\.integrate\(.*)\)$", r"\1, num_points=50)", program, flags=re.M)


IN_FULL = pytest.mark.parametrize("run", [short, pytest.param(str, id="in full", marks=pytest.mark.slow)])


LONG = "state-space", "dose-response", "survival", "row-effects", "spatial"  # which integrate and check


def pages():
    docs = ROOT / "docs"
    found = [ROOT / "README.md", *sorted(docs.glob("how-to/*.md")), *sorted(docs.glob("explanation/families/*.md"))]
    marks = {page: [pytest.mark.slow] * (page.stem in LONG) for page in found}
    return [
        pytest.param(page, id=f"{page.parent.stem}/{page.stem}", marks=marks[page])
        for page in found
        if any(blocks(page))
    ]


@IN_FULL
@pytest.mark.parametrize("page", pages())
def test_how_to(page, run, tmp_path, monkeypatch):
    if run is short:  # a fit's notes are a short check
        monkeypatch.setattr("pyro_sparsegp.guide.auto.check", lambda *args: [])
        monkeypatch.setattr("pyro_sparsegp.guide.nested._EVALUATIONS", 8)
    torch.set_default_dtype(torch.float32)  # as a reader's session starts
    monkeypatch.chdir(tmp_path)
    namespace = {"__name__": page.stem}
    for block in blocks(page):
        exec(compile(run(block), str(page), "exec"), namespace)
    pyro.clear_param_store()


@pytest.mark.slow  # a session of its own; in short it is run as the pages are
def test_readme(tmp_path):
    program = next(blocks(ROOT / "README.md"))
    ran = subprocess.run(
        [sys.executable, "-W", "error::UserWarning", "-c", program],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert ran.returncode == 0, ran.stderr


def test_readme_is_short_and_its_links_lead_somewhere():
    text = (ROOT / "README.md").read_text()
    assert len(text.encode()) <= 6 * 1024
    links = re.findall(r"\]\(([^)#\s]+)", text)
    assert links
    inside = [re.sub(r"^https://.*?/(blob/)?main/", "", link) for link in links]
    assert [link for link in inside if "://" not in link and not (ROOT / link).exists()] == []


def test_each_rule_is_on_the_page_of_refusals_with_its_reason():
    text = (ROOT / "docs" / "how-to" / "refusals.md").read_text()
    every = [rule for rules in RULES.values() for rule in rules]
    wanted = {f"{rule.__name__.replace('_', ' ')} | {' '.join(rule.__doc__.split())} |".lower() for rule in every}
    found = {line.split(" | ", 1)[1].lower() for line in text.splitlines() if line.startswith(("| At ", "| Where "))}
    assert found == wanted


def test_pages_show_what_their_programs_make():
    """docs/run_pages.py writes the output under a program, and draws the picture."""
    for page in [*(ROOT / "docs" / "how-to").glob("*.md"), *(ROOT / "docs" / "explanation" / "families").glob("*.md")]:
        text = page.read_text()
        assert "```text\n```" not in text, page.name
        assert all((page.parent / name).exists() for name in re.findall(r"\]\((pictures/.*?)\)", text)), page.name
        if page.parent.stem == "families" and page.stem != "index":
            assert any(blocks(page)), page.name
            assert "](pictures/" in text, page.name


@pytest.mark.parametrize("module", [families, kernels], ids=["families", "kernels"])
def test_the_reference_has_all_names(module):
    text = (ROOT / "docs" / "reference" / f"{module.__name__.split('.')[-1]}.md").read_text()
    assert sorted(re.findall(r"auto(?:class|function):: (\w+)", text)) == sorted(module.__all__)


def test_links_between_pages_lead_somewhere_in_the_repository():
    """And on the site, where conf.py's relocate turns those that leave docs/."""
    made = {"changelog.md", "contributing.md", "benchmarks", "tutorials"}  # brought into docs/ by a build
    pages = [page for page in (ROOT / "docs").rglob("*.md") if page.relative_to(ROOT / "docs").parts[0] not in made]
    links = [(page, link) for page in pages for link in re.findall(r"\]\(([^)#\s]+)", page.read_text())]
    dead = [(page.name, link) for page, link in links if "://" not in link and not (page.parent / link).exists()]
    assert len(pages) > 40
    assert dead == []


def test_notebooks_open_with_a_question_and_close_with_what_to_try_next():
    for notebook in sorted((ROOT / "tutorials").glob("*.ipynb")):
        cells = json.loads(notebook.read_text())["cells"]
        assert re.search(r"^\*.*\?\*$", "".join(cells[0]["source"]), re.M), notebook.name
        assert "".join(cells[-1]["source"]).startswith("## What to try next"), notebook.name
        assert any("assert" in "".join(cell["source"]) for cell in cells), notebook.name


def test_each_family_has_a_page_that_says_when():
    pages = [page for page in (ROOT / "docs" / "explanation" / "families").glob("*.md") if page.stem != "index"]
    text = "\n".join(page.read_text() for page in pages)
    recipes = [name for name in families.__all__ if not inspect.isabstract(getattr(families, name))]
    assert [name for name in recipes if name != "SparseGP" and f"families.{name}`" not in text] == []
    for page in pages:
        found = page.read_text()
        assert all(f"**{word}" in found for word in ("Cost.", "Take it", "Leave it", "Paper.")), page.name
        assert "$$" in found or "=" in found, page.name  # an equation


def test_each_tutorial_and_benchmark_is_listed():
    index = (ROOT / "docs" / "tutorials" / "index.md").read_text()
    names = {path.stem for path in (ROOT / "tutorials").glob("*.ipynb")}
    assert set(re.findall(r"^:link: (\w+)$", index, re.M)) == names
    told = (ROOT / "docs" / "explanation" / "benchmarks.md").read_text()
    tables = [path.name for path in (ROOT / "tests" / "benchmarks").glob("*.md")]
    assert [name for name in tables if f"benchmarks/{name})" not in told] == []


def test_an_address_completes_what_names_it():
    """docs/set_address.py, for the day that the repository has one."""
    scope = runpy.run_path(str(ROOT / "docs" / "set_address.py"))
    address = "https://github.com/some-organisation/pyro_sparsegp"
    readme = scope["with_badges"](scope["absolute"]((ROOT / "README.md").read_text(), address), address)
    links = re.findall(r"\]\(([^)]+)", readme)
    assert all(link.startswith("https://") for link in links)
    assert f"{address}/blob/main/CONTRIBUTING.md" in links
    assert len(readme.encode()) <= 6 * 1024
    badges = re.findall(r"badge.svg\)\]\(.*/actions/workflows/(.*)\)", readme)
    assert {path.name for path in (ROOT / ".github" / "workflows").glob("*.yml")} == {*badges}
    project = (ROOT / "pyproject.toml").read_text()
    if "[project.urls]" not in project:
        assert tomllib.loads(scope["with_urls"](project, address))["project"]["urls"]["Homepage"] == address
    assert f'repository-code: "{address}"' in scope["with_repository"]((ROOT / "CITATION.cff").read_text(), address)
