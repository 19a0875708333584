"""Optimisers: Adam with rates that fall to the end, and steps that several processes take together."""

import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Optional, Union

import pyro
import torch
from pyro import poutine
from pyro.infer import SVI
from pyro.infer.util import zero_grads
from pyro.optim import PyroOptim
from torch import Tensor
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ..gaussians.steps import steppers
from ..guide import AutoSparseGP
from ..numerics.processes import Workers, joined, put_gradients

_WARM = 3  # steps over which rates rise, while Adam's second moments are of few gradients
PLATEAU = 0.4  # share of the steps in which rates stay
_LAST = 0.01  # share of a rate at the end
_POINTS = 256  # inducing inputs of a set from which on each takes smaller steps
_NETWORK = 0.2  # share of the rate that a network's biases and other vectors take
_UNIQUE = re.compile(r"_[0-9a-f]{12}(?=\.|$)")
_INPUTS = re.compile(r"\.gps\..*\.basis\.(.*\.)?inputs_\d+$")


def falling(step: int, steps: int) -> float:
    """The share of its rate that a step takes: 1 over the first part, then by a cosine to a hundredth."""
    # 1 up to t = 0, then 0.01 + 0.99 · ½(1 + cos πt), where t is 0 after the first two fifths and 1 at the end
    past = (step / max(steps, 1) - PLATEAU) / (1 - PLATEAU)
    return _LAST + (1 - _LAST) * 0.5 * (1 + math.cos(math.pi * min(max(past, 0.0), 1.0)))


class FallingAdam(PyroOptim):
    """Adam (Kingma and Ba, 2015) whose rates stay for the first part of the steps and fall by a cosine to a hundredth.

    Noise of mini-batches moves parameters in proportion to the rate: a fit whose rate stays ends up beside the
    optimum, one whose rate falls at it (Robbins and Monro, 1951; the cosine is of Loshchilov and Hutter, 2017).

    :param lr: of all parameters, before it falls. Of the M > 256 inducing inputs of a set √(256/M) of it: features of
        a row are moved by the sum of their steps, which are noise of the batch. The n weights of a network's unit,
        which start at some 1/√n, take 1/√n of it, its vectors a fifth.
    """

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__(torch.optim.Adam, {"lr": lr, "betas": (0.9, 0.99)})
        self._factor = 1.0

    def at(self, step: int, steps: int) -> None:
        """Set the rates of the step with this number, of so many."""
        self._factor = min(1.0, (step + 1) / _WARM) * falling(step, steps)
        for optimiser in self.optim_objs.values():
            (group,) = optimiser.param_groups
            group["lr"] = self._factor * group["initial_lr"]

    def _get_optim(self, param: Any) -> Any:
        optimiser, store, share = super()._get_optim(param), pyro.get_param_store(), 1.0
        name = store.param_name(param) or ""
        module, registered, _ = name.partition("$$$")
        beside = [p for key, p in store.named_parameters() if registered and key.startswith(module + registered)]
        if _INPUTS.search(name):
            share = math.sqrt(_POINTS / max(param.shape[-2], _POINTS))
        # A number beside a network, a module with weights in matrices, is a hyperparameter.
        elif param.dim() and any(p.dim() > 1 and len(p) > 1 for p in beside):
            share = param[0].numel() ** -0.5 if param.dim() > 1 else _NETWORK
        (group,) = optimiser.param_groups
        # One kernel for the whole update: half the time of a parameter's step.
        group["fused"] = param.device.type in ("cpu", "cuda")
        group["initial_lr"] = share * group["lr"]
        group["lr"] = self._factor * group["initial_lr"]
        return optimiser


@dataclass
class Update:
    """A step of Adam as tensor operations alone, in place, for parameters that have taken some."""

    like: Tensor
    params: Sequence[Tensor] = ()
    optimisers: Sequence[Any] = ()  # of one parameter each

    def __post_init__(self) -> None:
        like = self.like
        self.states = [one.state[p] for one, p in zip(self.optimisers, self.params)]
        self.kept = [tuple(state.values()) for state in self.states]
        # CUDA's kernel reads rates in float32
        wide = torch.float32 if like.is_cuda else torch.float64
        self.rates = [torch.zeros((), dtype=wide, device=like.device) for _ in self.params]
        self.held = torch.zeros((), dtype=torch.float32, device=like.device)

    def fits(self) -> bool:
        """Whether the optimisers still have these states."""
        pairs = zip(self.optimisers, self.params, self.kept)
        return all(a is b for one, p, kept in pairs for a, b in zip(one.state[p].values(), kept))

    def begin(self, takes: bool) -> None:
        """Read the rates of the next step, which is taken or only tried."""
        self.held.fill_(not takes)
        for rate, one in zip(self.rates, self.optimisers):
            rate.fill_(one.param_groups[0]["lr"])

    def __call__(self, grads: list[Tensor], failed: Tensor) -> None:
        held = torch.maximum(self.held, failed.to(self.held))
        for p, grad, state, rate, one in zip(self.params, grads, self.states, self.rates, self.optimisers):
            first, second, step, group = state["exp_avg"], state["exp_avg_sq"], state["step"], one.param_groups[0]
            step.add_(1 - held)
            options = {name: group[name] for name in ("weight_decay", "eps", "amsgrad", "maximize")}
            betas = dict(zip(("beta1", "beta2"), group["betas"]))
            torch._fused_adam_([p], [grad], [first], [second], [], [step], lr=rate, found_inf=held, **betas, **options)  # type: ignore


def update_of(optim: Optional[PyroOptim], params: Sequence[Tensor], like: Tensor) -> Update:
    """The update of these parameters, if the optimiser has moved all by its fused kernel on one device; or of none."""
    known = [getattr(optim, "optim_objs", {}).get(p) for p in params]
    pairs = zip(params, known)
    moved = [one and p.device == like.device and one.state and one.param_groups[0].get("fused") for p, one in pairs]
    return Update(like, params, known) if all(moved) else Update(like)


def follow_rates(guide: AutoSparseGP, optim: Union[PyroOptim, Optimizer, LRScheduler]) -> None:
    """Scale natural steps by the ratio of an optimiser's rate to the largest that it has had.

    A schedule changes the rates of the optimiser's own parameters, and not the rates of natural steps.
    :func:`fit` calls this before each step; call it after each step of your own loop:

    >>> svi.step(x, y), scheduler.step(), follow_rates(guide, scheduler)  # doctest: +SKIP

    :param guide: the guide, after its first call.
    :param optim: an optimiser with rates that change, such as a ``PyroLRScheduler`` or ``ClippedAdam`` with ``lrd``; or
        one of ``torch.optim``, or a scheduler of it, in a loop of ``loss_and_grads``.
    """
    each: Any = getattr(optim, "optim_objs", {"": optim}).values()  # of Pyro's one for each parameter
    optimisers = [getattr(one, "optimizer", one) for one in each]
    if not all(isinstance(one, Optimizer) for one in optimisers):
        raise ValueError(f"follow_rates reads rates of an optimiser or a scheduler: optim is {type(optim).__name__}")
    groups = [(group, one.defaults) for one in optimisers for group in one.param_groups]
    for group, defaults in groups:  # a schedule that begins below its rate notes this one in the group
        before = group.get("largest_lr", group.get("initial_lr", defaults["lr"]))
        group["largest_lr"] = max(float(before), float(group["lr"]))
    found = [float(group["lr"]) / group["largest_lr"] for group, _ in groups if group["largest_lr"] > 0]
    if found:  # an optimiser that has taken no step knows no parameter
        share_rates(guide, max(found))


def share_rates(guide: AutoSparseGP, share: float) -> None:
    """Let natural steps take this share of their rates."""
    for module in steppers(guide):
        module.share = share


def shared_step(svi: SVI, *args: object, **kwargs: object) -> float:
    """A step of SVI by the gradients of all processes' batches joined, within :func:`sharing`, and its loss, of them
    all; natural steps are by the sums of all of them, too.
    """
    with poutine.trace(param_only=True) as capture:
        loss = svi.loss_and_grads(svi.model, svi.guide, *args, **kwargs)
    sites: Any = capture.trace.nodes
    parameters = list(dict.fromkeys(site["value"].unconstrained() for site in sites.values()))
    put_gradients(parameters, joined)
    svi.optim(parameters)
    zero_grads(parameters)
    return float(joined(torch.tensor(loss, dtype=torch.float64))[0])


def agree(guide: AutoSparseGP, workers: Workers) -> None:
    """Give a guide and the model's parameters in Pyro's store the values that they have in the first process."""
    local = guide.core.facts.local_latents if workers.num > 1 else ()
    if local:  # whose values processes would mix: test_distributed.py::test_latents_of_rows_are_refused
        raise ValueError(
            f"several processes do not take latents inside plates: site {local[0]!r} has a value for each row, and "
            "each process has other rows. Train in one process."
        )
    own = {id(p) for p in guide.parameters()}
    # By names without those of modules.unique_name, which differ between processes.
    named = sorted(pyro.get_param_store().named_parameters(), key=lambda pair: _UNIQUE.sub("", pair[0]))
    workers.agree([*guide.parameters(), *guide.buffers(), *(p for _, p in named if id(p) not in own)])
