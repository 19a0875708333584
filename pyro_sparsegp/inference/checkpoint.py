"""All that a fit is, as one file that is either there in full or as it was before."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pyro
import torch
from pyro import poutine
from torch import nn

from ..guide import AutoSparseGP
from .expectation import ExpectationPropagation
from .quadrature import kept_sites


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


def snapshot(guide: AutoSparseGP, model: Callable, method: Any) -> dict[str, Any]:
    """The parameters, the optimiser, what expectation propagation keeps, and the random numbers' state."""
    store, own = pyro.get_param_store().get_state(), f"{guide._pyro_name}."
    params = {name: value.detach() for name, value in store["params"].items() if not name.startswith(own)}
    return {
        "random": (pyro.util.get_rng_state(), torch.cuda.get_rng_state_all() if torch.cuda.is_initialized() else []),
        "guide": guide.state_dict(),
        "parameters": {name: (value, store["constraints"][name]) for name, value in params.items()},
        "model": model.state_dict() if isinstance(model, nn.Module) else None,
        # A guide's name is another in each process: its place is taken by "".
        "optim": {str(name).replace(own, ".", 1): value for name, value in method.optim.get_state().items()},
        "expectation": getattr(method, "progress", None),
        "sites": {name: sites.progress for name, sites in kept_sites(guide).items()},
    }


def restore(state: dict[str, Any], guide: AutoSparseGP, model: Callable, method: Any, call: tuple) -> None:
    """Put all of :func:`snapshot` back; the arguments of a first call have the model register what is to be loaded."""
    # The guide's parameters first, which a call then gives to Pyro's store under the names that the optimiser asks for.
    guide.load_state_dict(state["guide"])
    with poutine.block(), torch.no_grad():
        guide.prepare(*call[0], **call[1])
    if isinstance(model, nn.Module):
        model.load_state_dict(state["model"])
    store, own, optim = pyro.get_param_store(), f"{guide._pyro_name}.", method.optim
    for name, (value, constraint) in state["parameters"].items():
        known: Any = store.setdefault(name, torch.distributions.transform_to(constraint)(value), constraint)
        # In place: a network's own parameters are in the store.
        known.unconstrained().data.copy_(value)
    optim.optim_objs.clear()
    optim.grad_clip.clear()
    optim.set_state({own + n[1:] if n.startswith(".") else n: value for n, value in state["optim"].items()})
    if isinstance(method, ExpectationPropagation):
        method.progress = state["expectation"]
    for name, sites in kept_sites(guide).items():
        sites.progress = state["sites"][name]
    pyro.util.set_rng_state(state["random"][0])
    if torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["random"][1])
