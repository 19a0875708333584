"""An evidence lower bound with function values integrated by Gauss-Hermite quadrature."""

from __future__ import annotations

import copy
import itertools
import math
from collections.abc import Callable, Collection, Iterator
from contextlib import suppress
from functools import partial
from typing import Any, Optional, Union
from weakref import WeakKeyDictionary

import numpy as np
import pyro
import torch
from pyro import poutine
from pyro.distributions.util import scale_and_mask
from pyro.infer import ELBO
from pyro.infer.elbo import ELBOModule
from pyro.infer.util import torch_item
from pyro.poutine.util import site_is_subsample
from torch import Tensor
from torch.distributions import kl_divergence

from ..gaussians.sites import KeptSites
from ..guide import AutoSparseGP
from ..numerics.linalg import flags_kept
from ..posterior.drawing import OTHER_LATENTS, NodeSite
from ..program.dependence import COUPLED, DATAWISE
from ..program.facts import Structure
from ..program.traces import RandomState, held_trace
from ..warned import warn_once
from .compiled import BACKENDS, CompiledSteps
from .expected import Expectations, find_expectations, joint_or_marginal_draw, posterior_at

__all__ = ["TraceQuadrature_ELBO", "quadrature_axes"]

_MAX_AXES = 2
_RISE = 100  # of a loss, over its lowest or what it has come down by, that is told of


def quadrature_axes(structure: Structure) -> dict[str, tuple[int, ...]]:
    """The axes of the product grid on which each GP site is integrated; a site that must be drawn is left out.

    Sites that meet in one term of a density (a mean and a log-noise) get axes of their own, sites that never
    meet share one. An inner layer of a deep GP and values that the model couples across inputs are drawn, and
    so is a group that would need more than two axes, and sites of one posterior that meet across rows.
    """
    width = {}
    for name, kind in structure.dependence.items():
        if name in structure.inner or kind == COUPLED or not structure.meets_by_rows(name):
            continue
        outputs = int(np.prod(structure.gps[name]["batch_shape"], dtype=int))
        width[name] = outputs if kind == DATAWISE else 1
    meets: dict[str, set[str]] = {name: set() for name in width}
    for f, g in structure.interactions:
        if f in width and g in width:
            meets[f].add(g)
            meets[g].add(f)
    for name in width:  # sites of one posterior are correlated even where a third stands between them
        meets[name] |= (set(structure.company(name)) & set(width)) - {name}
    axes: dict[str, tuple[int, ...]] = {}
    for name in width:
        taken = {axis for other in meets[name] if other in axes for axis in axes[other]}
        free = (axis for axis in itertools.count() if axis not in taken)
        axes[name] = tuple(itertools.islice(free, width[name]))
    too_many = {name for name, used in axes.items() if max(used) >= _MAX_AXES}
    while True:  # a group is drawn as a whole
        spread = {other for name in too_many for other in meets[name]} - too_many
        if not spread:
            return {name: used for name, used in axes.items() if name not in too_many}
        too_many |= spread


class TraceQuadrature_ELBO(ELBO):
    """The evidence lower bound with KL terms in closed form and function values integrated by quadrature.

    ELBO = Σ E_q[log p(y | f, ·)] − Σ KL. The expectation of every downstream log density over a GP site's
    marginals N(m, v) is Gauss-Hermite quadrature at m + √v·t_k: two nodes are exact for a Gaussian likelihood.
    Two GP sites that meet in one density use the product grid, turned to each row's covariance if they have one
    posterior; beyond two, and for an inner layer of a deep GP, values are drawn. The model runs once, under
    :func:`torch.func.vmap` over the nodes, so that it sees f as ``(N,)``. Other latents are one draw a particle: the
    bound is deterministic if there are none.

    A distribution that brings its own expectation over normal parameters (a method ``expected_log_prob(value,
    variance)``, see :class:`~pyro_sparsegp.inference.expected.ExpectedLogProb`) is asked for that instead, however many
    function values it takes: :class:`~pyro_sparsegp.distributions.RobustMax` does.

    >>> elbo = TraceQuadrature_ELBO(num_nodes=20)

    With ``compile=True`` a step of training, ``svi.step``, is traced to a graph of torch's operations, forward and
    backward, when arguments of its kind (shapes, dtypes, numbers) come for the second time, and replayed without Python
    from then on; ``compile="inductor"`` has :func:`torch.compile` make code of the graph, which takes a C++ compiler
    and up to a minute, and is quicker still. Losses, gradients and errors are those without. What the model reads
    besides (parameters, buffers, tensors and numbers in closures, globals, attributes) is looked up or compared at each
    step. What a trace can't hold warns once, says why, and runs as without: families on sites, control flow by values,
    NumPy's random numbers, handlers around the step or the guide, batch normalisation. Of anything else that changes
    from step to step beyond reach, such as a file, only a check by a step that is not compiled, at the 1st, 2nd, 4th,
    8th, … replay, tells.

    :param num_nodes: K, nodes an axis.
    :param num_particles: draws of other latents, averaged.
    :param compile: ``True`` or ``"inductor"``: steps of training are compiled.
    """

    def __init__(
        self, num_nodes: int = 20, num_particles: int = 1, compile: Union[bool, str] = False, **kwargs: Any
    ) -> None:
        if not isinstance(num_nodes, int) or num_nodes < 1:
            raise ValueError(f"TraceQuadrature_ELBO's num_nodes must be a whole number of at least 1, got {num_nodes}")
        if kwargs.get("vectorize_particles"):
            raise ValueError(
                "TraceQuadrature_ELBO does not take vectorize_particles=True: function values are event dimensions "
                "that become batch dimensions of the data. Use vectorize_particles=False, or more num_nodes."
            )
        if compile not in BACKENDS:
            raise ValueError(f"TraceQuadrature_ELBO's compile must be True, False or 'inductor', got {compile!r}")
        super().__init__(num_particles=num_particles, **kwargs)
        self.num_nodes, self.compile = num_nodes, compile
        self._settled = False  # no other way through a model is tried than the one that was found
        self._compiled: WeakKeyDictionary[AutoSparseGP, CompiledSteps] = WeakKeyDictionary()
        nodes, weights = np.polynomial.hermite_e.hermegauss(num_nodes)  # for the weight exp(−t²/2)
        self._nodes = torch.from_numpy(nodes)
        self._weights = torch.from_numpy(weights / weights.sum())
        self._placed: dict[Any, tuple[Tensor, Tensor]] = {}
        self._levels: WeakKeyDictionary[AutoSparseGP, tuple[float, float]] = WeakKeyDictionary()
        self._ways: WeakKeyDictionary[AutoSparseGP, int] = WeakKeyDictionary()
        self._expectations: WeakKeyDictionary[AutoSparseGP, Optional[Expectations]] = WeakKeyDictionary()

    def loss(self, model: Callable, guide: Any, *args: Any, **kwargs: Any) -> float:
        """Minus the bound, in nats.

        :raises ValueError: if it is NaN or infinite, naming the sites.
        """
        with torch.no_grad():
            loss = self.differentiable_loss(model, guide, *args, **kwargs)
        return self._value(loss, guide, args, kwargs)

    def loss_and_grads(self, model: Callable, guide: Any, *args: Any, **kwargs: Any) -> float:
        """Minus the bound, in nats; its gradient is added to the parameters'.

        Warns once if it has risen a hundredfold where q is not whitened.

        :raises ValueError: if the bound is NaN or infinite, naming the sites, before anything reaches the parameters.
        """
        unwrapped: Any = poutine.unwrap(guide)
        value = self._replayed(model, guide, unwrapped, args, kwargs) if self.compile else None
        if value is None:
            loss, value = self._evaluated(model, guide, unwrapped, args, kwargs)
            if loss.requires_grad:
                loss.backward(retain_graph=self.retain_graph)
                self._check_gradients(unwrapped)
        self._watch(unwrapped, value)
        return value

    def _evaluated(
        self, model: Callable, guide: Any, unwrapped: Any, args: tuple, kwargs: dict[str, Any]
    ) -> tuple[Tensor, float]:
        """The loss, as a tensor and as a number, which is read together with the flags of its factorisations.

        Where one failed, it is evaluated anew, from the same state and with the same random numbers, and each flag is
        looked at, as it is in a first call.
        """
        if unwrapped in self._expectations:
            _guide_of(model, guide)
            unwrapped.prepare(*args, **kwargs)
            sites = [module.sites for module in unwrapped.site_modules().values()] if unwrapped.on_sites else ()
            kept = [(part, part.memory) for part in sites if isinstance(part, KeptSites)]
            data, state = unwrapped.data, RandomState(unwrapped.like)
            with suppress(RuntimeError, ValueError):  # which may come of a factor that is none
                with flags_kept() as flags:
                    loss = self._minus_bound(unwrapped, guide, args, kwargs)
                failed = [flag.any().to(loss.dtype) for flag in flags]
                read: list[float] = torch.stack([loss.detach(), *failed]).tolist()
                if not any(read[1:]) and math.isfinite(read[0]):
                    return loss, read[0]
            state.restore()
            for part, memory in kept:
                if unwrapped.data is data:  # else they followed the rows into another order
                    part.memory = memory
        loss = self.differentiable_loss(model, guide, *args, **kwargs)
        return loss, self._value(loss, guide, args, kwargs)

    def _replayed(
        self, model: Callable, guide: Any, unwrapped: Any, args: tuple, kwargs: dict[str, Any]
    ) -> Optional[float]:
        """The loss of a compiled step, if this one is."""
        if not torch.is_grad_enabled() or not isinstance(unwrapped, AutoSparseGP) or model != unwrapped.model:
            return None
        if unwrapped not in self._compiled:
            plain = copy.copy(self)
            plain._settled, plain._compiled = True, WeakKeyDictionary()
            self._compiled[unwrapped] = CompiledSteps(plain.differentiable_loss, self.compile == "inductor")
        return self._compiled[unwrapped].step(model, guide, unwrapped, args, kwargs)

    def _watch(self, guide: Any, value: float) -> None:
        """Warn once if the loss has risen a hundredfold where q is in coordinates in which Adam's steps overshoot."""
        first, lowest = self._levels.get(guide, (value, value))
        self._levels[guide] = first, min(lowest, value)
        if value - lowest <= _RISE * max(abs(lowest), first - lowest, 1.0):
            return
        families = {name: spec["family"] for name, spec in guide.structure.gps.items()}
        families = {name: family for name, family in families.items() if not family.get("natural")}
        found = {name: "whiten=False" for name, family in families.items() if family.get("whiten") is False}
        found |= {name: "num_columns=" for name, family in families.items() if family.get("num_columns") is not None}
        if found:
            which = ", ".join(f"{name!r} ({how})" for name, how in found.items())
            warn_once(
                guide.warned,
                "risen",
                next(iter(found)),
                f"the loss has risen from {lowest:.4g} to {value:.4g}. The posterior of GP site {which} is not "
                "whitened: the curvature of its divergence is that of an inverse kernel matrix, over which Adam's "
                "steps can overshoot without end. Take natural steps, a far smaller rate, or a whitened family.",
                stacklevel=3,
            )

    def _check_gradients(self, guide: Any) -> None:
        named = [(name, p.grad) for name, p in guide.named_parameters() if p.grad is not None]
        if not named or torch.stack([grad.sum() for _, grad in named]).isfinite().all():
            return
        broken = [name for name, grad in named if not grad.isfinite().all()]
        if not broken:
            return  # a sum that overflows
        for parameter in guide.parameters():
            parameter.grad = None  # the next step adds to it
        raise ValueError(
            f"the bound is finite, its gradient is not, at {', '.join(broken)}. The parameters are as they were before "
            "this step. A likely cause is a torch.where or a clamp in the model that hides an infinite branch (its "
            "gradient is 0 times infinity): keep that branch's input harmless too; or too large a learning rate."
        )

    def _value(self, loss: Tensor, guide: Any, args: tuple, kwargs: dict[str, Any]) -> float:
        value = torch_item(loss)
        if not math.isfinite(value):
            unwrapped: Any = poutine.unwrap(guide)
            why = unwrapped.explain_nan(*args, **kwargs)
            kind = "NaN" if math.isnan(value) else "infinite"
            raise ValueError(
                f"the bound is {kind}: {why}. The parameters are as they were before this step; look for NaN in the "
                "data (leave missing rows out with poutine.mask), too large a learning rate, or a density without "
                "support here."
            )
        return value

    def __call__(self, model: Any, guide: Any) -> ELBOModule:
        """The loss as a module of the model's and the guide's parameters, called with the model's arguments.

        Its parameters are not to be had before the guide's first call, or state, makes the guide's.
        """
        return _Module(model, guide, self)

    def differentiable_loss(self, model: Callable, guide: Any, *args: Any, **kwargs: Any) -> Tensor:
        """Minus the bound as a scalar tensor."""
        unwrapped = _guide_of(model, guide)
        unwrapped.prepare(*args, **kwargs)
        return self._minus_bound(unwrapped, guide, args, kwargs)

    def _minus_bound(self, unwrapped: AutoSparseGP, guide: Any, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        """As :meth:`differentiable_loss`, of a guide that is prepared."""
        bounds = [self._bound(unwrapped, guide, args, kwargs) for _ in range(self.num_particles)]
        return -sum(bounds[1:], bounds[0]) / self.num_particles

    def _get_trace(self, model: Callable, guide: Any, args: Any, kwargs: Any) -> Any:
        raise TypeError("TraceQuadrature_ELBO runs the model once for all nodes; it has no single trace")

    def _bound(self, guide: AutoSparseGP, wrapped: Callable, args: tuple, kwargs: dict[str, Any]) -> Tensor:
        assert guide.structure is not None
        if guide not in self._expectations:
            warn = partial(warn_once, guide.warned, "expectation not used", stacklevel=6)
            self._expectations[guide] = find_expectations(guide, args, kwargs, warn)
        expected = self._expectations[guide]
        structure = guide.structure if expected is None else expected.rest
        axes = quadrature_axes(structure)
        drawn = [
            name
            for name, kind in structure.dependence.items()
            if name not in axes and name not in structure.inner and kind != COUPLED and structure.meets_by_rows(name)
        ]
        if drawn:
            warn_once(
                guide.warned,
                "integrated by draws",
                ", ".join(drawn),
                f"GP sites {', '.join(drawn)} meet in densities of more than {_MAX_AXES} function values: these are "
                "integrated by Monte Carlo, one draw a particle, not by quadrature.",
                stacklevel=5,
            )
        num_axes = 1 + max((axis for used in axes.values() for axis in used), default=-1)

        def at(node: tuple[Tensor, ...]) -> dict[str, Tensor]:
            return {
                name: node[used[0]] if len(used) == 1 else torch.stack([node[axis] for axis in used])
                for name, used in axes.items()
            }

        def once(*node: Tensor) -> Tensor:
            return _log_density_minus_kl(*guide.at_nodes(at(node), wrapped, args, kwargs)[:2])

        def run() -> tuple[poutine.Trace, poutine.Trace, dict[str, Tensor]]:
            zeros = at((guide.like.new_zeros(()),) * num_axes)
            if expected is not None:
                zeros |= {name: guide.like.new_zeros(()) for name in expected.gps if name not in axes}
            return guide.at_nodes(zeros, wrapped, args, kwargs)

        def held_at(
            model_trace: poutine.Trace, guide_trace: poutine.Trace, values: dict[str, Tensor]
        ) -> Callable[..., Tensor]:
            done: Collection[str] = () if expected is None else expected.sites
            for name in () if expected is None else expected.gps:
                if name in structure.dependence and name not in axes:
                    coupled = structure.dependence[name] == COUPLED
                    values = values | {name: joint_or_marginal_draw(posterior_at(guide_trace, name), coupled)}

            def held(*node: Tensor) -> Tensor:
                moved = {}
                for name, z in at(node).items():
                    site: NodeSite = posterior_at(guide_trace, name)
                    moved[name] = site.at_node(z).rsample()
                trace = held_trace(guide.model, values | moved, args, kwargs, model_trace)
                return _log_density_minus_kl(trace, guide_trace, done)

            return held

        def twice() -> Callable[..., Tensor]:
            # The guide runs as it is; only the model's second run, with all values held, sees the nodes.
            return held_at(*run())

        if expected is not None and expected.values is not None:
            with pyro.validation_enabled(False):
                at_means: dict[str, Optional[Tensor]] = dict.fromkeys(expected.gps)
                model_trace, guide_trace, values = guide.at_nodes(at_means, wrapped, args, kwargs)
                if expected.hold(model_trace):
                    total = expected.total(guide.model, (model_trace, guide_trace), values, args, kwargs)
                    return total + _log_density_minus_kl(model_trace, guide_trace, expected.sites)
            self._expectations[guide] = None
            return self._bound(guide, wrapped, args, kwargs)
        if expected is not None:
            model_trace, guide_trace, values = run()
            total = expected.total(guide.model, (model_trace, guide_trace), values, args, kwargs)
            if not structure.dependence:  # nothing else depends on function values
                return total + _log_density_minus_kl(model_trace, guide_trace, expected.sites)
            held = held_at(model_trace, guide_trace, values)
            return total + self._integrated(guide, once, lambda: held, num_axes, outside=True)
        return self._integrated(guide, once, twice, num_axes)

    def _integrated(
        self, guide: AutoSparseGP, once: Callable, twice: Callable, num_axes: int, outside: bool = False
    ) -> Tensor:
        """The bound's terms summed over the product grid.

        :param outside: whether the guide has run, so that only the held model is left.
        """
        if not num_axes:
            return twice()() if outside else once()
        nodes, weights = self._rule(guide)
        values = self._at_all_nodes(guide, once, twice, nodes, num_axes, outside)
        for _ in range(num_axes):
            values = values @ weights.to(values.dtype)  # priors of Python numbers have the default dtype
        return values

    def _rule(self, guide: AutoSparseGP) -> tuple[Tensor, Tensor]:
        like = guide.like
        key = like.dtype, like.device
        if key not in self._placed:
            self._placed[key] = self._nodes.to(like), self._weights.to(like)
        return self._placed[key]

    def _at_all_nodes(
        self, guide: AutoSparseGP, once: Callable, twice: Callable, nodes: Tensor, num_axes: int, outside: bool
    ) -> Tensor:
        """The bound's terms on the product grid, ``(K,) * num_axes``.

        torch.func.vmap refuses some programs: those with an old-style autograd function or ``.item()`` on their way
        to f run once unmapped and once mapped; those that do so after f run once for each node.
        """
        ways = [
            lambda: _mapped(once, nodes, num_axes),
            lambda: _mapped(twice(), nodes, num_axes),
            lambda: _one_by_one(twice(), nodes, num_axes),
        ]
        # Families on sites read the model while the guide runs: that run stays outside of vmap.
        first = self._ways.get(guide, 1 if guide.on_sites or outside else 0)
        if self._settled:
            return ways[first]()
        for way in range(first, len(ways)):
            state = torch.get_rng_state()
            try:
                values = ways[way]()
            except (RuntimeError, TypeError, ValueError) as error:
                if way == len(ways) - 1:
                    raise  # not vmap's doing
                torch.set_rng_state(state)
                refusal = str(error).splitlines()[0]
                continue
            self._ways[guide] = way
            if way == 2 and way > first:
                warn_once(
                    guide.warned,
                    "vmap refused",
                    ", ".join(guide.structure.gps) if guide.structure else "",
                    "torch.func.vmap refuses what this model does with function values; it now runs once for each "
                    f"quadrature node, {self.num_nodes**num_axes} times a step: {refusal}",
                    stacklevel=5,
                )
            return values
        raise RuntimeError("no way of evaluating the bound is left")


class _Module(ELBOModule):
    def named_parameters(self, *args: Any, **kwargs: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
        guide = poutine.unwrap(self.guide)
        if isinstance(guide, AutoSparseGP) and guide.structure is None:
            raise ValueError(
                "the guide has no parameters before its first call: call it with the data, guide(x, y), before an "
                "optimiser asks TraceQuadrature_ELBO()(model, guide) for them."
            )
        return super().named_parameters(*args, **kwargs)


def _guide_of(model: Callable, guide: Any) -> AutoSparseGP:
    """The guide without handlers.

    :raises ValueError: if it is none of GP sites, or of another model.
    """
    unwrapped = poutine.unwrap(guide)
    if not isinstance(unwrapped, AutoSparseGP):
        raise ValueError(
            f"TraceQuadrature_ELBO needs an AutoSparseGP guide, got {type(unwrapped).__name__}. It guides all of a "
            f"model's sites; {OTHER_LATENTS}."
        )
    if model != unwrapped.model:
        raise ValueError(
            "TraceQuadrature_ELBO runs the guide's own model; it was given another, or one under a handler. Wrap "
            "the model before it goes to AutoSparseGP, wrap the guide, or open the handler around the step."
        )
    return unwrapped


def _mapped(total: Callable, nodes: Tensor, num_axes: int) -> Tensor:
    for axis in range(num_axes):
        in_dims = tuple(0 if i == num_axes - 1 - axis else None for i in range(num_axes))
        total = torch.func.vmap(total, in_dims=in_dims, randomness="same")
    with pyro.validation_enabled(False):
        return total(*[nodes] * num_axes)


def _one_by_one(total: Callable, nodes: Tensor, num_axes: int) -> Tensor:
    values = [total(*node) for node in itertools.product(nodes, repeat=num_axes)]
    return torch.stack(values).reshape([len(nodes)] * num_axes)


def _log_density_minus_kl(model_trace: poutine.Trace, guide_trace: poutine.Trace, skip: Collection[str] = ()) -> Tensor:
    """The bound's terms at the traces' values, summed: log densities of what is observed, minus divergences."""
    total: Any = 0.0
    site: Any
    for name, site in model_trace.nodes.items():
        if site["type"] != "sample" or name in skip or site["mask"] is False:
            continue
        if name not in guide_trace.nodes:
            if site_is_subsample(site):
                continue
            total = total + weighted_sum(site["fn"].log_prob(site["value"], *site["args"], **site["kwargs"]), site)
            continue
        total = total - divergence(guide_trace.nodes[name], site)
    for name, site in guide_trace.nodes.items():  # auxiliary sites of an overridden get_posterior
        if site["type"] == "sample" and name not in model_trace.nodes:
            total = total - weighted_sum(site["fn"].log_prob(site["value"]), site)
    return total


def divergence(guide_site: Any, model_site: Any) -> Tensor:
    """KL of a latent site's posterior from its prior, or an estimate of it from the draw, with its scale and mask."""
    q, p = guide_site["fn"], model_site["fn"]
    if q is p:  # drawn from the model
        return torch.zeros(())
    if not q.has_rsample:
        raise ValueError(
            f"site {guide_site['name']!r} has a posterior without reparameterised draws, {q}; TraceQuadrature_ELBO has "
            "no gradient for it. Use a reparameterised posterior, or enumerate and sum the site out in the model."
        )
    try:
        value = kl_divergence(q, p)
    except NotImplementedError:
        value = q.log_prob(guide_site["value"]) - p.log_prob(guide_site["value"])
    return weighted_sum(value, guide_site)


def weighted_sum(value: Tensor, site: Any) -> Tensor:
    """The sum of a site's terms, with its scale and mask."""
    return scale_and_mask(value, site["scale"], site["mask"]).sum()
