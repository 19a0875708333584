"""Values of a discrete latent that note by which numbers a program picks among the elements of its plate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["Values"]


class Values(Tensor):
    """All values of an enumerated latent, or a function of these alone, ``(K, 1, ..., N)``: the same for each element.

    ``z[group]`` and ``z[..., group]`` give each row the values that its element of the plate has, which are those of
    any, and note the rows' numbers: what depends on them is added up by these.

    :param site: its name.
    :param place: the dimension of its plate.
    :param read: the numbers so far.
    """

    site: str
    place: int
    read: list[Tensor]

    @classmethod
    def of(cls, values: Tensor, site: str, place: int, read: list[Tensor]) -> Values:
        """Such values of a site, ``values``."""
        found = values.as_subclass(cls)
        found.site, found.place, found.read = site, place, read
        return found

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func == Tensor.__getitem__ and isinstance(args[0], Values):
            index = args[1]
            index = index[1] if isinstance(index, tuple) and len(index) == 2 and index[0] is Ellipsis else index
            if isinstance(index, (int, Tensor)):
                return args[0]._picked(index)
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **kwargs)
            given = [part for part in (*args, *kwargs.values()) if isinstance(part, Tensor)]
            own = args[0] if args and isinstance(args[0], Values) else None
            if own is None or any(part is not own for part in given) or not isinstance(found, Tensor):
                return found
            same = type(found) is Tensor and found.shape == own.shape
            return Values.of(found, own.site, own.place, own.read) if same else found

    def _picked(self, index: Any) -> Tensor:
        with torch._C.DisableTorchFunctionSubclass():
            if (
                not isinstance(index, Tensor)
                or index.dim() != 1
                or index.is_floating_point()
                or index.dtype == torch.bool
            ):
                what = f"{index.dtype} of shape {tuple(index.shape)}" if isinstance(index, Tensor) else repr(index)
                raise ValueError(
                    f"discrete site {self.site!r} is enumerated, and indexed by {what}: give each row the number of "
                    f"its element of the plate, whole numbers (N,), {self.site}[group]; or loop over pyro.plate."
                )
            if not any(index is one or torch.equal(index, one) for one in self.read):
                self.read.append(index)
            return self.as_subclass(Tensor).index_select(self.place, torch.zeros_like(index))
