"""Many draws of a program: at once, under :func:`torch.func.vmap`, where the program allows it."""

import pickle
import warnings
from collections.abc import Callable, Iterator, Mapping
from contextvars import ContextVar
from functools import partial
from operator import itemgetter
from typing import Any, Optional

import pyro
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map
from tqdm.auto import tqdm

from ..numerics.decisions import Decisions, Mapped, deciding
from ..numerics.functions import setting
from ..numerics.linalg import MAPPED, flags_kept
from .asking import Unsupported, attempt
from .data import map_tensors, tensors
from .traces import RandomState

Draw = dict[Any, Any]  # of tensors, or of dictionaries and tuples of them
DrawOne = Callable[[Draw], Draw]  # a draw of an item's tensors
SHOWN: ContextVar[bool] = ContextVar("whether bars are shown", default=True)
_PATIENCE = 2.0  # seconds without a bar

_AT_ONCE = 2**21  # numbers that draws made at once may hold in one place: more is slower, in memory that is new
_MOST = 100  # draws at once
_FEW, _POOR = 0.2, 3  # after so many runs of which this share of draws is right all go one by one
_DRAWS = {Tensor.normal_, Tensor.uniform_, Tensor.exponential_, Tensor.cauchy_}
_NEW = "zeros", "ones", "full", "empty"
_MAKES = {getattr(torch, name) for kind in _NEW for name in (kind, f"{kind}_like")}
_MAKES |= {getattr(Tensor, f"new_{kind}") for kind in _NEW}
_WRITES = "more elements than `self`"  # in what torch.func.vmap says of writing mapped numbers to what is not mapped


def late_bar(desc: str, unit: str = " evaluations", total: Optional[int] = None) -> tqdm:
    """A bar that shows after two seconds, and leaves nothing behind."""
    return tqdm(total=total, desc=desc, unit=unit, delay=_PATIENCE, leave=False, disable=not SHOWN.get())


def vmapped(function: Callable[..., Any], *stack: object, **options: Any) -> Any:
    """:func:`torch.func.vmap` of a function, called within an :class:`attempt`. Where it refuses to write mapped
    numbers into a tensor that the program makes, as Pyro's ``OrderedLogistic`` does into zeros, what is made is mapped,
    too.
    """
    state = RandomState(tensors(stack)[0])
    with attempt() as asked:
        return torch.func.vmap(function, **options)(*stack)
    error: Any = asked.error
    if _WRITES not in str(error):
        raise error
    state.restore()

    def made(*parts: object) -> Any:
        with _Made(tensors(parts)[0]):
            return function(*parts)

    return torch.func.vmap(made, **options)(*stack)


def mapped(function: Callable[[Any], tuple[Tensor, ...]], stack: Tensor | Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """A function of a tensor, or of a mapping to tensors, over their first dimension: in one run, or in a loop for
    programs that :func:`torch.func.vmap` refuses.
    """
    with attempt():
        return vmapped(function, stack, randomness="same")
    each = [function(map_tensors(itemgetter(i), stack)) for i in range(len(tensors(stack)[0]))]
    return tuple(map(torch.stack, zip(*each)))


def in_blocks(one: DrawOne, items: Mapping[Any, Tensor], numbers: Callable[[Draw], int]) -> Iterator[Draw]:
    """A function of each item's tensors, results stacked, a block of items after the other.

    The first is alone, in plain torch: it warns, learns and raises. Others are under ``torch.func.vmap`` with random
    numbers of their own, or in a loop where it refuses the program: at most 100 at once, and as many as memory
    allows, where a result is made of so many ``numbers``. After two seconds there is a bar.

    What is decided by numbers, such as how often sites are updated, is decided for all as for the one that is alone.
    Where others' numbers lead another way, the first of these is alone, and leads. Items that are draws' numbers say
    nothing of what a draw is made of. Then one that fails has its whole block drawn anew: else draws such as this one
    would come too seldom.
    """
    num, is_known = len(next(iter(items.values()))), any(value.is_floating_point() for value in items.values())

    def alone(item: Tensor) -> tuple[Draw, list[bool]]:
        with deciding(decisions := Decisions()):
            found = one({key: value[int(item)] for key, value in items.items()})
        bar.update()
        return map_tensors(lambda value: value[None], found), decisions.read

    with late_bar("draws", "it", total=num) as bar:
        every = torch.arange(num)
        first, way = alone(every[0])
        yield first
        size = min(max(_AT_ONCE // max(numbers(first), 1), 1), _MOST)
        least, patience = (_FEW, _POOR) if is_known else (1.0, 0)
        is_mapped = size > 1
        for start in range(1, num, size):
            left, parts = every[start : start + size], list[tuple[Tensor, Draw]]()
            while len(left):
                led = left  # from here on all go one by one
                if is_mapped:
                    found, fails = _at_once(one, {key: value[left] for key, value in items.items()}, way)
                    patience -= int((~fails).float().mean() < least)
                    is_mapped = bool(found) and patience >= 0
                if is_mapped:
                    parts.append((left[~fails], map_tensors(partial(_rows, ~fails), found)))
                    bar.update(len(parts[-1][0]))
                    left = left[fails]
                    led = left[:1]  # the first that fails leads
                for item in led:
                    draw, way = alone(item)
                    parts.append((item[None], draw))
                left = left[len(led) :]
            order = torch.cat([numbers for numbers, _ in parts]).argsort()
            yield tree_map(partial(_in_order, order), *(draw for _, draw in parts))


def all_draws(one: DrawOne, items: Mapping[Any, Tensor], numbers: Callable[[Draw], int]) -> Draw:
    """The draws of :func:`in_blocks`, stacked in one."""
    return tree_map(lambda *parts: torch.cat(parts), *in_blocks(one, items, numbers))


def _in_order(order: Tensor, *values: Tensor) -> Tensor:
    return torch.cat(values)[order.to(values[0].device)]


def _rows(which: Tensor, value: Tensor) -> Tensor:
    return value[which.to(value.device)]


def _at_once(one: DrawOne, block: Draw, way: list[bool]) -> tuple[Draw, Tensor]:
    """The results by one mapped run, and which of them fail: a matrix has no factor, numbers are NaN, or their way is
    another. If the run is refused, all fail.
    """

    def flagged(item: Draw) -> tuple[Draw, Tensor]:
        with flags_kept() as flags, deciding(Mapped(way, flags)):
            found = one(item)
        # A plate's indices, whole numbers, may be on another device.
        faults = [*flags, *(value.isnan() for value in tensors(found) if value.is_floating_point())]
        return found, torch.stack([fault.any() for fault in faults]).any()

    state = _host_state()
    # An error of the program's own the loop raises again.
    with attempt() as asked, setting(MAPPED, True), _Noise(), pyro.validation_enabled(False), warnings.catch_warnings():
        # torch's: of an operation without a rule, and of the memory that torch.binomial has for its result
        for text in ("There is a performance drop", "An output with one or more elements was resized"):
            warnings.filterwarnings("ignore", text)
        found, failed = vmapped(flagged, block, randomness="different")
    # What a program draws from NumPy or Python would be one number for the block: test_what_a_program_draws_from_numpy.
    if asked.error is not None or state != _host_state():
        return {}, torch.ones(len(next(iter(block.values()))), dtype=torch.bool)
    return found, failed.cpu()


def _host_state() -> bytes:
    """That of the global generators of Python and NumPy."""
    state = pyro.util.get_rng_state()
    return pickle.dumps((state["random"], state.get("numpy")))


class _Made(TorchFunctionMode):
    """What is made within is mapped as ``like`` is."""

    def __init__(self, like: Tensor) -> None:
        super().__init__()
        self.none = like.new_zeros(())

    def __torch_function__(self, func: Callable, types: tuple, args: tuple = (), kwargs: Mapping = {}) -> Any:
        found = func(*args, **kwargs)
        return found + self.none.to(found) if func in _MAKES else found


class _Noise(TorchFunctionMode):
    """Draws in place, as ``Normal.rsample`` makes them: vmap has no random numbers of its own for these. What comes
    from a generator of the program's, the same at each run, is refused: vmap would take others for each draw.
    """

    def __torch_function__(self, func: Callable, types: tuple, args: tuple = (), kwargs: Mapping = {}) -> Any:
        if kwargs.get("generator") is not None:  # test_what_a_program_draws_from_a_seed_stays
            raise Unsupported("a program's own generator draws")
        if func not in _DRAWS:
            return func(*args, **kwargs)
        drawn = func(torch.rand_like(args[0]), *args[1:], **kwargs)
        # Whoever reads the tensor, and not what is returned, gets NaN, and the loop.
        args[0].fill_(torch.nan)
        return drawn
