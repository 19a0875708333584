"""A guide's state: all that makes it, for another process or a copy."""

from __future__ import annotations

from dataclasses import asdict
from functools import partial
from typing import Any

import torch
from pyro import poutine
from pyro.infer.autoguide.utils import deep_setattr
from torch import Tensor

from ..gaussians.sites import KeptSites
from ..modules import drop_stored, take_name, unique_name
from ..program.data import TrainingData
from ..program.facts import Structure
from ..program.registration import held_parameters
from .conditioned import Conditioned
from .joint import groups_of
from .networks import Calls

__all__ = ["Saved"]


class Saved(Conditioned):
    """A guide whose ``state_dict`` is all of it: a freshly made one, of the same model, is this one after loading.

    Its name in Pyro's parameter store is its own; a guide that is loaded takes the saved one's, if that one is gone.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        # A name of its own keeps this guide's parameters apart from all others in Pyro's global store.
        take_name(self, unique_name("AutoSparseGP"))
        self._checked_parameters = False
        self._loaded = False  # and not called since

    def state_dict(self, *args: Any, **kwargs: Any) -> dict[str, Any]:
        """All that makes the guide: a freshly made one, of the same model, is this one after ``load_state_dict``.

        With a family on sites, or latents under the data plate, it holds the training data too, N(D + 1) numbers for
        the arguments (x, y): a draw from the posterior conditions on them, given a draw of the other latents. In
        memory the guide keeps the arguments of the last training call themselves, no copies. Arguments other than
        tensors, numbers, strings and lists, tuples and dictionaries of them are left out, and with them the data: then
        call the loaded guide with the data once, ``guide(x, y)``.
        """
        return super().state_dict(*args, **kwargs)

    def _save_to_state_dict(self, *args: Any, **kwargs: Any) -> None:
        if self.structure is not None and not self._loaded:
            self.conditions_now(median=True)  # the sites are kept, for a guide that is loaded without the data
        super()._save_to_state_dict(*args, **kwargs)

    def get_extra_state(self) -> dict[str, Any]:
        """The :class:`Structure`, in plain Python, the name of the guide's parameters in Pyro's store, and the training
        data where prediction needs them.
        """
        if self.structure is None:
            return {}
        state: dict[str, Any] = {"name": self._pyro_name, **asdict(self.structure)}
        if self.data is not None and self.is_about_rows and self.data.is_plain:
            state["data"] = {"args": self.data.args, "kwargs": self.data.kwargs}
        return state

    def set_extra_state(self, state: dict[str, Any]) -> None:
        """Nothing: :meth:`load_state_dict` rebuilds the modules from it first."""

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        saved = state_dict.get(prefix + "_extra_state")
        if saved:
            tensors = {key[len(prefix) :]: value for key, value in state_dict.items() if key.startswith(prefix)}
            # "memory" is of rows that absorb kept, in states of earlier releases.
            found = {key: value for key, value in saved.items() if key not in ("name", "data", "memory")}
            self._rebuild(Structure(**found), tensors)
            self.data = None
            if "data" in saved:
                data = TrainingData(self.model, saved["data"]["args"], saved["data"]["kwargs"])
                self.data = data.mapped(partial(_placed, like=self.like), self.model)
            if "name" in saved:
                self._resume_name(saved["name"])
        super()._load_from_state_dict(state_dict, prefix, *args)

    def _rebuild(self, saved: Structure, tensors: dict[str, Any]) -> None:
        now = self.structure
        if now is not None:
            _require_alike(now, saved)
        if sorted(saved.joint) != sorted(groups_of(self.families)):
            raise ValueError(
                f"the saved guide has one posterior for each of the groups of GP sites {saved.joint}, this guide "
                f"declares {groups_of(self.families)}; make the guide with the saved families."
            )
        fresh = now is None or now.gps != saved.gps or now.latents != saved.latents
        if fresh:
            self.forget()
            for name, latent in saved.latents.items():
                if latent["shape"] is None or name in saved.coupled:
                    continue
                like = tensors[f"locs.{name}_unconstrained"]
                is_point = f"scales.{name}_unconstrained" not in tensors
                if is_point != self._is_point(name):
                    kinds = ("a point", "a distribution") if is_point else ("a distribution", "a point")
                    raise ValueError(
                        f"the saved posterior of latent site {name!r} is {kinds[0]}, this guide declares {kinds[1]}; "
                        "make the guide with the point_estimates that it was saved with."
                    )
                self._set_latent(name, like.new_zeros(latent["shape"]), latent["event_dim"])
            for name, spec in saved.gps.items():
                places = f"gps.{name}.", "joints."
                like = next(t for key, t in tensors.items() if key.startswith(places) and t.is_floating_point())
                deep_setattr(self, "gps." + name, self.family_of(name).rebuild(spec, like, name))
                self._like = like
        if fresh:
            self.join(saved)
        self.structure = saved
        self.calls = Calls() if saved.follows_networks else None
        if fresh and saved.coupled:
            like = tensors["together.loc"]
            self.couple(
                saved, self.modules_by_site(), {"locs": torch.zeros_like(like), "scales": torch.ones_like(like)}
            )
        self._loaded, self._checked_parameters = True, False

    def forget(self) -> None:
        """Be as a guide that was never called."""
        self.data = None
        for name in ("gps", "joints", "locs", "scales", "together"):
            if name in self._modules:
                delattr(self, name)
        self.structure = self.calls = None
        self._checked_parameters = False

    def _resume_name(self, name: str) -> bool:
        """Take the name that this guide's parameters had when they were saved, if the guide that was saved is gone: a
        saved optimiser finds them by it.
        """
        before = self._pyro_name
        if not take_name(self, name):
            return False
        drop_stored(before)
        self._loaded = True
        return True

    def _pyro_set_supermodule(self, name: str, context: Any) -> None:
        # Its name is its own inside another module, too: two of these may hold guides under one attribute's name.
        super()._pyro_set_supermodule(self._pyro_name, context)

    def _apply(self, *args: Any, **kwargs: Any) -> Any:
        self._like = args[0](self._like)
        for module in self.site_modules().values():
            if isinstance(module.sites, KeptSites):
                module.sites.marginals = None
        if self.data is not None:
            self.data = self.data.mapped(args[0], self.model)
        return super()._apply(*args, **kwargs)

    def __getstate__(self) -> dict[str, Any]:
        # Weak references, which Pyro's store hangs on what it hands out, do not pickle.
        for parameter in [*self.parameters(), *(held for held, *_ in held_parameters(self.model))]:
            parameter.__dict__.pop("unconstrained", None)
        return super().__getstate__()

    def __setstate__(self, state: dict[str, Any]) -> None:
        super().__setstate__(state)
        self.trace = poutine.Trace()
        # A copy is a guide of its own, with a name of its own.
        if not self._resume_name(self._pyro_name):
            take_name(self, unique_name("AutoSparseGP"))


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
