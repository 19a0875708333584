"""Expectation propagation."""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any, Optional

import pyro
import torch
from pyro import poutine
from torch import Tensor

from ..families import ExpectationFamily
from ..guide import AutoSparseGP
from ..numerics.linalg import cholesky, flags_kept, solve_lower
from ..numerics.tilted import log_normaliser
from ..program.dependence import ELEMENTWISE, NONE
from ..program.terms import Terms
from ..program.traces import RandomState
from .cavities import cavity_of, log_normaliser_of, prior_of
from .distributed import Workers
from .refinement import NoFactorError, Pace, Refinement, State, Status
from .site_runs import SiteRun, SiteRuns

__all__ = ["ExpectationPropagation"]

_Pace, _Status = Pace, Status  # by the names that states of before know


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
        self._agreed = self._checked = False
        self._looks = False  # at each Cholesky factorisation, since one has failed
        self._sites = SiteRuns(guide, needs_all=gradient == "exact")
        self._refined = Refinement(self.damping, self.power, num_nodes, self.workers, guide.warned)

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
            for name, status in self._refined.status.items()
        }

    def get_state(self) -> dict[str, Any]:
        """What the next sweep takes from this one, besides the guide's state and the optimiser's; see
        :func:`~pyro_sparsegp.fit`.
        """
        return {
            "paces": self._refined.paces,
            "status": self._refined.status,
            "factors": self._refined.factors,
            "seen": self._refined.seen,
            "agreed": self._agreed,
        }

    def set_state(self, state: dict[str, Any]) -> None:
        """Go on from :meth:`get_state`."""
        refined = self._refined
        refined.paces, refined.status = dict(state["paces"]), dict(state["status"])
        refined.factors, refined.seen, self._agreed = dict(state["factors"]), dict(state["seen"]), state["agreed"]

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
            random = RandomState(guide.like)
            kept = [(module, module.memory) for module in guide.modules_by_site().values()]
            looking: AbstractContextManager[list[Tensor]] = nullcontext([]) if self._looks else flags_kept()
            with looking as flags:
                processes, values, trace = guide.priors(args, kwargs)
                if sweeps:
                    guide.require_data()
                assert guide.structure is not None
                terms = Terms(guide.model, guide.structure, values, processes, args, kwargs, self._sites.findings)
                runs = [
                    self._sites.read(name, process, terms, trace, indices, (args, kwargs))
                    for name, process in processes.items()
                ]
            runs[0].flags = flags
        sites: Any = capture.trace.nodes
        parameters = list(dict.fromkeys(site["value"].unconstrained() for site in sites.values()))
        if self.workers.num > 1 and not self._agreed:
            self._agreed = True
            self.workers.agree(parameters)
            return self._work(args, kwargs, indices, sweeps, train)
        # With sites that say nothing yet, log Z tells more of the prior than of the data.
        untouched = self.schedule == "inner" and any(run.module.empty and run.index is None for run in runs)
        try:
            loss, value = self._sweep_all(runs, terms, sweeps, train and not untouched, (args, kwargs))
        except NoFactorError:  # of any process, which all have told each other
            random.restore()
            for module, memory in kept:
                module.memory = memory
            self._looks = True
            return self._work(args, kwargs, indices, sweeps, train)
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

    # Sweeps.

    def _sweep_all(
        self, runs: list[SiteRun], terms: Terms, sweeps: int, train: bool, call: tuple[tuple, dict[str, Any]]
    ) -> tuple[Optional[Tensor], float]:
        """Refine the sites up to ``sweeps`` times; the loss before the last, with its graph, and as a number."""
        for i in range(max(sweeps, 1)):
            states = [self._refined.state(run, terms, keep=sweeps > 0) for run in runs]
            moves = [self._refined.propose(run, state) for run, state in zip(runs, states)] if sweeps else []
            last = i + 1 >= sweeps or all(self._refined.status[run.name].change <= self.tolerance for run in runs)
            loss, total = self._loss(runs, states, terms, train and last)
            value, *told = torch.cat([total.reshape(1), *[move.told for move in moves]]).tolist()
            self._require_finite(value, call)
            for run, move in zip(runs, moves):
                own, told = told[: len(move.told)], told[len(move.told) :]
                self._refined.keep(run, *self._refined.accept(run, move, own))
                self._sites.known(run)
            if last:
                break
        return loss, value

    def _require_finite(self, value: float, call: tuple[tuple, dict[str, Any]]) -> None:
        if not math.isfinite(value):
            raise ValueError(
                f"−log Z_EP is {value}: {self.guide.explain_nan(*call[0], **call[1])}. The parameters are as they "
                "were before this step; look for NaN in the data (leave missing rows out with poutine.mask), data "
                "outside of a density's support, or too large a learning rate."
            )

    # The objective.

    def _loss(
        self, runs: list[SiteRun], states: list[State], terms: Terms, train: bool
    ) -> tuple[Optional[Tensor], Tensor]:
        """Minus the objective: this process's part of it, with the gradient wanted, and all of it."""
        with torch.set_grad_enabled(train):
            common, own = -terms.priors, -terms.rest
            for run, state in zip(runs, states):
                normaliser, expected = self._log_z(run, state, terms, train)
                common, own = common - normaliser, own - expected
        (total,) = self.workers.sum(own.detach())
        return own + common / self.workers.num if train else None, total + common.detach()

    def _log_z(self, run: SiteRun, state: State, terms: Terms, train: bool) -> tuple[Tensor, Tensor]:
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
                normaliser = normaliser + prior_of(turn, state.loc, state.factor)
            mean = (phi * cavity.loc).sum(-1)
            variance = 2 * (phi * cavity.cov).sum(-1) - cavity.variance
        elif train:
            gram, pull = self.workers.sum(*run.module.sums(run.phi, run.precision, run.linear))
            eye = torch.eye(gram.shape[-1], dtype=gram.dtype, device=gram.device)
            factor = cholesky(gram + eye, 0.0, f"q's precision at site {run.name!r}")
            loc = torch.cholesky_solve(pull[..., None], factor)[..., 0]
            moving = cavity_of(run.phi, run.phi, self.power * run.precision, self.power * run.linear, loc, factor)
            mean, variance, log_ratio = moving.mean, moving.variance, moving.log_ratio
            normaliser = log_normaliser_of(factor, loc, pull)
        values = None
        if train and terms.differentiable and run.name in terms:
            values = terms.log_density(run.name, at.nodes)
        log_z = log_normaliser(at, mean + run.prior_mean, variance + run.residual, values, self.power)
        each = torch.where(cavity.valid, log_z + log_ratio, 0.0) / self.power
        return normaliser.sum(), run.scale * each.sum()
