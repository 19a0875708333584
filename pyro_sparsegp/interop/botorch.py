"""BoTorch's model interface (Balandat et al., 2020): ``pip install pyro-sparsegp[botorch]``."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Optional, Union

import pyro
import torch
from torch import Tensor

from ..guide import AutoSparseGP
from ..guide.runs import Posteriors
from ..inference.quadrature import own_guide
from ..numerics.arguments import refuse
from ..numerics.functions import broadcast_shapes
from ..numerics.linalg import cholesky, solve_lower
from ..posterior.drawing import by_groups
from ..posterior.sparse_posterior import SparsePosterior
from ..program.handlers import held_trace
from ..program.traces import bare, repeatable, whole_plates

try:
    from botorch.models.model import FantasizeMixin
    from botorch.models.model import Model as BoTorchModel
    from botorch.posteriors.gpytorch import GPyTorchPosterior
    from gpytorch.distributions import MultitaskMultivariateNormal, MultivariateNormal
    from linear_operator import to_linear_operator
except ImportError as error:
    raise ImportError("pyro_sparsegp.interop.botorch needs BoTorch: pip install botorch") from error

__all__ = ["Model"]


class Model(BoTorchModel, FantasizeMixin):
    """A trained guide as a BoTorch model, for acquisition functions and their optimisers.

    Its posterior is the GP site's, under any family and likelihood, with other latents at their medians. It can be
    differentiated by the inputs, and a q-batch is joint. Under a computation-aware family the variance includes what
    the computation left out. The outputs belong to one site, or to several in order, which are then independent.

    The model follows its guide, which may train on or :meth:`~AutoSparseGP.absorb` a measurement. :meth:`fantasize` and
    :meth:`condition_on_observations` give the model after a hypothetical measurement, and leave the guide as it is.

    :param model: the Pyro model that the guide was made of.
    :param guide: trained, or called once, on the data so far.
    :param site: the GP site's name, or several.
    :param arguments: from inputs ``(N, D)`` to the arguments that the model takes, by default ``model(x)``.
    :param noise: the variance of a measurement of f, where the likelihood does not say: one whose mean is not f. It
        broadcasts to ``(..., q, P)``.
    :raises ValueError: for a guide of another class or model, one never called, or one without that GP site.
    """

    guide: AutoSparseGP
    likelihood = None  # of which BoTorch's fantasize asks whether it is GPyTorch's, with a noise held

    def __init__(
        self,
        model: Callable,
        guide: AutoSparseGP,
        site: Union[str, Sequence[str]] = "f",
        arguments: Callable[[Tensor], tuple[Any, ...]] = lambda x: (x,),
        noise: Union[float, Tensor, None] = None,
    ) -> None:
        super().__init__()
        own = own_guide(model, guide, "Model(model, guide)")
        facts = own.facts
        self.sites = (site,) if isinstance(site, str) else tuple(site)
        unknown, together = [name for name in self.sites if name not in facts.gps], own.joint.field.keys() & facts.gps
        joint = {name: math.prod(facts.gps[name].outputs) for name in self.sites if name in together}
        are_names = 0 < len(self.sites) == len({*self.sites})
        faults = {
            f"Model's site is a name, or several different names, got {site!r}": not are_names,
            f"Model's site {next(iter(unknown), '')!r} is none of the guide's GP sites, {sorted(facts.gps)}": unknown,
            f"Model's outputs of {sorted(joint)} have one posterior, and Model takes outputs to be independent: give "
            "the guide independent=True": sum(joint.values()) > 1,
        }
        refuse(faults)
        vars(self)["guide"] = guide  # as no part of this module: BoTorch's train() and eval() are not the guide's
        self.noise, self.arguments, modules = None, arguments, guide.modules_by_site()
        self._outputs = list(range(sum(modules[name].batch_shape.numel() for name in self.sites)))
        if noise is not None:
            value = torch.as_tensor(noise if isinstance(noise, (int, float, Tensor)) else math.nan)
            if not (value.isfinite() & (value >= 0)).all():
                raise ValueError(f"Model's noise is a variance, or a tensor of them, of at least 0; got {noise!r}")
            self.noise = value + guide.like.new_zeros(len(self._outputs))

    @property
    def batch_shape(self) -> torch.Size:
        """None: one model. Of fantasies, theirs."""
        return torch.Size()

    @property
    def num_outputs(self) -> int:
        """How many outputs there are, P."""
        return len(self._outputs)

    def subset_output(self, idcs: list[int]) -> Model:
        """The model of some of the outputs."""
        new, num = copy.copy(self), len(self._outputs)
        unknown = [i for i in idcs if not -num <= i < num]
        if unknown:
            raise ValueError(f"Model has {num} outputs, numbers 0 to {num - 1}; got {unknown}")
        new._outputs = [self._outputs[i] for i in idcs]
        return new

    def posterior(
        self,
        X: Tensor,
        output_indices: Optional[list[int]] = None,
        observation_noise: Union[bool, Tensor] = False,
        posterior_transform: Any = None,
        **kwargs: object,
    ) -> Any:
        """The joint posterior of the values at q inputs, of each batch.

        :param X: ``(..., q, D)``.
        :param output_indices: the outputs wanted; by default all.
        :param observation_noise: whether it is of measurements; or their variances, which broadcast to
            ``(..., q, P)``. The likelihood's are those at the posterior mean, of a distribution around f.
        :param posterior_transform: BoTorch's, applied last.
        :returns: a ``GPyTorchPosterior`` over ``(..., q, P)``.
        :raises ValueError: for noise of a likelihood whose mean is not f, or an output that there is not.
        """
        if X.dim() < 2:
            raise ValueError(f"Model.posterior's X is (..., q, D), got a tensor of shape {tuple(X.shape)}")
        if output_indices is not None:
            return self.subset_output(output_indices).posterior(X, None, observation_noise, posterior_transform)
        X = self.transform_inputs(X)
        means, covariances = self._joint(X)
        noise = self._noises(X) if observation_noise is True else observation_noise
        if isinstance(noise, Tensor):
            covariances = covariances + noise.expand(*means.shape[1:], len(means)).movedim(-1, 0).diag_embed()
        # An operator, which is factorised when it is drawn from, with jitter: places may coincide.
        normals = [MultivariateNormal(mean, to_linear_operator(c)) for mean, c in zip(means, covariances)]
        whole = normals[0] if len(normals) == 1 else MultitaskMultivariateNormal.from_independent_mvns(normals)
        found = GPyTorchPosterior(whole)
        return found if posterior_transform is None else posterior_transform(found)

    def _joint(self, X: Tensor) -> tuple[Tensor, Tensor]:
        # Means (P, ..., q) and covariances (P, ..., q, q).
        (*batch, q, _), run = X.shape, self._run(X)[0]
        posteriors = [run.posteriors[name] for name in self.sites]
        means = torch.cat([_by_output(f.mean) for f in posteriors])[self._outputs]
        blocks = torch.cat([_by_output(_blocks(f, q), 3) for f in posteriors])[self._outputs]
        return means.reshape(-1, *batch, q), blocks.reshape(-1, *batch, q, q)

    def _noises(self, X: Tensor) -> Tensor:
        # The variances of measurements, which broadcast to (..., q, P): those given, or the likelihood's.
        if self.noise is not None:
            return self.noise.to(X)[..., self._outputs]
        run, arguments = self._run(X)
        # Posterior means of GP sites may coincide. Whose values a datum's mean has shows where each has values of its
        # own: test_noise_is_that_of_the_site_around_f.
        with torch.no_grad(), pyro.validation_enabled(False), whole_plates(), repeatable(self.guide.like):
            apart = {name: q.mean + torch.rand_like(q.mean) for name, q in run.posteriors.items()}
            moved = held_trace(self.guide.model, apart, arguments, {}, run.trace).nodes
        found = torch.cat([self._noise(name, apart[name], moved, run.data) for name in self.sites])
        return found[self._outputs].reshape(-1, *X.shape[:-1]).movedim(0, -1)

    def _run(self, X: Tensor) -> tuple[Posteriors, tuple[Any, ...]]:
        arguments = self.arguments(X.reshape(-1, X.shape[-1]))
        return self.guide.run_at(arguments, {}, at_medians=True, draws_data=False), arguments

    def _noise(self, name: str, f: Tensor, moved: Mapping[str, Any], data: Mapping[str, Any]) -> Tensor:
        # The variance of an observation of each of a site's values, (P, N); mixtures are not around f.
        for site in () if self.guide.facts.discrete else data:
            try:
                centre, variance = bare(moved[site]["fn"]).mean, bare(data[site]["fn"]).variance
            except (AttributeError, NotImplementedError):
                continue
            pair = [torch.atleast_2d(part) for part in (centre, variance.expand(centre.shape))]
            for around, variance in (pair, [part.mT for part in pair]):  # a row for each output, or a column
                if around.shape == torch.atleast_2d(f).shape and torch.allclose(around, f):
                    return _by_output(variance)
        raise ValueError(
            f"the variance of a measurement is not known: no observed site has a distribution of mean {name!r}, "
            f"such as Normal({name}, noise). Give it, Model(model, guide, noise=variance), "
            "posterior(X, observation_noise=...) or condition_on_observations(X, Y, noise=...)."
        )

    def condition_on_observations(
        self, X: Tensor, Y: Tensor, noise: Union[float, Tensor, None] = None, **kwargs: object
    ) -> Model:
        """The model conditioned on further measurements: q as a Gaussian process, given the old and the new ones.

        With m and C the posterior's mean and covariance, C(x, X)(C(X, X) + Σ)⁻¹ is the gain, of y − m(X) in the mean
        and of C(X, x') in the covariance: exact given q for Gaussian noise, however few the inducing inputs are.

        :param X: ``(..., n, D)``.
        :param Y: measurements of f, ``(..., n, P)`` with as many batches or more, which are the new model's.
        :param noise: their variances, which broadcast to Y; by default the likelihood's.
        :raises ValueError: if the shapes do not fit, or no noise is given and the likelihood has none.
        """
        return _Given(self, X, Y, noise)


class _Given(Model):
    """A model given measurements that its guide does not know."""

    def __init__(self, before: Model, X: Tensor, Y: Tensor, noise: Union[float, Tensor, None]) -> None:
        BoTorchModel.__init__(self)
        outputs = before.num_outputs
        if min(X.dim(), Y.dim()) < 2 or Y.shape[-2:] != (X.shape[-2], outputs):
            raise ValueError(
                f"Model.condition_on_observations takes X (..., n, D) and Y (..., n, {outputs}), got tensors of shapes "
                f"{tuple(X.shape)} and {tuple(Y.shape)}"
            )
        if noise is None:
            noise = before._noises(X)
        vars(self)["guide"] = before.guide
        self.before, self._outputs = before, list(range(outputs))
        self.places, self.values = X, Y.expand(broadcast_shapes(Y.shape, (*X.shape[:-1], outputs)))
        self.variances = torch.as_tensor(noise, dtype=Y.dtype, device=Y.device).expand(self.values.shape)

    @property
    def batch_shape(self) -> torch.Size:
        """That of the measurements."""
        return self.values.shape[:-2]

    def _noises(self, X: Tensor) -> Tensor:
        return self.before._noises(X)[..., self._outputs]

    def _joint(self, X: Tensor) -> tuple[Tensor, Tensor]:
        batch, num = broadcast_shapes(X.shape[:-2], self.batch_shape), self.places.shape[-2]
        # Places of each batch, those measured first.
        places = [x.expand(*batch, *x.shape[-2:]) for x in (self.places, X)]
        mean, covariance = self.before._joint(torch.cat(places, -2))
        # m(x) + C(x, X)(C(X, X) + Σ)⁻¹(y − m(X)), C(x, x') − C(x, X)(C(X, X) + Σ)⁻¹C(X, x')
        known = covariance[..., :num, :num] + self.variances.movedim(-1, 0).diag_embed()
        factor = cholesky(known, None, "the covariance of measurements that Model is conditioned on")
        cross = solve_lower(factor, covariance[..., :num, num:])
        missed = solve_lower(factor, (self.values.movedim(-1, 0) - mean[..., :num])[..., None])
        mean, covariance = mean[..., num:, None] + cross.mT @ missed, covariance[..., num:, num:] - cross.mT @ cross
        return mean[self._outputs].squeeze(-1), covariance[self._outputs]


def _by_output(values: Tensor, dims: int = 1) -> Tensor:
    # Values (..., *dims) with all outputs in one first dimension.
    return values.reshape(-1, *values.shape[values.dim() - dims :])


def _blocks(posterior: SparsePosterior, q: int) -> Tensor:
    # The covariances of each q consecutive values, (..., N/q, q, q).
    if q == 1:
        return posterior.variance[..., None, None]
    dims = len(posterior.batch_shape)
    x, phi = by_groups(posterior.process.x, q, dims), [by_groups(block, q, dims) for block in posterior.features]
    found = posterior.process.kernel(x) + posterior.coefficients.covariance_change(phi)
    return found.expand(len(x), *posterior.batch_shape, q, q).movedim(0, -3)
