"""The effects of an additive model: the posterior of each summand of a kernel, and of all of them jointly.

With a feature block Φ_c for each component and q(w) = N(m, S),

    Cov(f_c(x), f_d(x')) = [c = d] k_c(x, x') + φ_c(x)ᵀ(S − I)_cd φ_d(x'),

so effects are correlated wherever S has blocks off its diagonal (Adam, Durrande and John, 2018, section 3.2).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Optional, Union

import torch
from torch import Tensor

from ..kernels.algebra import term_names
from ..kernels.anova import legendre
from ..numerics.linalg import on_diagonal, residual_cholesky, side_by_side, sum_blocks, times

_NODES = {1: 40, 2: 16, 3: 8}  # of a quadrature over the columns of an effect, along each of them


class Components(Sequence):
    """The components of a posterior: a sequence of :class:`SparsePosterior`, one for each summand of the kernel.

    ``components[2]`` and ``components["wind"]`` are posteriors of single effects; :attr:`covariance_matrix` and
    :meth:`rsample` know how they go together. Names come from ``kernel.named("wind")``, from the columns (``"x0"``,
    ``"x0:x1"``) or from the kernel's class (``"constant"``). They add up to f less its prior mean.

    :param whole: the posterior of the sum.
    :param inputs: where each component is wanted, ``(N_c, D)`` each; by default where the whole is.
    """

    def __init__(self, whole: Any, inputs: Optional[Sequence[Tensor]] = None) -> None:
        self._whole, found = whole, whole.basis.components()
        self.names = term_names(whole.process.kernel)
        if len(found) != len(self.names):
            num, terms = len(found), list(self.names)
            raise ValueError(f"the basis of GP site {whole.name!r} has {num} components(), not one for each of {terms}")
        self._blocks = [blocks for _, _, blocks in found]
        inputs = inputs or [whole.process.x] * len(found)
        self._rows = [x.shape[-2] for x in inputs]
        self._parts = [whole.part(*component, x) for component, x in zip(found, inputs)]

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, str):
            if index not in self.names:
                site, terms = self._whole.name, list(self.names)
                raise ValueError(f"the kernel of site {site!r} has no term {index!r}; its terms are {terms}")
            index = self.names.index(index)
        return self._parts[index]

    def __len__(self) -> int:
        return len(self._parts)

    def items(self) -> Iterator[tuple[str, Any]]:
        """Names and posteriors."""
        return zip(self.names, self._parts)

    def at(self, x: Union[Tensor, Sequence[Tensor]]) -> Components:
        """The components at other inputs: ``(N', D)`` for all, or a list with one such matrix for each.

        :raises ValueError: if a list has not as many entries as the kernel has terms.
        """
        inputs = [x] * len(self) if isinstance(x, Tensor) else list(x)
        if len(inputs) != len(self):
            raise ValueError(f"Components.at got {len(inputs)} matrices of inputs for the terms {list(self.names)}")
        return Components(self._whole, [self._whole.at(part).process.x for part in inputs])

    @property
    def covariance_matrix(self) -> Tensor:
        """The joint covariance of all effects, one after the other, ``(..., ΣN_c, ΣN_c)``."""
        # [c = d] k_c(x, x') + φ_c(x)ᵀ(S − I)_cd φ_d(x')
        return self._prior + self._whole.coefficients.covariance_change(self._features)

    def rsample(self, sample_shape: Any = torch.Size()) -> dict[str, Tensor]:
        """Joint draws of all effects, by name, ``(*sample_shape, ..., N_c)`` each, in O(ΣN_c³).

        Where components share coefficients (inducing points of the whole kernel) in O((ΣN_c)³).
        """
        shape = torch.Size(sample_shape) + self._whole.batch_shape
        # f_c = Φ_c w + r_c, whose w are drawn together
        w = self._whole.coefficients.rsample(shape)
        draws = [
            part.process.x.new_zeros(*shape, rows) + sum_blocks(part.features, [w[b] for b in blocks])
            for part, blocks, rows in zip(self._parts, self._blocks, self._rows)
        ]
        if sum(map(len, self._blocks)) == len(set().union(*self._blocks)):
            noise = [times(part.residual_tril, torch.randn_like(draw)) for part, draw in zip(self._parts, draws)]
        else:  # one basis for all: what it leaves of one component depends on what it leaves of the others
            together = torch.cat(draws, -1)
            what = f"the residual covariance of the components of site {self._whole.name!r}"
            tril = residual_cholesky(self._prior, self._features, self._whole.process.jitter, what)
            noise = list(times(tril, torch.randn_like(together)).split(self._rows, -1))
        return {name: draw + rest for name, draw, rest in zip(self.names, draws, noise)}

    @torch.no_grad()
    def sobol_indices(self, num_draws: int = 500, prob: float = 0.9, draws: bool = False) -> dict[str, Any]:
        """Each effect's share in the variance of f, S_c = V[f_c]/Σ_d V[f_d]: by name its mean and a central interval.

        The inputs are independent and uniform over the intervals of the kernel's :class:`~pyro_sparsegp.kernels.Anova`
        terms, under which effects are orthogonal (Durrande et al., 2013, section 3). Each draw of all effects, with
        their coupling, gives a set of indices. Variances are by quadrature, O(40³) an effect; a constant has index 0.

        :param prob: of the interval.
        :param draws: return the draws instead, ``(num_draws, ...)``.
        :returns: (mean, low, high), each a number, of several outputs a list.
        :raises ValueError: naming the terms that have no zero mean over a box.
        """
        boxes: list[dict[int, Any]] = []
        known: dict[int, Any] = {}
        for label, part in self.items():
            box = part.process.kernel.centred
            if box is None or len(box) > max(_NODES):
                raise ValueError(
                    f"Sobol indices need terms that have mean zero along each of at most {max(_NODES)} columns; term "
                    f"{label!r} of site {self._whole.name!r} is {part.process.kernel!r}. Write kernels.Anova(k, low, "
                    "high)[column], products of these for interactions, and constants into kernels.Constant."
                )
            for column, bounds in box.items():
                first = zip(bounds, known.setdefault(column, bounds))
                if any(torch.as_tensor(a).cpu().ne(torch.as_tensor(b).cpu()).any() for a, b in first):
                    raise ValueError(
                        f"Sobol indices need one interval for each column; term {label!r} of site {self._whole.name!r} "
                        f"has {bounds} in column {column}, another term {known[column]}."
                    )
            boxes.append(box)
        if not any(boxes):
            raise ValueError(f"the kernel of site {self._whole.name!r} has no term that varies")
        grids = [self._grid(box) for box in boxes]
        drawn = self.at([x for x, _ in grids]).rsample((num_draws,)).values()
        parts = [f.square() @ weights for f, (_, weights) in zip(drawn, grids)]
        # S_c = V[f_c]/Σ_d V[f_d] of each draw (Durrande et al., 2013, section 3)
        shares = dict(zip(self.names, torch.stack(parts) / sum(parts)))
        ends = parts[0].new_tensor([(1 - prob) / 2, (1 + prob) / 2])
        return shares if draws else {n: (s.mean(0).tolist(), *s.quantile(ends, 0).tolist()) for n, s in shares.items()}

    def _grid(self, box: dict[int, Any]) -> tuple[Tensor, Tensor]:
        # A product grid of Gauss-Legendre nodes over a box, (G, D), and weights (G,) that add up to 1; of a constant 0.
        like = self._whole.process.x
        if not box:
            return like.new_zeros(1, like.shape[-1]), like.new_zeros(1)
        nodes, weights = legendre(_NODES[len(box)], like.dtype, like.device)
        axes = [low + (high - low) * (1 + nodes) / 2 for low, high in box.values()]
        places, shares = (torch.cartesian_prod(*p).reshape(-1, len(box)) for p in (axes, [weights] * len(box)))
        grid = like.new_zeros(len(places), like.shape[-1])
        grid[:, list(box)] = places
        return grid, shares.prod(-1)

    @property
    def _prior(self) -> Tensor:
        # Effects are independent under the prior.
        num, parts = sum(self._rows), [part.process for part in self._parts]
        whole = parts[0].x.new_zeros(*self._whole.batch_shape, num, num)
        return on_diagonal([part.kernel(part.x) for part in parts], whole)

    @property
    def _features(self) -> list[Tensor]:
        # Φ of the effects, one after the other; zeros where an effect has no block of w.
        own = [dict(zip(blocks, part.features)) for blocks, part in zip(self._blocks, self._parts)]

        def block(b: int, size: int) -> Tensor:
            zeros = [self._whole.process.x.new_zeros(rows, size) for rows in self._rows]
            return side_by_side([phi.get(b, zero).mT for phi, zero in zip(own, zeros)]).mT

        return [block(b, size) for b, size in enumerate(self._whole.coefficients.sizes)]

    def __repr__(self) -> str:
        return repr([part.process.kernel for part in self._parts])
