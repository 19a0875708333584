"""A guide's state: all that makes it, for another process or a copy."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

import pyro
import torch
from pyro import poutine
from pyro.infer.autoguide.utils import deep_setattr

from ..modules import drop_stored, take_name, unique_name
from ..program.data import TrainingData
from ..program.facts import Structure
from .conditions import conditions_now
from .field import keep_rows, make_field
from .known import Core, KnownGuide
from .latents import couple
from .messenger import SiteMessenger


def _rebuild(guide: KnownGuide, state_dict: dict[str, Any], prefix: str) -> None:
    """Make what a saved state is to be loaded into.

    :raises ValueError: if it is of another model, or of other families.
    """
    saved = state_dict.get(prefix + "_extra_state")
    if not saved:
        return
    tensors = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
    # Earlier releases had facts of their own.
    facts = Structure(**{key: value for key, value in saved.items() if key in Structure.__dataclass_fields__})
    held = {i: f"field.rows_{i}" for i, name in enumerate(facts.field) if name in facts.gps}
    now = guide.core.facts
    # A guide that was called keeps its parameters, which an optimiser may have:
    # test_guide.py::TestState::test_loading_into_a_used_guide_keeps_its_parameters
    fresh = [now.gps, now.latents, now.coupled, now.field] != [facts.gps, facts.latents, facts.coupled, facts.field]
    if fresh:
        guide.forget()
    core = guide.core = Core(facts, loaded=True)
    if fresh:
        _make_parameters(guide, facts, tensors)
    keep_rows(guide, {i: torch.zeros_like(tensors[key]) for i, key in held.items()})
    if "data" in saved:
        data = TrainingData(guide.model, saved["data"]["args"], saved["data"]["kwargs"])
        like = guide.like
        core.data = data.mapped(lambda t: t.to(like if t.is_floating_point() else like.device), guide.model)
    _resume_name(guide, saved["name"])


def _make_parameters(guide: KnownGuide, facts: Structure, tensors: dict[str, Any]) -> None:
    for name, latent in facts.latents.items():
        loc = tensors.get(f"locs.{name}_unconstrained")  # none, where its posterior is joint with others'
        is_point = loc is not None and f"scales.{name}_unconstrained" not in tensors
        # test_guide.py::test_states_of_other_point_estimates_are_refused
        is_other = is_point != guide.is_point(name) or (loc is None and guide.is_independent(name))
        if latent["shape"] is not None and is_other:
            raise ValueError(
                f"the saved posterior of latent site {name!r} is a point, joint with others' or independent, and this "
                "guide has another: make the guide with the point_estimates= and independent= that it was saved with."
            )
        if loc is not None:
            guide.set_latent(name, loc.new_zeros(latent["shape"]), latent["event_dim"])
    for name, spec in facts.gps.items():
        like = next(t for k, t in tensors.items() if k.startswith(f"gps.{name}.") and t.is_floating_point())
        deep_setattr(guide, "gps." + name, guide.family_of(name).rebuild(spec, like, name))
        guide.like = like
    if facts.coupled:
        like = tensors["together.loc"]
        couple(guide, torch.zeros_like(like), torch.eye(len(like)).to(like))
    if facts.field:
        make_field(guide, facts.field)
    if facts.intercepts:
        guide.field.register_buffer("slopes", torch.zeros_like(tensors["field.slopes"]))


def _resume_name(guide: KnownGuide, name: str) -> bool:
    """Take the name that a guide's parameters had when they were saved, if the guide that was saved is gone: a
    saved optimiser finds them by it.
    """
    before = guide._pyro_name
    if not take_name(guide, name):
        return False
    drop_stored(before)
    guide.core.loaded = True
    return True


class SavedGuide(SiteMessenger):
    """A guide that is saved, loaded, copied and moved whole."""

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        if self.structure is not None and not self.core.loaded:
            conditions_now(self, median=True)  # the sites are kept, for a guide that is loaded without the data
        super()._save_to_state_dict(*args, **kwargs)

    def get_extra_state(self) -> dict[str, Any]:
        """What is known of the program, in plain Python, the name of the guide's parameters in Pyro's store, and the
        training data where prediction needs them.
        """
        if self.structure is None:
            return {}
        state: dict[str, Any] = {"name": self._pyro_name, **asdict(self.structure)}
        data = self.core.data
        if data is not None and self.is_about_rows and data.is_plain:
            state["data"] = {"args": data.args, "kwargs": data.kwargs}
        return state

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Nothing: :meth:`load_state_dict` rebuilds the modules from it first."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        _rebuild(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _pyro_set_supermodule(self, name: str, context: Any) -> None:
        # Its name is its own inside another module, too: two of these may hold guides under one attribute's name.
        super()._pyro_set_supermodule(self._pyro_name, context)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self.like = args[0](self.like)
        if self.core.data is not None:
            self.core.data = self.core.data.mapped(args[0], self.model)
        return super()._apply(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        # Weak references, which Pyro's store hangs on what it hands out, do not pickle.
        stored = [parameter for _, parameter in pyro.get_param_store().named_parameters()]
        for parameter in [*self.parameters(), *self.core.registered, *stored]:
            parameter.__dict__.pop("unconstrained", None)
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.trace = poutine.Trace()
        # A copy is a guide of its own, with a name of its own.
        if not _resume_name(self, self._pyro_name):
            take_name(self, unique_name("AutoSparseGP"))
