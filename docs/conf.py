"""The documentation site: ``sphinx-build -W docs docs/_build/html``."""

import base64
import json
import os
import re
import shutil
import tomllib
import urllib.request
from pathlib import Path

from docutils import nodes
from docutils.utils.math.latex2mathml import tex2mathml

import pyro_sparsegp

HERE = Path(__file__).parent
ROOT = HERE.parent

project = "pyro_sparsegp"
author = "The pyro_sparsegp developers"
copyright = author
version = release = pyro_sparsegp.__version__

extensions = [
    "myst_nb",
    "sphinx.ext.autodoc",
    "sphinx.ext.intersphinx",
    "sphinx.ext.viewcode",
    "sphinx_copybutton",
    "sphinx_design",
]
exclude_patterns = ["_build", "**/.ipynb_checkpoints"]
templates_path: list[str] = []

# Pages are MyST Markdown; notebooks are shown as they were executed and committed.
nb_execution_mode = "off"
nb_code_prompt_show = "Show imports and options"
myst_enable_extensions = ["colon_fence", "deflist", "dollarmath", "substitution"]
# Where the repository and its issues are, once set_address.py has written that.
urls = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"].get("urls", {})
links = {"Repository": urls.get("Homepage"), "Issues": urls.get("Issues")}
myst_substitutions = {"repository": "".join(f"[{name}]({address}) · " for name, address in links.items() if address)}
myst_heading_anchors = 3
suppress_warnings = ["mystnb.unknown_mime_type"]

html_theme = "furo"
html_math_renderer = "mathml"  # browsers show it by themselves: no script, no network
# Fonts that systems have: pages look the same without a network.
html_theme_options = {
    "light_css_variables": {
        "font-stack--monospace": "ui-monospace, SFMono-Regular, Menlo, Consolas, 'Liberation Mono', "
        "'DejaVu Sans Mono', 'Noto Sans Mono', monospace"
    }
}
if urls:
    html_theme_options |= {"source_repository": urls["Homepage"], "source_branch": "main", "source_directory": "docs/"}
html_title = f"pyro_sparsegp {release}"
html_static_path = ["_static"]
html_css_files = ["pages.css"]

autodoc_default_options = {"members": True, "member-order": "bysource"}
autodoc_typehints = "description"
autodoc_typehints_description_target = "documented_params"
autoclass_content = "class"

# Inventories of other projects are asked for one by one, so that a build without a network works, and is as strict.
INVENTORIES = {
    "python": "https://docs.python.org/3/",
    "torch": "https://docs.pytorch.org/docs/stable/",
    "pyro": "https://docs.pyro.ai/en/stable/",
}
intersphinx_timeout = 10


def reachable(address: str) -> bool:
    """Whether that project's inventory can be had now."""
    try:
        with urllib.request.urlopen(address + "objects.inv", timeout=intersphinx_timeout) as reply:
            return reply.status == 200
    except OSError:
        return False


offline = os.environ.get("DOCS_OFFLINE") == "1"
intersphinx_mapping = {
    name: (address, None) for name, address in INVENTORIES.items() if not offline and reachable(address)
}

linkcheck_anchors = False
linkcheck_timeout = 20


def copy_if_new(source: Path, target: Path, text: str | None = None) -> None:
    """Write only what has changed, so that a second build is quick."""
    content = source.read_bytes() if text is None else text.encode()
    target.parent.mkdir(parents=True, exist_ok=True)
    if not target.exists() or target.read_bytes() != content:
        target.write_bytes(content)


def gather(app: object) -> None:
    """Bring what lies elsewhere in the repository: notebooks, their last pictures, and the benchmarks' tables."""
    for notebook in sorted((ROOT / "tutorials").glob("*.ipynb")):
        # Links into docs/ are relative to tutorials/, which is a part of docs/ here.
        text = notebook.read_text().replace("](../docs/", "](../")
        copy_if_new(notebook, HERE / "tutorials" / notebook.name, text)
        pictures = [
            output["data"]["image/png"]
            for cell in json.loads(notebook.read_text())["cells"]
            for output in cell.get("outputs", [])
            if "image/png" in output.get("data", {})
        ]
        if pictures:
            picture = HERE / "_static" / "pictures" / f"{notebook.stem}.png"
            picture.parent.mkdir(parents=True, exist_ok=True)
            picture.write_bytes(base64.b64decode(pictures[0]))
    benchmarks = ROOT / "tests" / "benchmarks"
    for picture in sorted(benchmarks.glob("*.png")):
        copy_if_new(picture, HERE / "benchmarks" / picture.name)
    for table in sorted(benchmarks.glob("*.md")):
        text = table.read_text()
        if not text.startswith("# "):  # most begin with the command that made them
            text = f"# {table.stem}\n\n{text}"
        if not re.search(r"^## ", text, re.M):
            text = re.sub(r"^### ", "## ", text, flags=re.M)
        copy_if_new(table, HERE / "benchmarks" / table.name, text)
    shutil.copy(ROOT / "CHANGELOG.md", HERE / "changelog.md")
    shutil.copy(ROOT / "CONTRIBUTING.md", HERE / "contributing.md")


def relocate(app: object, name: str, source: list[str]) -> None:
    """Links that lead out of docs/ in the repository lead to what was brought here."""
    up = "../" * name.count("/")
    source[0] = re.sub(rf"\]\({re.escape(up)}\.\./(?:tests/)?(tutorials|benchmarks)/", rf"]({up}\1/", source[0])


def as_mathml(block: bool) -> tuple:
    """How a page's HTML gets a formula: as MathML, which docutils makes of its LaTeX."""

    def visit(writer: object, node: nodes.Element) -> None:
        formula = tex2mathml(node.astext(), as_block=block)
        writer.body.append(f'<div class="math">{formula}</div>' if block else formula)
        raise nodes.SkipNode

    return visit, None


def setup(app: object) -> None:
    """Register with Sphinx."""
    app.add_html_math_renderer("mathml", as_mathml(False), as_mathml(True))
    app.connect("builder-inited", gather)
    app.connect("source-read", relocate)
