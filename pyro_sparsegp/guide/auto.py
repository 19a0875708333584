"""The guide that users make."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from typing import Any, Optional, Union

import torch
from pyro import poutine
from pyro.infer.autoguide.initialization import init_to_feasible, init_to_mean
from torch import Tensor

from ..modules import drop_stored
from ..posterior.sparse_posterior import SparsePosterior
from ..process import GaussianProcess
from ..program.checks import require_sizes
from ..program.data import TrainingData
from ..program.handlers import observes
from ..program.traces import all_sites, free_values, is_free, repeatable, whole_plates
from ..warned import warn_once
from .absorb import absorb
from .correction import note_rows, warn_of_unseen
from .first_call import ObservesNothingError, check_parameters, explain_nan, initialise
from .joint import Families
from .runs import LARGEST_JOINT, AtNodes, BySite, Look, Priors, Train
from .state import Saved

__all__ = ["AutoSparseGP"]

_KEEP_ROWS = (
    "to learn hyperparameters on a stream keep some of its rows yourself, take SVI steps on them, "
    "svi.step(x, y, size=N) for N rows in all, then absorb them anew, guide.absorb(x, y, forget=1.0)."
)


class AutoSparseGP(Saved):
    """A guide for a Pyro model with Gaussian process sites: a sparse variational family for each of them.

    q(c, f) = q(c) Π_f q(f | c), with c the other latents, q(c) a product of normals in unconstrained space, and for
    each GP site q(f | c) the family's: under the hyperparameters in c, f = μ + φᵀw + r with a basis φ, a Gaussian q(w)
    and the residual r as in the prior. Families on sites take q(w) from the data and c, others learn one for all c.

    It runs the model: at each site it sees the prior, under the hyperparameters just drawn, and
    answers with a posterior. Other latents get Pyro's mean-field normal (override :meth:`get_posterior` for
    others) or a point estimate. The first call initialises: it finds the GP sites, places inducing inputs among
    that call's inputs, and learns how the likelihood depends on function values; call the guide once on
    representative inputs, all of them say, if the first mini-batch is smaller than the number of inducing points.

    ``guide(*args)`` draws all sites; sites that were observed at the first call and are not now (``y=None``) come
    from the model, so that ``guide(x_new)`` and :class:`~pyro.infer.Predictive` are posterior predictive.
    ``guide.train()``, the default, draws function values independently of each other, which is what a likelihood
    of single values needs; ``guide.eval()`` draws them jointly.

    Each guide owns its parameters, whatever the parameter store holds; ``state_dict`` and ``load_state_dict``
    restore everything into a freshly made guide.

    :param model: a Pyro model.
    :param families: one family for all GP sites (each gets a copy), or a mapping from site names. A tuple of names,
        ``{("f", "g"): CoupledPrecision(32)}``, gives these sites one posterior: each has its own basis, and q(w) of the
        coefficients of all of them is one Gaussian, of a family that couples them.
    :param init_loc_fn: how other latents start, from Pyro's ``pyro.infer.autoguide.initialization``.
    :param init_scale: their initial standard deviation, in unconstrained space.
    :param point_estimates: ``True``, or names of other latents, that are fitted as points (maximum a posteriori); by
        default none is, but for families of expectation propagation, which takes points only.
    :param independent_draws: names of GP sites whose values are drawn independently of each other in training though
        the model couples them, such as those at an image's patches in a deep convolutional GP: cheaper, and a common
        practice, but what training then maximises is not quite the bound.
    :param coupled: ``True``, or names of other latents, that are jointly Gaussian, in unconstrained space, with each
        other and with the coefficients of GP sites of free families: q(w | c) = N(m + Bε, S) with ε the standardised
        c. Intercepts, group effects and hyperparameters then keep the width that an independent q(c) q(f) takes from
        them; families on sites follow c by themselves, and then it is q(c) alone that is coupled. Costs D² + MD
        numbers for D values of c. By default none is.
    :param amortized_plates: as in :class:`~pyro.infer.autoguide.AutoNormalMessenger`.
    :raises ValueError: if ``model`` or ``families`` are none, at once; at the first call, naming the site, if a family
        does not fit a site, its kernel or its likelihood.
    """

    def __init__(
        self,
        model: Callable,
        families: Families,
        *,
        init_loc_fn: Callable = init_to_mean(fallback=init_to_feasible),
        init_scale: float = 0.1,
        point_estimates: Union[bool, Collection[str], None] = None,
        independent_draws: Collection[str] = (),
        coupled: Union[bool, Collection[str]] = False,
        amortized_plates: tuple[str, ...] = (),
    ) -> None:
        super().__init__(
            model,
            families,
            point_estimates,
            independent_draws,
            coupled,
            init_loc_fn=init_loc_fn,
            init_scale=init_scale,
            amortized_plates=amortized_plates,
        )
        self._nodes: Optional[Mapping[str, Optional[Tensor]]] = None  # of the quadrature that calls

    def __call__(self, *args: Any, **kwargs: Any) -> dict[str, Tensor]:
        """Draw every site, running the model once.

        :returns: latent, deterministic and observed sites' values by name.
        :raises ValueError: naming the site and the remedy, if the model or its data do not fit the guide.
        """
        if self._nodes is not None:  # at_nodes calls, perhaps through a wrapper
            rows = self.rows_of(args, kwargs)
            conditions = self.conditions_of_call(rows, args, kwargs)
            self.meets_data = True  # unless a step of training finds otherwise
            draws = self._train(AtNodes(self._nodes, rows, conditions, all_joint=not self.training), args, kwargs)
            if not self.meets_data:
                self.require_data()
            return draws
        self.prepare(*args, **kwargs)
        rows = self.rows_of(args, kwargs)
        self.require_refined(lambda: rows.fewer or not observes(self.model, self.observed, self.like, args, kwargs))
        run = Train(
            rows,
            self.conditions_of_call(rows, args, kwargs),
            joint_up_to=torch.inf if not self.training else LARGEST_JOINT if rows.fewer else 0,
            observing=self._observing(args, kwargs),
            sums_out=self._has_data(args, kwargs),
        )
        return self._train(run, args, kwargs)

    def _train(self, run: Train, args: tuple, kwargs: dict[str, Any]) -> dict[str, Tensor]:
        with self.held(run.conditions):
            draws = self.perform_explained(run, args, kwargs)
        require_sizes(self.trace)
        if any(process.kernel.depends_on_rows for process in run.processes.values()):
            note_rows(self, run)
        if self.is_training:
            share = self.note_data(run.rows, args, kwargs)
            for posterior in run.posteriors.values():
                if posterior.coefficients.heard is not None:
                    posterior.coefficients.heard.share = share
        return draws

    def prepare(self, *args: Any, **kwargs: Any) -> None:
        """What a first call does before it draws: initialise, and check that all parameters would train."""
        self._wake(args, kwargs)
        if torch.is_grad_enabled() and not self._checked_parameters:
            check_parameters(self, args, kwargs)
        self._check_loaded(args, kwargs)

    def _wake(self, args: tuple, kwargs: dict[str, Any]) -> None:
        if self._loaded:  # its parameters are what it was loaded with, whatever a file brought into Pyro's store
            drop_stored(self._pyro_name)
        if self.structure is None:
            initialise(self, args, kwargs)
            self.data = TrainingData(self.model, args, kwargs)

    def _check_loaded(self, args: tuple, kwargs: dict[str, Any]) -> None:
        """Check the parameters at the first call after a state was loaded, whatever the call is for."""
        if not self._loaded:
            return
        self._loaded = False
        if not self._checked_parameters and not torch.is_inference_mode_enabled():
            # The graph is what shows where parameters come from; what the call draws later stays as it would be.
            with torch.enable_grad(), whole_plates(), repeatable(self.like):
                check_parameters(self, args, kwargs)

    def absorb(self, *args: Any, forget: float = 0.0, **kwargs: Any) -> None:
        """Add new rows to the posteriors of GP sites, without the rows seen before (Bui, Nguyen and Turner, 2017).

        Under natural steps q(w) ∝ N(w; 0, I) exp(r₀ᵀw − ½wᵀG₀w) holds what all rows so far say in the sums (G₀, r₀),
        and sites N(zₙ | μₙ + φₙᵀw, 1/λₙ) of the new rows are added: G = G₀ + ΦᵀΛΦ, r = r₀ + Φᵀλ(z − μ). A likelihood
        that is Gaussian in f gives them at once, so that rows absorbed in pieces make the posterior of all; for others
        they are iterated, λ = −E[ℓ''], λ(z − m) = E[ℓ'], with (G₀, r₀) for the prior, and the old rows' sites stay as
        they were. Hyperparameters, inducing inputs and other latents, held at their medians, stay too.

        A step of training afterwards means what it did before: q goes towards the sum over the rows that it is given,
        scaled to the plate's size. Rows that are to count must be among them, the old ones too; after absorbed rows
        alone, absorb further ones. A guide that has taken no step starts at the prior.

        :param args: the arguments of the model, with the new rows; plates have the new rows' number.
        :param forget: the share of (G₀, r₀) dropped before, for functions that drift; 0.1 at each call gives the last
            ten most of the weight.
        :param kwargs: keyword arguments of the model.
        :raises ValueError: naming the site and the remedy, where q is no such sum (families on sites, expectation
            propagation, ``natural=False``), or where the likelihood does not factorise over the rows.
        """
        if "memory" in kwargs:
            raise ValueError(f"absorb takes no memory= any more: {_KEEP_ROWS}")
        self._ready(args, kwargs)
        absorb(self, args, kwargs, forget)

    def relearn(self, *args: Any, **kwargs: Any) -> None:
        """It has left.

        :raises ValueError: always, with what to do instead.
        """
        raise ValueError(f"guide.relearn has left: {_KEEP_ROWS}")

    def posterior(self, *args: Any, **kwargs: Any) -> dict[str, SparsePosterior]:
        """The posterior of each GP site at these inputs, other latents at their posterior median.

        What a site takes from the spread of other latents is not in its width: under ``coupled``, where that makes it
        less than half of what it is, a warning tells so; draws of all together are
        :func:`~pyro_sparsegp.predict`'s. An inner layer of a deep GP is at its posterior mean. Subsampling is off.
        Latents of single rows are those learned if the arguments are all those of training, observations included, else
        draws from the model.

        :returns: by site, a :class:`SparsePosterior` with event shape ``(N,)``; P outputs are its batch.
        :raises KeyError: where what is returned is asked for a site that is none of the GP sites.
        """
        run = self._at_medians(args, kwargs)
        self._look(run, True, args, kwargs)
        self.warn_of_medians(run.posteriors)
        return BySite(run.posteriors)

    def posterior_at_medians(self, *args: Any, **kwargs: Any) -> dict[str, SparsePosterior]:
        """:meth:`posterior`, for those who want it given these medians."""
        run = self._at_medians(args, kwargs)
        self._look(run, True, args, kwargs)
        return BySite(run.posteriors)

    def _at_medians(self, args: tuple, kwargs: dict[str, Any]) -> Look:
        self._ready(args, kwargs)
        known = self.are_known_rows(args, kwargs)
        return Look(self.conditions_now(median=True), draws_data=False, rows_known=known)

    def draw(self, *args: Any, joint: bool = True, **kwargs: Any) -> dict[str, Tensor]:
        """One of :meth:`draws`."""
        return next(self.draws(1, *args, joint=joint, **kwargs))

    def draws(self, num: int, *args: Any, joint: bool = True, **kwargs: Any) -> Iterator[dict[str, Tensor]]:
        """Draws of every site at new inputs, for prediction: subsampling is off, latents under the data plate come
        from the model, or are those learned if the arguments are all those of training, observations included.

        :param num: how many.
        :param joint: draw function values jointly, in O(N³), or independently from their marginals.
        """
        if isinstance(num, bool) or not isinstance(num, int) or num < 1:
            raise ValueError(f"the number of draws must be a whole number of at least 1, got {num!r}")
        self._ready(args, kwargs)
        conditions, known = None, self.are_known_rows(args, kwargs)
        for _ in range(num):
            if conditions is None or self.has_random_latents:
                conditions = self.conditions_now(False, known)
            yield self._look(Look(conditions, joint, self._warn_of_size, rows_known=known), False, args, kwargs)

    def _ready(self, args: tuple, kwargs: dict[str, Any]) -> None:
        try:
            self._wake(args, kwargs)
        except ObservesNothingError as error:
            raise ValueError(
                "this guide has seen no data, so that it has no posterior to look at or to predict with: train it "
                "first, svi.step(x, y) or fit(model, guide, (x, y), steps=500), or load a saved state."
            ) from error
        self.require_refined()
        self._check_loaded(args, kwargs)

    def _look(self, run: Look, median: bool, args: tuple, kwargs: dict[str, Any]) -> dict[str, Tensor]:
        with self.on(run, median), poutine.block(), whole_plates(), self.held(run.conditions):
            draws = self.perform(run, args, kwargs)
        warn_of_unseen(self, run)
        return draws

    def _warn_of_size(self, name: str, num: int) -> None:
        warn_once(
            self.warned,
            "large joint draw",
            name,
            f"{num} values of GP site {name!r} are drawn jointly, at O(N³) time and O(N²) memory a draw; "
            "predict(..., joint=False) draws them independently, in O(N).",
            stacklevel=4,
        )

    def at_nodes(
        self, nodes: Mapping[str, Optional[Tensor]], wrapped: Callable, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[Any, Any, dict[str, Tensor]]:
        """One run with GP sites at standardised quadrature nodes, mean + sd·node; ``None`` is the mean.

        :param wrapped: this guide, or what handlers such as ``poutine.scale`` made of it.
        :returns: the model's trace, the guide's, and the values of all sites, the plates' row numbers among them.
        """
        before, self._nodes = self._nodes, nodes
        try:
            wrapped(*args, **kwargs)
            return (*self.traces(), free_values(self.trace))
        finally:
            self._nodes = before
            self.trace = poutine.Trace()  # under vmap its tensors are of no use to others

    def priors(
        self, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[dict[str, GaussianProcess], dict[str, Tensor], poutine.Trace]:
        """One run with other latents at their points, for expectation propagation.

        :returns: the GP sites' priors under them; the values of latents and the plates' row numbers; the run's trace.
        """
        relation = self.relation(args, kwargs)
        run = Priors(relation is None or not self.local_latents or (relation.inputs and relation.order is None))
        self.perform(run, args, kwargs)
        require_sizes(self.trace)
        self.check_rows(relation)
        values = {
            name: torch.as_tensor(site["value"])
            for name, site in all_sites(self.trace)
            if is_free(site) and name not in run.processes
        }
        return run.processes, values, self.trace

    def explain_nan(self, *args: Any, **kwargs: Any) -> str:
        """Which sites' log densities are NaN or infinite at these arguments, for an error."""
        return explain_nan(self, args, kwargs)

    # What a call is.

    def _observing(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Whether a call's rows are those of training, asked only where kernels' diagonals depend on them."""
        if self._predicting is not None or not self.corrected_modules():
            return self._predicting is None
        return observes(self.model, self.observed, self.like, args, kwargs)

    def _has_data(self, args: tuple, kwargs: dict[str, Any]) -> bool:
        """Whether a call observes anything, asked only where discrete latents are summed out of its densities."""
        assert self.structure is not None
        return not self.structure.enumerated or observes(self.model, self.observed, self.like, args, kwargs)
