"""The posterior that guides give: the marginal formula's, with its components and sample functions."""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor

from .base import Marginals
from .components import Components
from .paths import sample_paths


class SparsePosterior(Marginals):
    """The posterior of a Gaussian process under a finite basis and a Gaussian over its coefficients.

    A distribution over the values at the process's inputs x, with event shape ``(N,)``; :meth:`at` gives it at
    other inputs. ``rsample`` draws values jointly. A function has no Lebesgue density, so ``log_prob`` is relative to
    the prior process: log dq/dp = log q(w) − log p(w). ``log_prob`` takes only the
    last draw: the object keeps the coefficients w of no other.

    :param process: the prior at the inputs.
    :param basis: the basis under that prior's kernel.
    :param coefficients: q(w).
    :param name: the site, for errors.
    :param sites: q(w)'s Gaussian likelihood terms, if any.
    :param features: Φ at the inputs, if known already.
    """

    @property
    def components(self) -> Components:
        """The posterior of each summand of the kernel, in the order of ``kernel.terms``, without the mean μ."""
        return self._cached("components", lambda: Components(self, SparsePosterior))

    def at(self, x: Tensor) -> SparsePosterior:
        """The same posterior at other inputs ``(N', D)``.

        :raises ValueError: naming the site, if they are not a matrix of finite numbers of the posterior's dtype.
        """
        here = self.process.x
        if not isinstance(x, Tensor) or x.dim() != here.dim() or x.dtype != here.dtype:
            got = f"{x.dtype} of shape {tuple(x.shape)}" if isinstance(x, Tensor) else type(x).__name__
            raise ValueError(
                f"the posterior of site {self.name!r} got inputs {got}; its own are {here.dtype} of shape "
                f"{tuple(here.shape)}: give as many columns, one row for each input, of the same dtype."
            )
        try:
            process = self.process.at(x).expand(self.process.batch_shape)
        except ValueError as error:
            raise ValueError(f"the posterior of site {self.name!r}: {error}") from None
        return SparsePosterior(process, self.basis, self.coefficients, self.name, self.sites)

    def paths(self, num: int, num_features: int = 2048) -> Callable[[Tensor], Tensor]:
        """``num`` sample functions, x ↦ ``(num, ..., N)``: the same input gives the same value at every call.

        By Matheron's rule (Wilson et al., 2020, eq. 8): a prior function plus φ(x)ᵀ(w − w'), where w' are that
        function's own coefficients. The prior functions of a stationary kernel are ``num_features`` random
        Fourier waves; a kernel with finite features has exact ones. For other kernels
        (:class:`~pyro_sparsegp.kernels.Periodic`, ``Anova``, adapted ones) values are drawn exactly, conditioned on all
        values drawn before. A call costs O(n³), n counting points of earlier calls, too.
        """
        return sample_paths(self, num, num_features)
