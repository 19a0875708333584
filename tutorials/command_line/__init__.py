"""What the tutorials ask on the command line. In a notebook nothing is asked: the defaults hold.

Imported before matplotlib.pyplot: on the command line pictures go to files.
"""

import argparse
import sys
from pathlib import Path

import matplotlib

IN_NOTEBOOK = "ipykernel" in sys.modules
if not IN_NOTEBOOK:
    matplotlib.use("Agg")


def options(description, device=True, **numbers):
    """``--out DIR``, ``--device``, and whole numbers by name, each a default and its help.

    ``full`` says that none of the numbers was changed: what a tutorial claims is asserted then, not in short runs.
    """
    parser = argparse.ArgumentParser(description=description)
    if device:
        parser.add_argument("--device", default="cpu", help="cpu or cuda")
    for name, (default, text) in numbers.items():
        parser.add_argument(f"--{name}", type=int, default=default, help=text)
    place = Path("output" if IN_NOTEBOOK else "tutorials/output")
    parser.add_argument("--out", type=Path, default=place, help="where the pictures go")
    found = parser.parse_args([] if IN_NOTEBOOK else None)
    found.full = all(getattr(found, name) == default for name, (default, _) in numbers.items())
    found.out.mkdir(parents=True, exist_ok=True)
    return found
