"""A Gaussian of hyperparameters by natural steps of single draws.

q(θ) = N(a, RRᵀ). With a draw θ = a + Rε and the gradient of minus the bound by it, g, and e = Rᵀg − ε, which has that
of log q(θ) too, the natural gradient by the Fisher matrix (RRᵀ)⁻¹ (Amari, 1998) gives

    a ← a − ρRe,   R ← R − ρ R tril½(eεᵀ)/(1 + εᵀε),

normalised as least-mean-squares filters are, so that it is stable whatever ε is drawn; and no step of a, and none of
R's diagonal, is longer than ρ, a fraction of q's own deviations. Where log p is quadratic and q is right, e is 0 for
every draw, so steps from a start at the mode and its curvature have next to no noise.
"""

import functools
import itertools
import math
from dataclasses import dataclass
from typing import Optional

import torch
from torch import Tensor

from ..numerics.processes import by_draws
from .steps import Natural, Pass, Rate, recorded


def _falling(step: int) -> float:
    """ρ of step t: a start at the mode counts for twenty steps, at last it is an average over some fifty."""
    return max(0.02, 1 / (20 + step))


@dataclass(frozen=True)
class Drawn:
    """A draw θ = a + Rε."""

    loc: Tensor  # a, (D,)
    root: Tensor  # R, lower triangular, (D, D)
    noise: Tensor  # ε
    value: Tensor  # θ
    taken: Optional[Pass] = None  # where the weight of log q(θ) is recorded

    @functools.cached_property
    def whitened(self) -> Tensor:
        """ε of the value, R⁻¹(θ − a): its numbers, and a function of θ."""
        return torch.linalg.solve_triangular(self.root, (self.value - self.loc)[:, None], upper=False)[:, 0]

    def densities_of(self, noise: Tensor, rows: slice = slice(None)) -> Tensor:
        """log q of some entries, each given those before it, at this ε; natural steps want their weight."""
        value = -0.5 * (noise.square() + math.log(2 * math.pi)) - self.root.diagonal()[rows].log()
        if self.taken is not None:
            value = self.taken.keep(value)
            self.taken.divergences.append(value)
        return value

    def noise_of(self, value: Tensor, rows: slice) -> Tensor:
        """ε of some entries of this value, given those before them."""
        # R_ii⁻¹(z_i − a_i − R_i<ε_<)
        moved = value - self.loc[rows] - self.root[rows, : rows.start] @ self.whitened[: rows.start]
        return torch.linalg.solve_triangular(self.root[rows, rows], moved[:, None], upper=False)[:, 0]

    def density_of(self, value: Tensor, rows: slice) -> Tensor:
        """log q of some entries of this value, each given those before it."""
        return self.densities_of(self.noise_of(value, rows), rows)

    @functools.cached_property
    def densities(self) -> Tensor:
        """Those of θ, ``(D,)``."""
        return self.densities_of(self.whitened)


class DrawnGaussian(Natural):
    """q(θ) = N(a, RRᵀ) over D latents, by natural steps; else a and a tilt A are parameters, with the root RA.

    :param loc: a at the start, ``(D,)``.
    :param root: R at the start, ``(D, D)``.
    :param rate: ρ in (0, 1], or a function of the number of steps taken; by default max(0.02, 1/(20 + t)).
    """

    root: Tensor

    def __init__(self, loc: Tensor, root: Tensor, rate: Rate = _falling) -> None:
        super().__init__((len(loc),), (), loc, rate)
        self._set("loc", loc)
        self.tilt = torch.nn.Parameter(torch.zeros_like(root))
        self.register_buffer("root", root.detach().clone())

    @property
    def mean(self) -> Tensor:
        """a, ``(D,)``."""
        return self._kept("loc")

    @property
    def tril(self) -> Tensor:
        """R, ``(D, D)``."""
        return self.root @ self.tilt_matrix if self.has_tilt else self.root

    def forward(self, noise: Tensor) -> Drawn:  # type: ignore[override]
        """The draw of this ε, ``(D,)``."""
        record = recorded()
        # Natural steps go on from where plain gradients have led.
        if record is not None and self.is_tilted:
            self.root = self.root @ self.tilt_matrix
            self._end_tilt()
        loc, root = self.mean, self.tril
        # θ = a + Rε
        value = loc + root @ noise
        if record is None:
            return Drawn(loc, root, noise, value)
        taken = record.new(self, None)
        value = taken.keep(value)
        taken.draws.append((noise, value))
        return Drawn(loc, root, noise, value, taken)

    def rate_of(self, passes: list[Pass], share: float) -> float:
        return self.next_rate(share)  # its steps are bounded by themselves

    def step(self, taken: Pass, rate: Tensor, weight: Tensor, again: bool) -> None:
        root, loc = self.root, self._kept("loc")
        unit = weight / len(loc)  # every latent has told the weight
        pairs = [(noise, grad) for noise, value in taken.draws if (grad := value.grad) is not None]
        for share, own, grad in itertools.chain(*itertools.starmap(by_draws, pairs)):
            # Rᵀ∂: densities of q(θ) given the draw are constants of ε, whose part by R is told here.
            pull = root.mT @ (grad / unit)
            pull = torch.where(0 * pull.sum() == 0, pull, 0.0)  # 0 if it is not finite
            # a ← a − ρRe, ρe of a root mean square below ρ
            bounded = pull * (rate * (1 + pull.square().mean()).rsqrt())
            loc = torch.addmv(loc, root, bounded, alpha=-share)
            # R tril½(eεᵀ), lower triangular: sums of the columns from each one on.
            along = root * pull
            below = along.flip(-1).cumsum(-1).flip(-1) - 0.5 * along
            # R tril½(eεᵀ)/(1 + εᵀε), bounded by what it is of R's diagonal: R stays a root
            change = below * (own / (1 + own.square().sum()))
            size = (change.diagonal() / root.diagonal()).square().amax()
            self.root = self.root - change * (share * rate * (1 + size).rsqrt())
        self._set("loc", loc)
