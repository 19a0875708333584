"""Families on projections of the data (Wenger et al., 2024)."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Union

from torch import Tensor

from ..approximations.on_sites import ProjectedGP
from ..bases.actions import BlockPolicy, EigenPolicy, KrylovPolicy, Policy, RandomPolicy, UserPolicy
from ..kernels.base import white_share
from ..numerics.arguments import refuse, require_count
from ..process import GaussianProcess
from .base import SiteFamily, require_matrix


@dataclass(frozen=True, eq=False, repr=False)
class ComputationAware(SiteFamily):
    """CaGP: the posterior given i projections Sᵀz of the data (Wenger et al., 2024, eq. 5), never overconfident.

    Mean μ + k(x, X)S(SᵀK̂S)⁻¹Sᵀ(z − μ), covariance k − k(x, X)S(SᵀK̂S)⁻¹Sᵀk(X, x) with K̂ = K + Λ⁻¹: the
    variance is the exact posterior's plus what the computation left out. One step evaluates all N² kernel entries
    (not kept: memory is O(N·i)), and so does a posterior at new inputs.

    :param num_actions: i.
    :param actions: "sparse" (learned, one number a datum, eq. 14), "cg" (residuals of conjugate gradients), "eigen"
        (top eigenvectors), "random", or a callable ``(kernel, sites) -> S`` of shape ``(N, i)``; of a module a copy
        trains, ``guide.gps.f.policy.policy``. Sparse and random actions belong to the rows of the first call.
    :param tolerance: of "cg": the relative residual that ends the iterations.
    :param batches: whether training steps bring mini-batches, ``size=N``. The actions are then of the n rows of the
        guide's first call, ``guide(x[rows], y[rows])``, and 0 elsewhere: q is the posterior given less, still never
        overconfident, and the bound that of all N. A step on B evaluates n² + nB kernel entries, a new input n.
    """

    num_actions: int = 64
    actions: Union[str, Callable] = "sparse"
    tolerance: float = field(default=1e-4, kw_only=True)
    batches: bool = field(default=False, kw_only=True)

    def __post_init__(self) -> None:
        super().__post_init__()
        require_count(self.num_actions, "ComputationAware's num_actions")
        if not callable(self.actions) and self.actions not in _POLICIES:
            raise ValueError(
                f"actions must be one of {sorted(_POLICIES)} or a callable (kernel, sites) -> S, got {self.actions!r}"
            )

    def build(self, process: GaussianProcess, name: str) -> ProjectedGP:
        require_matrix(process, name)
        x, kernel = process.x.detach(), process.kernel
        has_diagonal = kernel.depends_on_rows or (white_share(kernel, x).abs() > 1e-4).any()
        num, rows = self.num_actions, x.shape[-2]
        faults = {
            f"site {name!r} asks for {num} actions, the guide's first call has {rows} rows": rows < num,
            f"the kernel of site {name!r} has a diagonal term, such as White or a DeepBasis' correction, which "
            "projections of data cannot tell from noise: put it into the likelihood, or turn the correction "
            "off.": has_diagonal,
        }
        refuse(faults)
        return self._module(x, process.batch_shape)

    def _rebuild(self, spec: dict[str, Any], like: Tensor, name: str) -> ProjectedGP:
        x = like.new_zeros(spec["rows"] or self.num_actions, spec["columns"])
        return self._module(x, spec["batch_shape"])

    def _module(self, x: Tensor, batch_shape: Sequence[int]) -> ProjectedGP:
        if callable(self.actions):
            policy: Policy = UserPolicy(self.actions, self.num_actions)
        else:
            policy = _POLICIES[self.actions](self, x, batch_shape)
        return ProjectedGP(policy, x, batch_shape, self.declared(), self.rate, self.updates, batches=self.batches)


_POLICIES: dict[str, Callable[[ComputationAware, Tensor, Sequence[int]], Policy]] = {
    "cg": lambda family, x, batch_shape: KrylovPolicy(family.num_actions, family.tolerance),
    "eigen": lambda family, x, batch_shape: EigenPolicy(family.num_actions),
    "random": lambda family, x, batch_shape: RandomPolicy(x, family.num_actions),
    "sparse": lambda family, x, batch_shape: BlockPolicy(x, family.num_actions, batch_shape),
}
