"""Latents that are no Gaussian processes, jointly Gaussian with each other and with the coefficients of GP sites."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping
from operator import attrgetter
from typing import Any, Optional, TypeVar, Union

import pyro.distributions as dist
import torch
from torch import Tensor
from torch.distributions import biject_to

from ..approximations.free import SparseGP
from ..gaussians import Drawn, DrawnGaussian
from ..modules import at_path
from ..posterior.sparse_posterior import SparsePosterior
from ..program.facts import Structure
from ..program.traces import RandomState
from ..warned import Warned, warn_once
from .joint import follow
from .latents import MeanFieldLatents

__all__ = ["CoupledLatents"]

_T = TypeVar("_T")

_OF_ROWS = "has a value for each row"


class _Part(dist.Normal):
    """Some entries of a draw, each given those before it.

    :param drawn: of all entries.
    :param rows: which.
    :param shape: of their values.
    """

    def __init__(self, drawn: Drawn, rows: slice, shape: torch.Size) -> None:
        self.drawn, self.rows, self.asked = drawn, rows, False
        scale = drawn.root.diagonal()[rows].reshape(shape)
        super().__init__(drawn.loc[rows].reshape(shape), scale, validate_args=False)

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:
        if sample_shape:
            raise ValueError("a latent that is coupled with others has one draw in a run of the guide")
        self.asked = True
        return self.drawn.value[self.rows].reshape(self.loc.shape)

    def noise_of(self, value: Tensor) -> Tensor:
        """ε, ``(n,)``, behind values, given those before."""
        loc, root, start = self.drawn.loc, self.drawn.root, self.rows.start
        moved = value.reshape(-1) - loc[self.rows]
        if start:
            first = (self.drawn.value - loc)[:start, None]
            noise = torch.linalg.solve_triangular(root[:start, :start], first, upper=False)
            moved = moved - (root[self.rows, :start] @ noise)[:, 0]
        return torch.linalg.solve_triangular(root[self.rows, self.rows], moved[:, None], upper=False)[:, 0]

    def log_prob(self, value: Tensor) -> Tensor:
        square = self.noise_of(value).square().reshape(self.loc.shape)
        density = -0.5 * (square + math.log(2 * math.pi)) - self.scale.log()
        weigh = self.drawn.weigh
        return density if weigh is None else density + weigh(density.shape)


class CoupledLatents(MeanFieldLatents):
    """Some latents have one Gaussian in unconstrained space, z ~ N(a, RRᵀ), drawn when it is first asked for: by one of
    them or by a GP site, whose coefficients given z have a mean linear in it. Both learn by natural steps.
    """

    _mirrors = False  # whether draws are the mirror images of those before

    coupled: Union[bool, Collection[str]]
    _parts: dict[str, _Part]
    together: Any
    warned: Warned

    def coupled_among(self, found: Structure) -> list[str]:
        """The latents that are coupled, in the order of the first call.

        :raises ValueError: naming a site that can't be.
        """
        if not self.coupled:
            return []
        refused = {name: self._why_not(name, latent, found) for name, latent in found.latents.items()}
        able = [name for name, why in refused.items() if why is None]
        if isinstance(self.coupled, bool):
            for name in found.grouped:
                if refused.get(name) == _OF_ROWS:
                    plate = next(iter(found.latents[name]["plates"]))
                    warn_once(
                        self.warned,
                        "coupled",
                        name,
                        f"coupled=True leaves out latent site {name!r}: its plate {plate!r} holds data, so that it is "
                        "taken for one of single rows. Give the data a plate of another name and of the same size, and "
                        "leave the latent in its own, to have it coupled.",
                        stacklevel=4,
                    )
            return able
        for name in self.coupled:
            if name not in able:
                kind = "is a GP site, whose family says what q(f) is" if name in found.gps else "is no latent site"
                raise ValueError(
                    f"coupled names site {name!r}, which {refused.get(name, kind)}; what can be coupled is {able}"
                )
        return [name for name in able if name in self.coupled]

    def _why_not(self, name: str, latent: dict[str, Any], found: Structure) -> Optional[str]:
        plates = set(latent["plates"])
        if plates & set(found.data_plates):
            return _OF_ROWS
        if plates & set(self.amortized_plates):
            return "shares its posterior over a plate"
        if self._is_point(name):
            return "is fitted as a point"
        return "has a posterior of its own" if latent["shape"] is None else None

    def start_at(self, name: str, value: Tensor) -> None:
        """Have a latent start at a value in unconstrained space."""
        if not self._is_coupled(name):
            at_path(self.locs, f"{name}_unconstrained").copy_(value)
            return
        rows, _ = self._place(name)
        self.together.loc = self.together.loc.clone().index_copy(
            0, torch.arange(rows.start, rows.stop, device=value.device), value.detach().flatten()
        )

    def couple(self, found: Structure, modules: Mapping[str, Any], start: Optional[dict[str, Tensor]] = None) -> None:
        """Make the parameters of what is coupled, in the place of those of each latent alone.

        :param modules: the variational modules of GP sites, of which free posteriors follow.
        :param start: loc and scale of them all; by default, those of each alone.
        """
        if not found.coupled:
            return
        if start is None:
            start = {
                kind: torch.cat([attrgetter(name)(getattr(self, kind)).detach().flatten() for name in found.coupled])
                for kind in ("locs", "scales")
            }
            for name in found.coupled:
                for kind in ("locs", "scales"):
                    *path, leaf = f"{kind}.{name}".split(".")
                    delattr(at_path(self, ".".join(path)), leaf)
        self.together = DrawnGaussian(start["locs"], start["scales"])
        for i, group in enumerate(found.joint):
            follow(at_path(self, f"joints.group_{i}"), {name: modules[name] for name in group}, start["locs"])
        joint = {name for group in found.joint for name in group}
        for name, module in modules.items():
            if isinstance(module, SparseGP) and name not in joint:
                module.follow(start["locs"], name)

    def warn_of_medians(self, posteriors: Mapping[str, SparsePosterior]) -> None:
        """Warn of GP sites that are far wider over the draws of the latents that they follow than at their medians.

        With q(w | ε) = N(m + BRε, S), the variance of f(x) over ε is that at ε = 0 and ‖(BR)ᵀφ(x)‖² more.
        """
        for name, q in posteriors.items() if self.structure is not None and self.structure.coupled else ():
            slope = self._slope(name)
            if slope is None or ("medians", name) in self.warned:
                continue
            moves = (slope @ self.together.root).split([phi.shape[-1] for phi in q.features], -2)
            more = sum(phi @ block for phi, block in zip(q.features, moves)).square().sum(-1)
            share = float((q.variance / (q.variance + more)).detach().min().sqrt())
            if share < 0.5:
                warn_once(
                    self.warned,
                    "medians",
                    name,
                    f"guide.posterior holds other latents at their medians, and GP site {name!r} follows them, as "
                    f"coupled= asks: at some inputs its standard deviation is {share:.2g} of what it is over their "
                    f"draws. It is right for a sum with these medians; for {name!r} alone take draws, "
                    f"predict(model, guide, x)[{name!r}].",
                    stacklevel=3,
                )

    def _slope(self, name: str) -> Optional[Tensor]:
        """B, ``(..., M, D)``, of a GP site's coefficients; ``None`` if they follow nothing."""
        assert self.structure is not None
        for i, group in enumerate(self.structure.joint):
            if name in group:
                whole = at_path(self, f"joints.group_{i}")
                blocks = whole.following.slope.split(whole.following.sizes, -2)
                return torch.cat([blocks[b] for b in whole.blocks[name]], -2)
        module = at_path(self.gps, name)
        return module.following.slope if isinstance(module, SparseGP) and module.following is not None else None

    def _is_coupled(self, name: str) -> bool:
        return self.structure is not None and name in self.structure.coupled

    def _place(self, name: str, prior: Any = None) -> tuple[slice, torch.Size]:
        """Where a latent's entries are among all, and its values' shape: in plates of one, as its prior has it."""
        assert self.structure is not None
        start = 0
        for other in self.structure.coupled:
            latent = self.structure.latents[other]
            shape = torch.Size(latent["shape"])
            if other == name:
                rows, outer = slice(start, start + shape.numel()), len(shape) - latent["event_dim"]
                if prior is not None and _without_ones(prior.batch_shape) == _without_ones(shape[:outer]):
                    shape = prior.batch_shape + shape[outer:]
                return rows, shape
            start += shape.numel()
        raise KeyError(name)

    def drawn(self) -> Optional[Drawn]:
        """This run's draw of all latents that are coupled, or their medians; ``None`` if none is."""
        if self.structure is None or not self.structure.coupled:
            return None
        if self._computing_median:
            self.together.settle()
            loc, root = self.together.loc, self.together.root
            return Drawn(loc, root, torch.zeros_like(loc), loc)
        if self._run.drawn is None:
            noise = torch.randn_like(self.together.loc)
            self._run.drawn = self.together(-noise if self._mirrors else noise, self._mirrors)
        return self._run.drawn

    def with_mirrored(self, evaluate: Callable[[], _T]) -> list[_T]:
        """What is evaluated in runs of this guide; and again, if latents are coupled, with the same random numbers, the
        same rows of a mini-batch among them, but the latents' draw a + Rε at its mirror image, a − Rε.
        """
        if self.structure is None or not self.structure.coupled:
            return [evaluate()]
        state = RandomState(self.like)
        found = [evaluate()]
        state.restore()
        self._mirrors = True
        try:
            return [*found, evaluate()]
        finally:
            self._mirrors = False

    def _get_params(self, name: str, prior: Any) -> tuple[Tensor, Tensor]:
        if not self._is_coupled(name):
            return super()._get_params(name, prior)
        rows, shape = self._place(name, prior)
        self.together.settle()
        return self.together.loc[rows].reshape(shape), self.together.root.diagonal()[rows].reshape(shape)

    def get_posterior(self, name: str, prior: Any) -> Any:
        if not self._is_coupled(name):
            return super().get_posterior(name, prior)
        rows, shape = self._place(name, prior)
        assert self.structure is not None
        known = shape[: len(shape) - self.structure.latents[name]["event_dim"]]
        if prior.batch_shape != known:
            raise ValueError(
                f"site {name!r} is coupled and has the shape {tuple(known)} of the guide's first call, here "
                f"{tuple(prior.batch_shape)}: leave it out of coupled=, or the plates that it stands in whole."
            )
        posterior = super().get_posterior(name, prior)
        if isinstance(posterior, Tensor):  # at the median
            return posterior
        drawn = self.drawn()
        assert drawn is not None
        part = self._parts[name] = _Part(drawn, rows, shape)
        transform = posterior.transforms[0]
        return dist.TransformedDistribution(part.to_event(transform.domain.event_dim), transform)

    def _pyro_post_sample(self, msg: Any) -> None:
        super()._pyro_post_sample(msg)
        name = msg["name"]
        part = self._parts.pop(name, None)
        if part is None or part.asked or self._run.held:
            return
        # A handler holds it at a value of its own: q of all else is that given this value.
        met = [gp for gp in self._run.processes if isinstance(at_path(self.gps, gp), SparseGP)]
        if met:
            raise ValueError(
                f"site {name!r} is coupled and held at a value by a handler, and stands after GP site {met[0]!r}, "
                "whose posterior depends on it: sample it before that site in the model."
            )
        value = biject_to(msg["infer"]["prior"].support).inv(msg["value"])
        noise = part.drawn.noise.clone()
        noise[part.rows] = part.noise_of(value).detach()
        self._run.drawn = self.together(noise, self._mirrors)


def _without_ones(shape: torch.Size) -> list[int]:
    return [size for size in shape if size != 1]
