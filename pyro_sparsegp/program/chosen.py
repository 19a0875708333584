"""Values of a discrete latent that note by which numbers a program picks among the elements of its plate."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

__all__ = ["Values"]

_WHOLE = (torch.int64, torch.int32, torch.int16, torch.int8, torch.uint8)


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
        with torch._C.DisableTorchFunctionSubclass():
            found = func(*args, **kwargs)
            given = [part for part in (*args, *kwargs.values()) if isinstance(part, Tensor)]
            # A function of the values alone is the same for each element, too, as torch.where(z == 1, ...):
            # test_rows_that_share_a_class.
            alone = type(found) is Tensor and all(part is given[0] and found.shape == part.shape for part in given)
            if not alone or not given or not isinstance(given[0], Values):
                return found
            return Values.of(found, given[0].site, given[0].place, given[0].read)

    def __getitem__(self, index: Any) -> Tensor:
        index = index[1] if isinstance(index, tuple) and index[:1] == (Ellipsis,) else index
        if not isinstance(index, (int, Tensor)):
            return super().__getitem__(index)
        numbers = torch.as_tensor(index)
        if numbers.dim() != 1 or numbers.dtype not in _WHOLE:
            what = f"{numbers.dtype} of shape {tuple(numbers.shape)}" if numbers.dim() else str(index)
            raise ValueError(
                f"discrete site {self.site!r} is enumerated, and indexed by {what}: give each row the number of "
                f"its element of the plate, whole numbers (N,), {self.site}[group]; or loop over pyro.plate."
            )
        # The same numbers twice are one choice: test_group_classes.py::test_groups.
        if not any(numbers is one or torch.equal(numbers, one) for one in self.read):
            self.read.append(numbers)
        with torch._C.DisableTorchFunctionSubclass():
            return self.as_subclass(Tensor).index_select(self.place, torch.zeros_like(numbers))
