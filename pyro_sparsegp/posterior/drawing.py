"""A posterior as a run of the guide has it at a site: how it is drawn, and how its density enters an objective."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping
from typing import Any, Optional

import torch
from torch import Tensor

from ..numerics.linalg import default_jitter, residual_cholesky, variance_floor
from .sparse_posterior import SparsePosterior

OTHER_LATENTS = "for another posterior of a latent override get_posterior(name, prior) in a subclass"


class Site(SparsePosterior):
    """A posterior as the guide's answer at a site: joint draws."""

    # The draw's density is relative to the prior process, the model's is 1 in the guide's own pair of traces only:
    # anyone else, who sets it against the model's exact density, is refused.
    in_pair = False

    def paired(self) -> Site:
        """This answer, draws and all, as an entry of the guide's own pair of traces."""
        new = copy.copy(self)
        new.in_pair = True
        return new

    def log_prob(self, value: Tensor) -> Tensor:
        """log dq/dp at a draw, in nats; refused outside the guide's pair of traces."""
        self._require_pair()
        return super().log_prob(value)

    def _require_pair(self) -> None:
        if not self.in_pair:
            raise ValueError(
                f"the posterior of GP site {self.name!r} has a density relative to the prior process only. These do "
                "not work with it: pyro.infer.Importance, psis_diagnostic, ReweightedWakeSleep, WeighedPredictive, "
                "vectorize_particles=True, a guide that contains it. Give SVI the AutoSparseGP itself; "
                f"{OTHER_LATENTS}. For importance weights call guide.eval(), guide(*args), and guide.get_traces()."
            )


class Expected(Tensor):
    """A log density that is right in expectation only: it may be added up, and no draw be weighed by it."""

    @classmethod
    def __torch_function__(cls, func: Callable, types: tuple, args: tuple = (), kwargs: Mapping = {}) -> Any:
        # Else RenyiELBO's value is wrong in silence: test_quadrature.py, test_weights_and_renyi.
        if func.__name__ in ("exp", "logsumexp", "softmax", "log_softmax"):
            raise ValueError(
                "this objective weighs draws, as RenyiELBO does, by densities that are expectations in training. "
                "Call guide.eval() first, or use TraceQuadrature_ELBO, Trace_ELBO or TraceMeanField_ELBO."
            )
        return super().__torch_function__(func, types, args, kwargs)


class ExpectedSite(Site):
    """A site's posterior in training where the likelihood couples function values: joint draws, log_prob = KL."""

    def log_prob(self, value: Tensor) -> Tensor:
        # the expectation of the relative log density, whatever the value
        self._require_pair()
        return self.kl.expand(value.shape[:-1]).as_subclass(Expected)


class MarginalSite(ExpectedSite):
    """A site's posterior in training: draws of its marginals, row by row independent, log_prob = KL."""

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:
        self.coefficients.note_draws()
        shape = self._extended_shape(sample_shape)
        return self.mean + self.stddev * torch.randn(shape, dtype=self.mean.dtype, device=self.mean.device)


class FunctionSite(ExpectedSite):
    """A part of a field in training: draws given coefficients, which all of it shares, and independent residuals."""

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:
        w = self.coefficients.rsample(torch.Size(sample_shape) + self._batch_shape)
        values = self.given(w)
        left = values.variance.clamp(min=variance_floor(self.variance))
        return values.mean + left.sqrt() * torch.randn_like(values.mean)


class GroupedSite(ExpectedSite):
    """A site's posterior in training where densities couple values within groups of inputs: draws that are, too."""

    group = 1  # so many consecutive inputs, such as the patches of an image

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:
        # in O(NG²) for groups of G, which are a first dimension here
        shape = torch.Size(sample_shape) + self._batch_shape
        x = by_groups(self.process.x, self.group, len(shape))
        num, size = x.shape[0], x.shape[-2]
        phi = [by_groups(block, self.group, len(shape)) for block in self.features]
        # Patches that are alike, such as empty ones, leave a singular matrix with the rounding of k − ΦΦᵀ.
        jitter = 10 * default_jitter(x.dtype) if self.process.jitter is None else self.process.jitter
        what = f"the residual covariance of site {self.name!r} in a group"
        tril = residual_cholesky(self.process.kernel(x), phi, jitter, what)
        noise = _each(tril, torch.randn(num, *shape, size, dtype=x.dtype, device=x.device))
        value = sum(map(_each, phi, self.coefficients.rsample(torch.Size((num, *shape)))), noise)
        return self.process.mean_at(self.process.x) + value.movedim(0, -2).flatten(-2)


def by_groups(rows: Tensor, size: int, dims: int) -> Tensor:
    """``(..., N, R)`` as ``(groups, ..., size, R)``, with so many dimensions between."""
    groups = rows.unflatten(-2, (-1, size)).movedim(-3, 0)
    return groups.reshape(groups.shape[0], *[1] * (dims + 3 - groups.dim()), *groups.shape[1:])


def _each(matrix: Tensor, v: Tensor) -> Tensor:
    # Av, (groups, ..., R), for A (groups, ..., R, C) and v (groups, ..., C); of one matrix for all outputs of a group,
    # the values are columns of one product.
    return torch.einsum("g...rc,g...c->g...r", matrix, v)


class NodeSite(ExpectedSite):
    """A site's posterior at a quadrature node: ``rsample`` is mean + sd·node."""

    node: Optional[Tensor] = None  # the mean

    def rsample(self, sample_shape: object = torch.Size()) -> Tensor:
        return self.mean if self.node is None else self.mean + self.stddev * self.node

    def at_node(self, node: Optional[Tensor]) -> NodeSite:
        """This site at a standardised node, ``()`` or, for one node an output, ``(P,)``; ``None`` is the mean."""
        self.node = node[..., None] if node is not None and node.dim() else node
        return self
