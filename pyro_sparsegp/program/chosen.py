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
        own = next((part for part in args if isinstance(part, Values)), None)
        with torch._C.DisableTorchFunctionSubclass():
            if func == Tensor.__getitem__ and own is args[0]:
                index = args[1][1] if isinstance(args[1], tuple) and args[1][:1] == (Ellipsis,) else args[1]
                if isinstance(index, (int, Tensor)):
                    return own._picked(index)
            # A function of the values alone is the same for each element, too, as torch.where(z == 1, ...):
            # test_values_keep_their_numbers_through_functions_of_their_own.
            found = func(*args, **kwargs)
            others = [part for part in (*args, *kwargs.values()) if isinstance(part, Tensor) and part is not own]
            if own is None or others or type(found) is not Tensor or found.shape != own.shape:
                return found
            return Values.of(found, own.site, own.place, own.read)

    def _picked(self, index: Any) -> Tensor:
        if (
            not isinstance(index, Tensor)
            or index.dim() != 1
            or index.dtype.is_floating_point
            or index.dtype == torch.bool
        ):
            what = f"{index.dtype} of shape {tuple(index.shape)}" if isinstance(index, Tensor) else repr(index)
            raise ValueError(
                f"discrete site {self.site!r} is enumerated, and indexed by {what}: give each row the number of "
                f"its element of the plate, whole numbers (N,), {self.site}[group]; or loop over pyro.plate."
            )
        # The same numbers twice are one choice: test_group_classes.py::test_groups.
        if not any(index is one or torch.equal(index, one) for one in self.read):
            self.read.append(index)
        return self.as_subclass(Tensor).index_select(self.place, torch.zeros_like(index))
