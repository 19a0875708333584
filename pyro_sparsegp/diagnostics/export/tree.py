"""Posteriors as ``xarray.DataTree`` in ArviZ's schema."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Optional, Union

from torch import Tensor

from ...predict import bare_model
from . import backend
from .draws import Draw, GuideSource, require_names, seeded
from .labels import Labels, constant_data, require_sample_dims, with_sample_dims
from .prior import draw_prior
from .samples import SampleSource
from .sources import Source, as_source, target_of
from .writer import Writer, name_of

if TYPE_CHECKING:
    import xarray
else:
    xarray = backend.Later("xarray")

__all__ = ["to_datatree"]

Arguments = Union[Tensor, tuple, Mapping[str, Any]]


def to_datatree(
    model: Callable,
    guide: Any,
    *args: Any,
    num_samples: int = 1000,
    predict: Optional[Arguments] = None,
    prior: int = 0,
    include_f: bool = False,
    exact: bool = False,
    log_likelihood: bool = True,
    posterior_predictive: bool = True,
    coords: Optional[Mapping[str, Any]] = None,
    dims: Optional[Mapping[str, Sequence[str]]] = None,
    dtype: str = "float32",
    chunk_size: int = 8192,
    seed: Optional[int] = None,
    name: Optional[str] = None,
    sample_dims: Sequence[str] = ("chain", "draw"),
    **kwargs: Any,
) -> xarray.DataTree:
    """Posterior draws and all that ArviZ needs to judge them, as an ``xarray.DataTree``.

    Groups: ``posterior`` (hyperparameters; of each GP site f the coefficients ``f_w`` of its basis, N(0, I) a priori),
    ``posterior_predictive``, ``log_likelihood``, ``log_prior``, ``sample_stats``, ``observed_data``,
    ``constant_data``, with ``predict`` also ``predictions`` and ``predictions_constant_data``, with ``prior`` also
    ``prior`` and ``prior_predictive``; what is drawn has dimensions ``(chain, draw, ...)``. One fit is one chain:
    several guides of the same model, restarts, become chains.

    The log likelihood is integrated over what a draw leaves open, log ∫ p(yₙ | fₙ) p(fₙ | w, θ) dfₙ; of MCMC, whose
    draws hold f itself, log ∫ p(yₙ | fₙ) p(fₙ | f₋ₙ, θ) dfₙ. ``sample_stats`` has ``diverging`` of an ``MCMC``, and
    what else :class:`NUTS` keeps (``energy``, ``tree_depth`` ...); of a guide ``log_q``, the log density of (θ, w)
    under it, and ``lp``, what is set against it in importance weights, both in float64:

    * ``lp``: log p(θ) p(w) + Σₙ E[log p(yₙ | fₙ) | w, θ], the target "vfe" that the evidence lower bound is for;
    * ``lp_fitc``: log p(θ) p(w) + Σₙ log ∫ p(yₙ | fₙ) p(fₙ | w, θ) dfₙ, that of expectation propagation;
    * ``lp_exact``, with ``exact=True``: log p(θ) p(w) + log p(y | w, θ) under the exact prior, in O(N³).

    Draws are of the posterior that the guide predicts with. Where a kernel's variance correction changes q(w)
    (:class:`~pyro_sparsegp.families.ExactWeightSpace`), it is the changed one, and "fitc" its target.

    :class:`~pyro_sparsegp.families.ComputationAware` knows w, and is uncertain of f given w: it needs ``exact=True``,
    and then has joint draws of f in place of w, with one target, p(θ) p(f) p(y | f), and the log likelihood of MCMC.
    Memory is that of the arrays returned plus ``chunk_size`` rows of features; each draw costs one prediction of the
    training data and a few runs of the model.

    :param model: the model.
    :param guide: a fitted guide, several of them in a list, an object that has a guide (SVI, expectation
        propagation), an ``MCMC`` that has run, or its samples.
    :param args: the model's training arguments, all rows, with observations.
    :param num_samples: draws of each guide; MCMC has as many as its samples.
    :param predict: the model's arguments at new inputs, observations left out: a tensor, a tuple or a mapping.
    :param prior: how many draws of the prior and of its predictions to add (:func:`prior_predictive`); 0 adds none.
    :param include_f: keep function values at the training inputs, ``(chain, draw, N)``; under NUTS, too.
    :param exact: whether to do what takes O(N³) a draw.
    :param log_likelihood: whether to compute it, and ``lp``.
    :param posterior_predictive: whether to draw it.
    :param coords: coordinate values by dimension.
    :param dims: names of a variable's dimensions, instead of the plates' names and ``{variable}_dim_{i}``.
    :param dtype: of all groups but ``sample_stats``.
    :param chunk_size: rows whose features are held in memory at once.
    :param seed: makes the draws repeatable and leaves the global generators alone.
    :param name: the tree's name.
    :param sample_dims: names of the dimensions of draws: a chain's and a draw's, or one for all draws, ("sample",), as
        ArviZ's own converters of variational posteriors have it; stock functions then take ``sample_dims=["sample"]``.
        This module's functions want chains and draws.
    :param kwargs: the model's further arguments.
    :raises ValueError: where the result, the arguments or the labels do not fit.
    """
    if not isinstance(num_samples, int) or num_samples < 1:
        raise ValueError(f"num_samples must be a whole number of at least 1, got {num_samples!r}")
    if not isinstance(prior, int) or prior < 0:
        raise ValueError(f"prior must be a number of draws, 0 or more, got {prior!r}")
    require_sample_dims(sample_dims)
    backend.xarray()
    guides = list(guide) if isinstance(guide, (list, tuple)) else [guide]
    sources = [as_source(model, one, args, kwargs, exact, chunk_size) for one in guides]
    chains, num_samples = _shape(sources, num_samples)
    require_names(sources[0].names)
    writer = Writer(Labels(dims, coords), (chains, num_samples), dtype)
    new = None if predict is None else _arguments(predict)
    shared = {"model": name_of(model), "posterior": sources[0].name, "family": _families(sources[0]), "name": name}
    own: dict[str, dict[str, Any]] = {}
    fixed: dict[str, dict[str, Any]] = {}
    with seeded(seed):
        for chain in range(chains):
            source = sources[chain % len(sources)]
            for s in range(num_samples):
                draw = source.draw()
                if not own:
                    run = source.attributes if isinstance(source, SampleSource) else {}
                    own = {"posterior": run, "sample_stats": {"target": target_of(source), **run}}
                writer.at(chain, s)
                _write(writer, source, draw, include_f, log_likelihood, posterior_predictive)
                if new is not None:
                    writer.functions |= set(draw.functions)
                    for variable, value in source.at(*new, draw).items():
                        writer.put("predictions", variable, value)
                if not fixed:  # wrong labels are found before the other draws are made
                    fixed = _data_of(model, source, draw, new, writer)
                    writer.check(writer.datasets(shared, own, fixed))
    groups = writer.datasets(shared, own, fixed)
    if prior:
        before = Writer(Labels(dims, coords), (1, prior), dtype)
        with seeded(seed):
            found = draw_prior(bare_model(model), args, kwargs, before, shared, sources[0].data, include_f, check=False)
        groups |= {group: found[group] for group in ("prior", "prior_predictive") if group in found}
    groups = {group: with_sample_dims(dataset, sample_dims) for group, dataset in groups.items()}
    return backend.xarray().DataTree.from_dict(groups, name=name)


def _shape(sources: Sequence[Source], num_samples: int) -> tuple[int, int]:
    """How many chains and draws: each guide is a chain, MCMC has its own."""
    if not sources:
        raise ValueError("to_datatree was given an empty list of guides")
    if isinstance(sources[0], SampleSource):
        if len(sources) > 1:
            raise ValueError("to_datatree takes one MCMC result, whose chains it keeps; or a list of guides")
        chains, draws = sources[0].shape
        return chains, draws
    if any(isinstance(source, SampleSource) for source in sources):
        raise ValueError("to_datatree takes a list of guides or one MCMC result, not both")
    return len(sources), num_samples


def _data_of(
    model: Callable, source: Source, draw: Draw, new: Optional[tuple[tuple, dict[str, Any]]], writer: Writer
) -> dict[str, dict[str, Any]]:
    """The groups that have no draws."""
    observed = {site: node["value"] for site, node in draw.data.items()}
    fixed = {
        "observed_data": {site: writer.whole(site, value.detach().cpu().numpy()) for site, value in observed.items()},
        "constant_data": constant_data(model, source.args, source.kwargs, observed),
    }
    if new is not None:
        fixed["predictions_constant_data"] = constant_data(model, *new, {})
    return fixed


def _write(
    writer: Writer, source: Source, draw: Draw, include_f: bool, log_likelihood: bool, posterior_predictive: bool
) -> None:
    if not writer.learned:
        writer.learn(draw)
    for variable, value in draw.values.items():
        writer.put("posterior", variable, value)
    for site, w in draw.coefficients.items():
        writer.put("posterior", f"{site}_w", w)
    if include_f:
        for site, f in draw.functions.items():
            writer.put("posterior", site, f)
    for variable, log_prior in draw.log_priors.items():
        writer.put("log_prior", variable, log_prior)
    if posterior_predictive:
        for site, node in draw.data.items():
            writer.put("posterior_predictive", site, node["fn"].sample())
    if log_likelihood:
        densities = source.densities(draw)
        for site in source.data:
            writer.put("log_likelihood", site, densities.integrated[site])
        for target, log_joint in source.log_joints(draw, densities).items():
            writer.put("sample_stats", target, log_joint)
    if draw.log_q is not None:
        writer.put("sample_stats", "log_q", draw.log_q)
    for name, stat in draw.stats.items():
        writer.put("sample_stats", name, stat)


def _arguments(predict: Arguments) -> tuple[tuple, dict[str, Any]]:
    if isinstance(predict, Tensor):
        return (predict,), {}
    if isinstance(predict, Mapping):
        return (), dict(predict)
    if isinstance(predict, (tuple, list)):
        return tuple(predict), {}
    raise ValueError(
        "predict must be the model's arguments at new inputs, a tensor, a tuple or a mapping, got "
        f"{type(predict).__name__}"
    )


def _families(source: Source) -> Optional[dict[str, Any]]:
    if not isinstance(source, GuideSource):
        return None
    return {name: spec["family"] for name, spec in source.structure.gps.items()}
