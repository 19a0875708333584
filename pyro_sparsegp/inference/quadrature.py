"""Objectives: the evidence lower bound, function values integrated by quadrature, and projected data's evidence."""

import math
from collections.abc import Callable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from typing import Any, cast
from weakref import WeakKeyDictionary

import torch
from pyro import poutine
from pyro.infer import ELBO
from pyro.infer.elbo import ELBOModule
from pyro.infer.util import torch_item
from torch import Tensor, nn

from ..bases.actions import ProjectedFeatures
from ..gaussians.steps import Record, recording
from ..guide import AutoSparseGP
from ..guide.changes import watch
from ..guide.first_call import explain_nan
from ..guide.moving import following
from ..guide.runs import AtNodes
from ..guide.search import ALL_ROWS
from ..numerics.arguments import refuse, require_count
from ..numerics.decisions import decided
from ..numerics.linalg import flags_kept
from ..numerics.processes import largest
from ..posterior.drawing import OTHER_LATENTS
from ..program.asking import attempt
from ..program.data import Relation, TrainingData
from ..program.traces import RandomState, repeatable
from ..warned import warn_once
from .plan import Plan, plan_of
from .terms import Inputs, log_density_minus_kl, posterior_at, weighted_sum
from .warm_up import Evaluated, is_whole, largest_loss, warm_up, warm_up_again

_LOOKS = {4**k for k in range(2, 16)}  # steps after which it is asked whether nodes are enough
_LEAST = 0.03  # nats that are told of


@dataclass
class _Known:
    """What an objective knows of a guide."""

    is_warm: bool = False  # whether its posteriors have met data
    steps: int = 0  # that it has taken
    loss: float = math.inf  # of the last one
    most: float = math.inf  # the loss from which on the next one has lost q, if both are on all rows
    call: Any = None  # the last one's arguments


class TraceQuadrature_ELBO(ELBO):
    """The evidence lower bound with KL terms in closed form and function values integrated by quadrature.

    ELBO = Σ E_q[log p(y | f, ·)] − Σ KL. The expectation of every downstream log density over a GP site's
    marginals N(m, v) is Gauss-Hermite quadrature at m + √v·t_k: two nodes are exact for a Gaussian likelihood.
    A linear predictor of several sites and latents is itself normal, and is integrated as one variable. Other densities
    of two sites use the product grid; Normal(f, exp(g)) has nodes for g alone. Densities of more values, and inner
    layers of a deep GP, use draws. A model runs once if the parameters of its likelihoods are f, ``f.exp()`` or such.
    Other models run once more under :func:`torch.func.vmap` over the nodes, and see f as ``(N,)``. Models with a
    network, and models that subsample, run only under vmap. Hyperparameters are drawn once per particle; without them
    the bound is deterministic.

    A distribution that brings its own expectation, :class:`~pyro_sparsegp.distributions.ExpectedLogProb`, such as
    :class:`~pyro_sparsegp.distributions.RobustMax`, needs no quadrature, for any number of function values.

    >>> elbo = TraceQuadrature_ELBO(num_nodes=20)

    :param num_nodes: K, the number of quadrature nodes per axis. Families on sites use K nodes, too.
    :param num_particles: the number of draws of other latents to average over.
    """

    def __init__(self, num_nodes: int = 20, num_particles: int = 1, **kwargs: object) -> None:
        require_count(num_nodes, "TraceQuadrature_ELBO's num_nodes")
        if kwargs.get("vectorize_particles"):
            raise ValueError(
                "TraceQuadrature_ELBO does not take vectorize_particles=True: function values are event dimensions "
                "that become batch dimensions of the data. Use vectorize_particles=False, or more num_nodes."
            )
        super().__init__(num_particles=num_particles, **kwargs)
        self.num_nodes = num_nodes
        self._known: WeakKeyDictionary[AutoSparseGP, _Known] = WeakKeyDictionary()

    def loss(self, model: Callable, guide: Callable, *args: object, **kwargs: object) -> float:
        """Minus the bound, in nats.

        :raises ValueError: if it is NaN or infinite, naming the sites.
        """
        with torch.no_grad():
            loss = self.differentiable_loss(model, guide, *args, **kwargs)
        return finite("the bound", loss, guide, args, kwargs)

    def loss_and_grads(self, model: Callable, guide: Callable, *args: object, **kwargs: object) -> float:
        """Minus the bound, in nats; its gradient is added to the parameters'.

        Before the first gradient, posteriors that learn by natural gradients take up to five steps of their own, on the
        same arguments; and so they do on all rows where a step has lost a nat a datum.

        :raises ValueError: if the bound is NaN or infinite, naming the sites, before anything reaches the parameters.
        """
        unwrapped = own_guide(model, guide, "TraceQuadrature_ELBO")
        unwrapped.prepare(*args, **kwargs)
        evaluate = partial(self._evaluated, unwrapped, guide, args, kwargs)
        known = self._known.setdefault(unwrapped, _Known())
        if not known.is_warm:
            data: Any = unwrapped.core.data
            are_few = max(unwrapped.core.sizes.values(), default=0) <= ALL_ROWS
            share = unwrapped.relation(args, kwargs).share if are_few else 1.0  # else they may want too much memory
            share = float(largest(unwrapped.like.new_tensor(share)))  # as many passes in all processes
            first = partial(self._evaluated, unwrapped, guide, data.args, data.kwargs) if share < 1 else evaluate
            found, known.is_warm = warm_up(unwrapped, evaluate, first, math.ceil(1 / share))
        else:
            found = evaluate()
        now = model, args, kwargs
        if found[1] > known.most and is_whole(unwrapped) and Relation(TrainingData(model, *known.call), now, True).same:
            found = warm_up_again(unwrapped, evaluate, found, known.most)
        loss, value, record = found
        if loss.requires_grad:
            record.retain()
            loss.backward(retain_graph=self.retain_graph)
            self._check_gradients(unwrapped, record)
            if known.is_warm:  # else a mask leaves all of this batch out, which nothing is learned of
                record.step(unwrapped.row_share)
        self._note(value, unwrapped, guide, args, kwargs)
        return value

    def _note(self, value: float, guide: AutoSparseGP, wrapped: object, args: tuple, kwargs: dict[str, Any]) -> None:
        """Note a step's loss; at some steps look whether nodes are enough."""
        closed, known = guide.core.forms, self._known[guide]
        before, known.loss, known.call = known.loss, value, (args, kwargs)
        # A batch that a mask leaves out has no loss that a later one could be more than.
        known.most = largest_loss(guide, value) if known.is_warm and is_whole(guide) else math.inf
        known.steps += 1
        if known.steps in _LOOKS and closed is not None and (closed.rest.gps or closed.values):
            self._warn_of_few_nodes(before - value, guide, wrapped, (args, kwargs))

    def _warn_of_few_nodes(self, gain: float, guide: AutoSparseGP, wrapped: Any, call: tuple[tuple, Any]) -> None:
        """Tell of a bound that other numbers of nodes change, by more than a tenth of what a step gains."""
        # No Gauss-Hermite rule converges for a density with a kink, as of a quantile's loss, and natural steps may
        # stand still where its error is larger than their gain. Beside an early q a smooth one may be as narrow, while
        # the steps still gain much more. Errors at kinks have any sign: one difference may be small.
        found = []
        for num in range(self.num_nodes, self.num_nodes + 4):
            with repeatable(guide.like), torch.no_grad():
                other = TraceQuadrature_ELBO(num, self.num_particles)
                found.append(float(other._minus_bound(guide, wrapped, *call)))
        error = max(found) - min(found)
        rounding = 1e3 * torch.finfo(guide.like.dtype).eps * abs(found[0])
        if error > max(_LEAST, rounding, 0.1 * abs(gain)):
            warn_once(
                guide.warned,
                "too few nodes",
                "",
                f"the bound changes by {error:.2g} nats with more than {self.num_nodes} nodes: a density has a kink "
                "in function values, or is far narrower than their posterior. Give its distribution an "
                "expected_log_prob, or take more nodes, TraceQuadrature_ELBO(num_nodes=200).",
                stacklevel=5,
            )

    def _evaluated(self, guide: AutoSparseGP, wrapped: Callable, args: tuple, kwargs: dict[str, Any]) -> Evaluated:
        """The loss, as a tensor and as a number, and what natural steps are to know of it."""
        # The number is read together with the flags of factorisations. Where one failed, it is evaluated anew, from the
        # same state and with the same random numbers, and each flag is looked at.
        kept = [(sites, sites.memory) for sites in guide.kept_sites.values()]
        state = RandomState(guide.like)
        with attempt():
            with flags_kept() as flags, recording(guide.like) as record:
                loss = self._minus_bound(guide, wrapped, args, kwargs)
            read: list[float] = torch.stack([loss.detach(), *map(Tensor.any, flags)]).tolist()
            if not any(read[1:]) and math.isfinite(read[0]):
                return loss, read[0], record
        state.restore()
        for part, memory in kept:
            part.memory = memory
        with recording(guide.like) as record:
            loss = self._minus_bound(guide, wrapped, args, kwargs)
        return loss, finite("the bound", loss, wrapped, args, kwargs), record

    def _check_gradients(self, guide: AutoSparseGP, record: Record) -> None:
        """Raise if they are not finite. The signs of curvatures, which natural steps ask for, are read at one look."""
        grads = {name: p.grad for name, p in guide.named_parameters() if p.grad is not None}
        signs = record.signs
        numbers = [*map(Tensor.sum, grads.values()), *signs.values(), record.zero.detach()]
        found: list[float] = torch.stack(numbers).tolist()
        for row, signed in zip(signs, found[len(grads) :]):
            row.is_signed = decided(bool(signed))
        # A sum may overflow.
        broken = [n for n, total in zip(grads, found) if not (math.isfinite(total) or grads[n].isfinite().all())]
        if not broken:
            return
        for parameter in guide.parameters():
            parameter.grad = None  # the next step adds to it
        raise ValueError(
            f"the bound is finite, its gradient is not, at {', '.join(broken)}. The parameters are as they were before "
            "this step. A likely cause is a torch.where or a clamp in the model that hides an infinite branch (its "
            f"gradient is 0 times infinity): keep that branch's input harmless too; actions that are 0 or depend "
            "on one another; or too large a learning rate."
        )

    def __call__(self, model: nn.Module, guide: AutoSparseGP) -> ELBOModule:
        """The loss as a module of the model's and the guide's parameters, called with the model's arguments.

        It has its parameters once the guide has: after the guide's first call, or a loaded state.
        """
        return _Module(model, guide, self)

    def differentiable_loss(self, model: Callable, guide: Callable, *args: object, **kwargs: object) -> Tensor:
        """Minus the bound as a scalar tensor."""
        unwrapped = own_guide(model, guide, "TraceQuadrature_ELBO")
        unwrapped.prepare(*args, **kwargs)
        watch(unwrapped, args, kwargs, is_due=False)
        return self._minus_bound(unwrapped, guide, args, kwargs)

    def _minus_bound(self, guide: AutoSparseGP, wrapped: Callable, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        """As :meth:`differentiable_loss`, of a guide that is prepared."""
        if torch.is_grad_enabled():
            guide.core.num_nodes = self.num_nodes  # sites are read at as many
        # −(1/S) Σₛ ELBOₛ, at S draws of the latents that are not integrated
        with following(guide) if guide.core.moving else nullcontext():
            bounds = [self._bound(guide, wrapped, args, kwargs) for _ in range(self.num_particles)]
        return -sum(bounds[1:], bounds[0]) / len(bounds)

    def _get_trace(self, model: Callable, guide: Callable, args: tuple, kwargs: object) -> Any:
        raise TypeError("TraceQuadrature_ELBO runs the model for all nodes at once; it has no single trace")

    def plan(self, guide: AutoSparseGP, *args: object, **kwargs: object) -> Plan:
        """How the expectation of each density is found, chosen once for a program: print it.

        >>> print(elbo.plan(guide))  # doctest: +SKIP
        y: in closed form

        :param guide: after its first call; of one that was loaded ``args`` are the model's arguments.
        """
        _ = guide.facts  # raises before the guide's first call
        return plan_of(guide, args, kwargs)

    def _bound(self, guide: AutoSparseGP, wrapped: Callable, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        return plan_of(guide, args, kwargs).bound(Inputs(guide, wrapped, args, kwargs, self.num_nodes))


AutoSparseGP.objective = TraceQuadrature_ELBO  # which a check compares with draws


class ProjectedLikelihood(TraceQuadrature_ELBO):
    """An objective: log p(Sᵀy) instead of the evidence lower bound (Wenger et al., 2024, eq. 9 and lemma S2).

    −½((y − μ)ᵀS(SᵀK̂S)⁻¹Sᵀ(y − μ) + log|SᵀK̂S| − log|SᵀS| + i log 2π): the evidence of the data projected on
    orthonormalised actions. It replaces the densities of observed sites that depend on a GP; other
    observed sites and the divergences of other latents stay. It is no bound on log p(y). Wenger et al. (2024) find that
    hyperparameters trained by it generalise worse (figures S1 and S2): the default,
    :class:`~pyro_sparsegp.TraceQuadrature_ELBO`, is the better choice.

    :param num_particles: the number of draws of other latents to average over.
    :raises ValueError: at a step, naming the site, for a family without projections or a likelihood not Gaussian in f.
    """

    def __init__(self, num_particles: int = 1, **kwargs: Any) -> None:
        super().__init__(num_particles=num_particles, **kwargs)

    def _bound(self, guide: AutoSparseGP, wrapped: Callable, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        facts = guide.facts
        nodes = dict.fromkeys(facts.gps, guide.like.new_zeros(()))
        model_trace, guide_trace, _ = guide.at_nodes(AtNodes(guide, nodes=nodes), wrapped, args, kwargs)
        # Σ log p(Sᵀy) of the GP sites, lemma S2, log p(y) of sites that are not after one, − Σ KL of other latents
        total = log_density_minus_kl(model_trace, guide_trace, {*facts.gps, *facts.downstream})
        for name in facts.gps:
            q = posterior_at(guide_trace, name)
            if not isinstance(q.basis, ProjectedFeatures) or not facts.gps[name].is_quadratic:
                raise ValueError(
                    "ProjectedLikelihood is for GP sites of the family ComputationAware whose likelihood is Gaussian "
                    f"in the function values; site {name!r} is not. Use TraceQuadrature_ELBO."
                )
            total = total + weighted_sum(q.coefficients.log_evidence(q.basis.actions.log_gram), model_trace.nodes[name])
        return total


def finite(what: str, loss: Tensor, guide: Callable, args: tuple, kwargs: dict[str, Any]) -> float:
    """An objective's value; raise if it is NaN or infinite, naming the sites."""
    value, unwrapped = torch_item(loss), cast(Any, poutine.unwrap(guide))
    if not math.isfinite(value):
        raise ValueError(
            f"{what} is {'NaN' if math.isnan(value) else 'infinite'}: {explain_nan(unwrapped, args, kwargs)}. The "
            "parameters are as they were before this step; look for NaN in the data (leave missing rows out with "
            "poutine.mask), data outside of a density's support, or too large a learning rate."
        )
    return value


class _Module(ELBOModule):
    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        _ = own_guide(self.model, self.guide, "TraceQuadrature_ELBO").facts  # raises before the guide's first call
        return super().named_parameters(*args, **kwargs)


def own_guide(model: Callable, guide: Any, objective: str) -> AutoSparseGP:
    """The guide without handlers; raise if it is none of GP sites, or of another model."""
    unwrapped: Any = poutine.unwrap(guide)
    its = getattr(unwrapped, "model", model)
    faults = {
        f"{objective} needs an AutoSparseGP guide, got {type(unwrapped).__name__}. It guides all of a model's sites; "
        f"{OTHER_LATENTS}.": not isinstance(unwrapped, AutoSparseGP),
        f"{objective} runs the guide's own model; it was given another, or one under a handler. Wrap the model before "
        "it goes to AutoSparseGP, wrap the guide, or open the handler around the step.": model != its,
    }
    refuse(faults)
    return unwrapped
