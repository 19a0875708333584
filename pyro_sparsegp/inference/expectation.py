"""Expectation propagation."""

from __future__ import annotations

import inspect
import math
import warnings
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Optional

import pyro
import torch
from pyro import poutine
from torch import Tensor

from ..expectation_gp import ExpectationGP
from ..families import ExpectationFamily
from ..guide import AutoSparseGP
from ..linalg import NumericalWarning, cholesky, row_squares, solve_lower, variance_floor
from ..process import GaussianProcess
from ..structure import ELEMENTWISE, NONE
from ..terms import Findings, Terms
from ..tilted import Tilted, log_normaliser, tilted
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
    index: Optional[Tensor]  # the row numbers of the data given; None for all
    num: int  # how many data there are
    rows: Tensor  # the features that the sites are about
    anchor: Optional[Tensor]  # L, with its graph, where the sites are about u = Lw
    precision: Tensor
    linear: Tensor

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
    loc: Tensor  # q's mean
    factor: Tensor  # of q's precision
    log_normaliser: Tensor  # G(q) − G(p)


_SLOWEST = 1 / 64


@dataclass
class _Pace:
    """A share of the damping's ρ, which falls where updates go astray: with likelihoods that are not log-concave.

    :param change: the last sweep's largest move, and the sites from which it started.
    """

    now: float = 1.0
    ceiling: float = 1.0
    change: float = math.inf
    start: Optional[tuple[Tensor, Tensor]] = None


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
    """Expectation propagation, with hyperparameters trained meanwhile (paper 4).

    Hernández-Lobato and Hernández-Lobato, 2016, "Scalable Gaussian Process Classification via Expectation
    Propagation"; with a power, Bui, Yan and Turner, 2017. Each factor ∫ p(yₙ | f) N(f | φₙᵀw, dₙ) df has a
    Gaussian site in h = φₙᵀw. One sweep refines the sites of all data given, in parallel: from the cavity
    (m⁻, v⁻), which is q without αth part of the site, and Z = ∫ p(y | f)^α N(f | m⁻, v⁻ + d) df with
    a = ∂log Z/∂m⁻ and β = −∂²log Z/∂m⁻², it takes αν = β/(1 − v⁻β) and αb = (a + m⁻β)/(1 − v⁻β), damped.
    All of this needs one-dimensional integrals of the model's own likelihood only. The objective is
    log Z_EP = G(q) − G(p) + Σₙ (log Zₙ + G(cavity) − G(q))/α, with G the log normaliser of a Gaussian.

    Other parameters (hyperparameters, inducing inputs, the likelihood's) climb log Z_EP with the sites held.
    Other latents are points: the log density of their priors is added. A step on part of the data (a plate that
    subsamples) refines their sites only and scales their terms up, paper 4's eq. 6.

    >>> from pyro_sparsegp.families import SparseEP
    >>> guide = AutoSparseGP(model, SparseEP(32))  # doctest: +SKIP
    >>> ep = ExpectationPropagation(model, guide, pyro.optim.Adam({"lr": 0.02}))  # doctest: +SKIP
    >>> losses = [ep.step(x, y) for _ in range(200)]  # doctest: +SKIP

    :param model: a Pyro model whose likelihood is a product of terms with one function value each.
    :param guide: an :class:`AutoSparseGP` of that model with the family :class:`~pyro_sparsegp.families.SparseEP`.
    :param optim: a Pyro optimiser for all parameters; with a learning rate of 0, or by :meth:`sweep`, they stay.
    :param damping: ρ in (0, 1], the weight of the new site: 1 is undamped. Paper 4 takes 0.5 for all data at once
        and 0.99 for mini-batches.
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

    def step(self, *args: Any, indices: Optional[Tensor] = None, **kwargs: Any) -> float:
        """Refine the sites, once or to convergence, and take one step of the optimiser.

        :param args: the model's arguments, with the data.
        :param indices: the data's row numbers, ``(B,)``, where part of the data comes in a plate that does not say
            them (``subsample=x``). The model is given them, too, if it asks for ``indices``.
        :returns: −log Z_EP − log p(other latents), in nats, before this step; estimated from part of the data.
        :raises ValueError: naming the site, if it is not finite, before anything changes; if the model or the guide do
            not fit.
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
            terms = Terms(guide, values, processes, args, kwargs, self._findings)
            runs = [self._run(name, process, terms, trace, indices) for name, process in processes.items()]
        sites: Any = capture.trace.nodes
        parameters = list(dict.fromkeys(site["value"].unconstrained() for site in sites.values()))
        if self.workers.num > 1 and not self._agreed:
            self._agreed = True
            self.workers.agree(parameters)
            return self._work(args, kwargs, indices, sweeps, train)
        # With sites that say nothing yet, log Z tells more of the prior than of the data.
        untouched = self.schedule == "inner" and any(run.module.empty for run in runs)
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
        self, name: str, process: GaussianProcess, terms: Terms, trace: poutine.Trace, indices: Optional[Tensor]
    ) -> _Run:
        module: ExpectationGP = attrgetter(name)(self.guide.gps)
        features = module.basis(process.kernel, process.jitter, name)
        blocks, anchor = features(process.x), features.anchor
        phi = blocks[0] if len(blocks) == 1 else torch.cat(blocks, -1)
        prior = process.variance
        residual = torch.maximum(prior - row_squares(phi), variance_floor(prior))
        index, num = self._rows(name, process, terms, trace, indices)
        with torch.no_grad():
            if index is None:
                kept = module.precision.shape[-1]
                if kept not in (0, num):
                    raise ValueError(
                        f"GP site {name!r} has sites of {kept} data, this call brings {num}. For a part of the data, "
                        "give the plate their full number and row numbers, pyro.plate('data', N, subsample_size=B); "
                        "for other data, make a new guide."
                    )
                none = torch.zeros_like(process.mean)
                rows = phi.detach()
                precision, linear = (module.precision, module.linear) if kept else (none, none)
            else:
                if self.gradient == "exact":
                    raise ValueError(
                        'ExpectationPropagation\'s gradient="exact" needs all data in each step; this one brings '
                        f'{len(index)} of {num}. Take gradient="matched" for mini-batches.'
                    )
                module.make_room(num, phi.detach(), None if anchor is None else anchor.detach())
                rows = module.features_of(module.rows[..., index, :])
                precision, linear = module.precision[..., index], module.linear[..., index]
        return _Run(name, module, phi, residual, process.mean, index, num, rows, anchor, precision, linear)

    def _rows(
        self, name: str, process: GaussianProcess, terms: Terms, trace: poutine.Trace, indices: Optional[Tensor]
    ) -> tuple[Optional[Tensor], int]:
        """The row numbers of the data given, ``None`` if these are all, and how many there are."""
        here = process.x.shape[-2]
        if not terms.plates or name not in terms:
            if indices is not None:
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
            states = [self._state(run, terms) for run in runs]
            proposals = [self._propose(run, state) for run, state in zip(runs, states)]
            if i + 1 >= sweeps or all(self._status[run.name].change <= self.tolerance for run in runs):
                break
            self._require_finite(self._loss(runs, states, terms, False)[1], call)
            for run, proposal in zip(runs, proposals):
                self._keep(run, *proposal)
        loss, total = self._loss(runs, states, terms, train)
        value = self._require_finite(total, call)
        for run, proposal in zip(runs, proposals) if sweeps else ():
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
    def _state(self, run: _Run, terms: Terms) -> _State:
        factor, loc, pull = self._posterior(run)
        phi = run.phi.detach()
        cavity = _cavity(phi, run.rows, self.power * run.precision, self.power * run.linear, loc, factor)
        variance = cavity.variance + run.residual.detach()
        # The likelihood as the last tilted distribution showed it, and the cavity: near the tilted distribution.
        weight, tilt = self._seen_factor(run)
        precision = (1 / variance + weight).clamp(min=0.25 / variance)
        centre = (cavity.mean / variance + tilt) / precision

        def log_density(f: Tensor) -> Tensor:
            return terms.log_density(run.name, f) if run.name in terms else torch.zeros_like(f)

        prior_mean = run.prior_mean.detach()
        at = tilted(
            log_density,
            cavity.mean + prior_mean,
            variance,
            centre + prior_mean,
            precision.rsqrt(),
            self.power,
            self.num_nodes,
            self._passes(run),
        )
        found = 1 / at.variance - 1 / variance
        drawn = (at.mean - prior_mean) / at.variance - cavity.mean / variance
        usable = found.isfinite() & drawn.isfinite()
        self._remember_factor(run, torch.where(usable, found, 0.0), torch.where(usable, drawn, 0.0))
        return _State(cavity, at, loc, factor, _log_normaliser_of(factor, loc, pull))

    def _passes(self, run: _Run) -> int:
        """How often an integral's nodes are placed: as many times as they may have to close in."""
        if run.index is not None:
            return 5
        if run.name not in self._factors:
            return 7
        return 1 if self._paces[run.name].change < 0.5 else 3

    def _seen_factor(self, run: _Run) -> tuple[Tensor, Tensor]:
        """The Gaussian factors of f − μ that tilted distributions were to their cavities; 0 at first."""
        if run.name not in self._factors or self._factors[run.name][0].shape[-1] != run.num:
            none = run.prior_mean.new_zeros(*run.prior_mean.shape[:-1], run.num)
            if run.index is not None:
                self._factors[run.name] = none, none.clone()
            else:
                return none, none
        weight, tilt = self._factors[run.name]
        return (weight, tilt) if run.index is None else (weight[..., run.index], tilt[..., run.index])

    def _remember_factor(self, run: _Run, *factor: Tensor) -> None:
        if run.index is None:
            self._factors[run.name] = factor[0], factor[1]
            return
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
            if run.name not in self.guide.warned:
                self.guide.warned.add(run.name)
                warnings.warn(
                    f"expectation propagation at GP site {run.name!r} dropped sites of negative precision, with which "
                    "q had no covariance: the likelihood is not log-concave, and the updates may not converge. Look at "
                    "ep.status; lower damping (0.1) and power (0.5) help.",
                    NumericalWarning,
                    stacklevel=6,
                )
            run.precision, run.linear = _without_negative(run.precision, run.linear)
            if run.index is None:
                gram, pull = self.workers.sum(*module.sums(run.rows, run.precision, run.linear))
            else:
                module.precision, module.linear = _without_negative(module.precision, module.linear)
                gram, pull = self._resum(module)
            factor = cholesky(gram + eye, 0.0, f"q's precision at site {run.name!r}")
        return factor, torch.cholesky_solve(pull[..., None], factor)[..., 0], pull

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
        rate = self.damping * self._paces.setdefault(run.name, _Pace()).now
        # Each site by itself may at most double its marginal's variance, and move its mean by 3 standard deviations.
        size = spread.square().clamp(min=torch.finfo(spread.dtype).tiny)
        added = torch.maximum(rate * more, -0.5 / size)
        limit = 3 * (1 + added * size) / size.sqrt()
        pull = (rate * (shift - more * mean)).clamp(-limit, limit)
        new = run.precision + added, run.linear + pull + added * mean
        status = self._status.setdefault(run.name, _Status())
        status.sites = run.num
        status.skipped, status.negative = (~usable).sum(), (new[0] < 0).sum()
        moves = torch.maximum((more * spread.square()).abs(), ((shift - more * mean) * spread).abs())
        status.change = moves.amax() if moves.numel() else moves.sum()
        if self.workers.num > 1:
            counts = status.skipped.to(moves), status.negative.to(moves), moves.new_tensor(float(run.num))
            status.skipped, status.negative, status.sites = self.workers.sum(*counts)
            status.change = self.workers.largest(status.change)
        return self._careful(run, *new, cut=status.cut > status.cuts_seen)

    def _careful(self, run: _Run, precision: Tensor, linear: Tensor, cut: bool) -> tuple[Tensor, Tensor]:
        """The refined sites; or, if the last sweep led astray, those from which it started, to go slower from there."""
        pace, status = self._paces[run.name], self._status[run.name]
        change = float(status.change)
        start, status.cuts_seen = pace.start, status.cut
        astray = cut or change > max(2 * pace.change, 0.5)
        if start is not None and astray:
            pace.ceiling = pace.now = max(0.6 * pace.now, _SLOWEST)
            pace.start, pace.change = None, math.inf
            return start
        pace.now = max(0.6 * pace.now, _SLOWEST) if cut else min(1.1 * pace.now, pace.ceiling)
        if run.index is None and not astray:
            pace.start, pace.change = (run.precision, run.linear), change
        return precision, linear

    @torch.no_grad()
    def _keep(self, run: _Run, precision: Tensor, linear: Tensor) -> None:
        module, rows = run.module, run.phi.detach()
        if run.index is None:
            module.keep_all(rows, None if run.anchor is None else run.anchor.detach(), precision, linear)
            if self.workers.num > 1:
                module.settle()
                module.gram, module.pull = self.workers.sum(module.gram, module.pull)
        else:
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
    valid = left > 1e-6
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


def _without_negative(precision: Tensor, linear: Tensor) -> tuple[Tensor, Tensor]:
    return precision.clamp(min=0), torch.where(precision < 0, 0.0, linear)


def _prior_of(turn: Tensor, loc: Tensor, factor: Tensor) -> Tensor:
    """0, with the gradient by T of E_q log p(u), where w = T w₀ has the prior N(0, I) and q(w₀) is held."""
    inverse = solve_lower(factor, torch.eye(factor.shape[-1], dtype=factor.dtype, device=factor.device))
    squares = (turn @ loc[..., None]).square().sum((-2, -1)) + (turn @ inverse.mT).square().sum((-2, -1))
    value = turn.diagonal(dim1=-2, dim2=-1).log().sum(-1) - 0.5 * squares
    return value - value.detach()


def _log_normaliser_of(factor: Tensor, loc: Tensor, pull: Tensor) -> Tensor:
    """G(q) − G(p) = ½(mᵀPm − log|P|), of the batch's shape."""
    return 0.5 * (loc * pull).sum(-1) - factor.diagonal(dim1=-2, dim2=-1).log().sum(-1)
