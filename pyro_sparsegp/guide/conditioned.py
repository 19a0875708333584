"""A guide that knows its training data, and draws q(f | latents, data) of families on sites given both."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any, Optional

import torch
from torch import Tensor

from ..approximations.on_sites import SiteGP
from ..approximations.weight_space import elsewhere
from ..gaussians.sites import KeptSites, Sites
from ..posterior.sparse_posterior import SparsePosterior
from ..program.bare import bare
from ..program.checks import holds_part, require_finite, require_full_batch
from ..program.data import Relation, TrainingData
from ..program.handlers import Held, unrecorded, unweighted
from ..program.reader import Reader
from ..program.traces import all_sites, as_process, is_free, is_observation, repeatable
from ..warned import warn_once
from .gp_sites import GPSites
from .reading import SiteReading, settle, settle_again
from .runs import Conditions, Draw, Rows

__all__ = ["Conditioned", "Predicting"]

_SETTLED = 100  # updates of sites outside of training, at most
_LOOKS = {8 * 4**k for k in range(16)}  # steps at which it is asked again whether densities are quadratic


@dataclass
class Predicting:
    """Calls at the same inputs, of a guide that does not learn between them.

    :param conditions: those of the last call.
    """

    conditions: Optional[Conditions] = None


class Conditioned(GPSites):
    """A guide of GP sites that knows which rows it was trained on, where anything of it belongs to single rows."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.data: Optional[TrainingData] = None
        self._forgotten = False  # the training data, for others
        self.meets_data = True  # whether the last step of training observed what the first call did
        self._predicting: Optional[Predicting] = None
        self._kinds: Optional[dict[str, type]] = None  # of distributions at sites that hold data
        self._looks = 0
        self._unscaled: set[str] = set()  # sites whose rows were others than before, and no plate scaled them

    @property
    def is_training(self) -> bool:
        """Whether a call with data is a step of training: with gradients it is."""
        return torch.is_grad_enabled() and not self._computing_median

    @property
    def is_about_rows(self) -> bool:
        """Whether what it knows belongs to single rows of the training data."""
        return self.on_sites or bool(self.local_latents)

    @property
    def observed(self) -> Collection[str]:
        """The sites that held data at the first call."""
        return () if self.structure is None else self.structure.rows

    @contextmanager
    def predicting(self, kept: Predicting) -> Iterator[None]:
        """Take the inputs of calls for new ones, though there be observations at them.

        :param kept: what is the same in all of these calls.
        """
        before, self._predicting = self._predicting, kept
        try:
            yield
        finally:
            self._predicting = before

    # The training data.

    def is_given(self, name: str, site: Any) -> bool:
        """Whether what a site observes is a hyperparameter's value, as :func:`pyro.condition` gives it, and no data."""
        known = () if self.structure is None else self.structure.downstream
        return bool(known) and not site["cond_indep_stack"] and name not in known

    def relation(self, args: tuple, kwargs: dict[str, Any]) -> Optional[Relation]:
        """What a call's data are to those of training; ``None`` if a state without them was loaded."""
        return None if self.data is None else Relation(self.data, self.model, args, kwargs)

    def are_known_rows(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Whether a call brings all the data of training, row by row, where latents have a value for each row."""
        relation = self.relation(args, kwargs) if self.local_latents and self._predicting is None else None
        return relation is not None and relation.same and relation.order is None

    def forget_data(self) -> None:
        """Forget the training data: the next call with observations brings those that families on sites are about.

        Parameters stay. Families with parameters for each row (FreeSites, sparse actions) need a new guide.

        :raises ValueError: naming the GP site of such a family.
        """
        for name, module in self.site_modules().items():
            if not module.forgets:
                raise ValueError(
                    f"GP site {name!r} has the family {module.family['name']}, with parameters for each row of its "
                    "training data: make a new guide for other data."
                )
        for module in self.site_modules().values():
            module.forget()
        self.data, self._forgotten = None, True

    def rows_of(self, args: tuple, kwargs: dict[str, Any]) -> Rows:
        """Which rows a call brings. In a step of training the guide follows its data into another order."""
        relation, is_training = self.relation(args, kwargs), self.is_training
        if relation is None or not self.is_about_rows:
            same, inputs = is_training or not self.on_sites, True
        elif relation.order is None:
            same, inputs = relation.same, relation.inputs
        elif self.takes_batches:  # a batch of them: what q is conditioned on stays as it is
            same = inputs = False
        else:  # to look at the guide is to leave its rows where they are
            same, inputs = True, is_training
            if is_training:
                self._follow(relation.order, args, kwargs)
        batch = is_training and not same and self.takes_batches and not (relation is not None and relation.fewer)
        return Rows(same, inputs, is_training and same, batch, relation)

    def _remember(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Take note of the last step's arguments."""
        if self.data is None:
            self.data = TrainingData(self.model, args, kwargs)
        self.data.args, self.data.kwargs = args, kwargs

    def _follow(self, order: Tensor, args: tuple, kwargs: dict[str, Any]) -> None:
        """Follow the training data into another order of their rows."""
        _refuse_rows(self.local_latents, "the training data with its rows in another order")
        for module in self.site_modules().values():
            module.reorder(order)
        self.data = TrainingData(self.model, args, kwargs)

    def note_data(self, rows: Rows, args: tuple, kwargs: dict[str, Any]) -> float:
        """After a step of training: take note of its data, and check that they are what the guide is about.

        :returns: their share of all rows, as plates tell.
        """
        assert self.structure is not None
        sites: Any = self.trace.nodes
        observed = [
            name
            for name in self.structure.rows
            if name in sites
            and sites[name]["is_observed"]
            and (sites[name]["cond_indep_stack"] or not self.is_given(name, sites[name]))
        ]
        self.meets_data = bool(observed)
        if observed:
            if not rows.same:
                self._refuse_other_data(observed[0])
            if self.data is None:
                self.data = TrainingData(self.model, args, kwargs)
            if self._forgotten:
                self._forgotten = False
                for name in observed:
                    self.structure.rows[name] = torch.as_tensor(sites[name]["value"]).numel()
        share = self.check_rows(rows.relation)
        return share if observed else 0.0

    def require_data(self) -> None:
        """Raise if an objective's run met no data: the model has drawn them, y=None.

        :raises ValueError: naming a site that held data at the first call.
        """
        structure = self.structure
        if structure is None or not structure.rows:
            return
        given = []
        for name, site in all_sites(self.trace):
            if is_observation(site):
                if not self.is_given(name, site):
                    return
                given.append(name)
        # Beside what is given, data that are left out, not drawn, may be another step's.
        if not given or any(name in self.trace.nodes for name in structure.rows if name not in given):
            known = ", ".join(map(repr, structure.rows))
            raise ValueError(
                f"this step observes nothing, where the first call observed {known}: it would "
                "train towards the prior. Give it the data, svi.step(x, y); predictions are predict(model, guide, x), "
                "and a loss without a step is evaluate_loss."
            )

    def _refuse_other_data(self, observed: str) -> None:
        """Raise if a step of training brings other data than the guide is about."""
        require_finite(self.trace, observed)
        for name, module in () if self.takes_batches else self.site_modules().items():
            require_full_batch(name, module.family["name"], self.trace)
            raise ValueError(
                f"GP site {name!r} has the family {module.family['name']}, whose posterior is that of all its training "
                f"data, and this call with gradients brings other rows at site {observed!r}: it would be taken for a "
                "step of training on them. To evaluate the trained guide on other data use torch.no_grad(); to train "
                "it on other data, make a new guide or call guide.forget_data() first; for mini-batches take a family "
                "such as SVGP, and pyro.plate('data', size=N, subsample=x)."
            )
        sites: Any = self.trace.nodes
        drawn = [n for n in self.local_latents if n in sites and sites[n]["fn"] is sites[n]["infer"].get("prior")]
        _refuse_rows(drawn, f"other rows at site {observed!r} in a step of training")

    def check_rows(self, relation: Optional[Relation]) -> float:
        """Warn if a step's rows are a mini-batch that no plate scales up.

        :returns: in training, their share of all rows, the least of all sites that hold data.
        """
        assert self.structure is not None
        if not torch.is_grad_enabled() or not self.training:
            return 0.0
        share, scale, unscaled = 1.0, 1.0, []
        for name, site in all_sites(self.trace):
            if name in self.structure.gps:
                scale = site["scale"]  # of all that is scored, if that is scaled
            rows = self.structure.rows.get(name)
            if rows is None or not site["is_observed"]:
                continue
            for frame in site["cond_indep_stack"]:
                if frame.full_size not in (None, frame.size):
                    share = min(share, frame.size / frame.full_size)
                    break  # this plate scales them up, whatever handlers' scales are
            else:
                unscaled.append((name, site, rows))
        scaled = share < 1
        for name, site, rows in unscaled:
            num = site["value"].numel()
            # What is given has as many numbers in every step; so have data beside a batch that is scaled up.
            others = num == rows and not scaled and self._are_others(name, relation)
            if num < rows or (others and not self.is_given(name, site)):
                self._unscaled.add(name)
                self._warn_of_rows(name, site["scale"], num, rows)
            # A handler's scale is of a batch; of other numbers of rows than at first it is not known what they are.
            if num != rows or name in self._unscaled or not _equal(site["scale"], scale):
                share = 0.0
        return share

    def _warn_of_rows(self, name: str, scale: Any, num: int, rows: int) -> None:
        """Warn of a mini-batch, unless a handler's number scales it up to the first call's rows: others are weights."""
        is_number = isinstance(scale, (int, float))
        if num < rows and is_number and math.isclose(scale * num, rows):
            return
        fewer = f"{num} values in this step, {rows} in the first"
        warn_once(
            self.warned,
            "rows",
            name,
            f"site {name!r} observes {fewer if num < rows else f'other {num} rows than before'}, and no plate "
            "scales them up: if this is a mini-batch, give the plate the full size, pyro.plate('data', size=N, "
            "subsample=x) or subsample_size=B; otherwise the KL outweighs the data."
            + ("" if is_number and scale == 1 else " What poutine.scale gives is taken for a weight of the rows."),
            stacklevel=6,
        )

    def _are_others(self, name: str, relation: Optional[Relation]) -> bool:
        """Whether a step's rows are others than the first's, asked until it was told of."""
        asked = ("rows", name) not in self.warned and not self.by_expectation  # which refuses them itself
        return asked and relation is not None and relation.others and not relation.same

    def rows_here(self) -> list[str]:
        """The sites that held data at the first call, and that the last run met."""
        assert self.structure is not None
        return [name for name in self.structure.rows if name in self.trace.nodes]

    # Families on sites.

    def conditions_now(self, median: bool, known: bool = False) -> Conditions:
        """What prediction is conditioned on: read at the training data, for one draw of the latents or their medians.

        :param known: whether it is of those data, so that their rows' latents are to be those of the draw.
        :raises ValueError: if that takes the training data, and they were not loaded with the guide's state.
        """
        if not self.on_sites:
            return Conditions()
        if self.data is None:
            if self.has_random_latents:
                raise ValueError(
                    "the guide was loaded from a state without its training data, on which the posterior of GP site "
                    f"{next(iter(self.site_modules()))!r} given a draw of the other latents depends: call the guide "
                    "with them once, guide(x, y), not under torch.no_grad()."
                )
            return Conditions()
        if not self.by_expectation and self.data.overwritten:  # whose sites are kept
            warn_once(
                self.warned,
                "overwritten",
                "",
                f"the tensors that the guide was trained on were written to since, y.mul_(2.0) say, and the posterior "
                f"of GP site {next(iter(self.site_modules()))!r} is read off what is in them now: train on copies, "
                "y.clone(), or write to copies.",
                stacklevel=4,
            )
        with (
            torch.inference_mode(False),  # sites that are kept must serve training, too
            torch.no_grad(),
            self.on(self._run, median),
            repeatable(self.like) if median else nullcontext(),
        ):
            assert self.structure is not None
            return self.condition(self.data.args, self.data.kwargs, known and not self.structure.inner, False)

    def conditions_of_call(self, rows: Rows, args: tuple, kwargs: dict[str, Any]) -> Conditions:
        """As :meth:`condition`; while predicting, those of the call before unless latents are drawn anew."""
        kept, same, keep = self._predicting, rows.same and rows.inputs, rows.keep or rows.batch
        if kept is None:
            return self.condition(args, kwargs, same, keep)
        if kept.conditions is None or self.has_random_latents:
            kept.conditions = self.condition(args, kwargs, same, keep)
        return kept.conditions

    def condition(self, args: tuple, kwargs: dict[str, Any], same: bool, keep: bool) -> Conditions:
        """Draw the latents at the training data, and read under them the sites of families on sites.

        :param same: whether the arguments are the training data; else those are taken.
        :param keep: whether this is a step of training: modules keep the sites, gradients pass through them.
        """
        if not self.on_sites or (not same and self.data is None):
            return Conditions()
        if not same:
            assert self.data is not None
            args, kwargs = self.data.args, self.data.kwargs
        assert self.structure is not None
        inner = self.structure.inner
        run = Draw(same)
        with unrecorded() if keep else unweighted(whole=same), torch.set_grad_enabled(keep):
            self.perform(run, args, kwargs)
        trace = self.trace
        if same and self.takes_batches and self.data is not None and holds_part(trace):
            return self.condition(args, kwargs, False, keep)  # the rows it knows, as a batch of more
        if same and keep:
            self._remember(args, kwargs)
        modules = {name: module for name, module in self.site_modules().items() if name in run.processes}
        for name, module in modules.items():
            require_full_batch(name, module.family["name"], trace, module.takes_batches)
            if keep and not same and isinstance(module.sites, KeptSites):
                module.sites.marginals = None  # those of another step
        reader = Reader(self.model, args, kwargs, self.structure, trace)
        with torch.set_grad_enabled(keep):
            readings = self._read(reader, modules, run, keep)
        values = {
            name: site["value"]
            for name, site in all_sites(trace)
            if (name in inner or name not in run.processes) and is_free(site) and (same or self.is_shared(name))
        }
        draws = {name: run.posteriors[name] for name in inner if name in run.posteriors}
        return Conditions(values, draws, readings, run.drawn)

    def _read(self, reader: Reader, modules: dict[str, SiteGP], run: Draw, keep: bool) -> list[SiteReading]:
        """The sites of families on sites, at a run's latents."""
        marginals = {name: (q.mean.detach(), q.variance.detach()) for name, q in run.posteriors.items()}
        if keep:
            self._look_again(reader, run, [name for name in modules if name in reader.found.quadratic])
        readings = []
        for name, module in modules.items():
            process = run.processes[name]
            if isinstance(module.sites, KeptSites):
                reading = SiteReading.of(name, process, module, reader.found)
                readings.append(reading)
                if not reading.direct or reader.meeting(name):
                    marginals[name] = reading.resume() if keep else reading.marginal()
            elif reader.meeting(name):
                with torch.no_grad():
                    q = module(process, name)
                marginals[name] = q.mean, q.variance
        most, tolerance = self._patience(readings, keep) if readings else (0, 0.0)
        looking = not keep and self._computing_median and not all(reading.quadratic for reading in readings)
        if readings and not (looking and settle_again(reader, readings, marginals, tolerance)):
            settle(reader, readings, marginals, most, tolerance)
            for reading in readings if looking else ():
                reading.rest()
        for reading in readings:  # to look at a guide does not change how it trains
            reading.release()
            if keep or reading.module.sites.empty or (reading.direct and self._computing_median):
                reading.keep()
        return readings

    def _look_again(self, reader: Reader, run: Draw, names: list[str]) -> None:
        """Densities that were quadratic at the first call may not stay so: at some steps, and where distributions are
        of other kinds than before, it is asked again.
        """
        kinds = {name: type(bare(site["fn"])) for name, site in all_sites(reader.trace) if site["is_observed"]}
        before, self._kinds = self._kinds, kinds
        self._looks += 1
        if before is None or (kinds == before and self._looks not in _LOOKS):
            return
        with torch.no_grad():
            means = {name: (process.mean, process.variance) for name, process in run.processes.items()}
            for name in names:
                if not reader.is_quadratic(name, means, means[name][1].sqrt()):
                    reader.found.quadratic.remove(name)

    def _patience(self, readings: list[SiteReading], keep: bool) -> tuple[int, float]:
        """How many updates sites get at most, and what moves, in standard deviations, are not worth one."""
        if not keep:
            return _SETTLED, 1e-4 if self.like.dtype == torch.float64 else 1e-3
        most = max(reading.module.updates for reading in readings)
        # Under latents that are drawn anew, the sites that were kept are those of another draw.
        return (max(most, 5), 0.05) if self.has_random_latents else (most, 0.0)

    def held(self, conditions: Conditions) -> AbstractContextManager[Any]:
        """A run with latents as they were drawn before."""
        return Held(conditions.values, conditions.draws) if conditions.values else nullcontext()

    def posterior_given(self, name: str, prior: Any, sites: Optional[Sites], new_rows: bool) -> SparsePosterior:
        """The posterior of a GP site under a prior of other inputs, given the sites of a draw.

        :param sites: of a family on sites, those the draw was conditioned on.
        :param new_rows: whether the inputs are new, not those of training.
        """
        process, _ = as_process(prior)
        if process is None:
            raise ValueError(f"site {name!r} is no GP site")
        module = self._find(name)
        self._check(name, process, module)
        give = elsewhere(module) if new_rows else module
        return give(process, name, SparsePosterior, sites) if isinstance(module, SiteGP) else give(process, name)

    @property
    def site_status(self) -> dict[str, dict[str, Any]]:
        """For each GP site whose Gaussian sites are read off the model: how many there are; whether they are exact
        (the likelihood is Gaussian in f); how many had negative curvature, which was cut to 0, at the last reading;
        how many updates of training were cut since they lowered the bound; and whether those of the posterior, other
        latents at their medians, have converged: another would move no marginal by 0.001 standard deviations.
        """
        if self.structure is None:
            raise ValueError("the guide has read no sites yet: call it with the data, guide(x, y), or take an SVI step")
        return {
            reading.name: {
                "sites": reading.sites.precision.numel(),
                "exact": reading.quadratic,
                "truncated": int(reading.truncated),
                "halved": reading.module.sites.halved,
                "converged": reading.change <= 1e-3,
            }
            for reading in self.conditions_now(median=True).readings
        }


def _equal(one: Any, other: Any) -> bool:
    """Whether two scales are one number; tensors are not asked, which would be read back from a device."""
    return isinstance(one, (int, float)) and isinstance(other, (int, float)) and math.isclose(one, other)


def _refuse_rows(local: Sequence[str], what: str) -> None:
    if local:
        raise ValueError(
            f"this call brings {what}; site {local[0]!r} has a value for each row, which belongs to the row's "
            "number. Keep the rows and their order, or write plate = pyro.plate('data', N, subsample_size=B) and "
            "index the data by plate.indices."
        )
