"""Latents that are no Gaussian processes, jointly Gaussian with each other and with the coefficients of GP sites.

In unconstrained space z ~ N(a, RRᵀ), drawn when it is first asked for: by one of them or by a GP site, whose
coefficients given z have a mean linear in it. Both learn by natural steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from operator import attrgetter
from typing import Any, Optional, TypeVar

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
from ..warned import warn_once
from .joint import follow
from .known import KnownGuide

__all__ = [
    "condition_on_held",
    "couple",
    "coupled_among",
    "coupled_params",
    "coupled_posterior",
    "draw_of",
    "warn_of_medians",
    "with_mirrored",
]

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
        return self.drawn.weighed(density)


def coupled_among(guide: KnownGuide, facts: Structure) -> list[str]:
    """The latents that are coupled, in the order of the first call.

    :raises ValueError: naming a site that can't be.
    """
    if not guide.coupled:
        return []
    refused = {name: _why_not(guide, name, latent, facts) for name, latent in facts.latents.items()}
    able = [name for name, why in refused.items() if why is None]
    if not isinstance(guide.coupled, bool):
        for name in guide.coupled:
            if name not in able:
                kind = "is a GP site, whose family says what q(f) is" if name in facts.gps else "is no latent site"
                raise ValueError(
                    f"coupled names site {name!r}, which {refused.get(name, kind)}; what can be coupled is {able}"
                )
        return [name for name in able if name in guide.coupled]
    for name in facts.grouped:
        if refused.get(name) == _OF_ROWS:
            plate = next(iter(facts.latents[name]["plates"]))
            warn_once(
                guide.warned,
                "coupled",
                name,
                f"coupled=True leaves out latent site {name!r}: its plate {plate!r} holds data, so that it is "
                "taken for one of single rows. Give the data a plate of another name and of the same size, and "
                "leave the latent in its own, to have it coupled.",
                stacklevel=4,
            )
    return able


def _why_not(guide: KnownGuide, name: str, latent: dict[str, Any], facts: Structure) -> Optional[str]:
    plates = set(latent["plates"])
    if plates & set(facts.data_plates):
        return _OF_ROWS
    if plates & set(guide.amortized_plates):
        return "shares its posterior over a plate"
    if guide.is_point(name):
        return "is fitted as a point"
    return "has a posterior of its own" if latent["shape"] is None else None


def couple(guide: KnownGuide, facts: Structure, start: Optional[Mapping[str, Tensor]] = None) -> None:
    """Make the parameters of what is coupled, in the place of those of each latent alone.

    :param start: loc and scale of them all; by default, those of each alone.
    """
    if not facts.coupled:
        return
    if start is None:
        start = {}
        for kind in ("locs", "scales"):
            values = [attrgetter(name)(getattr(guide, kind)).detach().flatten() for name in facts.coupled]
            start[kind] = torch.cat(values)
            for name in facts.coupled:
                *path, leaf = f"{kind}.{name}".split(".")
                delattr(at_path(guide, ".".join(path)), leaf)
    guide.together = DrawnGaussian(start["locs"], start["scales"])
    modules = guide.modules_by_site()
    for i, group in enumerate(facts.joint):
        follow(guide.shared(i), {name: modules[name] for name in group}, start["locs"])
    for name, module in modules.items():
        if isinstance(module, SparseGP) and guide.group_of(name) is None:
            module.follow(start["locs"], name)


def _place(facts: Structure, name: str, prior: Any) -> tuple[slice, torch.Size]:
    """Where a latent's entries are among all, and its values' shape: in plates of one, as its prior has it."""
    start = 0
    for other in facts.coupled[: facts.coupled.index(name)]:
        start += math.prod(facts.latents[other]["shape"])
    shape = torch.Size(facts.latents[name]["shape"])
    rows, outer = slice(start, start + shape.numel()), len(shape) - facts.latents[name]["event_dim"]
    known = [size for size in shape[:outer] if size != 1]
    if known == [size for size in prior.batch_shape if size != 1]:
        shape = prior.batch_shape + shape[outer:]
    return rows, shape


def coupled_params(guide: KnownGuide, name: str, prior: Any) -> tuple[Tensor, Tensor]:
    """The mean of a coupled latent, and its standard deviation given those before it."""
    rows, shape = _place(guide.facts, name, prior)
    return guide.together.mean[rows].reshape(shape), guide.together.tril.diagonal()[rows].reshape(shape)


def coupled_posterior(guide: KnownGuide, name: str, prior: Any, alone: Any) -> Any:
    """The posterior of a coupled latent in a run: its part of the draw of all.

    :param alone: what it would be by itself.
    """
    rows, shape = _place(guide.facts, name, prior)
    known = shape[: len(shape) - guide.facts.latents[name]["event_dim"]]
    if prior.batch_shape != known:
        raise ValueError(
            f"site {name!r} is coupled and has the shape {tuple(known)} of the guide's first call, here "
            f"{tuple(prior.batch_shape)}: leave it out of coupled=, or the plates that it stands in whole."
        )
    part = guide.run.parts[name] = _Part(draw_of(guide, guide.run), rows, shape)
    transform = alone.transforms[0]
    return dist.TransformedDistribution(part.to_event(transform.domain.event_dim), transform)


def draw_of(guide: KnownGuide, run: Any) -> Any:
    """A run's draw of all latents that are coupled, or their medians; ``None`` if none is."""
    if guide.core is None or not guide.core.facts.coupled:
        return None
    q = guide.together
    if guide._computing_median:
        return Drawn(q.mean, q.tril, torch.zeros_like(q.mean), q.mean)
    if run.drawn is None:
        noise = torch.randn_like(q.mean)
        run.drawn = q(-noise if guide.mirrors else noise, guide.mirrors)
    return run.drawn


def condition_on_held(guide: KnownGuide, run: Any, name: str) -> None:
    """After a coupled latent's site: if a handler holds it at a value of its own, q of all else is that given it.

    :raises ValueError: if a GP site stands before it.
    """
    part = run.parts.pop(name, None)
    if part is None or part.asked or run.conditions.drawn is not None:
        return
    met = [gp for gp in run.processes if isinstance(guide.module_of(gp), SparseGP)]
    if met:
        raise ValueError(
            f"site {name!r} is coupled and held at a value by a handler, and stands after GP site {met[0]!r}, "
            "whose posterior depends on it: sample it before that site in the model."
        )
    site: Any = guide.trace.nodes[name]
    noise = part.drawn.noise.clone()
    noise[part.rows] = part.noise_of(biject_to(site["infer"]["prior"].support).inv(site["value"])).detach()
    run.drawn = guide.together(noise, guide.mirrors)


def with_mirrored(guide: KnownGuide, evaluate: Callable[[], _T]) -> list[_T]:
    """What is evaluated in runs of the guide; and again, if latents are coupled, with the same random numbers, the
    same rows of a mini-batch among them, but the latents' draw a + Rε at its mirror image, a − Rε.
    """
    facts = guide.structure
    if facts is None or not facts.coupled:
        return [evaluate()]
    state = RandomState(guide.like)
    found = [evaluate()]
    state.restore()
    guide.mirrors = True
    try:
        return [*found, evaluate()]
    finally:
        guide.mirrors = False


def warn_of_medians(guide: KnownGuide, posteriors: Mapping[str, SparsePosterior]) -> None:
    """Warn of GP sites that are far wider over the draws of the latents that they follow than at their medians.

    With q(w | ε) = N(m + BRε, S), the variance of f(x) over ε is that at ε = 0 and ‖(BR)ᵀφ(x)‖² more.
    """
    for name, q in posteriors.items() if guide.facts.coupled else ():
        slope = _slope(guide, name)
        if slope is None or ("medians", name) in guide.warned:
            continue
        moves = (slope @ guide.together.tril).split([phi.shape[-1] for phi in q.features], -2)
        more = sum(phi @ block for phi, block in zip(q.features, moves)).square().sum(-1)
        share = float((q.variance / (q.variance + more)).detach().min().sqrt())
        if share < 0.5:
            warn_once(
                guide.warned,
                "medians",
                name,
                f"guide.posterior holds other latents at their medians, and GP site {name!r} follows them, as "
                f"coupled= asks: at some inputs its standard deviation is {share:.2g} of what it is over their "
                f"draws. It is right for a sum with these medians; for {name!r} alone take draws, "
                f"predict(model, guide, x)[{name!r}].",
                stacklevel=3,
            )


def _slope(guide: KnownGuide, name: str) -> Optional[Tensor]:
    """B, ``(..., M, D)``, of a GP site's coefficients; ``None`` if they follow nothing."""
    group, module = guide.group_of(name), guide.module_of(name)
    if group is not None:
        whole = guide.shared(group)
        blocks = whole.following.slope.split(whole.following.sizes, -2)
        return torch.cat([blocks[b] for b in whole.blocks[name]], -2)
    return module.following.slope if isinstance(module, SparseGP) and module.following is not None else None
