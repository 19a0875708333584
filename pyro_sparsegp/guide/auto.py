"""The guide that users make."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from typing import Any, Optional, Union

import torch
from pyro import poutine
from torch import Tensor

from ..approximations.expectation import require_refined
from ..modules import drop_stored, take_name, unique_name
from ..numerics.codes import require_count
from ..posterior.sparse_posterior import SparsePosterior
from ..process import GaussianProcess
from ..program.checks import require_sizes
from ..program.handlers import observes, unrecorded
from ..program.traces import free_values, repeatable, whole_plates
from ..warned import without
from .absorb import absorb
from .arrival import check
from .checks import check_parameters
from .conditions import conditions_now, conditions_of_call
from .first_call import initialise, require_arguments
from .known import Families, Rows
from .rows import note_rows, note_step, or_of_training, quantiles_of, rows_of, share_of_rows, warn_of_unseen
from .runs import LARGEST_JOINT, BySite, Conditions, Posteriors, Priors, Run
from .start import init_to_centre
from .state import SavedGuide

_KEEP_ROWS = (
    "to learn hyperparameters on a stream keep some of its rows yourself, take SVI steps on them, "
    "svi.step(x, y, size=N) for N rows in all, then absorb them anew, guide.absorb(x, y, forget=1.0)."
)


class AutoSparseGP(SavedGuide):
    """A variational guide for a Pyro model with Gaussian process sites.

    >>> guide = AutoSparseGP(model, SVGP(64))  # doctest: +SKIP
    >>> SVI(model, guide, optim, TraceQuadrature_ELBO()).step(x, y)  # doctest: +SKIP
    >>> guide.posterior(x_new)["f"].mean  # doctest: +SKIP

    q(θ, u) = q(θ) q(u | θ). A GP site is f = μ + φᵀw + r with coefficients w; the residual r keeps its prior. u is
    all coefficients w and all latents with normal priors; q(u | θ) is one Gaussian. The hyperparameters θ are all other
    latents, jointly normal in unconstrained space. u has at most 2,000 numbers, and enters densities linearly (as a
    Normal's loc or log scale, a Poisson's log rate, a Bernoulli's logit). Without such a u each w has its family's
    q(w | θ), and the normal latents are independent of each other and of f.

    The first call initialises the guide: it finds the GP sites and the posterior mode of the hyperparameters, chooses
    inducing points among that call's inputs, and finds out how the likelihood depends on function values. If the first
    mini-batch has fewer rows than inducing points, first call the guide on more rows.

    ``guide(*args)`` draws all sites. Sites that were observed at the first call and are not now (``y=None``) are drawn
    from the model. ``guide.train()``, the default, draws each function value from its marginal: enough if each row
    depends on its own value. ``guide.eval()`` draws function values jointly. ``state_dict`` and ``load_state_dict``
    restore everything into a new guide. Override :meth:`get_posterior` for a posterior of your own.

    :param model: a Pyro model.
    :param families: one family for all GP sites (each gets a copy), or a mapping from site names. A tuple of names,
        ``{("f", "g"): CoupledPrecision(32)}``, gives these sites one posterior: each has its own basis, and one
        Gaussian q(w) covers the coefficients of all. The family must be one that couples them.
    :param init_loc_fn: start of latents other than f: one of ``pyro.infer.autoguide.initialization``.
    :param init_scale: the initial standard deviation of these latents, in unconstrained space.
    :param point_estimates: names of latents to fit as points (maximum a posteriori), or ``True`` for all. By
        default there are none; under expectation propagation all are points.
    :param independent_draws: GP sites whose values training draws independently although they are coupled. An
        example is a deep convolutional GP's site at an image's patches. Such draws are cheaper, and common practice,
        but training then maximises only an approximation of the bound.
    :param independent: names of latents to give independent normal posteriors (mean field), or ``True`` for all.
        Mean field is cheaper for thousands of latents, but its intervals are too narrow. By default there are none.
    :param start: hyperparameters start at their posterior mode ("mode", default) or at ``init_loc_fn`` (``None``).
    :raises ValueError: if ``model`` or ``families`` are invalid; at the first call, naming the site, if a family
        does not fit a site, its kernel or its likelihood.
    """

    @without(
        coupled="latents have a joint posterior by default, independent=True or names gives them one of their own",
        amortized_plates="override get_posterior(name, prior) in a subclass",
    )
    def __init__(
        self,
        model: Callable,
        families: Families,
        *,
        init_loc_fn: Callable = init_to_centre,
        init_scale: float = 0.1,
        point_estimates: Union[bool, Collection[str], None] = None,
        independent_draws: Collection[str] = (),
        independent: Union[bool, Collection[str]] = (),
        start: Optional[str] = "mode",
    ) -> None:
        require_arguments(model, families, independent_draws, independent, start)
        options = {"init_loc_fn": init_loc_fn, "init_scale": init_scale}
        search = start is not None
        super().__init__(model, families, point_estimates, independent_draws, independent, search, **options)
        self._asked: Optional[Callable[[tuple, dict[str, Any]], Optional[Run]]] = None  # makes an objective's run
        self._ahead: Optional[tuple[Rows, Conditions]] = None  # what runs at nodes are conditioned on, once it is known
        self.row_share = 0.0  # of all rows, those of the last step of training
        # A name of its own keeps this guide's parameters apart from all others in Pyro's global store.
        take_name(self, unique_name("AutoSparseGP"))

    def __repr__(self) -> str:
        """What q is: which latents have one Gaussian with GP sites, which are jointly normal, independent or points."""
        head = f"{type(self).__name__}({self.families!r})"
        if not self.core.known:
            return f"{head}, not called yet"
        facts = self.core.facts
        apart = [name for name in facts.latents if name not in facts.field and name not in facts.coupled]
        of_kinds = {
            "one Gaussian given the others": list(facts.field) or list(facts.gps),
            "jointly normal": facts.coupled,
            "independent": [name for name in apart if not self.is_point(name)],
            "points": [name for name in apart if self.is_point(name)],
        }
        kinds = [f"{kind}: {', '.join(names)}" for kind, names in of_kinds.items() if names]
        return f"{head}\n  {kinds[0]}\n  {'; '.join(kinds[1:]) or 'no other latents'}"

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Draw every site, running the model once.

        :returns: latent, deterministic and observed sites' values by name.
        :raises ValueError: naming the site and the remedy, if the model or its data do not fit the guide.
        """
        run = (self._asked or self._run_on)(args, kwargs)
        if run is None:
            return {}
        draws = run.perform(args, kwargs)
        require_sizes(run.trace)
        if isinstance(run, Posteriors) and any(p.kernel.depends_on_rows for p in run.processes.values()):
            note_rows(self, run)
        if self.is_training:
            self.row_share = note_step(self, run, args, kwargs)  # type: ignore[arg-type]
        return draws

    def _conditioned_on(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Rows, Conditions]:
        rows = rows_of(self, args, kwargs)
        return rows, conditions_of_call(self, rows, args, kwargs) if self.on_sites else Conditions()

    def _run_on(self, args: tuple, kwargs: dict[str, Any]) -> Posteriors:
        """A run for draws."""
        self.prepare(*args, **kwargs)
        rows, conditions = self._conditioned_on(args, kwargs)
        asks = self.by_expectation or self.corrected_modules() or self.facts.enumerated
        has_data = not asks or self._observes(args, kwargs)
        require_refined(self.modules_by_site(), not has_data)
        most = torch.inf if not self.training else LARGEST_JOINT if rows.fewer else 0
        run = Posteriors(self, conditions, rows, most, new_inputs=self.kept is not None or not has_data)
        run.sums_out = has_data
        return run

    def _are_known(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Whether a call brings all the data of training, row by row, where latents have a value for each row."""
        relation = self.relation(args, kwargs) if self.local_latents else None
        return relation is not None and relation.same

    def _observes(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        return observes(self.model, self.facts.rows, self.like, args, kwargs)

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """What a first call does before it draws: initialise, and check that all parameters would train."""
        core = self.core if self.core.known else initialise(self, args, kwargs)
        if core.loaded:  # its parameters are what it was loaded with, whatever a file brought into Pyro's store
            drop_stored(self._pyro_name)
        # Parameters are checked at the first step, and at the first call after a state was loaded, whatever that is
        # for: test_messages.py::test_a_latent_that_a_state_does_not_have.
        if not core.checked and (torch.is_grad_enabled() or (core.loaded and not torch.is_inference_mode_enabled())):
            # The graph is what shows where parameters come from; what the call draws later stays as it would be.
            with torch.enable_grad(), whole_plates() if core.loaded else nullcontext(), repeatable(self.like):
                check_parameters(self, core, args, kwargs)
        core.loaded = False

    def absorb(self, *args: Any, forget: float = 0.0, **kwargs: Any) -> None:
        """Add new rows to the posteriors of GP sites, without the rows seen before (Bui, Nguyen and Turner, 2017).

        q(w) ∝ N(w; 0, I) exp(r₀ᵀw − ½wᵀG₀w) keeps two sums over all rows so far, (G₀, r₀). absorb adds the sites
        N(zₙ | μₙ + φₙᵀw, 1/λₙ) of the new rows: G = G₀ + ΦᵀΛΦ, r = r₀ + Φᵀλ(z − μ). If the likelihood is Gaussian in f
        the sites are exact, and rows absorbed in pieces give the posterior of all rows. For other likelihoods absorb
        iterates λ = −E[ℓ''], λ(z − m) = E[ℓ'] with (G₀, r₀) as the prior. The sites of the old rows do not change, nor
        do hyperparameters and inducing inputs. Latents other than f are held at their medians.

        Training afterwards moves q towards the sum over the rows that it is given, scaled to the plate's size: give it
        the old rows too. A guide that has taken no step starts at the prior.

        :param args: the model's arguments, with the new rows alone; the data plate has as many rows.
        :param forget: the share of (G₀, r₀) to drop first, for functions that drift; 0.1 at each call gives the last
            ten calls most of the weight.
        :param kwargs: keyword arguments of the model.
        :raises ValueError: naming the site and the remedy, where q keeps no (G₀, r₀) (``SGPR`` and its kind,
            expectation propagation, ``natural=False``), or where the likelihood does not factorise over the rows.
        """
        if "memory" in kwargs:
            raise ValueError(f"absorb takes no memory= any more: {_KEEP_ROWS}")
        self._ready(args, kwargs)
        absorb(self, args, kwargs, forget)

    def relearn(self, *args: Any, **kwargs: Any) -> None:
        """Removed: raises a ValueError that says what to do instead."""
        raise ValueError(f"guide.relearn was removed: {_KEEP_ROWS}")

    def check(self, *args: Any, **kwargs: Any) -> list[str]:
        """Check the posteriors of the latents and of f after training: a line for each that is wrong, with what to do.

        The reference is the nested Laplace approximation of the posterior, at draws of the hyperparameters. The check
        asks whether the bound would still move means and widths of q(θ). It compares q's means and widths of latents
        and of f with importance-weighted draws. It searches for another mode from other starts, and tests whether the
        inducing points are enough. Above 20,000 rows the curvature is that of every k-th row. An empty list says that
        q's means are all within 0.3 standard deviations of the reference, and q's widths within a factor of 0.75 to
        1.33.

        :param args: the arguments of the model, with the training data, by default the first call's.
        """
        args, kwargs = or_of_training(self, "check", args, kwargs)
        self._ready(args, kwargs)
        if not self._observes(args, kwargs):
            raise ValueError("check compares the posterior with the data: give it the training arguments, check(x, y)")
        return check(self, args, kwargs)

    def posterior(self, *args: Any, **kwargs: Any) -> dict[str, SparsePosterior]:
        """The posterior of each GP site at these inputs, with other latents at their posterior medians.

        The variance includes the uncertainty of latents with normal priors, but not of hyperparameters:
        :func:`~pyro_sparsegp.predict` includes both. An inner layer of a deep GP is at its posterior mean.
        Subsampling is off. At the training data (all arguments, with observations) latents of single rows are as
        learned. At other data these latents are drawn from the model.

        :returns: by site, a :class:`SparsePosterior` with event shape ``(N,)``; P outputs are its batch.
        :raises KeyError: by the dict returned, for a site that is no GP.
        """
        args, kwargs = or_of_training(self, "posterior", args, kwargs)
        self._ready(args, kwargs)
        known = self._are_known(args, kwargs)
        run = Posteriors(self, conditions_now(self, median=True))
        run.draws_data, run.own_rows, run.at_medians = False, known, True
        return BySite(self._predicted(run, args, kwargs).posteriors)

    def draw(self, *args: Any, joint: bool = True, **kwargs: Any) -> dict[str, Tensor]:
        """One of :meth:`draws`."""
        return self.draws(1, *args, joint=joint, **kwargs)[0]

    def draws(self, num: int, *args: Any, joint: bool = True, **kwargs: Any) -> list[dict[str, Tensor]]:
        """Draws of every site at new inputs, a dictionary for each draw. Subsampling is off. Latents under the
        data plate are drawn from the model, or as learned if all arguments are the training data.

        :param num: how many.
        :param joint: draw function values jointly, in O(N³), or independently from their marginals.
        """
        require_count(num, "the number of draws")
        self._ready(args, kwargs)
        conditions, known, draws = None, self._are_known(args, kwargs), list[dict[str, Tensor]]()
        for _ in range(num):
            if conditions is None or self.has_random_latents:
                conditions = conditions_now(self, False, known)
            run = Posteriors(self, conditions, joint_up_to=torch.inf if joint else -1)
            run.own_rows = known
            draws.append(self._predicted(run, args, kwargs).values)
        return draws

    def median(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """The median of each latent, and the mean of each GP site at these inputs, by default the training data's."""
        args, kwargs = or_of_training(self, "median", args, kwargs)
        return super().median(*args, **kwargs)

    def quantiles(self, quantiles: Any, *args: Any, num_draws: int = 1000, **kwargs: Any) -> dict[str, Tensor]:
        """Quantiles of each latent and of each GP site's values at these inputs, by default the training data's. They
        are ``(Q, ...)`` by site, as in Pyro's AutoNormal.

        >>> guide.quantiles([0.05, 0.5, 0.95])["length"]           # doctest: +SKIP

        :param num_draws: the number of draws to estimate the quantiles from.
        """
        args, kwargs = or_of_training(self, "quantiles", args, kwargs)
        return quantiles_of(self, quantiles, num_draws, args, kwargs)

    def _ready(self, args: tuple, kwargs: dict[str, Any]) -> None:
        # test_messages.py::test_a_guide_that_saw_no_data
        if not self.core.known and not observes(self.model, None, self.like, args, kwargs):
            raise ValueError(
                "this guide has seen no data, so it has no posterior yet: train it first, svi.step(x, y) or "
                "fit(model, guide, (x, y), steps=500), or load a saved state."
            )
        with torch.no_grad():
            self.prepare(*args, **kwargs)
        require_refined(self.modules_by_site())

    def _predicted(self, run: Posteriors, args: tuple, kwargs: dict[str, Any]) -> Posteriors:
        with unrecorded(same=False, learns=False), whole_plates():
            run.perform(args, kwargs)
        warn_of_unseen(self, run)
        return run

    def forget_data(self) -> None:
        """Forget the training data. ``SGPR`` and its kind take new data from the next call with observations.

        Parameters stay. Families with parameters for each row (FreeSites, sparse actions) need a new guide.

        :raises ValueError: naming the GP site of such a family.
        """
        for name, module in self.site_modules().items():
            if module.num_rows is not None:  # test_computation_aware.py::test_other_numbers_of_rows
                raise ValueError(
                    f"GP site {name!r} has the family {module.family['name']}, with parameters for each row of its "
                    "training data: make a new guide for other data."
                )
        for module in self.site_modules().values():
            module.sites.forget()
        self.core.data, self.core.facts.rows = None, dict.fromkeys(self.core.facts.rows, 0)

    @property
    def site_status(self) -> dict[str, dict[str, Any]]:
        """By GP site, the state of its Gaussian sites (pseudo-observations): how many there are; whether they are exact
        (the likelihood is Gaussian in f); how many precisions were negative at the last update, and cut to 0; how many
        updates in training were halved because they lowered the bound; and whether the sites have converged: another
        update moves no marginal by over 0.001 standard deviations (other latents at their medians).
        """
        if not self.core.known:  # test_sites.py::test_messages_for_data_that_do_not_fit
            raise ValueError("the guide has read no sites yet: call it with the data, guide(x, y), or take an SVI step")
        return {reading.name: reading.status for reading in conditions_now(self, median=True).readings}

    # For objectives, and what else runs it.

    @contextmanager
    def predicting(self, kept: list[Conditions]) -> Iterator[None]:
        """Treat each call's inputs as new inputs, even if the call brings observations.

        :param kept: conditions of earlier calls (latents, Gaussian sites), used again if no latent is drawn.
        """
        before, self.kept = self.kept, kept
        try:
            yield
        finally:
            self.kept = before

    @contextmanager
    def conditioned(self, wrapped: Callable, args: tuple, kwargs: dict[str, Any]) -> Iterator[None]:
        """Read the Gaussian sites once, before runs at quadrature nodes: the runs may then be under vmap."""

        def read(args: tuple, kwargs: dict[str, Any]) -> None:
            self._ahead = self._conditioned_on(args, kwargs)

        try:
            self._asked = read
            wrapped(*args, **kwargs)
            self._asked = None
            yield
        finally:
            self._ahead = self._asked = None

    def at_nodes(
        self,
        nodes: Mapping[str, Optional[Tensor]],
        wrapped: Callable,
        args: tuple,
        kwargs: dict[str, Any],
        ahead: Optional[Priors] = None,
    ) -> tuple[Any, Any, Any]:
        """One run with GP sites at standardised quadrature nodes, mean + sd·node; ``None`` is the mean.

        :param wrapped: this guide, or this guide inside handlers such as ``poutine.scale``.
        :param ahead: a run to make instead, with u at its prior mean.
        :returns: the model's trace, the guide's trace, and a trace of all sites, with the plates' row numbers.
        """

        def makes(args: tuple, kwargs: dict[str, Any]) -> Run:
            rows, conditions = self._ahead or self._conditioned_on(args, kwargs)
            if ahead is not None:
                ahead.rows, ahead.nodes = rows, nodes
                return ahead
            return Posteriors(self, conditions, rows, 0 if self.training else torch.inf, nodes, self.kept is not None)

        before, state = self._asked, vars(self)
        try:
            state["_asked"] = makes
            wrapped(*args, **kwargs)
            return (*self.traces(), self.trace)
        finally:
            state.update(_asked=before, trace=poutine.Trace())  # under vmap its tensors are of no use to others

    def priors(
        self, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[dict[str, GaussianProcess], dict[str, Tensor], poutine.Trace]:
        """One run with latents other than f at their medians, for expectation propagation.

        :returns: the GP sites' priors given these latents; values of latents and plates' row numbers; the run's trace.
        """
        rows = rows_of(self, args, kwargs)
        run = Priors(self, at_medians=True, own_rows=rows.inputs)
        run.perform(args, kwargs)
        require_sizes(run.trace)
        if self.is_training:
            share_of_rows(self, rows)
        values = {name: value for name, value in free_values(run.trace).items() if name not in run.processes}
        return run.processes, values, run.trace
