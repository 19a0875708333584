"""BoTorch's model interface (Balandat et al., 2020): ``pip install pyro-sparsegp[botorch]``."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Optional, Union

import pyro
import torch
from pyro import poutine
from torch import Tensor

from ..guide import AutoSparseGP
from ..posterior.sparse_posterior import SparsePosterior

try:
    from botorch.models.model import Model as BoTorchModel
    from botorch.posteriors.gpytorch import GPyTorchPosterior
    from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
    from linear_operator import to_linear_operator
except ImportError as error:
    raise ImportError("pyro_sparsegp.interop.botorch needs BoTorch: pip install botorch") from error

__all__ = ["Model"]

_ROWS = 256  # whose covariance is formed at once


class Model(BoTorchModel):
    """A trained guide as a BoTorch model, for acquisition functions and their optimisers.

    Its posterior is that of the GP site's values, of any family under any likelihood, other latents at their medians,
    with gradients by the inputs; a q-batch is joint. Under a computation-aware family the variance holds what
    computation left out, so that acquisition functions explore there. Outputs are a site's, or those of several sites
    one after the other, which are independent of each other.

    The model refers to the guide: train it on, or :meth:`~AutoSparseGP.absorb` a measurement, and the posterior
    follows. Knowledge gradients, which condition on fantasies, are not supported.

    :param model: the Pyro model.
    :param guide: trained, or called once, on the data so far.
    :param site: the GP site's name, or several.
    :param arguments: from inputs ``(N, D)`` to the arguments that the model takes; by default they are its first and
        only one, ``model(x)``.
    :raises ValueError: if the guide was never called, or a site is none of its GP sites.
    """

    def __init__(
        self,
        model: Callable,
        guide: AutoSparseGP,
        site: Union[str, Sequence[str]] = "f",
        arguments: Callable[[Tensor], tuple[Any, ...]] = lambda x: (x,),
    ) -> None:
        super().__init__()
        if guide.structure is None:
            raise ValueError("Model's guide was never called: train it on the data first, or call guide(x, y)")
        self.sites = (site,) if isinstance(site, str) else tuple(site)
        known = sorted(guide.structure.gps)
        for name in self.sites:
            if name not in known:
                raise ValueError(f"Model's site {name!r} is none of the guide's GP sites, {known}")
        for group in guide.structure.joint:
            if len(set(group) & set(self.sites)) > 1:
                raise ValueError(f"Model's sites {group} have one posterior, and outputs are taken to be independent")
        self._parts = model, guide  # in a tuple: BoTorch's train() and eval() are not the guide's
        self.arguments = arguments
        self._outputs: Optional[list[int]] = None

    @property
    def guide(self) -> AutoSparseGP:
        """The guide."""
        return self._parts[1]

    @property
    def batch_shape(self) -> torch.Size:
        """None: one model."""
        return torch.Size()

    @property
    def num_outputs(self) -> int:
        """How many outputs there are, P."""
        return self._all if self._outputs is None else len(self._outputs)

    @property
    def _all(self) -> int:
        modules = self.guide.modules_by_site()
        return sum(modules[name].batch_shape.numel() for name in self.sites)

    def subset_output(self, idcs: list[int]) -> Model:
        """The model of some of the outputs."""
        new = Model(*self._parts, self.sites, self.arguments)
        new._outputs = self._of(idcs)
        return new

    def _of(self, chosen: Sequence[int]) -> list[int]:
        outputs = list(range(self._all)) if self._outputs is None else self._outputs
        unknown = [i for i in chosen if not -len(outputs) <= i < len(outputs)]
        if unknown:
            raise ValueError(f"Model has {len(outputs)} outputs, numbers 0 to {len(outputs) - 1}; asked for {unknown}")
        return [outputs[i] for i in chosen]

    def posterior(
        self,
        X: Tensor,
        output_indices: Optional[list[int]] = None,
        observation_noise: Union[bool, Tensor] = False,
        posterior_transform: Any = None,
        **kwargs: Any,
    ) -> Any:
        """The joint posterior of the values at q inputs, of each batch.

        :param X: ``(..., q, D)``.
        :param output_indices: the outputs wanted; by default all.
        :param observation_noise: whether it is of measurements; or their variances, which broadcast to
            ``(..., q, P)``. The likelihood's are those at the posterior mean, of a distribution whose mean is f, such
            as Normal(f, noise).
        :param posterior_transform: BoTorch's, applied last.
        :returns: a ``GPyTorchPosterior`` over ``(..., q, P)``.
        :raises ValueError: if noise is wanted of a likelihood whose mean is not f, or an output that there is not.
        """
        if X.dim() < 2:
            raise ValueError(f"Model.posterior's X is (..., q, D), got a tensor of shape {tuple(X.shape)}")
        X = self.transform_inputs(X)
        batch, q = X.shape[:-2], X.shape[-2]
        arguments = self.arguments(X.reshape(-1, X.shape[-1]))
        posteriors = self.guide.posterior(*arguments)
        chosen = self._of(range(self.num_outputs) if output_indices is None else output_indices)
        noises: list[Optional[Tensor]] = [None] * len(chosen)
        if isinstance(observation_noise, Tensor):
            noises = list(observation_noise.expand(*batch, q, len(chosen)).unbind(-1))
        elif observation_noise:
            variances = torch.cat([self._noise(name, posteriors, arguments) for name in self.sites])
            noises = [variances[i].reshape(*batch, q) for i in chosen]
        means = torch.cat([_by_output(posteriors[name].mean) for name in self.sites])
        blocks = torch.cat([_by_output(_blocks(posteriors[name], q), 3) for name in self.sites])
        normals = []
        for i, noise in zip(chosen, noises):
            covariance = blocks[i].reshape(*batch, q, q)
            if noise is not None:
                covariance = covariance + noise.diag_embed()
            # An operator, which is factorised when it is drawn from, with jitter: places may coincide.
            normals.append(MultivariateNormal(means[i].reshape(*batch, q), to_linear_operator(covariance)))
        whole = normals[0] if len(normals) == 1 else MultitaskMultivariateNormal.from_independent_mvns(normals)
        found = GPyTorchPosterior(whole)
        return found if posterior_transform is None else posterior_transform(found)

    def _noise(self, name: str, posteriors: dict[str, SparsePosterior], arguments: tuple[Any, ...]) -> Tensor:
        """The variance of an observation of each value, ``(P, N)``."""
        model, guide = self._parts
        assert guide.structure is not None
        means = {site: posterior.mean for site, posterior in posteriors.items()}
        with torch.no_grad():
            latents = {k: v for k, v in guide.median(*arguments).items() if k in guide.structure.latents}
        with pyro.validation_enabled(False), poutine.block():
            trace = poutine.trace(poutine.condition(model, {**latents, **means})).get_trace(*arguments)
        mean = means[name]
        for site in guide.observed:
            fn: Any = trace.nodes[site]["fn"] if site in trace.nodes else None
            while isinstance(fn, torch.distributions.Independent):
                fn = fn.base_dist
            try:
                centre = fn.mean
            except (AttributeError, NotImplementedError):
                continue
            if centre.shape == mean.shape and torch.allclose(centre, mean):
                return _by_output(fn.variance.expand(mean.shape))
        raise ValueError(
            f"Model.posterior's observation_noise=True: no observed site has a distribution of mean {name!r}, such as "
            f"Normal({name}, noise). Leave it out and let an objective of function values say what they are worth, or "
            "give the variances as a tensor."
        )


def _by_output(values: Tensor, dims: int = 1) -> Tensor:
    """Values ``(..., *dims)`` with all outputs in one first dimension."""
    return values.reshape(-1, *values.shape[values.dim() - dims :])


def _blocks(posterior: SparsePosterior, q: int) -> Tensor:
    """The covariances of each q consecutive values, ``(..., N/q, q, q)``."""
    if q == 1:
        return posterior.variance[..., None, None]
    x, parts = posterior.process.x, []
    step = q * max(1, _ROWS // q)
    for start in range(0, x.shape[-2], step):
        rows = slice(start, start + step)
        change = posterior.coefficients.covariance_change([phi[..., rows, :] for phi in posterior.features])
        whole = posterior.process.kernel(x[..., rows, :]) + change
        num = whole.shape[-1] // q
        apart = whole.reshape(*whole.shape[:-2], num, q, num, q)
        parts.append(apart.diagonal(dim1=-4, dim2=-2).movedim(-1, -3))
    found = torch.cat(parts, -3)
    return found.expand(*posterior.batch_shape, *found.shape[-3:])
