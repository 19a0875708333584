"""A guide's state: all that makes it, for another process or a copy."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import torch
from pyro.infer.autoguide.utils import deep_setattr
from torch import Tensor

from ..modules import drop_stored, take_name
from ..program.data import TrainingData
from ..program.facts import Structure
from .coupled import couple
from .field import make_field
from .joint import groups_of, join, require_by_rows
from .known import Core, KnownGuide
from .networks import Calls

__all__ = ["extra_state", "rebuild", "resume_name"]

_BESIDE = ("name", "data", "memory")  # the facts; "memory" is of rows that absorb kept, in earlier releases


def extra_state(guide: KnownGuide) -> dict[str, Any]:
    """What :meth:`AutoSparseGP.get_extra_state` gives."""
    if guide.core is None:
        return {}
    state: dict[str, Any] = {"name": guide._pyro_name, **asdict(guide.core.facts)}
    data = guide.core.data
    if data is not None and guide.is_about_rows and data.is_plain:
        state["data"] = {"args": data.args, "kwargs": data.kwargs}
    return state


def rebuild(guide: KnownGuide, state_dict: dict[str, Any], prefix: str) -> None:
    """Make what a saved state is to be loaded into.

    :raises ValueError: if it is of another model, or of other families.
    """
    saved = state_dict.get(prefix + "_extra_state")
    if not saved:
        return
    tensors = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
    if any(".following." in key for key in tensors):
        raise ValueError(
            "the saved guide was trained with coupled=, which has left: its coefficients follow other latents. Make a "
            "new guide, whose latents are joint by default, and train it."
        )
    facts = Structure(**{key: value for key, value in saved.items() if key not in _BESIDE})
    now = guide.structure
    if now is not None:
        _require_alike(now, facts)
    if sorted(facts.joint) != sorted(groups_of(guide.families)):
        raise ValueError(
            f"the saved guide has one posterior for each of the groups of GP sites {facts.joint}, this guide "
            f"declares {groups_of(guide.families)}; make the guide with the saved families."
        )
    if not facts.field:
        require_by_rows(facts)
    fresh = now is None or now.gps != facts.gps or now.latents != facts.latents
    if fresh:
        guide.forget()
        _make_parameters(guide, facts, tensors)
    core = guide.core = Core(facts, calls=Calls() if facts.follows_networks else None, loaded=True)
    if fresh:
        join(guide, facts)
        if facts.coupled:
            like = tensors["together.loc"]
            couple(guide, torch.zeros_like(like), torch.eye(len(like)).to(like))
        if facts.field:
            make_field(guide, facts.field)
    if "data" in saved:
        data = TrainingData(guide.model, saved["data"]["args"], saved["data"]["kwargs"])
        core.data = data.mapped(lambda tensor: _placed(tensor, guide.like), guide.model)
    if "name" in saved:
        resume_name(guide, saved["name"])


def _make_parameters(guide: KnownGuide, facts: Structure, tensors: dict[str, Any]) -> None:
    for name, latent in facts.latents.items():
        if name in facts.coupled or name in facts.field:
            _require_kind(guide, name, False)
            continue
        if latent["shape"] is None:
            continue
        like = tensors[f"locs.{name}_unconstrained"]
        is_point = f"scales.{name}_unconstrained" not in tensors
        _require_kind(guide, name, is_point)
        guide.set_latent(name, like.new_zeros(latent["shape"]), latent["event_dim"])
    for name, spec in facts.gps.items():
        places = f"gps.{name}.", "joints."
        like = next(t for key, t in tensors.items() if key.startswith(places) and t.is_floating_point())
        deep_setattr(guide, "gps." + name, guide.family_of(name).rebuild(spec, like, name))
        guide._like = like


def _require_kind(guide: KnownGuide, name: str, is_point: bool) -> None:
    if is_point != guide.is_point(name):
        kinds = ("a point", "a distribution") if is_point else ("a distribution", "a point")
        raise ValueError(
            f"the saved posterior of latent site {name!r} is {kinds[0]}, this guide declares {kinds[1]}; "
            "make the guide with the point_estimates that it was saved with."
        )


def resume_name(guide: KnownGuide, name: str) -> bool:
    """Take the name that a guide's parameters had when they were saved, if the guide that was saved is gone: a
    saved optimiser finds them by it.
    """
    before = guide._pyro_name
    if not take_name(guide, name):
        return False
    drop_stored(before)
    if guide.core is not None:
        guide.core.loaded = True
    return True


def _require_alike(now: Structure, saved: Structure) -> None:
    for kind, here, there in (
        ("GP sites", now.gps, saved.gps),
        ("other latents", now.latents, saved.latents),
        ("observed sites", now.rows, saved.rows),
        ("coupled latents", dict.fromkeys(now.coupled), dict.fromkeys(saved.coupled)),
    ):
        if here.keys() != there.keys():
            raise ValueError(
                f"the saved guide's {kind} are {sorted(there)}, this guide's are {sorted(here)}: it is the state of a "
                "guide of another model."
            )


def _placed(tensor: Tensor, like: Tensor) -> Tensor:
    return tensor.to(like) if tensor.is_floating_point() else tensor.to(like.device)
