"""All that a fit is, as one file that is either there in full or as it was before."""

from __future__ import annotations

import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Optional, Union

import pyro
import torch
from pyro import poutine
from torch import Tensor, nn

from ..gaussians.sites import KeptSites
from ..guide import AutoSparseGP
from .expectation import ExpectationPropagation

__all__ = [
    "load_parameters",
    "parameters_state",
    "prepare",
    "random_state",
    "read",
    "restore",
    "set_random_state",
    "snapshot",
    "write",
]

_VERSION = 1
_OWN = "guide."  # in the place of a guide's own name, which is another in each process


def write(state: dict[str, Any], path: Union[str, Path]) -> None:
    """Write a state so that at any time, also if the machine stops, the file is the old one or the new one."""
    path = Path(path)
    part = path.with_name(f"{path.name}.{os.getpid()}.part")
    try:
        with open(part, "wb") as file:
            torch.save(state, file)
            file.flush()
            os.fsync(file.fileno())
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)
    if os.name == "posix":  # the file's name is the folder's content
        folder = os.open(path.parent, os.O_RDONLY)
        try:
            os.fsync(folder)
        finally:
            os.close(folder)


def read(path: Union[str, Path]) -> dict[str, Any]:
    """A state of :func:`write`, its tensors on the CPU; it is unpickled, so trust where it came from.

    :raises ValueError: if the file is none.
    """
    try:
        state = torch.load(path, map_location="cpu", weights_only=False)
        version = state["version"]
    except Exception as error:
        raise ValueError(f"checkpoint {str(path)!r} is no file that fit wrote: {error}") from error
    if version != _VERSION:
        raise ValueError(f"checkpoint {str(path)!r} has version {version}, this release reads {_VERSION}")
    return state


def snapshot(guide: AutoSparseGP, model: Callable, method: Any) -> dict[str, Any]:
    """The parameters, the optimiser, what expectation propagation keeps, and the random numbers' state.

    Looking leaves all of it as it is: random numbers come after it as they would have.
    """
    random = random_state()
    state = {
        "version": _VERSION,
        **parameters_state(guide, model),
        "optim": _renamed(method.optim.get_state(), guide, out=True),
        "optimiser": _optimiser(method),
        "expectation": method.get_state() if isinstance(method, ExpectationPropagation) else None,
        "sites": {name: sites.progress for name, sites in _kept_sites(guide).items()},
        "random": random,
    }
    set_random_state(random)
    return state


def restore(state: dict[str, Any], guide: AutoSparseGP, model: Callable, method: Any) -> None:
    """Put all of :func:`snapshot` back, into the guide after :func:`prepare`; random numbers last."""
    before, now = state.get("optimiser"), _optimiser(method)  # checkpoints of before have none
    if before not in (None, now):
        raise ValueError(
            f"checkpoint: it is of a fit by the optimiser {before}, and this one is {now}; give fit what it began with."
        )
    load_parameters(state, guide, model)
    optim = method.optim
    inner = getattr(optim, "optim", optim)  # of one that processes share
    inner.optim_objs.clear()
    inner.grad_clip.clear()
    optim.set_state(_renamed(state["optim"], guide, out=False))
    if isinstance(method, ExpectationPropagation):
        method.set_state(state["expectation"])
    for name, sites in _kept_sites(guide).items():
        sites.progress = state["sites"][name]
    set_random_state(state["random"])


def _optimiser(method: Any) -> str:
    optim = getattr(method.optim, "optim", method.optim)  # that of several processes holds the user's
    return optim.pt_optim_constructor.__name__


def parameters_state(guide: AutoSparseGP, model: Callable) -> dict[str, Any]:
    """What was fitted: the guide's state, and that of the model's parameters in Pyro's store; copies."""
    random = random_state()
    store = pyro.get_param_store().get_state()
    prefix = f"{guide._pyro_name}."
    found = {
        "guide": {key: _copied(value) for key, value in guide.state_dict().items()},
        "parameters": {
            name: (value.detach().clone(), store["constraints"][name])
            for name, value in store["params"].items()
            if not name.startswith(prefix)
        },
        "model": {k: _copied(v) for k, v in model.state_dict().items()} if isinstance(model, nn.Module) else None,
    }
    set_random_state(random)
    return found


def load_parameters(state: dict[str, Any], guide: AutoSparseGP, model: Callable) -> None:
    """Put all of :func:`parameters_state` back; parameters that there are keep their identity."""
    guide.load_state_dict(state["guide"])
    if isinstance(model, nn.Module) and state["model"] is not None:
        model.load_state_dict(state["model"])
    store = pyro.get_param_store()
    here = dict(store.named_parameters())
    with torch.no_grad():
        for name, (value, constraint) in state["parameters"].items():
            if name in here and here[name].shape == value.shape:
                here[name].copy_(value)
            else:
                store.setdefault(name, torch.distributions.transform_to(constraint)(value), constraint)


def prepare(state: dict[str, Any], guide: AutoSparseGP, args: tuple, kwargs: dict[str, Any]) -> None:
    """Load the guide, and run the model once so that what it registers is there to be loaded."""
    guide.load_state_dict(state["guide"])
    with poutine.block(), torch.no_grad():
        guide.prepare(*args, **kwargs)


def _copied(value: Any) -> Any:
    # What a guide's own extra state refers to are the training data, which nothing changes.
    return value.detach().clone() if isinstance(value, Tensor) else value


def _kept_sites(guide: AutoSparseGP) -> dict[str, KeptSites]:
    found = {name: module.sites for name, module in guide.site_modules().items()}
    return {name: sites for name, sites in found.items() if isinstance(sites, KeptSites)}


def _renamed(state: dict[Optional[str], Any], guide: AutoSparseGP, out: bool) -> dict[str, Any]:
    """An optimiser's state by parameters' names, the guide's under a name that any process has."""
    if None in state:
        raise ValueError(
            "checkpoint: an optimiser's state is saved by the names of parameters in Pyro's store, of which some have "
            "none, as under module_local_params"
        )
    own = f"{guide._pyro_name}."
    before, after = (own, _OWN) if out else (_OWN, own)
    return {
        after + name.removeprefix(before) if str(name).startswith(before) else str(name): value
        for name, value in state.items()
        if name is not None
    }


def random_state() -> dict[str, Any]:
    """Of the global generators of torch, NumPy and Python."""
    cuda = torch.cuda.get_rng_state_all() if torch.cuda.is_available() and torch.cuda.is_initialized() else None
    return {"pyro": pyro.util.get_rng_state(), "cuda": cuda}


def set_random_state(state: dict[str, Any]) -> None:
    """Have random numbers come as they would have after :func:`random_state`."""
    pyro.util.set_rng_state(state["pyro"])
    if state["cuda"] is not None and torch.cuda.is_available():
        torch.cuda.set_rng_state_all(state["cuda"])
