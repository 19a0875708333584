"""The guide that users make."""

from collections.abc import Callable, Collection
from textwrap import indent
from typing import Any, ClassVar, Optional, Union

import torch
from pyro import poutine
from torch import Tensor

from ..approximations.on_sites import require_refined
from ..families import ExpectationFamily, SiteFamily
from ..modules import drop_stored, take_name, unique_name
from ..numerics.arguments import refuse, require_count
from ..numerics.functions import setting
from ..numerics.linalg import PRECISE
from ..posterior.sparse_posterior import SparsePosterior
from ..program import handlers, rules, traces
from ..program.draws import SHOWN, all_draws
from .absorb import absorb
from .calls import Call, NewRows, classify
from .changes import STEPS, watch
from .check import check
from .draws import items_of_draws, of_draw
from .first_call import check_parameters, initialise
from .integrate import integrate
from .known import Families
from .latents import init_to_centre
from .messenger import SiteMessenger
from .moving import follow
from .points import Points
from .posteriors.joint import AtPoints, Joint
from .posteriors.on_sites import OnSites
from .posteriors.separate import ByExpectation, Separate
from .runs import LARGEST_JOINT, Conditions, Posteriors, Run, note_rows, note_step, with_classes
from .summary import Summary

_KINDS = ((ExpectationFamily, ByExpectation()), (SiteFamily, OnSites()))  # by families of whom one is enough
_JOINT = Joint()


class AutoSparseGP(SiteMessenger):
    """A variational guide for a Pyro model with Gaussian process sites.

    >>> guide = AutoSparseGP(model, SVGP(64))  # doctest: +SKIP
    >>> SVI(model, guide, optim, TraceQuadrature_ELBO()).step(x, y)  # doctest: +SKIP
    >>> guide.posterior(x_new)["f"].mean  # doctest: +SKIP

    q(θ, u) = q(θ) q(u | θ). A GP site is f = μ + φᵀw + r with coefficients w; the residual r keeps its prior. u is
    all coefficients w and all latents with normal priors; q(u | θ) is one Gaussian. The hyperparameters θ are all other
    latents, jointly normal in unconstrained space. u may have 2,000 numbers, without values of its largest plate.
    Families that cannot share u, such as ``SparseEP``, have their own q(w | θ). Normal latents are then independent of
    each other and of f, and a warning names them.

    The first call finds the mode of the hyperparameters and how the likelihood depends on f. It chooses inducing
    points among its inputs, so give it more rows than inducing points.

    ``guide(*args)`` draws all sites; data that are not given, ``y=None``, are drawn from the model. ``guide.train()``,
    the default, draws each function value from its marginal, ``guide.eval()`` all of them jointly. Override
    :meth:`get_posterior` for a posterior of your own.

    ``load_state_dict`` restores a guide in a new one of the same model. The state holds the training data if a family
    on sites, latents under the data plate or classes of groups need them. If the model takes arguments other than
    tensors, numbers, strings, and collections of these, call the loaded guide with the data once.

    :param model: a Pyro model.
    :param families: one family for all GP sites (each gets a copy), or a mapping from site names. A tuple of names,
        ``{("f", "g"): SVGP(32)}``, asks for one posterior of these sites, u above, and raises where they have none.
    :param init_loc_fn: start of latents other than f: one of ``pyro.infer.autoguide.initialization``.
    :param init_scale: their initial standard deviation, in unconstrained space.
    :param point_estimates: names of latents to fit as points (maximum a posteriori), or ``True`` for all, EP's default.
    :param independent_draws: GP sites whose values training draws independently although they are coupled, such as a
        deep convolutional GP's at an image's patches: cheaper, but the bound is then approximate.
    :param independent: names of latents with independent normal posteriors, or ``True`` for all: cheaper for thousands
        of latents, but their intervals are too narrow.
    :param start: hyperparameters start at their posterior mode ("mode", default) or at ``init_loc_fn`` (``None``).
    :raises ValueError: at once, or at the first call, naming the site, if a family does not fit it or its likelihood.
    """

    at_points = AtPoints()  # the kind of draws at weighted points of the hyperparameters
    objective: ClassVar[Any]  # TraceQuadrature_ELBO, which its own module sets

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
        """As the class says."""
        named = {"independent_draws": independent_draws, "independent": independent, "point_estimates": point_estimates}
        super().__init__(model, families, named, start, init_loc_fn=init_loc_fn, init_scale=init_scale)
        kinds = [kind for own, kind in _KINDS if any(isinstance(family, own) for family in self.by_group.values())]
        self._own_kind = [*kinds, Separate()][0]
        self._instead: Optional[Callable[[tuple, dict[str, Any]], Any]] = None  # what a call does, if not a draw
        self.row_share = 0.0  # of all rows, those of the last step of training
        # A name of its own keeps this guide's parameters apart from all others in Pyro's global store.
        take_name(self, unique_name("AutoSparseGP"))

    @property
    def kind(self) -> Separate:
        """The kind of its posterior."""
        return _JOINT if self.core.joint.field else self._own_kind

    def __repr__(self) -> str:
        """What q is, which latents have one Gaussian with GP sites and so on; and the structure of the program."""
        head = f"{type(self).__name__}({self.families!r})"
        if self.structure is None:
            return f"{head}, not called yet"
        return head + "\n" + indent(f"{self.kind.describe(self)}\n{self.structure}", "  ")

    def __call__(self, *args: object, **kwargs: object) -> dict[str, Tensor]:
        """Draw every site, running the model once.

        :returns: latent, deterministic and observed sites' values by name.
        :raises ValueError: naming the site and the remedy, if the model or its data do not fit the guide.
        """
        if self._instead is not None:
            return self._instead(args, kwargs)
        self.prepare(*args, **kwargs)
        follow(self)
        call, conditions = self._given(args, kwargs)
        asks = self.corrected_modules() or self.facts.discrete or not self.kind.has_bound
        may_have_data = not asks or handlers.observes(self.model, self.facts.data, self.like, args, kwargs)
        # In a step values that no density couples are drawn by their marginals. Whoever leaves data out looks at draws.
        joint_up_to = (LARGEST_JOINT if call.relation.fewer else 0) if self.training else torch.inf
        if not may_have_data:
            require_refined(self.modules_by_site())
            call, conditions = NewRows(call.relation, call.inputs), with_classes(self, conditions)
        run = Posteriors(self, conditions, call, sums_out=may_have_data, joint_up_to=joint_up_to)
        with setting(PRECISE, joint_up_to > 0):  # joint draws have the residual, which Φ in float32 leaves below 0
            self._perform(run, args, kwargs)
        return run.values

    def _given(self, args: tuple, kwargs: dict[str, Any]) -> tuple[Call, Conditions]:
        call = classify(self, args, kwargs)
        return call, self.kind.given(self, call, args, kwargs)

    def _perform(self, run: Run, args: tuple, kwargs: dict[str, Any]) -> None:
        run.perform(args, kwargs)
        rules.require_sites(run.sites)
        note_rows(run)
        if torch.is_grad_enabled():
            self.row_share = note_step(run, args, kwargs)

    def prepare(self, *args: object, **kwargs: object) -> None:
        """Initialise at the first call; later look whether the program is the same, and once whether all is trained."""
        core = self.core if self.core.facts.gps else initialise(self, args, kwargs)
        if core.loaded:  # its parameters are what it was loaded with, whatever a file brought into Pyro's store
            drop_stored(self._pyro_name)
        # The program is looked at in training, and at the first call after a state was loaded, whatever that is for.
        if core.loaded or torch.is_grad_enabled():
            watch(self, args, kwargs, is_due=core.steps in STEPS)
            core.steps += 1
            if not (core.checked or torch.is_inference_mode_enabled()):
                # The graph is what shows where parameters come from; what the call draws later stays as it would be.
                with torch.enable_grad(), traces.repeatable(self.like):
                    check_parameters(self, args, kwargs)
        core.loaded = False

    def absorb(self, *args: object, forget: float = 0.0, **kwargs: object) -> None:
        """Add new rows to the posteriors of GP sites, without the rows seen before (Bui, Nguyen and Turner, 2017).

        q(w) ∝ N(w; 0, I) exp(r₀ᵀw − ½wᵀG₀w) keeps two sums over all rows so far, (G₀, r₀). absorb adds the sites
        N(zₙ | μₙ + φₙᵀw, 1/λₙ) of the new rows: G = G₀ + ΦᵀΛΦ, r = r₀ + Φᵀλ(z − μ). They are exact where the likelihood
        is Gaussian in f; else absorb iterates λ = −E[ℓ''], λ(z − m) = E[ℓ'] with (G₀, r₀) as the prior. All else stays;
        latents other than f are held at their medians. A guide that has taken no step starts at the prior. Training
        afterwards moves q towards the rows that it is given, scaled to the plate's size: give it the old ones, too.

        :param args: the model's arguments, with the new rows alone; the data plate has as many rows.
        :param forget: the share of (G₀, r₀) to drop first, for functions that drift: 0.1 weighs the last 10 calls most.
        :raises ValueError: naming the site and the remedy, where q keeps no (G₀, r₀) (families on sites,
            expectation propagation, ``natural=False``), or where the likelihood does not factorise over the rows.
        """
        self._ready(args, kwargs)
        self.core.points = None
        absorb(self, args, kwargs, forget)

    def check(self, *args: object, progress: bool = True, **kwargs: object) -> list[str]:
        """Check the posteriors of the latents and of f after training: a line for each that is wrong, with what to do.

        The reference is the nested Laplace approximation of the posterior at draws of the hyperparameters, above 20,000
        rows with the curvature of every k-th row. It asks whether the bound would still move q(θ), compares means and
        widths with importance-weighted draws, searches for another mode, and tests whether inducing points are enough.
        An empty list says that q's means are within 0.3 standard deviations of the reference, and widths within a
        factor of 0.75 to 1.33. Arguments are the training data, by default the first call's. ``progress`` shows a bar.
        """
        with setting(SHOWN, progress):
            return check(self, *self._with_data("check", args, kwargs))

    def integrate(self, *args: object, num_points: int = 200, **kwargs: object) -> Points:
        """After training replace q(θ) by weighted points, each with its own q(u | θ), as INLA does.

        One normal is too narrow for hyperparameters that few data inform, such as the variance of five groups. From now
        on draws, predictions, quantiles and trees come from the points; medians and :meth:`posterior` are at their
        median. Further training ends this, and losses always use the normal q(θ). A state holds the points. Take it for
        up to some eight hyperparameters. Arguments are the training data, by default the first call's.

        >>> guide.integrate(x, y)  # doctest: +SKIP
        200 points of length, scale, noise; effective size 143.2

        :param num_points: how many points to weigh; up to three times as many, until they are worth half of these. Each
            takes as long as some steps of training.
        :returns: the points; ``effective_size`` is how many points of equal weights they are worth.
        :raises ValueError: naming the cause, where the posterior has no nested Laplace approximation.
        """
        args, kwargs = self._with_data("integrate", args, kwargs)
        require_count(num_points, "num_points")
        self.core.points = integrate(self, args, kwargs, num_points)
        return self.core.points

    def posterior(self, *args: object, **kwargs: object) -> dict[str, SparsePosterior]:
        """The posterior of each GP site at these inputs, with other latents at their posterior medians.

        The variance includes the uncertainty of latents with normal priors; that of hyperparameters is in
        :func:`~pyro_sparsegp.predict`. An inner layer of a deep GP is at its posterior mean. Subsampling is off.
        Latents of single rows are as learned if all arguments are the training data, with observations, and else drawn.

        :returns: by site, a :class:`SparsePosterior` with event shape ``(N,)``; P outputs are its batch.
        """
        args, kwargs = self._or_of_training("posterior", args, kwargs)
        return self.run_at(args, kwargs, at_medians=True, draws_data=False).posteriors

    def draw(self, *args: object, joint: bool = True, **kwargs: object) -> dict[str, Tensor]:
        """A draw of every site at new inputs. Subsampling is off. Latents under the data plate are drawn from the
        model, or as learned if all arguments are the training data; discrete ones given the data, if there are any.

        :param joint: draw function values jointly, in O(N³), or independently from their marginals.
        """
        run = self.run_at(args, kwargs, joint_up_to=torch.inf if joint else 0)
        self.trace = run.trace
        # Classes of groups are known from the rows of training, unless all of these are here.
        known = () if run.call.inputs else self.facts.classes
        return run.values | handlers.given_data(self.model, run.trace, args, kwargs, known)

    def median(self, *args: object, **kwargs: object) -> dict[str, Tensor]:
        """The median of each latent, and the mean of each GP site at these inputs, by default the training data's."""
        args, kwargs = self._or_of_training("median", args, kwargs)
        found = self.run_at(args, kwargs, at_medians=True, draws_data=False).values
        return {name: value for name, value in found.items() if name not in [*self.facts.data, *self.facts.discrete]}

    def quantiles(self, quantiles: object, *args: object, num_draws: int = 1000, **kwargs: object) -> dict[str, Tensor]:
        """Quantiles, ``(Q, ...)``, of each latent, and of each GP site at these inputs. Without inputs: of the latents.

        >>> guide.quantiles([0.05, 0.5, 0.95])["length"]           # doctest: +SKIP

        :param num_draws: the number of draws to estimate the quantiles from.
        """
        levels = torch.as_tensor(quantiles).to(self.like)
        if not ((levels >= 0) & (levels <= 1)).all():
            raise ValueError(f"quantiles must be between 0 and 1, got {quantiles}")
        return {n: v.quantile(levels, 0) for n, v in self._marginal_draws("quantiles", args, kwargs, num_draws).items()}

    def summary(self, *args: object, num_draws: int = 1000, **kwargs: object) -> Summary:
        """Mean, standard deviation and 90 % interval of each latent, and of each GP site at these inputs, as a table.

        >>> print(guide.summary())  # doctest: +SKIP
                   mean     sd     5%    95%
        variance   1.04   0.52   0.45   2.03
        length     0.25   0.06   0.17   0.36

        Without inputs it is of the latents. It is of draws, from the weighted points after :meth:`integrate`, whose
        effective size is printed below.

        :param num_draws: the number of draws.
        :returns: an object that prints as the table, with ``names`` and, for each of their numbers, ``mean``, ``sd``,
            ``low`` and ``high``.
        """
        return Summary.of(self._marginal_draws("summary", args, kwargs, num_draws), self.core.points)

    @torch.no_grad()
    def _marginal_draws(self, what: str, args: tuple, kwargs: dict[str, Any], num_draws: int) -> dict[str, Tensor]:
        """Draws of latents, and of single values of GP sites where there are arguments, ``(num_draws, ...)``."""
        facts, is_given = self.facts, args or kwargs
        names, of_latents = list(facts.latents), not (is_given or {*facts.downstream} - {*facts.data})
        names += facts.gps if is_given else ()
        args, kwargs = self._or_of_training(what, args, kwargs)
        require_count(num_draws, "num_draws")
        if not names:
            return {}

        def one(item: dict[Any, Tensor]) -> dict[Any, Tensor]:
            with of_draw(item):
                values = self.run_at(args, kwargs, joint_up_to=0, draws_data=False, of_latents=of_latents).values
            return {name: values[name] for name in names if name in values}

        # 128 features a value.
        return all_draws(one, items_of_draws(self, num_draws), lambda d: 128 * sum(map(torch.numel, d.values())))

    def _or_of_training(self, what: str, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        if args or kwargs:
            return args, kwargs
        if self.core.data is None:
            raise ValueError(f"the guide holds no training data: give the model's arguments, guide.{what}(..., x)")
        return self.core.data.args, self.core.data.kwargs

    def _with_data(self, what: str, args: tuple, kwargs: dict[str, Any]) -> tuple[tuple, dict[str, Any]]:
        args, kwargs = self._or_of_training(what, args, kwargs)
        self._ready(args, kwargs)
        if not handlers.observes(self.model, self.facts.data, self.like, args, kwargs):
            raise ValueError(f"{what} is about the data: give it the training arguments, {what}(x, y)")
        return args, kwargs

    def _ready(self, args: tuple, kwargs: dict[str, Any]) -> None:
        with torch.no_grad():
            self.prepare(*args, **kwargs)
        follow(self)
        require_refined(self.modules_by_site())

    def run_at(self, args: tuple, kwargs: dict[str, Any], **asked: Any) -> Posteriors:
        """A run at new rows; latents of rows are known at training's data."""
        self._ready(args, kwargs)
        facts, asked = self.facts, {"sums_out": False, "marginal": asked.get("at_medians", False)} | asked
        same = bool(facts.local_latents + facts.classes) and self.relation(args, kwargs).same
        conditions = self.kind.given_now(self, asked.get("at_medians", False), same)
        # At the rows of training the sum over classes knows what these say.
        if asked.get("draws_data", True) and not (same and asked["sums_out"]):
            conditions = with_classes(self, conditions)
        with handlers.unrecorded(same=False, learns=False), traces.whole_plates(), setting(PRECISE, True):
            run = Posteriors(self, conditions, NewRows(inputs=same), **asked).perform(args, kwargs)
        note_rows(run)
        self.trace = poutine.Trace()  # a mapped run's tensors cannot be copied
        return run

    def forget_data(self) -> None:
        """Forget the training data and keep all parameters: families on sites take the next call's data.

        :raises ValueError: naming the GP site of a family with parameters for each row (sparse actions).
        """
        modules = self.site_modules()
        what = "with parameters for each row of its training data: make a new guide for other data."
        families = {f"GP site {name!r} has the family {m.family['name']}": m for name, m in modules.items()}
        refuse({f"{family}, {what}": module.num_rows is not None for family, module in families.items()})
        for module in modules.values():
            module.sites.forget()
        # Numbers of 0 are learned anew: the next rows may be more or fewer, and no mini-batch.
        self.core.data, self.core.sizes = None, dict.fromkeys(self.core.sizes, 0)

    @property
    def site_status(self) -> dict[str, dict[str, Any]]:
        """By GP site, of its Gaussian sites with other latents at their medians: how many there are; whether they are
        exact (the likelihood is Gaussian in f); how many precisions the last update cut to 0; how many updates were
        halved since they lowered the bound; whether another would move no marginal by over 0.001 standard deviations.
        """
        return {
            name: {
                "sites": reading.sites.precision.numel(),
                "exact": reading.quadratic,
                "truncated": int(reading.truncated),
                "halved": int(reading.module.sites.progress["halved"]),
                "converged": bool(reading.change <= 1e-3),
            }
            for name, reading in self.kind.given_now(self, median=True).readings.items()
        }

    def conditioned(self, wrapped: Callable, args: tuple, kwargs: dict[str, Any]) -> tuple[Call, Conditions]:
        """What runs at quadrature nodes are conditioned on: read before them, as they may be under vmap."""
        return self._within(wrapped, args, kwargs, self._given)

    def at_nodes(
        self,
        run: Run,
        wrapped: Callable,
        args: tuple,
        kwargs: dict[str, Any],
        given: Optional[tuple[Call, Conditions]] = None,
    ) -> tuple[Any, Any, Any]:
        """One run of an objective, with GP sites at quadrature nodes, or at their posteriors' or priors' means.

        :param wrapped: this guide, or this guide inside handlers such as ``poutine.scale``.
        :param given: what :meth:`conditioned` has read before.
        :returns: the model's trace, the guide's trace, and a trace of all sites, with the plates' row numbers.
        """

        def perform(args: tuple, kwargs: dict[str, Any]) -> None:
            run.call, run.conditions = given or self._given(args, kwargs)
            run.is_objectives = True
            self._perform(run, args, kwargs)

        try:
            self._within(wrapped, args, kwargs, perform)
            return (*self.get_traces(at_nodes=True), self.trace)
        finally:
            vars(self)["trace"] = poutine.Trace()  # under vmap its tensors are of no use to others

    def _within(self, wrapped: Callable, args: tuple, kwargs: dict[str, Any], asked: Callable) -> Any:
        """What is asked instead of draws, by the arguments that handlers around this guide hand on."""
        try:
            self._instead = asked
            return wrapped(*args, **kwargs)
        finally:
            self._instead = None
