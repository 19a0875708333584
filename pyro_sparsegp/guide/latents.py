"""Latents that are no Gaussian processes: mean field, points, and those of single rows."""

from __future__ import annotations

from collections.abc import Callable, Collection
from operator import attrgetter
from typing import Any, Optional, Union

import torch
from pyro.distributions import constraints
from pyro.infer.autoguide import AutoNormalMessenger
from pyro.infer.autoguide.initialization import init_to_sample
from pyro.infer.autoguide.utils import deep_setattr, helpful_support_errors
from pyro.nn import PyroParam
from pyro.poutine.runtime import get_plates
from torch import Tensor
from torch.distributions import biject_to

from ..program.facts import Structure
from ..program.groups import warn_of_groups
from ..program.traces import all_sites
from ..warned import Warned
from .runs import Run, Train

__all__ = ["MeanFieldLatents"]


class MeanFieldLatents(AutoNormalMessenger):
    """Pyro's mean-field guide, whose latents may be points and follow the data's dtype and device.

    A latent under a data plate is that of the rows it was fitted to: other rows' come from the model.
    """

    structure: Optional[Structure]
    point_estimates: Union[bool, Collection[str]]
    warned: Warned

    def __init__(
        self, model: Callable, init_loc_fn: Callable, init_scale: float, amortized_plates: tuple[str, ...]
    ) -> None:
        super().__init__(model, init_loc_fn=init_loc_fn, init_scale=init_scale, amortized_plates=amortized_plates)
        self.structure = None
        self._run: Run = Train()
        self._like = torch.empty(0)
        self.from_draws: Collection[str] = ()  # latents that start at a draw from the prior, whatever init_loc_fn says

    @property
    def like(self) -> Tensor:
        """A tensor of the guide's dtype and device."""
        return next(self.parameters(), self._like)

    def get_posterior(self, name: str, prior: Any) -> Any:
        """The posterior of a latent, given its prior under the values drawn upstream."""
        if self.structure is not None and (name not in self.structure.latents or self._is_new(name)):
            return prior
        if getattr(prior.support, "is_discrete", False):
            raise ValueError(
                f"site {name!r} is discrete and not observed. If it is data, the guide's first call needs them, "
                "model(x, y). If it is a latent, sum it out: infer={'enumerate': 'parallel'} in its pyro.sample."
            )
        self._check_local(name)
        if self._computing_median or self._is_point(name):
            return self._get_posterior_median(name, prior)
        return super().get_posterior(name, prior)

    def upstream_value(self, name: str) -> Tensor:
        """The value of a site before, for use in :meth:`get_posterior`.

        :raises ValueError: if there is none of that name, with those that there are.
        """
        if name not in self.trace.nodes:
            known = [site for site, node in all_sites(self.trace) if node["type"] == "sample"]
            raise ValueError(f"upstream_value({name!r}): no site of that name comes before; those that do are {known}")
        value: Any = self.trace.nodes[name]["value"]
        return value

    @property
    def local_latents(self) -> list[str]:
        """The latents that have a value for each row."""
        return [] if self.structure is None else [n for n in self.structure.latents if not self.is_shared(n)]

    def is_shared(self, name: str) -> bool:
        """Whether a latent's value is that of all rows, those of training and others."""
        assert self.structure is not None
        latent = self.structure.latents.get(name)
        return latent is not None and not set(latent["plates"]) & set(self.structure.data_plates)

    @property
    def has_random_latents(self) -> bool:
        """Whether a latent that is no GP, or a GP site that enters another, is drawn."""
        assert self.structure is not None
        return bool(self.structure.inner) or any(not self._is_point(name) for name in self.structure.latents)

    def _is_point(self, name: str) -> bool:
        points = self.point_estimates
        return points if isinstance(points, bool) else name in points

    def _is_new(self, name: str) -> bool:
        """Whether a latent under the data plate is asked for at other data than it was fitted to."""
        assert self.structure is not None
        plates = self.structure.latents[name]["plates"]
        if not plates:
            return False
        here = {plate.name: plate for plate in get_plates()}
        sizes = {name: plate.full_size or plate.size for name, plate in here.items()}
        differ = any(sizes.get(plate, size) != size for plate, size in plates.items())
        if not any(plate in self.structure.data_plates for plate in plates):
            if differ and not set(plates) & set(self.amortized_plates):
                raise ValueError(
                    f"latent site {name!r} was learned in plates of the sizes {plates}, here {sizes}: as none of its "
                    "plates holds data, its values are known by their numbers, and there are no others. Give plates of "
                    "those sizes; or have the data in the latent's own plate, and new rows' values come from the model."
                )
            return False
        # Row numbers of a plate's part say which rows they are.
        whole = all(plate.size == sizes[name] for name, plate in here.items())
        new = self._run.is_of_new_rows(differ, whole)
        if new and not differ and name in self.structure.grouped:
            warn_of_groups(self.warned, name, plates)
        return new

    def _check_local(self, name: str) -> None:
        for plate in get_plates():
            node = self.trace.nodes.get(plate.name)
            if node is None or plate.size == (plate.full_size or plate.size):
                continue
            indices = node["value"]
            if isinstance(indices, Tensor) and (indices.is_floating_point() or indices.dim() != 1):
                raise ValueError(
                    f"latent site {name!r} inside pyro.plate({plate.name!r}, subsample=...) has a value for every row, "
                    "but the plate was given data, not row numbers: write plate = pyro.plate(..., subsample_size=B) "
                    "and index the data by plate.indices, or give subsample=indices."
                )

    def _get_params(self, name: str, prior: Any) -> tuple[Tensor, Tensor]:
        try:
            loc = attrgetter(name)(self.locs)
        except AttributeError:
            self._new_latent(name, prior)
            loc = attrgetter(name)(self.locs)
        return loc, loc if self._is_point(name) else attrgetter(name)(self.scales)

    def _new_latent(self, name: str, prior: Any) -> None:
        with torch.no_grad(), helpful_support_errors({"name": name, "fn": prior}):
            transform = biject_to(prior.support)
            event_dim = transform.domain.event_dim
            # Parameters follow the data's dtype and device; the prior may be made of Python numbers.
            init_loc_fn = init_to_sample if name in self.from_draws else self.init_loc_fn
            start = init_loc_fn({"name": name, "fn": prior}).detach().to(self._like).clone()  # the user's may be held
            loc = self._adjust_plates(transform.inv(start), event_dim)
        self._set_latent(name, loc, event_dim)

    def _set_latent(self, name: str, loc: Tensor, event_dim: int) -> None:
        deep_setattr(self, "locs." + name, PyroParam(loc, event_dim=event_dim))
        if not self._is_point(name):
            scale = torch.full_like(loc, self._init_scale)
            deep_setattr(self, "scales." + name, PyroParam(scale, constraints.positive, event_dim))
