"""Posteriors that follow from Gaussian sites."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any, Optional, Union

import torch
from torch import Tensor

from ..gaussians.sites import FreeSites, KeptSites, Sites
from ..modules import AbstractModule
from ..posterior.sparse_posterior import SparsePosterior
from ..process import GaussianProcess

Kind = type[SparsePosterior]


class SiteGP(AbstractModule):
    """One site's variational module whose posterior follows from Gaussian sites.

    :param sites: where the sites are kept, or are parameters.
    :param at: "marginals" or "mean", where sites that are iterated are read.
    :param rate: the damping of updates where sites are iterated.
    :param updates: how many updates a training step makes there.
    """

    takes_batches = False  # whether steps may bring other rows than those whose sites it is conditioned on

    def __init__(
        self,
        sites: Union[KeptSites, FreeSites],
        batch_shape: Sequence[int],
        family: dict[str, Any],
        at: str = "marginals",
        rate: float = 1.0,
        updates: int = 1,
    ) -> None:
        super().__init__()
        self.sites, self.family = sites, family
        self.at, self.rate, self.updates = at, rate, updates
        self.batch_shape = torch.Size(batch_shape)

    def forward(
        self,
        process: GaussianProcess,
        name: str,
        kind: Kind = SparsePosterior,
        sites: Optional[Sites] = None,
        exact: bool = False,
        new: bool = False,
    ) -> SparsePosterior:
        """The posterior of ``process`` given ``sites``, by default those kept.

        :param exact: whether the sites are the likelihood itself, so that an optimal q(w) is where the bound is
            stationary.
        :param new: whether the process is at other inputs than the sites.
        """
        if sites is None and self.sites.empty:
            return self.unread(process, name, kind)
        sites = self.sites() if sites is None else sites
        if new:
            return self.at_new_inputs(process, name, kind, sites)
        return self.given(process, name, kind, sites, exact)

    def unread(self, process: GaussianProcess, name: str, kind: Kind, known: Any = None) -> SparsePosterior:
        """The prior, before any sites are read."""
        return self.given(process, name, kind, Sites.none(process.x, process.batch_shape), False, known)

    def by_sites(self, process: GaussianProcess, name: str) -> Callable[[Optional[Sites]], SparsePosterior]:
        """The posterior of ``process`` as a function of sites at its inputs, while they are read; of ``None``, before
        any are. What does not depend on them is made once, and held as long as the function is: no gradient is to pass.
        """
        known = self.prepared(process, name, process.x)

        def answer(sites: Optional[Sites]) -> SparsePosterior:
            if sites is None:
                return self.unread(process, name, SparsePosterior, known)
            return self.given(process, name, SparsePosterior, sites, False, known)

        return answer

    def prepared(self, process: GaussianProcess, name: str, x: Tensor) -> Any:
        """What :meth:`given` makes of sites' inputs x alone."""
        return None

    def at_new_inputs(self, process: GaussianProcess, name: str, kind: Kind, sites: Sites) -> SparsePosterior:
        """The posterior at new inputs, where a kernel's diagonal that depends on the rows is that beside the sites'."""
        return self.given(process.relative_to(sites.inputs), name, kind, sites, False)

    @property
    def num_rows(self) -> Optional[int]:
        """Of the training data, if parameters belong to each; otherwise ``None``."""
        return len(self.sites.inputs) if isinstance(self.sites, FreeSites) else None

    def spec(self) -> dict[str, Any]:
        """What is needed to make the module anew before its state is loaded, in plain Python."""
        shapes = {"columns": self.sites.inputs.shape[-1], "rows": self.num_rows}
        return {"batch_shape": list(self.batch_shape), "family": self.family, **shapes}

    @abstractmethod
    def given(
        self, process: GaussianProcess, name: str, kind: Kind, sites: Sites, exact: bool, known: Any = None
    ) -> SparsePosterior:
        """The posterior of ``process`` given ``sites``.

        :param known: :meth:`prepared` at their inputs, where it has been called.
        """


def same_rows(inputs: Tensor, x: Tensor) -> bool:
    """Whether two matrices of inputs are the same, or equal."""
    if inputs is x or inputs.shape != x.shape:
        return inputs is x
    with suppress(RuntimeError):  # of a tensor that is mapped; else nothing is read back: test_device.py
        if inputs.data_ptr() == x.data_ptr():
            return True
    return torch.equal(inputs, x)
