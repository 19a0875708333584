"""The robust-max likelihood of multi-class classification, with its expectations as one-dimensional integrals."""

from __future__ import annotations

import functools
import math
from typing import Any, ClassVar, Optional, Union

import torch
from pyro.distributions import TorchDistribution
from torch import Tensor
from torch.distributions import constraints

from ..kernels.base import as_tensor
from ..numerics.arguments import require_codes
from ..numerics.functions import broadcast_shapes, log_ndtr

# The trapezoidal rule on ±_REACH standard deviations: for a product of normal curves that differ in width it is far
# more precise than Gauss-Hermite of as many nodes (1e-6 where the largest is three times the smallest, not 1e-3).
_NODES, _REACH = 64, 5.3
_FAR = 1e4  # standard deviations; further out, where the scale is 0, log Φ has no gradient to use


class RobustMax(TorchDistribution):
    """A class y in {0, …, P − 1}: the one with the largest function value, except with probability ε.

    p(y | f) = 1 − ε if f_y is the largest of f_1, …, f_P, ε/(P − 1) otherwise, of batch shape ``(...,)``. For P
    independent outputs of one GP site, ``.expand([P]).to_event(1)`` with values ``(P, N)``, write ``RobustMax(f.mT)``.

    Under independent normals f_c ~ N(μ_c, σ_c²) all expectations follow from the probability that f_y is the largest,

        π_y = E_{f_y} ∏_{c ≠ y} Φ((f_y − μ_c)/σ_c),

    a sum over nodes. For two classes it is Φ((μ_y − μ_c)/√(σ_y² + σ_c²)); of more, that formula for the strongest
    rival takes most of the integral. :class:`~pyro_sparsegp.TraceQuadrature_ELBO` uses :meth:`expected_log_prob` by
    itself. As a function of f the density is piecewise constant: draws of f give no gradient, so objectives and
    families that need one refuse it.

    Hernández-Lobato, Hernández-Lobato and Dupont, 2011, "Robust multi-class Gaussian process classification"
    (Girolami and Rogers, 2006, eq. 7, for π).

    >>> q = RobustMax(torch.tensor([1.0, 0.0, -1.0]), epsilon=0.01)
    >>> [round(p, 3) for p in q.probs.tolist()]
    [0.99, 0.005, 0.005]
    >>> [round(p, 3) for p in q.expected_probs(torch.ones(3)).tolist()]
    [0.723, 0.226, 0.051]

    :param f: ``(..., P)``, P ≥ 2.
    :param epsilon: ε in (0, 1), a number or ``(...,)``.
    :raises ValueError: if f has no last dimension of at least two classes.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {"f": constraints.real_vector, "epsilon": constraints.unit_interval}
    normal_parameter: ClassVar[str] = "f"
    piecewise_constant: ClassVar[bool] = True

    def __init__(self, f: Tensor, epsilon: Union[float, Tensor] = 1e-3, validate_args: Optional[bool] = None) -> None:
        f = torch.as_tensor(f)
        if f.dim() < 1 or f.shape[-1] < 2:
            got = tuple(f.shape)
            raise ValueError(f"RobustMax's f must be (..., P) for P ≥ 2 classes, got {got}; of values (P, N) give f.mT")
        epsilon = as_tensor(epsilon, f)
        batch_shape = broadcast_shapes(f.shape[:-1], epsilon.shape)
        self.f = f.expand(*batch_shape, f.shape[-1])
        self.epsilon = epsilon.expand(batch_shape)
        super().__init__(batch_shape, validate_args=validate_args)

    @property
    def num_classes(self) -> int:
        return self.f.shape[-1]

    @property
    def support(self) -> Any:  # type: ignore[override]
        return constraints.integer_interval(0, self.num_classes - 1)

    @property
    def probs(self) -> Tensor:
        """p(y | f) of each class, ``(..., P)``."""
        largest = torch.nn.functional.one_hot(self.f.argmax(-1), self.num_classes)
        return self._of_wins(largest.to(self.f.dtype))

    def _of_wins(self, wins: Tensor) -> Tensor:
        error = self.epsilon[..., None]
        return (1 - error) * wins + error / (self.num_classes - 1) * (1 - wins)

    def expand(self, batch_shape: torch.Size, _instance: object = None) -> RobustMax:
        """The same distribution with the given batch shape."""
        shape = torch.Size(batch_shape)
        new = RobustMax(self.f.expand(*shape, self.num_classes), self.epsilon.expand(shape), validate_args=False)
        new._validate_args = self._validate_args  # a plate expands, and data in it are checked, too
        return new

    def sample(self, sample_shape: torch.Size = torch.Size()) -> Tensor:
        """Draws of classes, integers."""
        with torch.no_grad():
            return torch.distributions.Categorical(self.probs, validate_args=False).sample(torch.Size(sample_shape))

    def log_prob(self, value: Tensor) -> Tensor:
        """log p(y | f)."""
        self._require_classes(value)
        if self._validate_args:
            self._validate_sample(value)
        hit, miss = self._levels()
        return torch.where(self.f.argmax(-1) == value, hit, miss)

    def _require_classes(self, value: Tensor) -> None:
        if self._validate_args:
            require_codes(value, self.num_classes, "RobustMax's classes", "give y - 1 for classes from 1")

    def _levels(self) -> tuple[Tensor, Tensor]:
        # log(1 − ε) and log(ε/(P − 1)): the log density where f_y is the largest, and where it is not
        return torch.log1p(-self.epsilon), self.epsilon.log() - math.log(self.num_classes - 1)

    def expected_log_prob(self, value: Tensor, variance: Tensor) -> Tensor:
        """E[log p(y | f)] for independent f_c ~ N(this distribution's f_c, variance), ``(...,)``.

        :param value: y, ``(...,)``.
        :param variance: ``(..., P)``. π has errors of 1e-8 for equal variances, 1e-6 where standard deviations differ
            threefold, 3e-3 tenfold, and up to 1e-2 beside values that are fixed (variance 0).
        """
        # π_y log(1 − ε) + (1 − π_y) log(ε/(P − 1))
        self._require_classes(value)
        hit, miss = self._levels()
        return hit + self._losing_probability(value.long(), variance) * (miss - hit)

    def expected_probs(self, variance: Tensor) -> Tensor:
        """E[p(y | f)] of each class, ``(..., P)``, for independent f_c ~ N(this distribution's f_c, variance).

        The predictive one is ``RobustMax(q.mean.mT, epsilon).expected_probs(q.variance.mT)``.
        """
        shape = broadcast_shapes(self.f.shape, variance.shape)
        classes = [torch.full(shape[:-1], c, device=self.f.device) for c in range(self.num_classes)]
        losses = torch.stack([self._losing_probability(y, variance) for y in classes], -1)
        return self._of_wins(1 - losses)

    def _losing_probability(self, y: Tensor, variance: Tensor) -> Tensor:
        # 1 − π_y = (1 − E Φ_r) + E[Φ_r(1 − ∏_{c ≠ y, r} Φ_c)] with r the rival who is most likely above f_y: the first
        # term has a closed form, the second is small unless there are several rivals.
        mean = self.f
        shape = broadcast_shapes(mean.shape, variance.shape, (*y.shape, 1))
        floor = torch.finfo(mean.dtype).tiny ** 0.5  # the root of 0 has no gradient
        scale = variance.clamp(min=floor).sqrt().expand(shape)
        mean, y = mean.expand(shape), y.expand(shape[:-1])[..., None]
        own_mean, own_scale = mean.gather(-1, y), scale.gather(-1, y)
        margin = (own_mean - mean) / torch.hypot(own_scale, scale)
        rival = margin.detach().scatter(-1, y, math.inf).argmin(-1, keepdim=True)
        loss = torch.special.ndtr(-margin.gather(-1, rival))[..., 0]
        if self.num_classes == 2:
            return loss
        nodes, weights = _rule(mean.dtype, mean.device)
        at = own_mean + own_scale * nodes  # (..., K)
        z = (at[..., None] - mean[..., None, :]) / scale[..., None, :]  # (..., K, P)
        log_below = log_ndtr(z.clamp(-_FAR, _FAR))
        taken = torch.zeros(shape, dtype=torch.bool, device=mean.device).scatter(-1, torch.cat([y, rival], -1), True)
        others = log_below.masked_fill(taken[..., None, :], 0.0).sum(-1)
        below = log_below.gather(-1, rival[..., None, :].expand(*at.shape, 1))[..., 0]
        return loss + (below.exp() * -torch.expm1(others)) @ weights


@functools.lru_cache(maxsize=8)
def _rule(dtype: torch.dtype, device: torch.device) -> tuple[Tensor, Tensor]:
    with torch.inference_mode(False):  # what is kept must serve training, too
        nodes = torch.linspace(-_REACH, _REACH, _NODES, dtype=torch.float64)
        weights = torch.softmax(-0.5 * nodes.square(), 0)
        return nodes.to(device, dtype), weights.to(device, dtype)
