"""One verb for prediction: posterior draws of every site at new inputs, from a guide or from MCMC, whitened or not."""

from collections.abc import Callable, Mapping
from functools import partial
from itertools import zip_longest
from typing import Any, Optional, Union

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import MCMC
from pyro.infer.reparam.reparam import Reparam
from pyro.infer.reparam.strategies import Strategy
from pyro.poutine.messenger import Messenger
from pyro.poutine.reparam_messenger import ReparamHandler
from torch import Tensor

from .guide import AutoSparseGP
from .guide.draws import items_of_draws, of_draw
from .numerics.arguments import require_count
from .numerics.functions import if_known
from .numerics.linalg import solve_lower, times
from .process import GaussianProcess
from .program.checks import require_known_indices, warn_of_groups
from .program.draws import Draw, all_draws
from .program.enumeration import Enumeration
from .program.handlers import Held, given_data
from .program.structure import Role
from .program.traces import as_process, is_observation, plate_sizes, roles_beside, sample_sites, whole_plates
from .warned import Warned

Samples = Mapping[str, Tensor]
Call = tuple[tuple, dict[str, Any]]  # arguments of the model


@torch.no_grad()
def predict(
    model: Callable,
    result: Union[AutoSparseGP, MCMC, Samples],
    *args: object,
    num_samples: Optional[int] = None,
    joint: bool = True,
    data: Optional[tuple] = None,
    **kwargs: object,
) -> dict[str, Tensor]:
    """Posterior draws of every site of the model at new inputs.

    A guide's function values come from its sparse posterior. MCMC has drawn f at the training inputs, and f at new
    inputs is drawn given those values (:meth:`GaussianProcess.given`). Latents in a plate of data rows are drawn
    from the model; subsampling is off. If the program allows ``torch.func.vmap``, it runs once for up to 100 draws.

    :param model: the guide's model, or one with the same latent sites and another likelihood.
    :param result: a fitted guide, an ``MCMC`` that has run, or its samples, each ``(S, ...)``. MCMC may have run
        on the model under :class:`~pyro_sparsegp.Whitening`.
    :param args: the model's arguments at the new inputs, observations left out (``None``).
    :param num_samples: the number of draws of a guide, by default 100; MCMC gives one per sample.
    :param joint: draw a guide's function values jointly, in O(N³) a draw, or independently of each other.
    :param data: the training arguments, ``(x, y)``, if ``result`` is a mapping of samples.
    :param kwargs: the model's further arguments.
    :returns: the draws of each site, by name, ``(S, ...)``; function values are ``(S, N)``.
    :raises ValueError: if ``result`` is none of the above, or lacks the training data; or if the model itself holds
        data that do not match the new inputs.
    """
    if_known(require_count, num_samples, "num_samples")
    rows, apart = 0, True
    if isinstance(result, AutoSparseGP):
        result.prepare(*args, **kwargs)
        samples: Samples = items_of_draws(result, num_samples or 100)
        one: Callable[[Draw], Draw] = partial(_of_guide, model, result, joint, args, kwargs)
        apart, facts = result.has_random_latents, result.facts
        rows = sum(result.core.sizes.values()) if facts.classes else 0  # given which classes are drawn
    else:
        model, chains, old = sampled(model, result, None if data is None else (tuple(data), {}))
        warned = Warned()
        samples = {name: value.flatten(0, 1)[:num_samples] for name, value in chains.items()}
        have = min(map(len, samples.values()))
        if num_samples not in (None, have):
            raise ValueError(f"num_samples is {num_samples}, the MCMC result has {have} draws")
        rows = max(value[0].numel() for value in samples.values())

        def one(sample: Draw) -> Draw:
            trained = Trained(model, sample, *old, warned)
            trace = trained.at(args, kwargs)
            values = {name: site["value"] for name, site in sample_sites(trace).items()}
            return values | given_data(model, trace, args, kwargs, trained.values)

    def numbers(draw: Draw) -> int:  # of a covariance at the inputs; of features, where values are drawn singly
        most = rows + max(value.numel() for value in draw.values())
        return most * ((most if joint else 128) if apart else 1)

    with require_known_indices():
        return all_draws(one, samples, numbers)


def _of_guide(
    model: Callable, guide: AutoSparseGP, joint: bool, args: tuple, kwargs: dict[str, Any], made: Draw
) -> Draw:
    """A draw from a guide, for the guide's own model or another that follows the same latents."""
    try:
        with of_draw(made):
            values = guide.draw(*args, joint=joint, **kwargs)
    except RuntimeError as error:  # of data of training, whose shape is another
        require_own_rows(guide.trace.nodes, error)
        raise
    nodes, guide.trace = guide.trace.nodes, poutine.Trace()  # a mapped run's tensors cannot be copied
    if model is guide.model:
        require_own_rows(nodes)
        return values
    names = (*guide.facts.latents, *guide.facts.gps, *guide.facts.discrete)
    with whole_plates(), Held({name: values[name] for name in names if name in values}):
        trace = poutine.trace(model).get_trace(*args, **kwargs)
    sites = sample_sites(trace)
    # Else it is drawn from its prior: test_a_latent_that_training_held_is_not_drawn_from_its_prior_in_silence.
    here = {name: site["is_observed"] for name, site in sites.items()}
    differ = [name for name in names if here.get(name)]
    differ += [name for name in guide.facts.data if not here.get(name, True) and guide.is_given(name, sites[name])]
    if differ:
        raise ValueError(
            f"site {differ[0]!r} is held at a value in the guide's model, or in the model given to predict, and drawn "
            "in the other: give predict the guide's own model, or make the guide of the conditioned model, "
            "AutoSparseGP(poutine.condition(model, ...), ...), and train it."
        )
    require_own_rows(trace.nodes)
    return {name: site["value"] for name, site in sites.items()}


def require_own_rows(sites: Mapping[str, Any], error: Optional[Exception] = None) -> None:
    """Raise if a run at new inputs observes the data of training's rows."""
    for name, site in ((name, site) for name, site in sites.items() if is_observation(site)):
        value, shape = tuple(site["value"].shape), tuple(site["fn"].shape())
        if any(own not in (1, num) for own, num in zip_longest(value[::-1], shape[::-1], fillvalue=1)):
            raise ValueError(
                f"site {name!r} observes data of shape {value}, and has a distribution of shape {shape} at these "
                "inputs: the model must not hold the training data. Give it an argument for them, model(x, y=None), or "
                "give predict a model without data, with the same latents."
            ) from error


def sampled(model: Callable, result: object, data: Optional[Call]) -> tuple[Callable, dict[str, Tensor], Call]:
    """The model without whitening, MCMC's samples, ``(chain, draw, ...)`` each, and the training arguments."""
    # Trained takes whitened draws back to function values itself.
    while isinstance(model, ReparamHandler) and isinstance(model.msngr.config, Whitening):
        model = model.fn
    known: Any = getattr(result, "_args", None), getattr(result, "_kwargs", {})  # of MCMC alone
    match result:
        case MCMC():
            samples = result.get_samples(group_by_chain=True)
        case Mapping() if {isinstance(value, Tensor) for value in result.values()} == {True}:
            samples = {name: value[None] for name, value in result.items()}
        case _:
            raise ValueError(
                "the result must be an AutoSparseGP guide, a pyro.infer.MCMC or a non-empty mapping of its samples, "
                f"got {type(result).__name__}. The order is model, result, then the model's arguments. A GP site's "
                "posterior lacks the other latents: give the guide that it is from."
            )
    data = known if data is None else data
    if data[0] is None:
        raise ValueError("predict needs the training arguments: pass data=(x, y), or an MCMC that has run on them")
    return model, samples, data


class AtNewInputs(Messenger):
    """A run at other inputs: GP sites by ``function``, latents as known, but the model's in plates of data."""

    def __init__(self, before: poutine.Trace, values: Samples, warned: Warned, function: Callable) -> None:
        super().__init__()
        self.warned, self.function = warned, function
        plates, role_of = {n: plate_sizes(site) for n, site in sample_sites(before).items()}, roles_beside(before)
        self.values = {n: value for n, value in values.items() if role_of(plates.get(n, ())) == Role.ALL}
        self.groups = {name: own for name, own in plates.items() if role_of(own) == Role.GROUP}

    @require_known_indices()
    def run(self, model: Callable, args: tuple, kwargs: dict[str, Any]) -> poutine.Trace:
        """The model's run at these arguments."""
        with whole_plates(), self:
            return poutine.trace(model).get_trace(*args, **kwargs)

    def _pyro_sample(self, msg: dict[str, Any]) -> None:
        name, process = msg["name"], as_process(msg["fn"])[0]
        require_own_rows({name: msg})
        if msg["is_observed"]:
            return
        if process is not None:
            self.function(msg, process)
        elif name in self.values:
            msg["value"] = self.values[name]
        elif self.groups.get(name) == plate_sizes(msg):
            warn_of_groups(self.warned, name, self.groups[name])


class Trained(Messenger):
    """A run at the training inputs with latents at one MCMC draw, whitened or not; and runs elsewhere given it."""

    def __init__(self, model: Callable, sample: Samples, args: tuple, kwargs: dict[str, Any], warned: Warned) -> None:
        super().__init__()
        self.model, self.sample, self.warned = model, sample, warned
        self.known: dict[str, tuple[Tensor, Tensor, Tensor]] = {}  # inputs, values and prior means of GP sites there
        self.moments: dict[str, tuple[Tensor, Tensor]] = {}  # of GP sites in the last run elsewhere
        summed = Enumeration(sample)
        with self:
            self.trace = poutine.trace(summed(model)).get_trace(*args, **kwargs)
        # Without data, as of ``data=(x,)``, nothing is known of classes.
        seen = any(map(is_observation, sample_sites(self.trace).values()))
        role_of = roles_beside(self.trace)
        classes = [own.name for own in summed.latents.values() if seen and role_of(own.plates) == Role.ALL]
        self.values = {**sample, **summed.draw_of(classes)}

    def _pyro_sample(self, msg: dict[str, Any]) -> None:
        name, process = msg["name"], as_process(msg["fn"])[0]
        if msg["is_observed"]:
            return
        msg["value"] = self.sample.get(name, msg["value"])
        if process is not None:
            noise = f"{name}_whitened"
            if msg["value"] is None:
                if noise not in self.sample:
                    raise ValueError(f"the samples hold no draws of GP site {name!r}, nor of {noise}: {[*self.sample]}")
                msg["value"] = process.mean + times(process.scale_tril, self.sample[noise])
            self.known[name] = process.x, msg["value"], process.mean

    def at(self, args: tuple, kwargs: dict[str, Any], marginal: bool = False) -> poutine.Trace:
        """A run at other inputs; if ``marginal``, values are drawn one by one, discrete latents of rows summed out."""

        def function(msg: dict[str, Any], process: GaussianProcess) -> None:
            given: Any = process.given(*self.known[msg["name"]])
            msg["fn"] = given.to_event(msg["fn"].event_dim - 1)
            if marginal:
                mean, variance = self.moments[msg["name"]] = given.mean, given.variance.clamp(min=0)
                msg["value"] = mean + variance.sqrt() * torch.randn_like(mean)

        model = Enumeration(self.values)(self.model) if marginal else self.model
        return AtNewInputs(self.trace, self.values, self.warned, function).run(model, args, kwargs)


# Whitening, so that NUTS mixes over function values.


class WhitenReparam(Reparam):
    """Reparameterises a GP site as f = μ + Lε with LLᵀ = k(x, x) and a latent site ``{name}_whitened``, ε ~ N(0, I).

    (Murray and Adams, 2010, section 3: the prior's scale no longer constrains the values.)
    """

    def apply(self, msg: dict[str, Any]) -> Any:
        """Replace the GP site by its whitened noise and a deterministic value."""
        name, fn, value = msg["name"], msg["fn"], msg["value"]
        process, _ = as_process(fn)
        if process is None:
            raise ValueError(f"WhitenReparam is for GP sites; site {name!r} is a {type(fn).__name__}")
        process.require_place(f"site {name!r}")
        shape = fn.batch_shape + fn.event_shape
        white = dist.Normal(process.x.new_zeros(shape), 1.0).to_event(fn.event_dim)
        whitened = partial(pyro.sample, f"{name}_whitened", white, infer={"is_observed": msg["is_observed"]})
        if value is None:
            value = process.mean + times(process.scale_tril, whitened())
        else:  # values that are given, as by a start of NUTS or by condition, have one noise, L⁻¹(f − μ)
            root, centred = process.scale_tril.expand(*value.shape, -1), value - process.mean
            whitened(obs=solve_lower(root, centred[..., None])[..., 0])
        return {"fn": dist.Delta(value, event_dim=fn.event_dim).mask(False), "value": value, "is_observed": True}


class Whitening(Strategy):
    """Whitens every latent GP site: ``NUTS(poutine.reparam(model, config=Whitening()))``."""

    def configure(self, msg: dict) -> Optional[Reparam]:
        """The :class:`WhitenReparam` of a latent GP site, ``None`` elsewhere."""
        return WhitenReparam() if not msg["is_observed"] and as_process(msg["fn"])[0] is not None else None
