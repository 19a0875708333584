"""Steps of SVI that several processes take together, each with rows of its own."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any

import pyro
import torch
from pyro.optim import PyroOptim
from torch import Tensor

from ..guide import AutoSparseGP
from ..numerics.processes import Workers, joined


class SharedOptim(PyroOptim):
    """A Pyro optimiser that steps by the gradients of all processes' batches joined, within :func:`sharing`; natural
    steps are by the sums of all of them, too.

    >>> svi = SVI(model, guide, SharedOptim(pyro.optim.Adam({"lr": 0.01})), TraceQuadrature_ELBO())  # doctest: +SKIP
    >>> with sharing(torch.distributed.group.WORLD):  # doctest: +SKIP
    ...     svi.step(x, y, size=N)
    """

    def __init__(self, optim: PyroOptim) -> None:
        super().__init__(optim.pt_optim_constructor, optim.pt_optim_args, optim.pt_clip_args)
        self.optim = optim

    def __call__(self, params: Iterable[Tensor], *args: Any, **kwargs: Any) -> None:
        # The same order in all processes; SVI gives a set.
        ordered = sorted(params, key=_name)
        gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in ordered]
        for p, gradient in zip(ordered, joined(*gradients) if gradients else []):
            p.grad = gradient
        self.optim(ordered, *args, **kwargs)

    def get_state(self) -> dict[str, Any]:
        return self.optim.get_state()

    def set_state(self, state_dict: dict[str, Any]) -> None:
        self.optim.set_state(state_dict)


# modules.unique_name's, which differs between processes.
_UNIQUE = re.compile(r"_[0-9a-f]{12}(?=\.|$)")


def _name(parameter: Tensor) -> str:
    return _UNIQUE.sub("", str(pyro.get_param_store().param_name(parameter)))


def agree(guide: AutoSparseGP, workers: Workers) -> None:
    """Give a guide and the model's parameters in Pyro's store the values that they have in the first process.

    :raises ValueError: naming a latent site that has a value for each row.
    """
    local = guide.core.facts.local_latents if workers.num > 1 else ()
    if local:  # whose values processes would mix: test_distributed.py::test_latents_of_rows_are_refused
        raise ValueError(
            f"several processes do not take latents inside plates: site {local[0]!r} has a value for each row, and "
            "each process has other rows. Train in one process."
        )
    own = {id(p) for p in guide.parameters()}
    store = [p for p in dict(pyro.get_param_store().named_parameters()).values() if id(p) not in own]
    workers.agree([*guide.parameters(), *guide.buffers(), *sorted(store, key=_name)])
