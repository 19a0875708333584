"""Expectation propagation."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Optional

import pyro
import torch
from pyro import poutine
from torch import Tensor

from ..approximations.expectation import ExpectationGP
from ..families import ExpectationFamily
from ..guide import AutoSparseGP
from ..numerics.linalg import NumericalWarning, cholesky, row_squares, solve_lower, variance_floor
from ..numerics.rows import Objects, fingerprints
from ..numerics.tilted import Tilted, log_normaliser, tilted
from ..process import GaussianProcess
from ..program.dependence import ELEMENTWISE, NONE
from ..program.terms import Findings, Terms
from ..program.traces import all_sites, is_observation, tensors
from ..warned import warn_once
from .distributed import Workers

__all__ = ["ExpectationPropagation"]


@dataclass
class _Run:
    """One GP site in one run of the model, and its sites as they are."""

    name: str
    module: ExpectationGP
    phi: Tensor  # Φ at the data given, (..., B, M), with its graph
    residual: Tensor  # d, with its graph
    prior_mean: Tensor  # μ, with its graph
    spread: Tensor  # f's prior standard deviation
    index: Optional[Tensor]  # the row numbers of the data given; None for all
    num: int  # how many data there are
    rows: Tensor  # the features that the sites are about
    anchor: Optional[Tensor]  # L, with its graph, where the sites are about u = Lw
    precision: Tensor
    linear: Tensor
    order: Optional[Tensor] = None  # the sites' numbers where all data are given in another order
    data: Optional[tuple[Objects, Tensor]] = None  # all data given, if not those of the call before, and fingerprints

    @property
    def numbers(self) -> Optional[Tensor]:
        """The sites' numbers of the data given; ``None`` if it is all in their order."""
        return self.order if self.index is None else self.index

    def in_order(self, values: Tensor, dim: int = -1) -> Tensor:
        """Values of all data given, in the sites' order."""
        return values if self.order is None else values.index_select(dim, self.order.argsort())

    def as_given(self, values: Tensor) -> Tensor:
        """Values of sites, of the data given and in their order."""
        return (values if self.numbers is None else values[..., self.numbers]).to(self.precision)

    @property
    def scale(self) -> float:
        """How many data each datum given stands for."""
        return self.num / self.phi.shape[-2]


@dataclass
class _Cavity:
    """Marginals of φᵀw under the cavities, (..., B), and what they are made of.

    :param log_ratio: G(cavity) − G(q).
    :param valid: whether the cavity has a positive variance.
    :param loc: the cavities' means of w, (..., B, M).
    :param cov: the cavities' covariances of w and φᵀw, (..., B, M).
    """

    mean: Tensor
    variance: Tensor
    log_ratio: Tensor
    valid: Tensor
    loc: Tensor
    cov: Tensor
    marginal: tuple[Tensor, Tensor]  # q's mean and variance


@dataclass
class _State:
    """q, its cavities and tilted distributions at the sites as they are."""

    cavity: _Cavity
    at: Tilted
    gaussian: Tensor  # where the likelihood is one, so that the site found is exact whatever the cavity
    loc: Tensor  # q's mean
    factor: Tensor  # of q's precision
    log_normaliser: Tensor  # G(q) − G(p)


_SLOWEST = 1 / 64
_WIDEST = 4.0  # a cavity's variance, over the prior's


@dataclass
class _Pace:
    """A share of the damping's ρ, which falls where updates go astray: with likelihoods that are not log-concave.

    :param change: the last sweep's largest move, and the sites from which it started.
    :param moves: of each datum's site at its last visit in a mini-batch.
    """

    now: float = 1.0
    ceiling: float = 1.0
    change: float = math.inf
    start: Optional[tuple[Tensor, Tensor]] = None
    moves: Optional[Tensor] = None


@dataclass
class _Status:
    """Of one GP site's last sweep; in tensors, so that a step reads nothing back."""

    sites: Any = 0
    skipped: Any = 0
    negative: Any = 0
    cut: int = 0
    cuts_seen: int = 0
    change: Any = math.nan


class ExpectationPropagation:
    """Expectation propagation, with hyperparameters trained meanwhile.

    Hernández-Lobato and Hernández-Lobato, 2016, "Scalable Gaussian Process Classification via Expectation
    Propagation"; with a power, Bui, Yan and Turner, 2017. Each factor ∫ p(yₙ | f) N(f | φₙᵀw, dₙ) df has a
    Gaussian site in h = φₙᵀw. One sweep refines the sites of all data given, in parallel: from the cavity
    (m⁻, v⁻), which is q without αth part of the site, and Z = ∫ p(y | f)^α N(f | m⁻, v⁻ + d) df with
    a = ∂log Z/∂m⁻ and β = −∂²log Z/∂m⁻², it takes αν = β/(1 − v⁻β) and αb = (a + m⁻β)/(1 − v⁻β), damped.
    All of this needs one-dimensional integrals of the model's own likelihood only. The objective is
    log Z_EP = G(q) − G(p) + Σₙ (log Zₙ + G(cavity) − G(q))/α, with G the log normaliser of a Gaussian.

    Other parameters (hyperparameters, inducing inputs, the likelihood's) climb log Z_EP with the sites held.
    Other latents are points: the log density of their priors is added. A step on part of the data (a plate that
    subsamples) refines their sites only and scales their terms up (eq. 6).

    >>> from pyro_sparsegp.families import SparseEP
    >>> guide = AutoSparseGP(model, SparseEP(32))  # doctest: +SKIP
    >>> ep = ExpectationPropagation(model, guide, pyro.optim.Adam({"lr": 0.02}))  # doctest: +SKIP
    >>> losses = [ep.step(x, y) for _ in range(200)]  # doctest: +SKIP

    :param model: a Pyro model whose likelihood is a product of terms with one function value each.
    :param guide: an :class:`AutoSparseGP` of that model with the family :class:`~pyro_sparsegp.families.SparseEP`.
    :param optim: a Pyro optimiser for all parameters; with a learning rate of 0, or by :meth:`sweep`, they stay.
    :param damping: ρ in (0, 1], the weight of the new site: 1 is undamped. Hernández-Lobato and
        Hernández-Lobato take 0.5 for all data at once
        and 0.99 for mini-batches. Where the likelihood is Gaussian in f sites do not depend on cavities: they are
        taken as they are found. Sites of negative precision grow no further than q and the cavities bear.
    :param power: α in (0, 1]: 1 is expectation propagation, near 0 it is variational inference.
    :param schedule: "inner" updates the parameters after each sweep, "outer" only at convergence.
    :param gradient: "matched", which supposes that the tilted moments are q's, so that the cavities are held: those
        over w for all data at once (eq. 4 with w in the place of inducing values; only Zₙ moves), those over inducing
        values u = Lw for mini-batches (eq. 6; the prior moves, too), since the sites of other data are about u; or
        "exact", the derivative of log Z_EP with sites held, for all data at once. They agree at convergence.
    :param num_nodes: of each one-dimensional integral.
    :param tolerance: convergence, as the largest move of a marginal in its standard deviations.
    :param max_sweeps: the most sweeps that wait for it.
    :param group: a ``torch.distributed`` process group: each process gives its own share of the data, and all end
        up with the same q and parameters; loss and status are of all data. All start from the first process's
        parameters: inducing inputs that are given as a number are placed among its share.
    :raises ValueError: for arguments that do not fit, naming them.
    """

    def __init__(
        self,
        model: Callable,
        guide: AutoSparseGP,
        optim: pyro.optim.PyroOptim,
        damping: float = 0.5,
        power: float = 1.0,
        *,
        schedule: str = "inner",
        gradient: str = "matched",
        num_nodes: int = 48,
        tolerance: float = 1e-4,
        max_sweeps: int = 100,
        group: Optional[Any] = None,
    ) -> None:
        for argument, value, choices in (
            ("schedule", schedule, ("inner", "outer")),
            ("gradient", gradient, ("matched", "exact")),
        ):
            if value not in choices:
                raise ValueError(f"ExpectationPropagation's {argument} must be one of {choices}, got {value!r}")
        for argument, share in (("damping", damping), ("power", power)):
            if isinstance(share, bool) or not (isinstance(share, (int, float)) and 0 < share <= 1):
                raise ValueError(f"ExpectationPropagation's {argument} must be a number in (0, 1], got {share!r}")
        for argument, number, least in (("num_nodes", num_nodes, 4), ("max_sweeps", max_sweeps, 1)):
            if isinstance(number, bool) or not isinstance(number, int) or number < least:
                raise ValueError(
                    f"ExpectationPropagation's {argument} must be a whole number of at least {least}, got {number!r}"
                )
        if not (isinstance(tolerance, (int, float)) and tolerance >= 0):
            raise ValueError(f"ExpectationPropagation's tolerance must be a number of at least 0, got {tolerance!r}")
        if not isinstance(optim, pyro.optim.PyroOptim):
            raise ValueError(
                "ExpectationPropagation's optim must be a Pyro optimiser, such as pyro.optim.Adam({'lr': 0.01}), got "
                f"{type(optim).__name__}"
            )
        if not isinstance(guide, AutoSparseGP):
            raise ValueError(f"ExpectationPropagation needs an AutoSparseGP guide, got {type(guide).__name__}")
        if model != guide.model:
            raise ValueError("ExpectationPropagation runs the guide's own model; it was given another")
        if not all(isinstance(family, ExpectationFamily) for family in guide.declared_families()):
            raise ValueError(
                "ExpectationPropagation trains GP sites of the family SparseEP; the guide's families are "
                f"{guide.families!r}. Give AutoSparseGP(model, SparseEP(...)), or take SVI."
            )
        self.model, self.guide, self.optim = model, guide, optim
        self.damping, self.power, self.schedule, self.gradient = float(damping), float(power), schedule, gradient
        self.num_nodes, self.tolerance, self.max_sweeps = num_nodes, float(tolerance), max_sweeps
        self.workers = Workers(group)
        self._findings = Findings()
        self._paces: dict[str, _Pace] = {}
        self._status: dict[str, _Status] = {}
        self._agreed = self._checked = False
        self._seen: dict[str, int] = {}
        self._factors: dict[str, tuple[Tensor, Tensor]] = {}
        # The last call with all data: their order, and the fingerprints that it is relative to.
        self._calls: dict[str, tuple[Objects, Optional[Tensor], Tensor]] = {}

    def step(self, *args: Any, indices: Optional[Tensor] = None, **kwargs: Any) -> float:
        """Refine the sites, once or to convergence, and take one step of the optimiser.

        :param args: the model's arguments, with the data.
        :param indices: the data's row numbers, ``(B,)``, where part of the data comes in a plate that does not say
            them (``subsample=x``). The model is given them, too, if it asks for ``indices``. All data at once may come
            in any order: their values tell which they are, or these numbers.
        :returns: −log Z_EP − log p(other latents), in nats, before this step; estimated from part of the data.
        :raises ValueError: naming the site, if it is not finite, before anything changes; if the model or the guide do
            not fit; if as many data are given as before, but others.
        """
        return self._work(args, kwargs, indices, 1 if self.schedule == "inner" else self.max_sweeps, train=True)

    def sweep(self, *args: Any, indices: Optional[Tensor] = None, num: int = 1, **kwargs: Any) -> float:
        """Refine the sites ``num`` times, or to convergence if that comes first, with all parameters held.

        :returns: as :meth:`step`.
        """
        return self._work(args, kwargs, indices, num, train=False)

    def evaluate_loss(self, *args: Any, indices: Optional[Tensor] = None, **kwargs: Any) -> float:
        """−log Z_EP − log p(other latents) at sites and parameters as they are, in nats."""
        return self._work(args, kwargs, indices, 0, train=False)

    @property
    def status(self) -> dict[str, dict[str, Any]]:
        """For each GP site, of its last sweep: how many sites there are; how many were skipped, their cavities having
        no positive variance; how many have negative precision (likelihoods that are not log-concave); how often such
        sites were dropped since with them q had no covariance, which also slows the updates down for a while; the
        largest move of a marginal, in standard deviations, and whether it was below the tolerance. Of a mini-batch,
        all but the first and "cut" are of its own data.
        """
        return {
            name: {
                "sites": int(status.sites),
                "skipped": int(status.skipped),
                "negative": int(status.negative),
                "cut": status.cut,
                "change": float(status.change),
                "converged": float(status.change) <= self.tolerance,
            }
            for name, status in self._status.items()
        }

    def get_state(self) -> dict[str, Any]:
        """What the next sweep takes from this one, besides the guide's state and the optimiser's; see
        :func:`~pyro_sparsegp.fit`.
        """
        return {
            "paces": self._paces,
            "status": self._status,
            "factors": self._factors,
            "seen": self._seen,
            "agreed": self._agreed,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`get_state`."""
        self._paces, self._status = dict(state["paces"]), dict(state["status"])
        self._factors, self._seen, self._agreed = dict(state["factors"]), dict(state["seen"]), state["agreed"]

    # One call.

    def _work(self, args: tuple, kwargs: dict[str, Any], indices: Optional[Tensor], sweeps: int, train: bool) -> float:
        if indices is not None:
            indices = torch.as_tensor(indices)
        if indices is not None and "indices" in inspect.signature(self.model).parameters:
            kwargs = kwargs | {"indices": indices}
        guide = self.guide
        with torch.set_grad_enabled(train), poutine.trace(param_only=True) as capture:
            guide.prepare(*args, **kwargs)
            self._check_fit()
            processes, values, trace = guide.priors(args, kwargs)
            assert guide.structure is not None
            terms = Terms(guide.model, guide.structure, values, processes, args, kwargs, self._findings)
            runs = [
                self._run(name, process, terms, trace, indices, (args, kwargs)) for name, process in processes.items()
            ]
        sites: Any = capture.trace.nodes
        parameters = list(dict.fromkeys(site["value"].unconstrained() for site in sites.values()))
        if self.workers.num > 1 and not self._agreed:
            self._agreed = True
            self.workers.agree(parameters)
            return self._work(args, kwargs, indices, sweeps, train)
        # With sites that say nothing yet, log Z tells more of the prior than of the data.
        untouched = self.schedule == "inner" and any(run.module.empty and run.index is None for run in runs)
        loss, value = self._sweep_all(runs, terms, sweeps, train and not untouched, (args, kwargs))
        if train:
            if loss is not None and loss.requires_grad:
                loss.backward()
                self.workers.sum_gradients(parameters)
                self.optim(parameters)
            pyro.infer.util.zero_grads(parameters)
        return value

    def _check_fit(self) -> None:
        if self._checked:
            return
        structure, guide = self.guide.structure, self.guide
        assert structure is not None
        for name, kind in structure.dependence.items():
            why = None
            if name in structure.inner:
                why = "its values enter another GP site"
            elif any(name in pair for pair in structure.interactions):
                why = "it meets another GP site in one term of a density"
            elif kind not in (ELEMENTWISE, NONE):
                why = "one term of a density depends on several of its values"
            if why is not None:
                raise ValueError(
                    f"GP site {name!r} cannot be trained by expectation propagation, whose integrals are "
                    f"one-dimensional: {why}. Take SVI with TraceQuadrature_ELBO and a family such as SVGP."
                )
        if set(structure.dependence.values()) == {NONE}:
            raise ValueError(
                f"no log density depends on GP site {next(iter(structure.dependence))!r} in the guide's first call: "
                "were all its rows masked? Call the guide once with data before training, guide(x, y)."
            )
        points = guide.point_estimates
        free = [name for name in structure.latents if not (points if isinstance(points, bool) else name in points)]
        if free or (structure.latents and type(guide).get_posterior is not AutoSparseGP.get_posterior):
            raise ValueError(
                f"expectation propagation fits latents that are no GPs as points; the guide gives "
                f"{free or list(structure.latents)} distributions. Leave point_estimates and get_posterior alone, or "
                "take SVI with a family such as SVGP for posteriors of hyperparameters."
            )
        if self.workers.num > 1 and any(latent["plates"] for latent in structure.latents.values()):
            raise ValueError("with a process group, latents inside plates are not supported: shares would mix them")
        self._checked = True

    def _run(
        self,
        name: str,
        process: GaussianProcess,
        terms: Terms,
        trace: poutine.Trace,
        indices: Optional[Tensor],
        call: tuple[tuple, dict[str, Any]],
    ) -> _Run:
        module: ExpectationGP = attrgetter(name)(self.guide.gps)
        features = module.basis(process.kernel, process.jitter, name)
        blocks, anchor = features(process.x), features.anchor
        phi = blocks[0] if len(blocks) == 1 else torch.cat(blocks, -1)
        prior = process.variance
        residual = torch.maximum(prior - row_squares(phi), variance_floor(prior))
        index, num = self._rows(name, process, terms, trace, indices)
        order = data = None
        with torch.no_grad():
            kept = module.precision.shape[-1]
            if kept not in (0, num):
                raise ValueError(
                    f"GP site {name!r} has sites of {kept} data, this call brings {num}. For a part of the data, "
                    "give the plate their full number and row numbers, pyro.plate('data', N, subsample_size=B); "
                    "for other data, make a new guide."
                )
            none = torch.zeros_like(process.mean)
            rows, precision, linear = phi.detach(), none, none
            if index is None:
                order, data = self._order(name, process, trace, indices, call)
                if kept:
                    precision, linear = module.precision, module.linear
                    if order is not None:
                        precision, linear = precision[..., order], linear[..., order]
            else:
                if self.gradient == "exact":
                    raise ValueError(
                        'ExpectationPropagation\'s gradient="exact" needs all data in each step; this one brings '
                        f'{len(index)} of {num}. Take gradient="matched" for mini-batches.'
                    )
                if kept:
                    module.look_from(None if anchor is None else anchor.detach())
                    rows = module.features_of(module.rows[..., index, :])
                    precision, linear = module.precision[..., index], module.linear[..., index]
        return _Run(
            name,
            module,
            phi,
            residual,
            process.mean,
            prior.detach().sqrt(),
            index,
            num,
            rows,
            anchor,
            precision,
            linear,
            order,
            data,
        )

    def _order(
        self,
        name: str,
        process: GaussianProcess,
        trace: poutine.Trace,
        indices: Optional[Tensor],
        call: tuple[tuple, dict[str, Any]],
    ) -> tuple[Optional[Tensor], Optional[tuple[Objects, Tensor]]]:
        """The sites' numbers of all data in the order given, ``None`` if it is theirs; and the data, if they are not
        the last call's, with their fingerprints.
        """
        module, num = attrgetter(name)(self.guide.gps), process.x.shape[-2]
        assert self.guide.structure is not None
        known = self.guide.structure.rows
        observed = [site["value"] for other, site in all_sites(trace) if other in known and is_observation(site)]
        arguments = tensors(call)
        seen = [*arguments, *observed] if arguments else [process.x, *observed]
        last = self._calls.get(name)
        if indices is None and last is not None and last[2] is module.fingerprints and last[0].are(seen):
            return last[1], None
        columns = [
            [process.x.movedim(-2, 0)],
            _along(num, [a for a in arguments if not any(a is y for y in observed)]),
            _along(num, observed),
        ]
        none = process.x.new_zeros(num, dtype=torch.int64)
        found = torch.stack([fingerprints(column) if column else none for column in columns])
        order = module.order_of(found, name) if indices is None else indices.to(none.device)
        return order, (Objects(seen), found)

    def _rows(
        self, name: str, process: GaussianProcess, terms: Terms, trace: poutine.Trace, indices: Optional[Tensor]
    ) -> tuple[Optional[Tensor], int]:
        """The row numbers of the data given, ``None`` if these are all, and how many there are."""
        here = process.x.shape[-2]
        assert self.guide.structure is not None
        if not terms.plates or self.guide.structure.dependence[name] == NONE:
            if indices is not None and not _is_order(indices, here):
                raise ValueError(
                    "indices are given, but no plate holds a part of the data: say how many there are, "
                    "pyro.plate('data', N, subsample=x)"
                )
            return None, here
        if len(terms.plates) > 1 or name not in self._findings.rowwise:
            raise ValueError(
                f"the data of GP site {name!r} come in part, and not one for each of its values: a site needs all "
                "terms of its value at once. Give all data in each step."
            )
        ((plate, (size, full)),) = terms.plates.items()
        if size != here:
            raise ValueError(
                f"GP site {name!r} has {here} values, plate {plate!r} holds {size} of {full} rows: sample the process "
                "at the inputs of those rows."
            )
        if indices is None:
            indices = trace.nodes[plate]["value"] if plate in trace.nodes else None
            if not isinstance(indices, Tensor) or indices.is_floating_point() or indices.dim() != 1:
                raise ValueError(
                    f"plate {plate!r} holds {size} of {full} rows and does not say which: expectation propagation "
                    "keeps a site for each datum. Give their numbers, ep.step(..., indices=rows), or write "
                    "plate = pyro.plate('data', N, subsample_size=B) and index the data by plate.indices."
                )
        elif indices.shape != (size,) or indices.is_floating_point() or indices.dtype == torch.bool:
            raise ValueError(
                f"indices must be {size} row numbers, as many as the data given, got {indices.dtype} of shape "
                f"{tuple(indices.shape)}"
            )
        elif len(indices.unique()) < size or int(indices.min()) < 0 or int(indices.max()) >= full:
            raise ValueError(f"indices must be distinct row numbers from 0 to {full - 1}")
        return indices.to(process.x.device), full

    # Sweeps.

    def _sweep_all(
        self, runs: list[_Run], terms: Terms, sweeps: int, train: bool, call: tuple[tuple, dict[str, Any]]
    ) -> tuple[Optional[Tensor], float]:
        """Refine the sites up to ``sweeps`` times; the loss before the last, with its graph, and as a number."""
        for i in range(max(sweeps, 1)):
            states = [self._state(run, terms, keep=sweeps > 0) for run in runs]
            proposals = [self._propose(run, state) for run, state in zip(runs, states)] if sweeps else []
            if i + 1 >= sweeps or all(self._status[run.name].change <= self.tolerance for run in runs):
                break
            self._require_finite(self._loss(runs, states, terms, False)[1], call)
            for run, proposal in zip(runs, proposals):
                self._keep(run, *proposal)
        loss, total = self._loss(runs, states, terms, train)
        value = self._require_finite(total, call)
        for run, proposal in zip(runs, proposals):
            self._keep(run, *proposal)
        return loss, value

    def _require_finite(self, total: Tensor, call: tuple[tuple, dict[str, Any]]) -> float:
        value = float(total)
        if not math.isfinite(value):
            raise ValueError(
                f"−log Z_EP is {value}: {self.guide.explain_nan(*call[0], **call[1])}. The parameters are as they "
                "were before this step; look for NaN in the data (leave missing rows out with poutine.mask), data "
                "outside of a density's support, or too large a learning rate."
            )
        return value

    @torch.no_grad()
    def _state(self, run: _Run, terms: Terms, keep: bool) -> _State:
        phi = run.phi.detach()
        for share in (0.5, 0.5, 0.5, 0.0, None):
            factor, loc, pull = self._posterior(run)
            cavity = _cavity(phi, run.rows, self.power * run.precision, self.power * run.linear, loc, factor)
            # Other data's negative sites have grown since these were refined.
            if not keep or share is None or not self._any(~cavity.valid):
                break
            self._status.setdefault(run.name, _Status()).cut += 1
            self._weaken(run, share)
        variance = cavity.variance + run.residual.detach()
        # The likelihood as the last tilted distribution showed it, and the cavity: near the tilted distribution.
        weight, tilt = self._seen_factor(run)
        precision = (1 / variance + weight).clamp(min=0.25 / variance)
        centre = (cavity.mean / variance + tilt) / precision

        def log_density(f: Tensor) -> Tensor:
            return terms.log_density(run.name, f) if run.name in terms else torch.zeros_like(f)

        prior_mean = run.prior_mean.detach()
        mean = cavity.mean + prior_mean
        slope, curvature, gaussian = _parabola(log_density, mean, run.spread)
        exact = 1 / variance + self.power * curvature
        at = tilted(
            log_density,
            mean,
            variance,
            torch.where(gaussian, mean + self.power * slope / exact, centre + prior_mean),
            torch.where(gaussian, exact, precision).rsqrt(),
            self.power,
            self.num_nodes,
            self._passes(run),
        )
        found = 1 / at.variance - 1 / variance
        drawn = (at.mean - prior_mean) / at.variance - cavity.mean / variance
        usable = found.isfinite() & drawn.isfinite()
        if keep:
            self._remember_factor(run, torch.where(usable, found, 0.0), torch.where(usable, drawn, 0.0))
        return _State(cavity, at, gaussian, loc, factor, _log_normaliser_of(factor, loc, pull))

    def _passes(self, run: _Run) -> int:
        """How often an integral's nodes are placed: as many times as they may have to close in."""
        if run.index is not None:
            return 5
        if run.name not in self._factors:
            return 7
        return 1 if self._paces.setdefault(run.name, _Pace()).change < 0.5 else 3

    def _seen_factor(self, run: _Run) -> tuple[Tensor, Tensor]:
        """The Gaussian factors of f − μ that tilted distributions were to their cavities; 0 at first."""
        if run.name not in self._factors:
            none = torch.zeros_like(run.prior_mean)
            return none, none
        weight, tilt = self._factors[run.name]
        return run.as_given(weight), run.as_given(tilt)

    def _remember_factor(self, run: _Run, *factor: Tensor) -> None:
        if run.index is None:
            self._factors[run.name] = run.in_order(factor[0]), run.in_order(factor[1])
            return
        if run.name not in self._factors:
            none = run.prior_mean.new_zeros(*run.prior_mean.shape[:-1], run.num)
            self._factors[run.name] = none, none.clone()
        for kept, new in zip(self._factors[run.name], factor):
            kept[..., run.index] = new

    def _posterior(self, run: _Run) -> tuple[Tensor, Tensor, Tensor]:
        """The Cholesky factor of q's precision, q's mean, and their product."""
        module = run.module
        if run.index is None:
            gram, pull = self.workers.sum(*module.sums(run.rows, run.precision, run.linear))
        else:
            gram, pull = module.gram, module.pull
        eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
        factor, info = torch.linalg.cholesky_ex(gram + eye)
        if info.any():
            # Negative precisions of some sites outweigh the rest: without these sites q exists.
            self._status.setdefault(run.name, _Status()).cut += 1
            warn_once(
                self.guide.warned,
                "negative sites dropped",
                run.name,
                f"expectation propagation at GP site {run.name!r} dropped sites of negative precision, with which q "
                "had no covariance: the likelihood is not log-concave, and the updates may not converge. Look at "
                "ep.status; lower damping (0.1) and power (0.5) help.",
                NumericalWarning,
                stacklevel=6,
            )
            gram, pull = self._weaken(run, 0.0)
            factor = cholesky(gram + eye, 0.0, f"q's precision at site {run.name!r}")
        return factor, torch.cholesky_solve(pull[..., None], factor)[..., 0], pull

    def _weaken(self, run: _Run, share: float) -> tuple[Tensor, Tensor]:
        """Leave this share of all sites of negative precision; Σ νφφᵀ and Σ bφ then."""
        module = run.module
        run.precision, run.linear = _less_negative(run.precision, run.linear, share)
        if run.index is None:
            gram, pull = self.workers.sum(*module.sums(run.rows, run.precision, run.linear))
            return gram, pull
        module.precision, module.linear = _less_negative(module.precision, module.linear, share)
        return self._resum(module)

    def _resum(self, module: ExpectationGP) -> tuple[Tensor, Tensor]:
        phi = module.features_of(module.rows)
        module.gram, module.pull = self.workers.sum(*module.sums(phi, module.precision, module.linear))
        return module.gram, module.pull

    @torch.no_grad()
    def _propose(self, run: _Run, state: _State) -> tuple[Tensor, Tensor]:
        """The refined sites, damped."""
        cavity, at = state.cavity, state.at
        residual = run.residual.detach()
        variance = cavity.variance + residual
        slope = (at.mean - cavity.mean - run.prior_mean.detach()) / variance  # ∂log Z/∂m
        beta = (1 - at.variance / variance) / variance
        left = (residual + cavity.variance * at.variance / variance) / variance  # 1 − v⁻β, without cancellation
        precision = beta / left / self.power
        linear = (slope + cavity.mean * beta) / left / self.power
        usable = cavity.valid & precision.isfinite() & linear.isfinite()
        more = torch.where(usable, precision - run.precision, 0.0)
        shift = torch.where(usable, linear - run.linear, 0.0)
        mean, spread = cavity.marginal[0], cavity.marginal[1].clamp(min=0).sqrt()
        pace = self._paces.setdefault(run.name, _Pace())
        # Each site by itself may at most double its marginal's variance, and move its mean by 3 standard deviations.
        tiny = torch.finfo(spread.dtype).tiny
        down = (-more * spread.square()).clamp(min=tiny)
        far = ((shift - more * mean) * spread).abs() - 3 * more * spread.square()
        rate = (self.damping * pace.now * torch.ones_like(more)).minimum(0.5 / down)
        rate = rate.minimum(3 / far.clamp(min=tiny))
        rate = torch.where(state.gaussian & usable, 1.0, rate)
        new = self._valid(run, rate * more, rate * shift)
        status = self._status.setdefault(run.name, _Status())
        status.sites = run.num
        status.skipped, status.negative = (~usable).sum(), (new[0] < 0).sum()
        moves = torch.maximum((more * spread.square()).abs(), ((shift - more * mean) * spread).abs())
        status.change = moves.amax() if moves.numel() else moves.sum()
        if self.workers.num > 1:
            counts = status.skipped.to(moves), status.negative.to(moves), moves.new_tensor(float(run.num))
            status.skipped, status.negative, status.sites = self.workers.sum(*counts)
            status.change = self.workers.largest(status.change)
        # Sites that are exact may move by as much as they like.
        moves = torch.where(state.gaussian, 0.0, moves).reshape(-1, moves.shape[-1]).amax(0)
        return self._careful(run, *new, moves, cut=status.cut > status.cuts_seen)

    @torch.no_grad()
    def _valid(self, run: _Run, more: Tensor, shift: Tensor) -> tuple[Tensor, Tensor]:
        """The sites moved by ``more`` and ``shift``, those that lose precision less far if else q or the cavities of
        the data given had no covariance.
        """
        phi = run.phi.detach()
        if not self._any(run.precision + more < 0):
            return run.precision + more, run.linear + shift
        held, _ = run.module.sums(run.rows, run.precision, run.linear)
        share = more.new_ones(*more.shape[:-1], 1)
        for _ in range(8):
            step = torch.where(more < 0, share, 1.0)
            precision, linear = run.precision + step * more, run.linear + step * shift
            gram, _ = run.module.sums(phi, precision, linear)
            if run.index is None:
                (gram,) = self.workers.sum(gram)
            else:
                gram = run.module.gram + self.workers.sum(gram - held)[0]
            eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
            factor, info = torch.linalg.cholesky_ex(gram + eye)
            spread = (torch.cholesky_solve(phi.mT, factor).mT * phi).sum(-1)
            ok = (info == 0)[..., None] & _is_valid(1 - self.power * precision * spread, spread, phi).all(-1, True)
            if not self._any(~ok):
                break
            share = torch.where(ok, share, share / 4)
        else:
            up = more.clamp(min=0)
            return run.precision + up, run.linear + torch.where(more < 0, 0.0, shift)
        return precision, linear

    def _any(self, flags: Tensor) -> bool:
        """Whether any is true, in any process."""
        return bool(self.workers.largest(flags.any().float()))

    def _careful(self, run: _Run, precision: Tensor, linear: Tensor, moves: Tensor, cut: bool) -> tuple[Tensor, Tensor]:
        """The refined sites; or, if the last sweep led astray, those from which it started, to go slower from there.

        Mini-batches, whose data have others' visits since their own last one, go on from where they are.

        :param moves: of each site given, ``(B,)``.
        """
        pace, status = self._paces[run.name], self._status[run.name]
        change = float(self.workers.largest(moves.amax() if moves.numel() else moves.sum()))
        start, status.cuts_seen = pace.start, status.cut
        before = pace.change
        if run.index is not None:
            if pace.moves is None or pace.moves.shape[-1] != run.num:
                pace.moves = moves.new_full((run.num,), math.inf)
            before = float(self.workers.largest(pace.moves[run.index].amax()))
            pace.moves[run.index] = moves
        astray = cut or change > max(2 * before, 0.5)
        if start is not None and astray and run.index is None:
            pace.ceiling = pace.now = max(0.6 * pace.now, _SLOWEST)
            pace.start, pace.change = None, math.inf
            return run.as_given(start[0]), run.as_given(start[1])
        slower = cut or (astray and run.index is not None)
        pace.now = max(0.6 * pace.now, _SLOWEST) if slower else min(1.1 * pace.now, pace.ceiling)
        if run.index is not None:
            pace.start, pace.change = None, math.inf
        elif not astray:
            pace.start, pace.change = (run.in_order(run.precision), run.in_order(run.linear)), change
        return precision, linear

    @torch.no_grad()
    def _keep(self, run: _Run, precision: Tensor, linear: Tensor) -> None:
        module, rows = run.module, run.phi.detach()
        anchor = None if run.anchor is None else run.anchor.detach()
        if run.index is None:
            module.keep_all(run.in_order(rows, -2), anchor, run.in_order(precision), run.in_order(linear))
            if run.data is not None:
                module.fingerprints = run.in_order(run.data[1])
                self._calls[run.name] = run.data[0], run.order, module.fingerprints
            if self.workers.num > 1:
                module.settle()
                module.gram, module.pull = self.workers.sum(module.gram, module.pull)
        else:
            if module.empty:
                module.make_room(run.num, rows, anchor)
            gram, pull = self.workers.sum(*module.keep_some(run.index, rows, precision, linear))
            module.gram, module.pull = module.gram + gram, module.pull + pull
            self._seen[run.name] = self._seen.get(run.name, 0) + rows.shape[-2]
            if self._seen[run.name] >= run.num:  # rounding errors of the running sums
                self._seen[run.name] = 0
                self._resum(module)
        run.rows, run.precision, run.linear = rows, precision, linear

    # The objective.

    def _loss(
        self, runs: list[_Run], states: list[_State], terms: Terms, train: bool
    ) -> tuple[Optional[Tensor], Tensor]:
        """Minus the objective: this process's part of it, with the gradient wanted, and all of it."""
        with torch.set_grad_enabled(train):
            common, own = -terms.priors, -terms.rest
            for run, state in zip(runs, states):
                normaliser, expected = self._log_z(run, state, terms, train)
                common, own = common - normaliser, own - expected
        (total,) = self.workers.sum(own.detach())
        return own + common / self.workers.num if train else None, total + common.detach()

    def _log_z(self, run: _Run, state: _State, terms: Terms, train: bool) -> tuple[Tensor, Tensor]:
        """G(q) − G(p), and the sum of (log Z + G(cavity) − G(q))/α of the data given, scaled up to all."""
        cavity, normaliser, at = state.cavity, state.log_normaliser, state.at
        mean, variance = cavity.mean, cavity.variance
        log_ratio = cavity.log_ratio
        if train and self.gradient == "matched":
            # Only φ moves: of m⁻ = φᵀμ⁻ and v⁻ = φᵀV⁻φ.
            phi = run.phi
            if run.index is not None and run.anchor is not None:
                # The sites of other data stay where they are in u = Lw, and so do the cavities: φᵀw = φᵀL⁻¹u.
                turn = solve_lower(run.anchor, run.anchor.detach())
                phi = phi @ turn
                normaliser = normaliser + _prior_of(turn, state.loc, state.factor)
            mean = (phi * cavity.loc).sum(-1)
            variance = 2 * (phi * cavity.cov).sum(-1) - cavity.variance
        elif train:
            gram, pull = self.workers.sum(*run.module.sums(run.phi, run.precision, run.linear))
            eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
            factor = cholesky(gram + eye, 0.0, f"q's precision at site {run.name!r}")
            loc = torch.cholesky_solve(pull[..., None], factor)[..., 0]
            moving = _cavity(run.phi, run.phi, self.power * run.precision, self.power * run.linear, loc, factor)
            mean, variance, log_ratio = moving.mean, moving.variance, moving.log_ratio
            normaliser = _log_normaliser_of(factor, loc, pull)
        values = None
        if train and terms.differentiable and run.name in terms:
            values = terms.log_density(run.name, at.nodes)
        log_z = log_normaliser(at, mean + run.prior_mean, variance + run.residual, values, self.power)
        each = torch.where(cavity.valid, log_z + log_ratio, 0.0) / self.power
        return normaliser.sum(), run.scale * each.sum()


def _is_order(indices: Tensor, num: int) -> bool:
    """Whether these are all the numbers from 0, each once."""
    numbers = torch.arange(num, device=indices.device)
    return indices.shape == (num,) and torch.equal(indices.sort().values.to(numbers), numbers)


def _along(num: int, values: list[Tensor]) -> list[Tensor]:
    """Those of the tensors that have so many rows, along the first dimension or else the last, rows first."""
    shaped = [value for value in values if value.dim() and num in (value.shape[0], value.shape[-1])]
    return [value if value.shape[0] == num else value.movedim(-1, 0) for value in shaped]


def _cavity(phi: Tensor, rows: Tensor, precision: Tensor, linear: Tensor, loc: Tensor, factor: Tensor) -> _Cavity:
    """Marginals of φᵀw under q(w) without one site each, exp(−½ν(φ̂ᵀw)² + bφ̂ᵀw) with rows φ̂.

    With S = P⁻¹ and e = 1 − νφ̂ᵀSφ̂, V⁻ = S + νSφ̂φ̂ᵀS/e, μ⁻ = V⁻(Pm − bφ̂) and G(cavity) − G(q) =
    ½(−log e + (ν(φ̂ᵀm)² − 2bφ̂ᵀm + b²φ̂ᵀSφ̂)/e).

    :param precision: ν, ``(..., N)``; under a power α, αν.
    :param linear: b, ``(..., N)``, likewise.
    :param loc: m, ``(..., M)``.
    :param factor: the lower Cholesky factor of P.
    """
    solved = torch.cholesky_solve(rows.mT, factor).mT  # Sφ̂
    spread, centre = (solved * rows).sum(-1), (rows @ loc[..., None])[..., 0]
    left = 1 - precision * spread
    valid = _is_valid(left, spread, rows)
    left = torch.where(valid, left, 1.0)
    if phi is rows:
        across, cov, spread_here, centre_here = spread, solved, spread, centre
    else:
        cov = torch.cholesky_solve(phi.mT, factor).mT
        across, spread_here, centre_here = (solved * phi).sum(-1), (cov * phi).sum(-1), (phi @ loc[..., None])[..., 0]
    shift = precision * (centre - linear * spread) / left - linear
    quadratic = precision * centre.square() - 2 * linear * centre + linear.square() * spread
    return _Cavity(
        mean=centre_here + shift * across,
        variance=spread_here + precision * across.square() / left,
        log_ratio=0.5 * (quadratic / left - left.log()),
        valid=valid,
        loc=loc[..., None, :] + shift[..., None] * solved,
        cov=cov + (precision * across / left)[..., None] * solved,
        marginal=(centre_here, spread_here),
    )


def _is_valid(left: Tensor, spread: Tensor, rows: Tensor) -> Tensor:
    """Whether cavities, of variance φ̂ᵀSφ̂/e, have one that is positive and not far above the prior's.

    It exceeds the prior's only by negative sites of other data; without bounds it goes to infinity.

    :param left: e, ``(..., N)``.
    :param spread: φ̂ᵀSφ̂, ``(..., N)``.
    """
    rounding = 1000 * torch.finfo(left.dtype).eps
    return (left > rounding) & (spread <= _WIDEST * rows.square().sum(-1) * left)


def _parabola(log_density: Callable[[Tensor], Tensor], centre: Tensor, step: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """The slope and minus the curvature of log p(yₙ | f) by five nodes, and where a parabola goes through them all.

    :param centre: where the slope is taken, ``(..., N)``.
    :param step: between the nodes, ``(..., N)``.
    """
    steps = torch.arange(-2.0, 3.0, dtype=centre.dtype, device=centre.device).reshape(-1, *[1] * centre.dim())
    values = log_density(centre + step * steps)
    bends = 2 * values[1:-1] - values[:-2] - values[2:]
    rounding = 100 * torch.finfo(values.dtype).eps * values.abs().amax(0)
    bend, spread = bends[1], bends.amax(0) - bends.amin(0)
    gaussian = (bend > 0) & (spread <= 1e-6 * bend + rounding) & (rounding < 1e-3 * bend)
    return (values[3] - values[1]) / (2 * step), bend / step.square(), gaussian


def _less_negative(precision: Tensor, linear: Tensor, share: float) -> tuple[Tensor, Tensor]:
    left = torch.where(precision < 0, share, 1.0)
    return left * precision, left * linear


def _prior_of(turn: Tensor, loc: Tensor, factor: Tensor) -> Tensor:
    """0, with the gradient by T of E_q log p(u), where w = T w₀ has the prior N(0, I) and q(w₀) is held."""
    inverse = solve_lower(factor, torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device))
    squares = (turn @ loc[..., None]).square().sum((-2, -1)) + (turn @ inverse.mT).square().sum((-2, -1))
    value = turn.diagonal(dim1=-2, dim2=-1).log().sum(-1) - 0.5 * squares
    return value - value.detach()


def _log_normaliser_of(factor: Tensor, loc: Tensor, pull: Tensor) -> Tensor:
    """G(q) − G(p) = ½(mᵀPm − log|P|), of the batch's shape."""
    return 0.5 * (loc * pull).sum(-1) - factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
