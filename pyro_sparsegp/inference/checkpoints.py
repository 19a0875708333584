"""Files that a fit writes its state to."""

import os
from pathlib import Path
from typing import Any

import torch


def write(state: dict[str, Any], path: Path) -> None:
    """Write a state so that at any time, also if the machine stops, the file is the old one or the new one."""
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            torch.save(state, file)
            file.flush()
            # Before it has the name: a machine that stops may keep the name and lose what is not on the disk.
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def read(path: Path, mark: dict[str, Any]) -> dict[str, Any]:
    """A state of :func:`write` with this mark, tensors on the CPU; it is unpickled, so trust where it came from."""
    try:
        state = torch.load(path, map_location="cpu", weights_only=False)
        saved = state["mark"]
    except Exception as error:
        raise ValueError(f"checkpoint {str(path)!r} is no file that fit wrote: {error}") from error
    if saved != mark:
        raise ValueError(
            f"checkpoint {str(path)!r} was written by a fit with {saved}, this fit has {mark}: give the same"
        )
    return state
