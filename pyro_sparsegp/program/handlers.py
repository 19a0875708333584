"""Handlers of a program's run that hold its values, hide it, look at it ahead, or map it over many values."""

import pickle
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from typing import Any, Optional, Union

import pyro
import torch
from pyro import poutine
from pyro.infer.autoguide.initialization import InitMessenger
from pyro.poutine.block_messenger import BlockMessenger
from pyro.poutine.mask_messenger import MaskMessenger
from pyro.poutine.messenger import Messenger, block_messengers
from pyro.poutine.scale_messenger import ScaleMessenger
from pyro.poutine.trace_messenger import TraceMessenger
from torch import Tensor
from torch.overrides import TorchFunctionMode
from tqdm.auto import tqdm

from ..numerics.functions import held
from ..numerics.linalg import MAPPED, flags_kept
from .asking import Unsupported, asks_program, attempt
from .checks import require_known_indices
from .data import map_tensors, tensors
from .enumeration import PLATES, Enumeration, Factor, sizes
from .facts import kept_buffers
from .traces import (
    all_sites,
    as_process,
    fill_masked,
    free_values,
    is_observation,
    repeatable,
    sample_sites,
    whole_plates,
)

NO_RUN = poutine.Trace()  # which has met no site


class Held(Messenger):
    """Holds sites of a guide's run at values drawn before."""

    def __init__(self, values: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.values = values

    def _pyro_sample(self, msg: Any) -> None:
        if not msg["is_observed"] and msg["name"] in self.values:
            msg["value"] = self.values[msg["name"]]


class _Holding(Messenger):
    """Holds sites at values, whatever data the model has there, and at ``free`` those that it leaves free."""

    def __init__(self, values: Mapping[str, Tensor], free: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.values, self.free = values, free

    def _pyro_sample(self, msg: Any) -> None:
        name = msg["name"]
        # Data stay what they are, unless they are among the values: DensityReader.density asks at others.
        values = self.values if name in self.values or msg["is_observed"] else self.free
        if name in values:
            msg["value"], msg["is_observed"] = values[name], True


def held_trace(
    model: Callable, values: Mapping[str, Tensor], args: tuple, kwargs: dict[str, Any], like: poutine.Trace = NO_RUN
) -> poutine.Trace:
    """A run of the model with sites held at ``values``, unseen by other handlers: they pass for observed. Discrete
    sites that are enumerated are not in it; a site that would be drawn raises.

    ``like`` is a run under the handlers around this one: its values are held too, and sites get its scales and masks.
    Held are all latents, and plates' rows, so that the run sees those that the values belong to.
    """
    free = {name: site["value"] for name, site in all_sites(like) if site["type"] == "sample"}
    trace = trace_like(like, lambda: Enumeration({**values, **free})(model)(*args, **kwargs), _Holding(values, free))
    for name, site in sample_sites(trace).items():
        if not site["is_observed"]:
            raise ValueError(
                f"site {name!r} has no value when the model's densities are read: a handler around this call, such as "
                "poutine.reparam, changes which sites there are. Wrap the model in it before it goes to AutoSparseGP."
            )
    return trace


def trace_like(like: poutine.Trace, run: Callable[[], Any], handler: Messenger) -> poutine.Trace:
    """The trace of a run that other handlers do not see; its sites get the scales and masks of another run, under the
    handlers around this one.
    """
    there: dict[str, Any] = dict(like.nodes)
    with poutine.block(), poutine.trace() as tracer, asks_program(), handler, kept_buffers():
        run()
    for name, site in sample_sites(tracer.trace).items():
        if name in there:
            site["scale"], site["mask"] = there[name]["scale"], there[name]["mask"]
        fill_masked(site)
    return tracer.trace


# A program's run with some values moved, all others held.
Rerun = Callable[[Mapping[str, Tensor]], poutine.Trace]


def held_runs(model: Callable, trace: poutine.Trace, args: tuple, kwargs: dict[str, Any]) -> Rerun:
    """Runs of a program with the values given, all else as it was in a run."""
    return lambda moved: held_trace(model, moved, args, kwargs, trace)


def given_data(
    model: Callable, trace: poutine.Trace, args: tuple, kwargs: dict[str, Any], known: Collection[str]
) -> dict[str, Tensor]:
    """If a run met data, draws given these of its discrete latents that are summed out in training, and values of all
    sites under them; nothing, if it met none. Those that are ``known`` stay.
    """
    sites, free = sample_sites(trace), free_values(trace)
    drawn = [n for n in free if n in sites and sites[n]["infer"].get("enumerate") == "parallel" and n not in known]
    if not drawn or not any(map(is_observation, sites.values())):
        return {}
    values, summed = {name: value for name, value in free.items() if name not in drawn}, Enumeration()
    with whole_plates(), poutine.block(), Held(values):
        poutine.trace(summed(model)).get_trace(*args, **kwargs)
        with Held(summed.draw_of(drawn)):
            again = sample_sites(poutine.trace(model).get_trace(*args, **kwargs))
    return {name: site["value"] for name, site in again.items()}


def class_probabilities(model: Callable, values: Mapping[str, Tensor], *args: Any, **kwargs: Any) -> dict[str, Tensor]:
    """The exact probabilities p(z | values, data) of each enumerated discrete site z, given a draw of all others.

    p(z = k | ·) = ∂ log Σ_z p(z) p(data | z, ·) / ∂ log p(z = k), because the derivative of a log sum by the log of
    a term is that term's share. Average over a guide's joint draws at the training rows to get the posterior's: after
    ``guide.eval()``, ``class_probabilities(model, guide(x, y), x, y)``.

    :param model: the model.
    :param values: the values of all other latents, including GP sites at the training rows; other names are ignored.
    :param args: the model's arguments, the data among them.
    :param kwargs: its keyword arguments.
    :returns: by site, ``(..., K)``: a probability for each value, in the order of the distribution's
        ``enumerate_support()``, for each element of its plates ``(...)``.
    :raises ValueError: naming a latent whose value is not given.
    """
    enumeration = Enumeration()
    held = poutine.condition(enumeration(model), data=dict(values))
    with poutine.block(), torch.no_grad():
        trace = poutine.trace(held).get_trace(*args, **kwargs)
    for name, site in sample_sites(trace).items():
        shape, wanted = site["value"].shape, site["fn"].shape()
        if not site["is_observed"] or (name in values and shape != wanted):
            what = f"shape {tuple(shape)}, its distribution {tuple(wanted)}" if site["is_observed"] else "no value"
            raise ValueError(
                f"class_probabilities: site {name!r} has {what}: give one draw of each latent that is not enumerated, "
                "at these rows, such as guide(x, y) after guide.eval()."
            )
    factors, moves = [term.factor(True) for term in enumeration.terms], list[Tensor]()
    for dim, latent in enumeration.latents.items():
        # A factor of 1 for each value and element: its gradient is that of p(z).
        shape = len(latent.support), *[1] * (dim - 1 - PLATES), *sizes(latent.plates)
        moves.append(factors[0].value.new_zeros(shape).requires_grad_())
        factors.append(Factor(frozenset([dim]), latent.plates, moves[-1]))
    if not moves:
        return {}
    with torch.enable_grad():
        total = torch.stack([factor.value.sum() for factor in enumeration.contract(factors)]).sum()
    return {
        name: share.reshape(len(share), *sizes(plates, trim=True)).movedim(0, -1)
        for (name, plates, *_), share in zip(enumeration.latents.values(), torch.autograd.grad(total, moves))
    }


def unrecorded(same: bool, learns: bool) -> Any:
    """Hide a run from the traces around it. Handlers that change its sites stay in force, but scales and masks where
    its data are not the ``same`` that the call is about, and for the mask that leaves all out: with it Pyro's
    prediction says that it needs no densities.
    """
    kinds = (TraceMessenger,) if same or learns else (TraceMessenger, MaskMessenger, ScaleMessenger)

    def hides(m: Any) -> bool:
        sees_sites = isinstance(m, kinds) and not getattr(m, "param_only", False)  # optimisers see parameters
        return sees_sites or (not learns and isinstance(m, MaskMessenger) and m.mask is False)

    return block_messengers(hides)


def is_blocked(model: Callable) -> bool:
    """Whether a model was given under ``poutine.block``, which hides sites of it."""
    match getattr(model, "func", None):
        case partial(args=(handler, inner, *_)):  # as Pyro's handlers wrap a model
            return isinstance(handler, BlockMessenger) or is_blocked(inner)
    return False


def stand_in(fn: Any) -> Tensor:
    """A value of a distribution where any will do: not a draw, which transforms such as ``torch.func.hessian`` refuse,
    if there is another.
    """
    try:
        value = fn.enumerate_support(expand=False)[0] if fn.has_enumerate_support else fn.mean
    except (NotImplementedError, AttributeError):
        return fn.sample()
    return value.detach().expand(fn.shape())


@require_known_indices()
def observes(model: Callable, rows: Collection[str], like: Tensor, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Whether a run of the model with these arguments has data at ``rows``: it is run ahead, its GP sites at means."""

    def value_of(site: Any) -> Tensor:
        return site["fn"].mean if as_process(site["fn"])[0] else site["fn"]().to(like.device)

    with (
        poutine.block(),
        pyro.validation_enabled(False),
        torch.no_grad(),
        repeatable(like),
        InitMessenger(value_of),
        kept_buffers(),
    ):
        trace = poutine.trace(model).get_trace(*args, **kwargs)
    return any(name in rows and is_observation(site) for name, site in all_sites(trace))


Draw = dict[Any, Any]  # of tensors, or of dictionaries and tuples of them

_AT_ONCE = 2**21  # numbers that draws made at once may hold in one place: more is slower, in memory that is new
_MOST = 100  # draws at once
_PATIENCE = 2.0  # seconds without a bar
_DRAWS = {Tensor.normal_, Tensor.uniform_, Tensor.exponential_, Tensor.cauchy_}


def mapped(
    function: Callable[[Any], tuple[Tensor, ...]], stack: Union[Tensor, Mapping[str, Tensor]]
) -> tuple[Tensor, ...]:
    """A function of a tensor, or of a mapping to tensors, over their first dimension: in one run, or in a loop for
    programs that :func:`torch.func.vmap` refuses.
    """
    with attempt():
        return torch.func.vmap(function, randomness="same")(stack)
    each = stack if isinstance(stack, Tensor) else [dict(zip(stack, item)) for item in zip(*stack.values())]
    return tuple(map(torch.stack, zip(*map(function, each))))


def in_blocks(
    one: Callable[[Draw], Draw], items: Mapping[Any, Tensor], numbers: Callable[[Draw], int]
) -> Iterator[Draw]:
    """A function of each item's tensors, results stacked, a block of items after the other.

    The first is alone, in plain torch: it warns, learns and raises. Others are under ``torch.func.vmap`` with random
    numbers of their own, or in a loop where it refuses the program: at most 100 at once, and as many as memory
    allows, where a result is made of so many ``numbers``. After two seconds there is a bar.
    """
    num = len(next(iter(items.values())))

    def alone(item: int) -> Draw:
        return map_tensors(lambda value: value[None], one({key: value[item] for key, value in items.items()}))

    with tqdm(total=num, desc="draws", delay=_PATIENCE, leave=False) as bar:
        first = alone(0)
        yield first
        size = min(max(_AT_ONCE // max(numbers(first), 1), 1), _MOST)
        start = 1
        while start < num:
            stop = min(start + size, num)
            block = {key: value[start:stop] for key, value in items.items()}
            found = _at_once(one, block) if size > 1 else alone(start)
            if found is None:  # from here on one by one
                size = 1
                continue
            bar.update(stop - bar.n)
            start = stop
            yield found


def _at_once(one: Callable[[Draw], Draw], block: Draw) -> Optional[Draw]:
    """The results by one mapped run; ``None`` where it fails, a matrix has no factor or numbers are NaN."""

    def flagged(item: Draw) -> tuple[Draw, Tensor]:
        with flags_kept() as flags:
            found = one(item)
        # A plate's indices, whole numbers, may be on another device.
        faults = [*flags, *(value.isnan() for value in tensors(found) if value.is_floating_point())]
        return found, torch.stack([fault.any() for fault in faults]).any()

    state = _host_state()
    # An error of the program's own the loop raises again.
    with attempt() as asked, held(MAPPED, True), _Noise(), pyro.validation_enabled(False), warnings.catch_warnings():
        # torch's: of an operation without a rule, and of the memory that torch.binomial has for its result
        for text in ("There is a performance drop", "An output with one or more elements was resized"):
            warnings.filterwarnings("ignore", text)
        found, failed = torch.func.vmap(flagged, randomness="different")(block)
    if asked.error is not None:
        return None
    # What a program draws from NumPy or Python would be one number for the block: test_what_a_program_draws_from_numpy.
    return None if failed.any() or state != _host_state() else found


def _host_state() -> bytes:
    """That of the global generators of Python and NumPy."""
    state = pyro.util.get_rng_state()
    return pickle.dumps((state["random"], state.get("numpy")))


class _Noise(TorchFunctionMode):
    """Draws in place, as ``Normal.rsample`` makes them: vmap has no random numbers of its own for these. What comes
    from a generator of the program's, the same at each run, is refused: vmap would take others for each draw.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("generator") is not None:  # test_what_a_program_draws_from_a_seed_stays
            raise Unsupported("a program's own generator draws")
        if func not in _DRAWS:
            return func(*args, **kwargs)
        drawn = func(torch.rand_like(args[0]), *args[1:], **kwargs)
        # Whoever reads the tensor, and not what is returned, gets NaN, and the loop.
        args[0].fill_(torch.nan)
        return drawn
