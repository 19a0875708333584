"""A posterior as a run of the guide has it at a site: how it is drawn, and how its density enters an objective."""

from __future__ import annotations

import copy
from typing import Any, Optional

import torch
from torch import Tensor

from ..numerics.linalg import cholesky, default_jitter
from .sparse_posterior import SparsePosterior

__all__ = ["OTHER_LATENTS", "ExpectedSite", "GroupedSite", "MarginalSite", "NodeSite", "Site"]

OTHER_LATENTS = (
    "for other latents it has Pyro's mean-field normal, or what get_posterior(name, prior), overridden in a subclass, "
    "returns for them"
)


class Site(SparsePosterior):
    """A posterior as the guide's answer at a site: joint draws.

    The draw's density is relative to the prior process, the model's is 1 in the guide's own pair of traces only:
    anyone else, who sets it against the model's exact density, is refused.
    """

    in_pair = False

    def paired(self) -> Site:
        """This answer, draws and all, as an entry of the guide's own pair of traces."""
        new = copy.copy(self)
        new.in_pair = True
        return new

    def log_prob(self, value: Tensor) -> Tensor:
        """log dq/dp at a draw, in nats.

        :raises ValueError: outside the guide's pair of traces.
        """
        self._require_pair()
        return super().log_prob(value)

    def _require_pair(self) -> None:
        if not self.in_pair:
            raise ValueError(
                f"the posterior of GP site {self.name!r} has a density relative to the prior process only, which can't "
                "be set against the model's exact one: pyro.infer.Importance, psis_diagnostic, ReweightedWakeSleep and "
                "WeighedPredictive, which run guide and model apart, do not work with this guide, nor does "
                "vectorize_particles=True, nor a guide of your own that calls it, or has it for a part: give SVI the "
                f"AutoSparseGP itself; {OTHER_LATENTS}. After guide.eval() "
                "and guide(*args), guide.get_traces() gives a (model, guide) pair whose log densities make importance "
                "weights."
            )


class ExpectedSite(Site):
    """A site's posterior in training where the likelihood couples function values: joint draws, log_prob = KL."""

    def log_prob(self, value: Tensor) -> Tensor:
        """KL[q ‖ p]: the expectation of the relative log density, whatever the value."""
        self._require_pair()
        return self.kl.expand(value.shape[:-1])


class MarginalSite(ExpectedSite):
    """A site's posterior in training: independent draws of its marginals, log_prob = KL."""

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:
        """Independent draws of the marginals, ``(*sample_shape, ..., N)``."""
        return self.marginals.rsample(torch.Size(sample_shape))


class GroupedSite(ExpectedSite):
    """A site's posterior in training where densities couple function values within groups of inputs, such as the
    patches of an image: draws that are joint within a group and independent between groups, log_prob = KL.
    """

    group: int

    def in_groups_of(self, size: int) -> GroupedSite:
        """This site with groups of that many consecutive inputs."""
        self.group = size
        return self

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:
        """Draws of each group's values, ``(*sample_shape, ..., N)``, in O(NG²) for groups of G."""
        shape = torch.Size(sample_shape) + self._batch_shape
        x = self._grouped(self.process.x, len(shape))
        num, size = x.shape[0], x.shape[-2]
        phi = [self._grouped(block, len(shape)) for block in self.features]
        residual = self.process.kernel(x)
        scale = residual.detach().diagonal(dim1=-2, dim2=-1).mean(-1)
        for block in phi:
            residual = residual - block @ block.mT
        # Patches that are alike, such as empty ones, leave a singular matrix with the rounding of k − ΦΦᵀ.
        jitter = 10 * default_jitter(x.dtype) if self.process.jitter is None else self.process.jitter
        tril = cholesky(residual, jitter, f"the residual covariance of site {self.name!r} in a group", scale)
        value = _each(tril, torch.randn(num, *shape, size, dtype=x.dtype, device=x.device))
        for block, w in zip(phi, self.coefficients.rsample(torch.Size((num, *shape)))):
            value = value + _each(block, w)
        return self.process.mean_at(self.process.x) + value.movedim(0, -2).flatten(-2)

    def _grouped(self, rows: Tensor, dims: int) -> Tensor:
        """``(..., N, R)`` as ``(groups, ..., G, R)``, with ``dims`` dimensions between."""
        groups = rows.unflatten(-2, (-1, self.group)).movedim(-3, 0)
        return groups.reshape(groups.shape[0], *[1] * (dims + 3 - groups.dim()), *groups.shape[1:])


def _each(matrix: Tensor, v: Tensor) -> Tensor:
    """Av, ``(groups, ..., R)``, for A ``(groups, ..., R, C)`` and v ``(groups, ..., C)``."""
    if matrix.shape[1:-2].numel() > 1:
        return (matrix @ v[..., None])[..., 0]
    # One matrix serves all outputs of a group: their values are its columns.
    columns = v.flatten(1, -2).mT if v.dim() > 2 else v[..., None]
    product = (matrix.reshape(matrix.shape[0], *matrix.shape[-2:]) @ columns).mT
    return product.reshape(*v.shape[:-1], matrix.shape[-2])


class NodeSite(ExpectedSite):
    """A site's posterior at quadrature nodes: ``rsample`` is mean + sd·node.

    :param node: standardised, ``()`` or, for one node an output, ``(P,)``; ``None`` is the mean.
    """

    node: Optional[Tensor]

    def rsample(self, sample_shape: Any = torch.Size()) -> Tensor:
        """mean + sd·node, ``(..., N)``."""
        if self.node is None:
            return self.mean
        return self.mean + self.stddev * (self.node[..., None] if self.node.dim() else self.node)

    def at_node(self, node: Optional[Tensor]) -> NodeSite:
        """This site at a node."""
        self.node = node
        return self
