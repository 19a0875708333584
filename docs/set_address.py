"""Say where the repository lives, once that is known: ``python docs/set_address.py https://github.com/OWNER/NAME``.

Writes ``[project.urls]``, makes README's links absolute, as package indexes need them, gives it the badges of the
workflows in ``.github``, and completes CITATION.cff.
"""

import re
import sys
from pathlib import Path

ROOT = Path(__file__).parent.parent


def absolute(readme: str, address: str) -> str:
    """README with its links to files of the repository as addresses; pictures as the files themselves."""
    raw = address.replace("https://github.com/", "https://raw.githubusercontent.com/") + "/main/"
    readme = re.sub(r"(!\[[^\]]*\]\()(?!https?:|#)", rf"\g<1>{raw}", readme)
    return re.sub(r"(\]\()(?!https?:|#)", rf"\g<1>{address}/blob/main/", readme)


def with_badges(readme: str, address: str) -> str:
    """README with a badge of each workflow, below its title."""
    names = {"CI": "ci.yml", "Documentation": "pages.yml"}
    runs = {name: f"{address}/actions/workflows/{file}" for name, file in names.items()}
    badges = "\n".join(f"[![{name}]({run}/badge.svg)]({run})" for name, run in runs.items())
    return re.sub(r"\A(# .*\n)", rf"\g<1>\n{badges}\n", readme)


def with_urls(project: str, address: str) -> str:
    """pyproject.toml with ``[project.urls]``, before its optional dependencies."""
    if "[project.urls]" in project:
        raise ValueError("pyproject.toml has [project.urls] already: change them there")
    urls = {"Homepage": "", "Documentation": "/blob/main/docs/index.md", "Issues": "/issues"}
    urls |= {"Changelog": "/blob/main/CHANGELOG.md"}
    lines = "".join(f'{name} = "{address}{path}"\n' for name, path in urls.items())
    return project.replace(
        "[project.optional-dependencies]", f"[project.urls]\n{lines}\n[project.optional-dependencies]"
    )


def with_repository(citation: str, address: str) -> str:
    """CITATION.cff with ``repository-code``."""
    return citation.replace("license: ", f'repository-code: "{address}"\nlicense: ', 1)


if __name__ == "__main__":
    if len(sys.argv) != 2 or not re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+", sys.argv[1]):
        raise SystemExit(__doc__)
    changes = {"pyproject.toml": [with_urls], "README.md": [absolute, with_badges], "CITATION.cff": [with_repository]}
    for name, change in [(name, change) for name, found in changes.items() for change in found]:
        path = ROOT / name
        path.write_text(change(path.read_text(), sys.argv[1]))
