"""One verb for prediction: posterior draws of every site at new inputs, from a guide or from MCMC."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Optional, Union

import torch
from pyro import poutine
from pyro.infer import MCMC
from pyro.poutine.messenger import Messenger
from pyro.poutine.reparam_messenger import ReparamHandler
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from .guide import AutoSparseGP
from .numerics.linalg import NumericalWarning
from .process import GaussianProcess
from .program.groups import grouped, plate_sizes, warn_of_groups
from .program.traces import as_process, is_observation, whole_plates
from .warned import Warned, warn_once
from .whitening import Whitening, unwhiten

__all__ = ["predict"]

Samples = Mapping[str, Tensor]


@torch.no_grad()
def predict(
    model: Callable,
    result: Union[AutoSparseGP, MCMC, Samples],
    *args: Any,
    num_samples: Optional[int] = None,
    joint: bool = True,
    data: Optional[tuple] = None,
    **kwargs: Any,
) -> dict[str, Tensor]:
    """Posterior draws of every site of the model at new inputs.

    Function values come from the sparse posterior of a guide, or, for MCMC draws of f at the training inputs,
    from the process conditioned on them (:meth:`GaussianProcess.given`). Latents under a plate that holds data
    are drawn from the model; subsampling is off. A :class:`~pyro_sparsegp.NumericalWarning` counts
    the transitions of an ``MCMC`` that diverged.

    :param model: the model. Under a guide it may differ from the guide's in what follows the latent sites.
    :param result: a fitted guide, an ``MCMC`` that has run, or its samples, each ``(S, ...)``. MCMC may have run
        on the model under :class:`~pyro_sparsegp.Whitening`.
    :param args: the model's arguments at the new inputs, observations left out (``None``).
    :param num_samples: the number of draws of a guide, by default 100; MCMC has as many as its samples.
    :param joint: draw a guide's function values jointly, in O(N³) a draw, or independently of each other.
    :param data: the training arguments, ``(x, y)``, where ``result`` is a mapping of samples.
    :param kwargs: the model's further arguments.
    :returns: by site, ``(S, ...)``; function values are ``(S, N)``.
    :raises ValueError: where ``result`` is none of these, or lacks the training data; where the model holds data of
        other rows.
    """
    if num_samples is not None and (
        isinstance(num_samples, bool) or not isinstance(num_samples, int) or num_samples < 1
    ):
        raise ValueError(f"num_samples must be a whole number of at least 1, got {num_samples!r}")
    if isinstance(result, AutoSparseGP):
        draws = list(_from_guide(model, result, 100 if num_samples is None else num_samples, joint, args, kwargs))
    else:
        samples, (old_args, old_kwargs) = _samples_and_data(result, data)
        model = bare_model(model)
        available = len(next(iter(samples.values())))
        if num_samples is not None and num_samples > available:
            raise ValueError(f"num_samples is {num_samples}, the MCMC result has {available} draws")
        draws, warned = [], Warned()
        for s in range(available)[: num_samples or available]:
            one = {name: value[s] for name, value in samples.items()}
            known = _Known(model, one, old_args, old_kwargs, warned)
            draws.append(known.draw(args, kwargs))
    return {name: torch.stack([draw[name] for draw in draws]) for name in draws[0]}


def _values(trace: Any) -> dict[str, Tensor]:
    return {
        name: site["value"]
        for name, site in trace.nodes.items()
        if site["type"] == "sample" and not site_is_subsample(site)
    }


def _from_guide(
    model: Callable, guide: AutoSparseGP, num: int, joint: bool, args: tuple, kwargs: dict[str, Any]
) -> Iterator[dict[str, Tensor]]:
    structure = None if model is guide.model else guide.structure
    if structure is not None:
        _require_free(model, guide, args, kwargs)
    draws, warned = guide.draws(num, *args, joint=joint, **kwargs), Warned()
    for _ in range(num):
        try:
            values = next(draws)
        except RuntimeError as error:
            _require_own_rows(guide.trace.nodes, error)
            raise
        if structure is None:
            _require_own_rows(guide.trace.nodes)
            yield values
            continue
        latent = {name: values[name] for name in (*structure.latents, *structure.gps) if name in values}
        with whole_plates():
            trace = poutine.trace(poutine.condition(model, latent)).get_trace(*args, **kwargs)
        _require_own_rows({name: site for name, site in trace.nodes.items() if name not in latent})
        _warn_of_held(guide, trace.nodes, warned)
        yield _values(trace)


def _require_free(model: Callable, guide: AutoSparseGP, args: tuple, kwargs: dict[str, Any]) -> None:
    """Raise if a model holds latents of the guide's at values of its own."""
    assert guide.structure is not None
    with torch.no_grad(), poutine.block(), whole_plates():
        trace = poutine.trace(model).get_trace(*args, **kwargs)
    for name in (*guide.structure.latents, *guide.structure.gps):
        if name in trace.nodes and trace.nodes[name]["is_observed"]:
            raise ValueError(
                f"the model given to predict holds site {name!r} at a value that the guide was not trained "
                "with: make the guide of the conditioned model, AutoSparseGP(poutine.condition(model, ...), "
                "...), and train it."
            )


def _warn_of_held(guide: AutoSparseGP, sites: Mapping[str, Any], warned: Warned) -> None:
    """Tell of latents that the guide's own model held at a value, and this one draws."""
    assert guide.structure is not None
    for name in guide.structure.rows:
        if name in sites and not sites[name]["is_observed"] and guide.is_given(name, sites[name]):
            warn_once(
                warned,
                "held",
                name,
                f"the guide was trained with site {name!r} held at a value, which the model given to predict draws "
                "from its prior, apart from all that was learned: give predict the guide's own model.",
                stacklevel=5,
            )


def _require_own_rows(sites: Mapping[str, Any], error: Optional[Exception] = None) -> None:
    """Raise if a run at new inputs observes data of other rows, those of training."""
    for name, site in sites.items():
        if not is_observation(site):
            continue
        value, shape = site["value"].shape, torch.Size(site["fn"].shape())
        if len(value) > len(shape) or any(mine not in (1, num) for mine, num in zip(value[::-1], shape[::-1])):
            raise ValueError(
                f"site {name!r} observes data of shape {tuple(value)}, and has a distribution of shape {tuple(shape)} "
                "at these inputs: to predict there, the model must hold no data of training. Have it take them as an "
                "argument, model(x, y=None), or give predict a model that holds none, with the same latents."
            ) from error


def _samples_and_data(result: Any, data: Optional[tuple]) -> tuple[Samples, tuple[tuple, dict[str, Any]]]:
    args, kwargs = data, dict[str, Any]()
    if isinstance(result, MCMC):
        if data is None:
            args, kwargs = getattr(result, "_args", None), getattr(result, "_kwargs", None) or {}
    elif not (isinstance(result, Mapping) and result and all(isinstance(value, Tensor) for value in result.values())):
        raise ValueError(
            "predict's result must be an AutoSparseGP guide, a pyro.infer.MCMC or a non-empty mapping of its samples, "
            f"got {type(result).__name__}"
        )
    if args is None:
        raise ValueError("predict needs the training arguments: pass data=(x, y), or an MCMC that has run on them")
    if isinstance(result, MCMC):
        _warn_of_divergences(result)
        result = result.get_samples()
    return result, (tuple(args), kwargs)


def divergences(result: MCMC) -> list[list[int]]:
    """The numbers of the draws whose transitions diverged, of each chain."""
    chains = getattr(result, "_diagnostics", None) or []
    return [sorted(set((chain or {}).get("divergences", []))) for chain in chains]


def _warn_of_divergences(result: MCMC) -> None:
    num = sum(map(len, divergences(result)))
    if num:
        first = next(iter(result.get_samples(group_by_chain=True).values()))
        warnings.warn(
            f"{num} of {first.shape[0] * first.shape[1]} transitions of this MCMC diverged: its draws may miss part of "
            "the posterior, and so may all that is made of them. Run it on poutine.reparam(model, config=Whitening()), "
            "with NUTS(..., init_strategy=init_to_median), more warm-up steps or a larger target_accept_prob.",
            NumericalWarning,
            stacklevel=5,
        )


def bare_model(model: Callable) -> Callable:
    """The model under any whitening, whose draws predict takes back to function values itself."""
    while isinstance(model, ReparamHandler) and isinstance(model.msngr.config, Whitening):
        model = model.fn
    return model


class _Known(Messenger):
    """Runs the model at new inputs given one MCMC draw at the training inputs."""

    def __init__(
        self,
        model: Callable,
        sample: dict[str, Tensor],
        args: tuple,
        kwargs: dict[str, Any],
        warned: Optional[Warned] = None,
    ) -> None:
        super().__init__()
        self.model, self.sample = model, sample
        self.warned = Warned() if warned is None else warned
        self.known: dict[str, tuple[Tensor, Tensor, Tensor]] = {}
        self.groups: dict[str, dict[str, int]] = {}
        self.training = True
        trace = poutine.trace(self._run).get_trace(*args, **kwargs)
        plates = {
            frame.name for site in trace.nodes.values() if is_observation(site) for frame in site["cond_indep_stack"]
        }
        self.local = {
            name
            for name, site in trace.nodes.items()
            if site["type"] == "sample" and any(frame.name in plates for frame in site["cond_indep_stack"])
        }
        self.groups = {name: plate_sizes(trace.nodes[name]) for name in grouped(trace)}
        self.training = False

    def _run(self, *args: Any, **kwargs: Any) -> None:
        with self:
            self.model(*args, **kwargs)

    def draw(self, args: tuple, kwargs: dict[str, Any]) -> dict[str, Tensor]:
        """One draw of every site at new inputs."""
        with whole_plates():
            return _values(poutine.trace(self._run).get_trace(*args, **kwargs))

    def _pyro_sample(self, msg: Any) -> None:
        name = msg["name"]
        if msg["is_observed"] or site_is_subsample(msg):
            if not self.training:
                _require_own_rows({msg["name"]: msg})
            return
        process, event_dim = as_process(msg["fn"])
        if process is not None:
            if self.training:
                msg["value"] = self._function_values(name, process)
                self.known[name] = process.x, msg["value"], process.mean
            else:
                given: Any = process.given(*self.known[name])
                msg["fn"] = given.to_event(event_dim) if event_dim else given
        elif name in self.sample and (self.training or name not in self.local):
            msg["value"] = self.sample[name]
        elif self.groups.get(name) == plate_sizes(msg):
            warn_of_groups(self.warned, name, self.groups[name])

    def _function_values(self, name: str, process: GaussianProcess) -> Tensor:
        if name in self.sample:
            return self.sample[name]
        if f"{name}_whitened" in self.sample:
            return unwhiten(process, self.sample[f"{name}_whitened"])
        raise ValueError(
            f"the samples hold no draws of GP site {name!r}, nor of {name}_whitened: {sorted(self.sample)}"
        )
