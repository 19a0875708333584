"""Reading runs of a user's program: its sites, their densities, and what handlers such as masks and plates leave out of
them; their distributions, what these are made of, and which know E[log p(y | θ)] over a normal θ.

A closed form is used where θ is an affine function of function values and nothing else of the density depends on them:
:mod:`.explore` finds that out.
"""

import functools
import inspect
import math
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, suppress
from typing import Any, Optional

import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.distributions import Delta, MaskedDistribution, TorchDistribution
from pyro.distributions.torch_distribution import ExpandedDistribution
from pyro.distributions.util import scale_and_mask, sum_rightmost
from pyro.poutine.subsample_messenger import SubsampleMessenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from ..distributions import ExpectedLogProb
from ..numerics.functions import broadcast_shapes, if_known
from ..numerics.linalg import solve_lower
from ..process import GaussianProcess
from .asking import asks_program
from .structure import Role

_MULTIVARIATE = (dist.MultivariateNormal, dist.LowRankMultivariateNormal)
WRAPPERS = (torch.distributions.Independent, MaskedDistribution, ExpandedDistribution)


def all_sites(trace: poutine.Trace) -> list[tuple[str, Any]]:
    """A trace's sites of all types, with their names."""
    return list(trace.nodes.items())


def is_free(site: dict[str, Any]) -> bool:
    """Whether a sample site is not observed."""
    return site["type"] == "sample" and not site["is_observed"]


def free_values(trace: poutine.Trace) -> dict[str, Tensor]:
    """The values of a trace's sample sites that are not observed, plates' row numbers among them."""
    return {name: site["value"] for name, site in all_sites(trace) if is_free(site)}


def is_observation(site: dict[str, Any]) -> bool:
    """Whether a site holds data, rather than a deterministic value, such as ``poutine.reparam`` makes."""
    is_given = site["type"] == "sample" and site["is_observed"] and not site["infer"].get("_deterministic")
    return bool(is_given) and not isinstance(getattr(site["fn"], "base_dist", None), Delta)


def plate_sizes(site: dict[str, Any]) -> dict[str, int]:
    """The numbers of all rows of the plates that enclose a site."""
    return {frame.name: int(frame.full_size or frame.size) for frame in site["cond_indep_stack"] if frame.vectorized}


def cut_plates(site: dict[str, Any]) -> list[Any]:
    """The plates around a site that have drawn some of their rows."""
    return [frame for frame in site["cond_indep_stack"] if frame.full_size not in (None, frame.size)]


def share_of(site: dict[str, Any]) -> float:
    """The share of all rows that the plates which enclose a site have drawn."""
    return math.prod([frame.size / frame.full_size for frame in site["cond_indep_stack"] if frame.full_size])


def roles_beside(trace: poutine.Trace) -> Callable[[Collection[str]], Role]:
    """What latents are beside a run's data, by the plates that enclose them."""
    data = [plate_sizes(site).keys() for site in sample_sites(trace).values() if is_observation(site)]

    def role_of(plates: Collection[str]) -> Role:
        if not any({*plates} & own for own in data):
            return Role.ALL
        # Such as z in "groups" beside y in "groups" and "rows"; a latent in all of y's plates is one of single data.
        return Role.GROUP if any({*plates} < own for own in data) else Role.ROW

    return role_of


def piecewise_constant(trace: poutine.Trace) -> list[str]:
    """The observed sites whose distributions say that their density is piecewise constant in function values."""
    data = {name: bare(site["fn"]) for name, site in sample_sites(trace).items() if is_observation(site)}
    return [name for name, fn in data.items() if getattr(fn, "piecewise_constant", False)]


def log_densities(trace: poutine.Trace, skip: Collection[str] = ()) -> dict[str, Tensor]:
    """The log densities, masked and scaled, of a run's sample sites but ``skip`` and sites masked as a whole, of each
    entry that ``.to_event`` adds up; of a guide's latents their priors' densities.
    """
    found = {}
    for name, site in sample_sites(trace).items():
        if name not in skip and site["mask"] is not False:
            fn, event_dim = without_event(site["infer"].get("prior", site["fn"]))
            # They are of rows: ones more behind for the dimensions that .to_event has added.
            scale, mask = (
                part.reshape(part.shape + (1,) * event_dim) if isinstance(part, Tensor) else part
                for part in (site["scale"], site["mask"])
            )
            with asks_program():
                found[name] = torch.as_tensor(scale_and_mask(fn.log_prob(site["value"]), scale, mask))
    return found


def entries(site: dict[str, Any]) -> Tensor:
    """A site's log densities without scales and masks, with dimensions that ``.to_event`` has added up taken apart."""
    # A mask, of rows or of all, may be another in the next batch: test_q_waits_for_a_batch_that_is_not_masked.
    fn, _ = without_event(site["fn"])
    with asks_program():
        part = torch.as_tensor(bare(fn).log_prob(site["value"]))
    return part.expand(fn.shape()[: part.dim()])


class RandomState:
    """The state of the generators that a step draws from."""

    def __init__(self, like: Tensor) -> None:
        on_device = [torch.cuda.default_generators[like.device.index]] if like.is_cuda else []
        self.generators = [torch.default_generator, *on_device]
        self._states = list(map(torch.Generator.get_state, self.generators))

    @property
    def has_moved(self) -> bool:
        """Whether anything was drawn since."""
        return not all(map(torch.equal, self._states, map(torch.Generator.get_state, self.generators)))

    def restore(self) -> None:
        """Put the generators back."""
        for generator, state in zip(self.generators, self._states):
            generator.set_state(state)


@contextmanager
def repeatable(like: Tensor) -> Iterator[None]:
    """The same random numbers each time, and the global generator as it was."""
    state = RandomState(like)
    for generator in state.generators:  # torch.manual_seed formats the stack for each kind of device, in 1 ms
        generator.manual_seed(0)
    try:
        yield
    finally:
        state.restore()


@contextmanager
def whole_plates() -> Iterator[None]:
    """Turn subsampling off: plates with a ``subsample_size`` take all their rows."""
    # A plate draws its indices in its constructor, from its arguments; no message can change their number.
    original = SubsampleMessenger.__init__

    @functools.wraps(original)
    def whole(self: Any, name: str, size: Any = None, subsample_size: Any = None, subsample: Any = None, *a, **k):  # type: ignore[no-untyped-def]
        original(self, name, size, None, subsample, *a, **k)

    SubsampleMessenger.__init__ = whole  # type: ignore[method-assign]
    try:
        yield
    finally:
        SubsampleMessenger.__init__ = original  # type: ignore[method-assign]


def sample_sites(trace: poutine.Trace) -> dict[str, Any]:
    """A trace's sample sites by name, plates' row numbers not among them."""
    sites: dict[str, Any] = dict(trace.nodes)
    return {n: site for n, site in sites.items() if site["type"] == "sample" and not site_is_subsample(site)}


def as_process(prior: TorchDistribution) -> tuple[Optional[GaussianProcess], int]:
    """The GP under ``.to_event`` and the number of dimensions this added, or ``None``."""
    prior, event_dim = without_event(prior)
    return (prior, event_dim) if isinstance(prior, GaussianProcess) else (None, 0)


def without_event(fn: object) -> tuple[Any, int]:
    """The distribution under ``.to_event`` and the number of dimensions this added."""
    event_dim = 0
    while isinstance(fn, torch.distributions.Independent):
        event_dim += fn.reinterpreted_batch_ndims
        fn = fn.base_dist
    return fn, event_dim


def _layers(fn: object) -> Iterator[Any]:
    """A distribution, and what stands under ``.to_event``, ``.mask`` and ``.expand``, one after the other."""
    while isinstance(fn, WRAPPERS):
        yield fn
        fn = fn.base_dist
    yield fn


def bare(fn: TorchDistribution) -> Any:
    """The distribution under ``.to_event``, ``.mask`` and ``.expand``; without masks, where latents are summed out."""
    *_, inner = _layers(fn)
    return inner.without_masks() if hasattr(inner, "without_masks") else inner


def unmasked(fn: Any, value: Tensor, mask: object) -> Optional[Tensor]:
    """Which of an observed site's values no mask leaves out, in their shape; ``None`` if it has no mask.

    Masks are ``poutine.mask``'s, of whole rows, and the distribution's under ``.to_event`` and ``.expand``, of single
    values; where discrete latents are summed out, of the distribution given these.
    """
    fn = getattr(fn, "given_discrete", fn)
    masks = [(mask, fn.event_shape), *((getattr(layer, "_mask", None), layer.event_shape) for layer in _layers(fn))]
    given = [(torch.as_tensor(part, device=value.device), event) for part, event in masks if part is not None]
    if not given:
        return None
    parts = [part.reshape(part.shape + (1,) * len(event)) for part, event in given]
    # A mask is that of all values of discrete latents, whose dimensions are in front.
    seen = functools.reduce(torch.logical_and, [part[(0,) * max(part.dim() - value.dim(), 0)] for part in parts])
    return seen.expand(broadcast_shapes(seen.shape, value.shape))


def unmasked_rows(fn: TorchDistribution, value: Tensor, mask: Tensor) -> Optional[Tensor]:
    """Which of an observed site's log densities have such a value, in their shape; ``None`` if it has no mask."""
    return if_known(lambda seen: sum_rightmost(seen, fn.event_dim) > 0, unmasked(fn, value, mask))


def filled(fn: TorchDistribution, value: Tensor, mask: Tensor) -> Any:
    """An observed site's value with one of an unmasked row where it is masked and NaN."""
    # A mask makes such a term 0, but not its gradient, which is 0·NaN.
    if not isinstance(value, Tensor) or not value.is_floating_point() or not value.dim() or not value.numel():
        return value  # a factor's has no numbers: test_missing.py::test_a_factor_under_a_mask
    seen = unmasked(fn, value, mask)
    if seen is None:
        return value
    shape, num = seen.shape, seen.dim() - fn.event_dim
    rows, seen = (part.expand(shape).reshape(-1, *shape[num:]) for part in (value, seen))
    # The row's number stays a tensor: nothing is read back from the device.
    # Single values of an event may be masked apart from one another, and have unmasked rows of their own.
    filler = rows.gather(0, seen.to(torch.uint8).argmax(0, keepdim=True)).nan_to_num()
    return torch.where(~seen & rows.isnan(), filler, rows).reshape(shape)


def fill_masked(site: Any) -> None:
    """As :func:`filled`, of a sample site that is observed."""
    if site["is_observed"]:
        site["value"] = filled(site["fn"], site["value"], site["mask"])


# What distributions are made of.


def is_declared(fn: TorchDistribution) -> bool:
    """Whether a distribution knows its expectation over a normal parameter; a subclass may have another density."""
    return closed_form(fn, normal_parameter(fn)) is not None


def is_normal(fn: Any) -> bool:
    """Whether a distribution is normal around the parameter: its log density is quadratic in it."""
    return type(bare(fn)) in (dist.Normal, *_MULTIVARIATE)


def parameter_of(fn: TorchDistribution) -> Tensor:
    """θ, the parameter over which a declared distribution knows its expectation."""
    return getattr(bare(fn), normal_parameter(fn))


def normal_parameter(fn: TorchDistribution) -> str:
    """Its name."""
    return getattr(bare(fn), "normal_parameter", "loc")


def over_scale(fn: TorchDistribution, rows: Tensor) -> Tensor:
    """L⁻¹A of a multivariate normal, in whose log density L⁻¹θ has variances of its own; A of another distribution."""
    fn = bare(fn)
    if type(fn) not in _MULTIVARIATE:
        return rows
    return solve_lower(fn.scale_tril, rows.reshape(*fn.loc.shape, -1)).reshape(rows.shape)


# E[log p(value | θ)] of a distribution at the mean of η, made if asked for, by η's mean and variance (or L⁻¹θ's).
Made = Callable[[], Any]
Expected = Callable[[Made, Tensor, Tensor, Tensor], Tensor]


def _normal(made: Made, value: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    fn = made()
    return fn.log_prob(value) - variance / (2 * fn.scale.square())


def _multivariate(made: Made, value: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    return made().log_prob(value) - 0.5 * variance.sum(-1)


def _laplace(made: Made, value: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    fn = made()
    # E[max(z, 0)] and E[max(−z, 0)] for z ~ N(d, v): dΦ(d/√v) + √v φ(d/√v), and that minus d.
    distance, spread = value - fn.loc, variance.clamp(min=torch.finfo(variance.dtype).tiny).sqrt()
    t = distance / spread
    above = distance * torch.special.ndtr(t) + spread * (-0.5 * t.square()).exp() / math.sqrt(2 * math.pi)
    left, right = getattr(fn, "left_scale", fn.scale), getattr(fn, "right_scale", fn.scale)
    return -above / right - (above - distance) / left - (left + right).log()


def _poisson(made: Made, value: Tensor, mean: Tensor, variance: Tensor) -> Tensor:
    # E[y η − exp(η)]: what nodes give to rounding, on a K-th of the numbers
    return value * mean - (mean + 0.5 * variance).exp() - (value + 1).lgamma()


# By distribution, parameter and link: the one place that knows closed forms, beside what distributions bring.
_CLOSED: dict[tuple[type, str, str], Expected] = {
    (dist.Normal, "loc", "identity"): _normal,
    **dict.fromkeys([(kind, "loc", "identity") for kind in _MULTIVARIATE], _multivariate),
    **dict.fromkeys([(kind, "loc", "identity") for kind in (dist.Laplace, dist.AsymmetricLaplace)], _laplace),
    (dist.Poisson, "rate", "log"): _poisson,
}


def closed_form(fn: TorchDistribution, key: str, link: str = "identity") -> Optional[Expected]:
    """The expected log density of a distribution over η, a parameter under a link, if it is known."""
    inner = bare(fn)
    known = _CLOSED.get((type(inner), key, link))
    if known is None and isinstance(inner, ExpectedLogProb) and (inner.normal_parameter, "identity") == (key, link):
        # Else nothing shows what its density is made of: test_quadrature.py, Renamed.
        kept = {*vars(inner), *constraints_of(inner), "validate_args"}  # type: ignore[arg-type]
        is_shown = kept >= {key, *arguments_of(type(inner))}
        return (lambda made, value, mean, variance: made().expected_log_prob(value, variance)) if is_shown else None
    return known


def expectation(fn: TorchDistribution, value: Tensor, variance: Tensor) -> Tensor:
    """E[log p(value | θ)] for θ, of a multivariate normal L⁻¹θ, of this variance, as ``fn.log_prob(value)``."""
    form: Any = closed_form(fn, normal_parameter(fn))
    return rewrapped(fn, form(lambda: bare(fn), value, parameter_of(fn), variance))


# Names of one parameter: a distribution is made of one of these, and makes others of it where they are asked for.
_ALIKE = ("probs", "logits"), ("gate", "gate_logits"), ("covariance_matrix", "precision_matrix", "scale_tril")


def constraints_of(fn: TorchDistribution) -> dict[str, Any]:
    """The ranges of a distribution's parameters; Pyro takes one that does not say them."""
    with suppress(NotImplementedError):
        return getattr(bare(fn), "arg_constraints", {})
    return {}


arguments_of = functools.lru_cache(lambda kind: inspect.signature(kind).parameters)  # of a distribution's constructor


def parameters(fn: TorchDistribution) -> dict[str, Tensor]:
    """The tensors that a distribution is made of, by the names that it, or its constructor, has for them."""
    fn = bare(fn)
    names = dict.fromkeys([*constraints_of(fn), *filter(arguments_of(type(fn)).__contains__, vars(fn))]).keys()
    given = {group: next(filter(vars(fn).__contains__, group), group[-1]) for group in _ALIKE if {*group} <= names}
    made = {name for group in given for name in group} - {*given.values()}
    found = ((name, getattr(fn, name, None)) for name in names if name not in made)
    return {name: value for name, value in found if isinstance(value, Tensor)}


def rewrapped(fn: TorchDistribution, value: Tensor, masked: bool = True) -> Tensor:
    """A term for each single number of the distribution under ``fn``'s wrappers, as ``fn.log_prob`` has them; ``.mask``
    leaves none out if it is not ``masked``.
    """
    match fn:
        case torch.distributions.Independent():
            return sum_rightmost(rewrapped(fn.base_dist, value, masked), fn.reinterpreted_batch_ndims)
        case MaskedDistribution():
            inner = rewrapped(fn.base_dist, value, masked)
            return scale_and_mask(inner, mask=fn._mask if masked else None)
        case ExpandedDistribution():
            return rewrapped(fn.base_dist, value, masked).expand(fn.batch_shape)
    return value
