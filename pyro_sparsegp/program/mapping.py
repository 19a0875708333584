"""A function of many values, in one run under ``torch.func.vmap`` where it allows the program."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Optional, Union

import pyro
import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode
from tqdm.auto import tqdm

from ..numerics.linalg import MAPPED, flags_kept
from .data import map_tensors, tensors

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
    try:
        return torch.func.vmap(function, randomness="same")(stack)
    except (RuntimeError, TypeError, ValueError):
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
        together = min(max(8 * _AT_ONCE // sum((value.numel() for value in tensors(first)), 1), size), _MOST)
        for start in range(1, num, together):
            stop = min(start + together, num)
            # Results have their memory before what makes them: a process keeps freed matrices that lie below a result.
            kept = map_tensors(lambda value, n=stop - start: value.new_empty(n, *value.shape[1:]), first)
            at = start
            while at < stop:
                upto = min(at + size, stop)
                block = {key: value[at:upto] for key, value in items.items()}
                found = _at_once(one, block) if size > 1 else alone(at)
                if found is None:  # from here on one by one
                    size = 1
                    continue
                map_tensors(lambda room, v, i=at - start: room[i : i + len(v)].copy_(v), kept, found)
                bar.update(upto - bar.n)
                at = upto
            yield kept


def _at_once(one: Callable[[Draw], Draw], block: Draw) -> Optional[Draw]:
    """The results by one mapped run; ``None`` where it fails, a matrix has no factor or numbers are NaN."""

    def flagged(item: Draw) -> tuple[Draw, Tensor]:
        with flags_kept() as flags:
            found = one(item)
        # A plate's indices, whole numbers, may be on another device.
        faults = [*flags, *(value.isnan() for value in tensors(found) if value.is_floating_point())]
        return found, torch.stack([fault.any() for fault in faults]).any()

    token = MAPPED.set(True)
    try:
        with _Noise(), pyro.validation_enabled(False), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "There is a performance drop")  # torch's, of an operation without a rule
            found, failed = torch.func.vmap(flagged, randomness="different")(block)
    except (RuntimeError, TypeError, ValueError, NotImplementedError):  # the program's own the loop raises again
        return None
    finally:
        MAPPED.reset(token)
    return None if failed.any() else found


class _Noise(TorchFunctionMode):
    """Draws in place, as of ``Normal.rsample``, for which vmap has no random numbers of their own. What comes from a
    generator of the program's, the same at each run, is refused: vmap would take others for each draw.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if kwargs.get("generator") is not None:  # test_what_a_program_draws_from_a_seed_stays
            raise NotImplementedError
        if func not in _DRAWS:
            return func(*args, **kwargs)
        drawn = func(torch.rand_like(args[0]), *args[1:], **kwargs)
        # Whoever reads the tensor, and not what is returned, gets NaN, and the loop.
        args[0].fill_(torch.nan)
        return drawn
