"""Expectation propagation."""

from collections.abc import Callable
from typing import Any, Optional

import pyro
import torch
from pyro import poutine
from torch import Tensor

from ..guide import AutoSparseGP
from ..guide.calls import classify
from ..guide.runs import Priors, require_data, share_of_rows
from ..numerics.arguments import refuse, require_choice, require_count, require_share
from ..numerics.processes import Workers, put_gradients
from ..program.data import TrainingData, signature_of
from ..program.handlers import held_runs
from ..program.reader import Owners, Terms
from ..program.rules import require_sites
from ..program.structure import Depends
from .optimisers import agree
from .quadrature import finite, own_guide
from .refinement import Progress, SiteRun, site_run


class ExpectationPropagation:
    """Training by expectation propagation: sweeps over the sites, and steps of the hyperparameters.

    Hernández-Lobato and Hernández-Lobato, 2016, "Scalable Gaussian Process Classification via Expectation
    Propagation"; with a power, Bui, Yan and Turner, 2017. Each factor ∫ p(yₙ | f) N(f | φₙᵀw, dₙ) df has a
    Gaussian site in h = φₙᵀw. One sweep refines the sites of all data given, in parallel: from the cavity
    (m⁻, v⁻), which is q without αth part of the site, and Z = ∫ p(y | f)^α N(f | m⁻, v⁻ + d) df with
    a = ∂log Z/∂m⁻ and β = −∂²log Z/∂m⁻², it takes αν = β/(1 − v⁻β) and αb = (a + m⁻β)/(1 − v⁻β), damped.
    The objective is log Z_EP = G(q) − G(p) + Σₙ (log Zₙ + G(cavity) − G(q))/α, G the log normaliser of a Gaussian.

    Other parameters (hyperparameters, inducing inputs, the likelihood's) climb log Z_EP with sites and cavities held.
    Other latents are points: the log density of their priors is added. A step on part of the data (a plate that
    subsamples) refines only their sites, and scales their terms up (eq. 6).

    >>> from pyro_sparsegp.families import SparseEP
    >>> guide = AutoSparseGP(model, SparseEP(32))  # doctest: +SKIP
    >>> ep = ExpectationPropagation(model, guide, pyro.optim.Adam({"lr": 0.02}))  # doctest: +SKIP
    >>> losses = [ep.step(x, y) for _ in range(200)]  # doctest: +SKIP

    :param model: a Pyro model whose likelihood is a product of terms with one function value each.
    :param guide: an :class:`AutoSparseGP` of that model with the family :class:`~pyro_sparsegp.families.SparseEP`.
    :param optim: a Pyro optimiser for all parameters; :meth:`sweep` leaves them alone.
    :param damping: ρ in (0, 1], the weight of the new site: 1 is undamped. The paper takes 0.5 for all data at once and
        0.99 for mini-batches. Sites of Gaussian likelihoods are exact and not damped. Sites of negative precision grow
        only as far as q and the cavities stay proper.
    :param power: α in (0, 1]: 1 is expectation propagation, near 0 it is variational inference.
    :param schedule: "inner" updates the parameters after each sweep, "outer" only at convergence.
    :param num_nodes: the number of quadrature nodes of each integral.
    :param tolerance: convergence, as the largest move of a marginal in its standard deviations.
    :param max_sweeps: the largest number of sweeps to convergence.
    :param group: a ``torch.distributed`` process group: each process gives its own share of the data, and all end
        up with the same q and parameters, which start from the first process's: inducing inputs that are given as a
        number are placed among its share. Loss and status are of all data.
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
        num_nodes: int = 48,
        tolerance: float = 1e-4,
        max_sweeps: int = 100,
        group: Optional[Any] = None,
    ) -> None:
        own_guide(model, guide, "ExpectationPropagation")
        faults = {
            "ExpectationPropagation's optim must be a Pyro optimiser, pyro.optim.Adam({'lr': 0.01}), got "
            f"{type(optim).__name__}": not isinstance(optim, pyro.optim.PyroOptim),
            "ExpectationPropagation trains GP sites of the family SparseEP; the guide's families are "
            f"{guide.families!r}. Give AutoSparseGP(model, SparseEP(...)), or take SVI.": guide.kind.has_bound,
        }
        refuse(faults)
        require_share(damping, "ExpectationPropagation's damping")
        require_share(power, "ExpectationPropagation's power")
        require_choice(schedule, "ExpectationPropagation's schedule", "inner", "outer")
        require_count(num_nodes, "ExpectationPropagation's num_nodes", 4)
        require_count(max_sweeps, "ExpectationPropagation's max_sweeps")
        self.model, self.guide, self.optim = model, guide, optim
        self.damping, self.power, self.schedule = float(damping), float(power), schedule
        self.num_nodes, self.tolerance, self.max_sweeps = num_nodes, float(tolerance), max_sweeps
        self.workers = Workers(group)
        self._whole: Optional[torch.dtype] = None  # of the guide's data, where its sites are all of theirs
        self._known: tuple[Owners, set[str]] = {}, set()
        #: by GP site, how its updates go
        self.progress: dict[str, Progress] = {}

    def step(self, *args: object, indices: Optional[Tensor] = None, **kwargs: object) -> float:
        """Refine the sites, once or to convergence, and take one step of the optimiser.

        :param args: the model's arguments, with the data.
        :param indices: the row numbers of the data, ``(B,)``. A mini-batch under ``subsample=x`` needs them. The model
            gets them too, if it has an argument ``indices``. All data at once come in the same order each time.
        :returns: −log Z_EP − log p(other latents), in nats, before this step; estimated from part of the data.
        :raises ValueError: naming the site, if it is not finite, before anything changes; if the model or the guide do
            not fit; if other data come in the same number.
        """
        return self._work(args, kwargs, indices, 1 if self.schedule == "inner" else self.max_sweeps, train=True)

    def sweep(self, *args: object, indices: Optional[Tensor] = None, num: int = 1, **kwargs: object) -> float:
        """Refine the sites ``num`` times, or to convergence if that comes first, with all parameters held.

        :returns: as :meth:`step`.
        """
        return self._work(args, kwargs, indices, num, train=False)

    def evaluate_loss(self, *args: object, indices: Optional[Tensor] = None, **kwargs: object) -> float:
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
        counts = ("sites", "skipped", "negative", "cut")
        return {
            name: {count: int(getattr(progress, count)) for count in counts}
            | {"change": progress.change, "converged": progress.change <= self.tolerance}
            for name, progress in self.progress.items()
        }

    # One call.

    def _work(self, args: tuple, kwargs: dict[str, Any], indices: Optional[Tensor], sweeps: int, train: bool) -> float:
        if indices is not None:
            indices = torch.as_tensor(indices)
            if "indices" in signature_of(self.model).parameters:
                kwargs = kwargs | {"indices": indices}
        guide, call = self.guide, (args, kwargs)
        with torch.set_grad_enabled(train), poutine.trace(param_only=True) as capture:
            guide.prepare(*args, **kwargs)
            self._check_fit()
            if all(module.empty for module in guide.modules_by_site().values()):
                agree(guide, self.workers)
            run = Priors(guide, call=classify(guide, args, kwargs), at_medians=True).perform(args, kwargs)
            processes, trace = run.processes, run.trace
            require_sites(run.sites)
            share_of_rows(run)
            require_data(run)
            terms = Terms(held_runs(guide.model, trace, args, kwargs), guide.facts, processes, self._known)
            self._known = terms.owners, terms.rowwise
            runs = [site_run(self, *one, terms, trace, indices) for one in processes.items()]
            relation = guide.relation(args, kwargs)
        part = next((run.index for run in runs if run.index is not None), None)
        # After guide.double() data in float64 have other digits: test_float32.py, `keeps_the_sites`.
        if part is None and self._whole == guide.like.dtype and not relation.same:
            raise ValueError(
                f"GP site {runs[0].name!r} has a site for each of {runs[0].num} data, and this call brings others, or "
                "these in another order. Give the same rows in the same order; for other data, make a new guide."
            )
        sites: Any = capture.trace.nodes
        parameters = list(dict.fromkeys(site["value"].unconstrained() for site in sites.values()))
        # With sites that say nothing yet, log Z tells more of the prior than of the data.
        untouched = self.schedule == "inner" and part is None and any(run.module.empty for run in runs)
        loss, value = self._sweep_all(runs, terms, sweeps, train and not untouched, part is None, call)
        if sweeps:
            self._whole = None
            if part is None:  # by which they are known again, without a look at them
                self._whole, guide.core.data = guide.like.dtype, TrainingData(guide.model, args, kwargs)
        if loss.requires_grad:
            loss.backward()
            if self.workers.num > 1:  # which gives parameters without a gradient one
                put_gradients(parameters, self.workers.sum)
            self.optim(parameters)
        pyro.infer.util.zero_grads(parameters)
        return value

    def _check_fit(self) -> None:
        facts, guide = self.guide.facts, self.guide
        whys = {
            "its values enter another GP site": facts.inner,
            "it meets another GP site in one term of a density": [name for pair in facts.meeting for name in pair],
            "one term of a density depends on several of its values": [
                name for name, gp in facts.gps.items() if gp.depends.rank > Depends.ELEMENTWISE.rank
            ],
        }
        overrides = type(guide).get_posterior is not AutoSparseGP.get_posterior
        free = [name for name in facts.latents if overrides or not guide.is_point(name)]
        faults: dict[str, object] = {
            f"GP site {name!r} cannot be trained by expectation propagation, whose integrals are one-dimensional: "
            f"{why}. Take SVI with TraceQuadrature_ELBO and a family such as SVGP.": True
            for why, names in whys.items()
            for name in names
        }
        faults |= {
            f"no log density depends on GP site {next(iter(facts.gps))!r} in the guide's first call: were all its rows "
            "masked? Call the guide once with data before training, guide(x, y).": not facts.downstream,
            f"expectation propagation fits latents that are no GPs as points; the guide gives {free} "
            "distributions. Leave point_estimates and get_posterior alone, or take SVI with a family such as SVGP "
            "for posteriors of hyperparameters.": free,
        }
        refuse(faults)

    def _sweep_all(
        self, runs: list[SiteRun], terms: Terms, sweeps: int, train: bool, whole: bool, call: tuple
    ) -> tuple[Tensor, float]:
        """Refine the sites up to ``sweeps`` times; the loss before the last, with its graph, and as a number."""
        # The matched gradient is log Z's where sites are near their fixed point. Where parameters have moved them far
        # from it they are swept again first, once if the likelihood is Gaussian: test_a_learned_noise.
        for i in range(max(self.max_sweeps, sweeps)):
            for run in runs:
                run.look(terms)
            # This process's part of minus the objective, with the gradient wanted, and all of it.
            with torch.set_grad_enabled(train):
                normalisers, expected = zip(*(run.log_z(terms, train) for run in runs))
                common, own = -terms.priors - sum(normalisers), -terms.rest - sum(expected)
                loss = own + common / self.workers.num
            (total,) = self.workers.sum(own.detach())
            value = finite("−log Z_EP", total + common.detach(), self.guide, *call)
            for run in runs if sweeps else ():
                run.refine()
            far = train and whole and any(run.progress.far for run in runs)
            if not far and (i + 1 >= sweeps or all(run.progress.change <= self.tolerance for run in runs)):
                break
        return loss, value
