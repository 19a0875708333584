"""A GP site's module under expectation propagation: sites of the data, and q(w) in natural parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Optional

import torch
from torch import Tensor

from ..bases import Basis
from ..gaussians import from_natural, seen_from, weighted_gram
from ..gaussians.sites import Sites
from ..modules import AbstractModule, size_buffers
from ..numerics.linalg import over_lower
from ..posterior.sparse_posterior import SparsePosterior
from ..process import GaussianProcess


class ExpectationGP(AbstractModule):
    """q(w) ∝ N(w; 0, I) Πₙ exp(−½νₙ(φₙᵀw)² + bₙφₙᵀw): precision P = I + Σₙ νₙφₙφₙᵀ, Pm = Σₙ bₙφₙ.

    Prediction needs P and Pm alone. A site is about the row φₙ under which it was last refined, and about the function
    itself: when hyperparameters move, u = Lw keeps its meaning, and so does υₙ = L⁻ᵀφₙ (eq. 2). What was
    added is what is taken away, however far they have moved.

    :param like: a tensor of the dtype and device wanted.
    """

    precision: Tensor  # ν, (..., N)
    linear: Tensor  # b, (..., N)
    rows: Tensor  # υ, (..., N, M)
    gram: Tensor  # Σ νφφᵀ, (..., M, M)
    pull: Tensor  # Σ bφ, (..., M)
    anchor: Tensor  # L that gram and pull belong to, (..., M, M); empty if w keeps its meaning

    def __init__(self, basis: Basis, batch_shape: Sequence[int], like: Tensor, family: dict[str, Any]) -> None:
        super().__init__()
        self.basis, self.family = basis, family
        self.batch_shape = torch.Size(batch_shape)
        size = sum(basis.sizes)  # type: ignore[misc]
        # First one of the guide's dtype, which others may be wider than: test_float32.py, `far_from_the_prior`.
        shapes = {"gram": (size, size), "pull": (size,), "precision": (0,), "linear": (0,)}
        for buffer, shape in shapes.items():
            self.register_buffer(buffer, like.new_zeros(*batch_shape, *shape))
        self.register_buffer("rows", like.new_zeros(0, size))
        self.register_buffer("anchor", like.new_zeros(0, 0))

    @property
    def empty(self) -> bool:
        """Whether no site was ever refined."""
        return self.precision.shape[-1] == 0

    def forward(
        self, process: GaussianProcess, name: str, kind: type[SparsePosterior] = SparsePosterior
    ) -> SparsePosterior:
        """The posterior of ``process``, at its inputs and under its hyperparameters."""
        # u = Lw keeps its meaning where L moves: P − I and Pm are those of L⁻¹ now.
        features = self.basis(process.kernel, process.jitter, name)
        gram, pull = seen_from(self.gram, self.pull, self.anchor, features.anchor)
        return kind(process, features, from_natural(gram, pull, features.sizes, None, name), name)

    def features_of(self, rows: Tensor) -> Tensor:
        """Rows υ as features φ under the L of :attr:`gram`."""
        return rows @ self.anchor if self.anchor.numel() else rows

    @torch.no_grad()
    def put(self, index: Optional[Tensor], num: int, sites: Sites, anchor: Optional[Tensor]) -> None:
        """Put sites, at features under ``anchor``, in the place of those that some data had; the sums stay.

        :param index: the data's row numbers, distinct, ``(B,)``; ``None`` for all.
        :param num: how many data there are; those without sites have none refined yet.
        """
        phi, anchor = sites.inputs, sites.inputs.new_zeros(0, 0) if anchor is None else anchor
        # υ = L⁻ᵀφ: rows ΦL⁻¹
        rows = over_lower(phi, anchor) if anchor.numel() else phi
        if index is None:
            self.precision, self.linear, self.rows = sites.precision, sites.linear, rows
        else:
            if self.empty:
                self.precision = phi.new_zeros(*self.batch_shape, num)
                self.linear = torch.zeros_like(self.precision)
                self.rows = phi.new_zeros(*phi.shape[:-2], num, phi.shape[-1])
            self.rows[..., index, :] = rows
            self.precision[..., index] = sites.precision
            self.linear[..., index] = sites.linear
        self.anchor = anchor.detach()

    @torch.no_grad()
    def look_from(self, anchor: Optional[Tensor]) -> None:
        """Have :attr:`gram` and :attr:`pull` as they are seen from ``anchor``."""
        self.gram, self.pull = seen_from(self.gram, self.pull, self.anchor, anchor)
        if anchor is not None:
            self.anchor = anchor.detach()

    def sums(self, phi: Tensor, precision: Tensor, linear: Tensor) -> tuple[Tensor, Tensor]:
        """Σ νφφᵀ and Σ bφ, of the batch's shape."""
        # Sites found in float64 are summed in phi's dtype (test_float32.py, data far from the prior).
        precision, linear = precision.to(phi), linear.to(phi)
        # Σ νφφᵀ and Σ bφ
        gram, pull = weighted_gram(phi, precision), (phi.mT @ linear[..., None])[..., 0]
        return gram.expand(self.gram.shape), pull.expand(self.pull.shape)

    def spec(self) -> dict[str, Any]:
        """What is needed to make the module anew before its state is loaded, in plain Python."""
        return {"basis": self.basis.spec(), "batch_shape": list(self.batch_shape), "family": self.family}

    def _load_from_state_dict(self, state_dict: dict[str, Any], prefix: str, *args: Any) -> None:
        state_dict.pop(prefix + "fingerprints", None)  # of releases that knew rows by them
        size_buffers(self, state_dict, prefix)
        super()._load_from_state_dict(state_dict, prefix, *args)


def require_refined(modules: Mapping[str, Any], predicting: bool = True) -> None:
    """Raise if a module has no sites yet: what it gives is the prior, which would pass for a posterior.

    :param modules: of GP sites, by name.
    :param predicting: whether a posterior is wanted.
    """
    for name, module in modules.items():
        if isinstance(module, ExpectationGP) and module.empty and predicting:
            raise ValueError(
                f"GP site {name!r} has the family {module.family['name']}, and has taken no step yet. Take one "
                "first, ExpectationPropagation(model, guide, optim).step(x, y), or load the state of a trained guide."
            )
