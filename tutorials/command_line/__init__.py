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


SHORT = 5


def options(description, device=True, **numbers):
    """``--out DIR``, ``--device``, whole numbers by name, each a default, its help and what ``--short`` makes of it (5
    if left out), and ``--short``, which only sees whether all runs.

    ``full`` says that none of the numbers was changed: what a tutorial claims is asserted then, not in short runs.
    """
    parser = argparse.ArgumentParser(description=description)
    if device:
        parser.add_argument("--device", default="cpu", help="cpu or cuda")
    parser.add_argument(
        "--short", action="store_true", help="see in seconds whether all runs"
    )
    for name, (default, text, *_) in numbers.items():
        parser.add_argument(f"--{name}", type=int, help=f"{text}; {default} by default")
    place = Path("output" if IN_NOTEBOOK else "tutorials/output")
    parser.add_argument("--out", type=Path, default=place, help="where the pictures go")
    found = parser.parse_args([] if IN_NOTEBOOK else None)
    defaults = {name: default for name, (default, *_) in numbers.items()}
    short = {
        name: more[0] if more else SHORT for name, (_, _, *more) in numbers.items()
    }
    for name in numbers:
        if getattr(found, name) is None:
            setattr(found, name, short[name] if found.short else defaults[name])
    found.full = not found.short and all(
        getattr(found, name) == default for name, default in defaults.items()
    )
    found.out.mkdir(parents=True, exist_ok=True)
    return found
