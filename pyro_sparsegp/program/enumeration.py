"""Discrete latents summed out: a program's run with every value of theirs at once, and densities without them.

A site with ``infer={"enumerate": "parallel"}`` takes all its values z along a dimension of its own, left of all plates,
and leaves the run's record. Sites that depend on it get the distribution that is left when it is summed out, given the
sites before: after y₁, ..., yᵢ₋₁ that depend on z,

p(yᵢ | y₁, ..., yᵢ₋₁) = Σ_z p(z) p(y₁ | z) ... p(yᵢ | z) / Σ_z p(z) p(y₁ | z) ... p(yᵢ₋₁ | z),

for each element of the plates they share: the product over i is the sum over z of the joint density.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, ClassVar

import torch
from pyro.distributions import TorchDistribution
from pyro.distributions.util import scale_and_mask
from pyro.poutine.messenger import Messenger
from pyro.poutine.util import site_is_subsample
from torch import Tensor

from ..numerics.shapes import broadcast_shapes
from .bare import as_process, fill_masked

__all__ = ["Enumeration", "SummedOut", "is_enumerated"]

_PLATES = 4  # dimensions from the right that are left to plates


def is_enumerated(site: Any) -> bool:
    """Whether a site is a discrete latent that is to be summed out."""
    infer = site["infer"] or {}
    return infer.get("enumerate") == "parallel" and not site["is_observed"] and site["value"] is None


@dataclass
class _Group:
    """Discrete sites that meet in a site, and the log densities so far.

    :param dims: their dimensions, from the right.
    :param terms: log densities with these dimensions, to be evaluated.
    :param met: whether one is of a site that depends on them.
    """

    names: list[str]
    dims: set[int]
    frames: tuple[Any, ...]
    scale: Any
    terms: list[Callable[[], Tensor]] = field(default_factory=list)
    met: bool = False


class SummedOut(TorchDistribution):
    """What is left of a distribution when discrete variables upstream are summed out, given the sites before.

    :param fn: with their dimensions in front of the plates'.
    :param before: log p(z) p(y₁ | z) ... p(yᵢ₋₁ | z), with these dimensions.
    :param normalised: whether it sums to 1.
    :param depth: the number of plates' dimensions.
    """

    arg_constraints: ClassVar[dict[str, Any]] = {}

    def __init__(self, fn: Any, before: Callable[[], Tensor], normalised: bool, depth: int) -> None:
        self.fn, self.before, self.normalised, self.depth = fn, before, normalised, depth
        batch_shape = fn.batch_shape[len(fn.batch_shape) - depth :]
        super().__init__(torch.Size(batch_shape), fn.event_shape, validate_args=False)

    @property
    def support(self) -> Any:
        """That of the distribution given z."""
        return self.fn.support

    @property
    def has_rsample(self) -> bool:
        """No draw of a mixture passes a gradient on."""
        return False

    def log_prob(self, value: Tensor) -> Tensor:
        """log p(y | what came before)."""
        before = self.before()
        total = _summed(before + self.fn.log_prob(value))
        total = total if self.normalised else total - _summed(before)
        return total.reshape(total.shape[_PLATES - self.depth :])

    def _weights(self) -> Tensor:
        """p(z | what came before), all values of z in front."""
        before = self.before()
        before = before.expand(broadcast_shapes(before.shape, self.fn.batch_shape))
        return _values_in_front(before).softmax(0)

    def _parts(self, of: Callable[[Any], Tensor], weights: Tensor) -> Tensor:
        """A property of the distribution for each value of z, all in front."""
        shape = broadcast_shapes(self.before().shape, self.fn.batch_shape)
        return of(self.fn.expand(shape)).reshape(*weights.shape, *self.event_shape)

    def _mean(self, of: Callable[[Any], Tensor]) -> Tensor:
        weights = self._weights()
        shaped = weights.reshape(*weights.shape, *[1] * len(self.event_shape))
        return (shaped * self._parts(of, weights)).sum(0).reshape(self.shape())

    @property
    def mean(self) -> Tensor:
        """Σ_z p(z) E[y | z]."""
        return self._mean(lambda fn: fn.mean)

    @property
    def variance(self) -> Tensor:
        """Σ_z p(z) E[y² | z] − (Σ_z p(z) E[y | z])²."""
        return self._mean(lambda fn: fn.variance + fn.mean.square()) - self.mean.square()

    @torch.no_grad()
    def sample(self, sample_shape: Any = ()) -> Tensor:
        """A draw of y, z drawn with it."""
        if tuple(sample_shape):
            draws = [self.sample() for _ in range(torch.Size(sample_shape).numel())]
            return torch.stack(draws).reshape(*sample_shape, *self.shape())
        weights = self._weights()
        values = self._parts(lambda fn: fn.sample(), weights)
        chosen = torch.distributions.Categorical(weights.movedim(0, -1)).sample()
        index = chosen.reshape(1, *chosen.shape, *[1] * len(self.event_shape)).expand(1, *values.shape[1:])
        return values.gather(0, index)[0].reshape(self.shape())

    def expand(self, batch_shape: Any, _instance: Any = None) -> Any:
        """Only to the shape that it has."""
        if torch.Size(batch_shape) != self.batch_shape:
            raise NotImplementedError("a distribution with discrete variables summed out has the shape of its plates")
        return self


def _values_in_front(log_density: Tensor) -> Tensor:
    """With all values of discrete variables along one dimension, in front of the plates'."""
    padded = log_density.reshape(*[1] * max(0, _PLATES + 1 - log_density.dim()), *log_density.shape)
    return padded.flatten(0, padded.dim() - _PLATES - 1)


def _summed(log_density: Tensor) -> Tensor:
    return _values_in_front(log_density).logsumexp(0)


class Enumeration(Messenger):
    """Sums discrete latents out of a run: the innermost handler around a model."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []
        self._groups: dict[int, _Group] = {}  # by dimension

    def __enter__(self) -> Any:
        self.names, self._groups = [], {}
        return super().__enter__()

    def meet(self, msg: Any) -> None:
        """At a sample site: give an enumerated one all its values, and sum them out of others' distributions.

        :raises ValueError: naming the sites, where they cannot be summed out.
        """
        infer = msg["infer"] or {}
        if not self.names and infer.get("enumerate") != "parallel":
            return
        if site_is_subsample(msg) or infer.get("_deterministic"):
            return
        if not is_enumerated(msg):
            self._sum_out(msg)
            return
        name, fn = msg["name"], msg["fn"]
        _require_plates(msg)
        if not getattr(fn, "has_enumerate_support", False):
            raise ValueError(
                f"site {name!r} is to be enumerated, but {type(fn).__name__} cannot list its values: take Bernoulli, "
                "Categorical or another distribution of finitely many values."
            )
        dim = _PLATES + 1 + len(self.names)
        values = fn.enumerate_support(expand=False)
        values = values.reshape(len(values), *[1] * (dim - 1), *fn.event_shape)
        group = self._joined(msg)
        group.names.append(name)
        group.dims.add(dim)
        group.terms.append(_log_density(msg, values))
        self._groups |= dict.fromkeys(group.dims, group)
        self.names.append(name)
        # No other handler is to see it: it is no latent of this run.
        msg["value"], msg["done"], msg["type"] = values, True, "enumerated"

    _pyro_sample = meet

    def forget(self) -> None:
        """Forget all but the names: what the run's sites were."""
        self._groups = {}

    def _sum_out(self, msg: Any) -> None:
        fn = msg["fn"]
        if not self.names or not any(self._dims(fn)):
            return
        if as_process(fn)[0] is not None:
            raise ValueError(
                f"GP site {msg['name']!r} depends on the discrete site {self._names(fn)}, which is enumerated: each of "
                "its values would have a process of its own. Write these as GP sites, or outputs of one, and choose "
                "among their values downstream."
            )
        _require_plates(msg)
        group = self._joined(msg)
        before, normalised = tuple(group.terms), not group.met
        group.terms.append(_log_density(msg))
        group.met = True
        depth = max((-frame.dim for frame in msg["cond_indep_stack"] if frame.vectorized), default=0)
        msg["fn"] = SummedOut(fn, lambda: sum((term() for term in before[1:]), before[0]()), normalised, depth)

    def _dims(self, fn: Any) -> list[int]:
        """The enumerated dimensions that a distribution has."""
        shape = fn.batch_shape
        return [dim for dim in self._groups if dim <= len(shape) and shape[-dim] > 1]

    def _names(self, fn: Any) -> str:
        return ", ".join(repr(name) for dim in self._dims(fn)[:1] for name in self._groups[dim].names)

    def _joined(self, msg: Any) -> _Group:
        """The group of all discrete sites that a site depends on."""
        frames = tuple((frame.name, frame.counter) for frame in msg["cond_indep_stack"])
        joined = _Group([], set(), frames, msg["scale"])
        for group in {id(group): group for dim in self._dims(msg["fn"]) for group in [self._groups[dim]]}.values():
            if set(group.frames) != set(frames):
                here, there = ([name for name, _ in one] for one in (frames, group.frames))
                raise ValueError(
                    f"site {msg['name']!r} stands in plates {here} and depends on the discrete site "
                    f"{group.names[0]!r}, which stands in {there} and is enumerated: sums are taken for each row by "
                    "itself. Put both into the same plates, or sum the site out in the model."
                )
            numbers = isinstance(group.scale, (int, float)) and isinstance(msg["scale"], (int, float))
            if numbers and group.scale != msg["scale"]:
                raise ValueError(
                    f"site {msg['name']!r} is scaled by {msg['scale']:g} and the discrete site {group.names[0]!r}, on "
                    f"which it depends, by {group.scale:g}: put both under the same poutine.scale."
                )
            joined.names += group.names
            joined.dims |= group.dims
            joined.terms += group.terms
            joined.met |= group.met
        self._groups |= dict.fromkeys(joined.dims, joined)
        return joined


def _log_density(msg: Any, value: Any = None) -> Callable[[], Tensor]:
    """A site's log density given all values of the discrete ones, masked, when it has its value."""
    fn, mask, name = msg["fn"], msg["mask"], msg["name"]

    def evaluate() -> Tensor:
        site = {"type": "sample", "name": name, "is_observed": True, "fn": fn, "mask": mask}
        site["value"] = msg["value"] if value is None else value
        if value is None:
            fill_masked(site)
        return torch.as_tensor(scale_and_mask(fn.log_prob(site["value"]), 1.0, mask))

    return evaluate


def _require_plates(msg: Any) -> None:
    for frame in msg["cond_indep_stack"]:
        if frame.vectorized and -frame.dim > _PLATES:
            raise ValueError(
                f"site {msg['name']!r} stands in plate {frame.name!r} at dim {frame.dim}; with enumerated sites plates "
                f"have dims of -{_PLATES} to -1."
            )
