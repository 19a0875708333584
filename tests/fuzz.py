"""A fuzzer: random programs, families, data and training, against what must hold whatever they are.

    python tests/fuzz.py START COUNT [--verbose]

Configuration i depends on i alone; from 1,000 on they hold what came later, too: posteriors of several sites, rows that
are absorbed, indicators that are summed out, actions on some rows of more, and outputs by rows. One line is printed for
each that is not clean, and counts at the end; ``python tests/fuzz.py I 1 --verbose`` tells of one configuration, with
full tracebacks.
"""

from __future__ import annotations

import argparse
import copy
import dataclasses
import io
import linecache
import math
import pickle
import random
import re
import sys
import time
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Optional

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import pyro  # noqa: E402
import pyro.contrib.gp  # noqa: E402
import pyro.distributions as dist  # noqa: E402
import torch  # noqa: E402
from pyro import poutine  # noqa: E402
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO  # noqa: E402
from torch import Tensor  # noqa: E402

import pyro_sparsegp  # noqa: E402
from pyro_sparsegp import (  # noqa: E402
    AutoSparseGP,
    ExpectationPropagation,
    GaussianProcess,
    TraceQuadrature_ELBO,
    families,
    kernels,
    predict,
)
from pyro_sparsegp.program.registration import held_parameters  # noqa: E402

NUM_LEVELS = 3  # of the column of codes, and of the groups
LATER = 1000  # the first configuration that may hold what came later: those before stay as they were


# Kernels.


@dataclass(frozen=True)
class Term:
    """A kernel as it was drawn; Python numbers alone, so that it can be built in any dtype."""

    kind: str
    numbers: tuple = ()
    parts: tuple[Term, ...] = ()

    def walk(self) -> Iterator[Term]:
        yield self
        for part in self.parts:
            yield from part.walk()

    def kinds(self) -> set[str]:
        return {term.kind for term in self.walk()}


SMOOTH = ("RBF", "Matern12", "Matern32", "Matern52", "RationalQuadratic", "Periodic")
FINITE = ("Linear", "Constant", "Polynomial", "RandomFourier", "Categorical", "DeepBasis")
RARE = ("White", "Anova", "Convolutional", "TICK", "Foreign", "FromPyro")


def draw_length(r: random.Random, columns: int) -> Any:
    one = lambda: round(math.exp(r.uniform(-2, 1)), 3)  # noqa: E731
    return tuple(one() for _ in range(columns)) if r.random() < 0.4 else one()


def draw_leaf(r: random.Random, columns: int, codes: bool, finite: bool, unit: bool) -> Term:
    """One kernel on some columns, of which the last may be of codes."""
    kinds = FINITE if finite else SMOOTH * 4 + FINITE * 2 + RARE
    kind = r.choice([k for k in kinds if (k != "Categorical" or codes) and (k != "Polynomial" or unit)])
    if kind == "DeepBasis":
        corrected = r.random() < (0.5 if finite else 0.1)
        return Term(kind, (columns, r.randrange(100), corrected, r.random() < 0.5))
    if kind in ("Convolutional", "TICK") and columns != 4:
        kind = "RBF"
    if kind == "Categorical":
        return Term("Select", (columns - 1,), (Term("Categorical"),))
    if kind == "Anova":
        base = Term(r.choice(SMOOTH), (draw_length(r, 1),))
        return Term("Select", (r.randrange(columns),), (Term("Anova", (), (base,)),))
    if kind == "Polynomial":
        return Term(kind, (r.choice((1, 2, 3)), r.choice((0.0, 0.5, 1.0))))
    if kind == "RandomFourier":
        return Term(kind, (columns, r.randrange(100), r.choice((2, 8, 30)), draw_length(r, 1)))
    if kind in ("Constant", "White", "FromPyro"):
        return Term(kind, (columns,))
    if kind in SMOOTH and columns > 1 and r.random() < 0.4:
        dims = tuple(sorted(r.sample(range(columns), r.randrange(1, columns))))
        return Term("Select", dims, (Term(kind, (draw_length(r, len(dims)),)),))
    return Term(kind, (draw_length(r, columns),))


def draw_kernel(r: random.Random, columns: int, codes: bool, finite: bool, additive: bool, unit: bool) -> Term:
    def leaf() -> Term:
        term = draw_leaf(r, columns, codes, finite, unit)
        return Term("Scaled", (round(math.exp(r.uniform(-2, 1.5)), 3),), (term,)) if r.random() < 0.4 else term

    def factor() -> Term:
        return Term("Product", (), (leaf(), leaf())) if r.random() < 0.15 else leaf()

    count = r.choice((1, 2, 2, 3, 4)) if additive else r.choice((1, 1, 1, 2, 3))
    return Term("Sum", (), tuple(factor() for _ in range(count))) if count > 1 else factor()


class Network(torch.nn.Module):
    """Features of a DeepBasis, in the dtype of its inputs."""

    def __init__(self, columns: int, seed: int) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = torch.nn.Parameter(torch.randn(columns, 6, generator=generator, dtype=torch.float64))
        self.last = torch.nn.Parameter(torch.randn(6, 3, generator=generator, dtype=torch.float64) / 2)

    def forward(self, x: Tensor) -> Tensor:
        return (x @ self.first.to(x)).tanh() @ self.last.to(x)


class Foreign:
    """A kernel of the user's own: a callable with a method ``diag``."""

    def __call__(self, x: Tensor, z: Optional[Tensor] = None) -> Tensor:
        z = x if z is None else z
        return (-(x[..., :, None, :] - z[..., None, :, :]).abs().sum(-1)).exp()

    def diag(self, x: Tensor) -> Tensor:
        return x.new_ones(x.shape[:-1])

    def __repr__(self) -> str:
        return "Foreign()"


# Families.


@dataclass(frozen=True)
class Points:
    """Inducing inputs: a number, or that many inputs given as a tensor; -1 is all that the data have."""

    num: int
    given: bool


@dataclass(frozen=True)
class Recipe:
    """A family as it was drawn."""

    name: str
    options: dict[str, Any]

    @property
    def kind(self) -> type:
        return getattr(families, self.name)

    @property
    def on_sites(self) -> bool:
        return issubclass(self.kind, families.SiteFamily)

    @property
    def keeps_sites(self) -> bool:
        return self.on_sites and "FreeSites" not in self.name

    @property
    def is_additive(self) -> bool:
        return "Additive" in self.name or "Coupled" in self.name

    @property
    def points(self) -> list[Points]:
        return [value for value in self.options.values() if isinstance(value, Points)]

    @property
    def spans_data(self) -> bool:
        """Whether the posterior of a Gaussian likelihood is exact."""
        if self.name == "ExactWeightSpace":
            return True
        if self.name == "ComputationAware":
            whole = self.options["num_actions"] == -1 and not self.options.get("batches")
            return whole and self.options["actions"] != "cg"
        fixed = self.points == [Points(-1, True)] and not self.options["trainable"]
        return fixed and self.name in ("SGPR", "ConditionalSGPR", "AdditiveSGPR")

    @property
    def depends_on_order(self) -> bool:
        """Whether another order of the rows makes another start."""
        if self.name == "ComputationAware":
            return self.options["actions"] == "random"
        return any(not points.given for points in self.points)


def draw_points(r: random.Random, distinct: int) -> Points:
    if r.random() < 0.35:
        return Points(-1, True)
    return Points(r.randint(1, max(1, min(distinct, 12))), r.random() < 0.4)


def draw_family(
    r: random.Random, num: int, distinct: int, columns: int, among: Optional[tuple[str, ...]] = None
) -> Recipe:
    """A family for some rows, fewer of them distinct."""

    def free() -> dict[str, Any]:
        return {"start": r.choice(("data", "data", "prior"))}

    def placed() -> dict[str, Any]:
        init = r.choice(("greedy",) * 4 + ("kmeans",) + ("grid",) * (columns < 3))
        points = draw_points(r, distinct)
        return {"inducing": points, "init": init, "trainable": r.random() < (0.15 if points.num < 0 else 0.6)}

    def sites() -> dict[str, Any]:
        return {
            "at": r.choice(("marginals", "marginals", "mean")),
            "rate": r.choice((0.3, 0.7, 0.7, 1.0)),
            "updates": r.choice((1, 1, 3)),
        }

    def one_of_two() -> Points:
        return Points(r.randint(1, max(1, min(distinct // 2, 5))), distinct < 2 or r.random() < 0.4)

    def nested() -> dict[str, Any]:
        first, more = one_of_two(), one_of_two()
        return {**placed(), "inducing": first, "orthogonal": more}

    def actions() -> dict[str, Any]:
        count = -1 if r.random() < 0.5 else r.randint(1, max(1, num // 2))
        return {"num_actions": count, "actions": r.choice(("sparse", "sparse", "cg", "eigen", "random"))}

    def whiten() -> dict[str, Any]:
        return {"whiten": r.random() < 0.7}

    def some_columns() -> dict[str, Any]:
        return {"num_columns": r.choice((None, None, 1, 3))}

    def coupling() -> dict[str, Any]:
        return {"rank": r.choice((None, 1, 3)), "base": r.choice(("block", "identity"))}

    draws: dict[str, Callable[[], dict[str, Any]]] = {
        "SVGP": lambda: placed() | free() | whiten(),
        "SGPR": lambda: placed() | sites(),
        "FreeSites": lambda: placed() | sites(),
        "OrthogonalInducing": lambda: nested() | free() | whiten(),
        "OrthogonallyDecoupled": lambda: nested() | free() | whiten() | some_columns(),
        "CollapsedOrthogonal": lambda: nested() | sites(),
        "SemiCollapsedOrthogonal": lambda: nested() | sites() | {"covariance": r.choice(("free", "prior"))},
        "ConditionalSGPR": lambda: placed() | sites(),
        "MeanFieldAdditive": lambda: placed() | free(),
        "CoupledCovariance": lambda: placed() | free(),
        "CoupledPrecision": lambda: placed() | free() | coupling(),
        "AdditiveSGPR": lambda: placed() | sites(),
        "AdditiveFreeSites": lambda: placed() | sites(),
        "ComputationAware": lambda: actions() | sites(),
        "WeightSpace": free,
        "ExactWeightSpace": sites,
        "SparseEP": placed,
    }
    name = r.choice(among or [*draws, "SVGP", "SGPR", "ComputationAware"])
    return Recipe(name, draws[name]())


# Configurations.


LIKELIHOODS: dict[str, Callable[[Tensor, Any, Tensor], Any]] = {  # of η, a scale and the second GP
    "normal": lambda eta, scale, g: dist.Normal(eta, scale),
    "bernoulli": lambda eta, scale, g: dist.Bernoulli(logits=eta),
    "poisson": lambda eta, scale, g: dist.Poisson(eta.exp()),
    "student": lambda eta, scale, g: dist.StudentT(4.0, eta, scale),
    "gamma": lambda eta, scale, g: dist.Gamma(2.0, 2.0 * (-eta).exp()),
    "negative binomial": lambda eta, scale, g: dist.NegativeBinomial(3.0, logits=eta - 1.0),
    "categorical": lambda eta, scale, g: dist.Categorical(logits=eta.mT),
    "outputs": lambda eta, scale, g: dist.Normal(eta.mT, scale).to_event(1),
    "summed": lambda eta, scale, g: dist.Normal(eta.sum(-2), scale),
    "heteroscedastic": lambda eta, scale, g: dist.Normal(eta, scale * (g / 2).exp()),
}
NEW_LIKELIHOODS: dict[str, Callable[[Tensor, Any, Tensor], Any]] = {  # from LATER on
    "added": lambda eta, scale, g: dist.Normal(eta + g, scale),
    "product": lambda eta, scale, g: dist.Normal(eta * g, scale),
    "outliers": lambda eta, scale, g: dist.Normal(eta, scale * (1 + 9 * g)),  # g is the indicator
    "outliers written out": lambda eta, scale, g: dist.MixtureSameFamily(
        dist.Categorical(eta.new_tensor([1 - OUTLIERS, OUTLIERS]).expand(*eta.shape, 2)),
        dist.Normal(eta[..., None], torch.stack(torch.broadcast_tensors(*[eta * 0 + scale * s for s in (1, 10)]), -1)),
    ),
}
DENSITIES = LIKELIHOODS | NEW_LIKELIHOODS
OUTLIERS = 0.1  # their share
TWO = ("heteroscedastic", "added", "product")  # GP sites
GAUSSIAN = ("normal", "outputs", "summed")
LOCATED = (*GAUSSIAN, "student", "heteroscedastic", *NEW_LIKELIHOODS)  # η is in the units of y
SEVERAL = ("categorical", "outputs", "summed")


@dataclass(frozen=True)
class Configuration:
    """All that was drawn; the data follow from it."""

    index: int
    family: Recipe
    kernel: Term
    likelihood: str
    num_outputs: int  # 0 is one function, without a batch
    per_output: bool  # hyperparameters of each output
    latents: tuple[str, ...]
    points: bool  # other latents are points
    mean: str
    offset: bool
    missing: str  # "", "mask" or "obs_mask"
    num: int
    columns: int
    codes: bool
    num_new: int
    dtype: torch.dtype
    jitter: Optional[float]
    scales: dict[str, float]  # of inputs, length scales, the prior variance and the observations
    duplicates: bool
    constant_column: bool
    origin: bool  # the first row is 0
    weight: float  # of the data, by poutine.scale in the model
    conditioned: bool  # the model is under poutine.condition
    first: str  # how the guide is called first
    objective: str
    steps: int
    rate: float
    batch: Optional[int]
    again: str  # how it is trained a second time
    propagation: dict[str, Any] = field(default_factory=dict)
    coupled: bool = False  # other latents with each other and with the coefficients
    joint: bool = False  # both GP sites have one posterior
    absorbs: bool = False  # further rows
    support: int = 0  # rows that actions act on, of more

    @classmethod
    def draw(cls, index: int) -> Configuration:
        """The configuration of a number."""
        found = cls._draw(index)
        return found if index < LATER else found._later(random.Random(-index))

    def _later(self, r: random.Random) -> Configuration:
        """With something of what came later."""
        new: dict[str, Any] = {}
        kind = r.choice(("joint", "joint", "absorbs", "outliers", "support", "outputs"))
        columns, codes, likelihood = self.columns, self.codes, self.likelihood
        num = max(self.num, 4)
        among: Optional[tuple[str, ...]] = None
        if kind == "joint":
            among = ("SVGP", "CoupledPrecision", "CoupledPrecision", "CoupledCovariance", "WeightSpace")
            likelihood = r.choice(TWO)
            new |= {"joint": True, "absorbs": r.random() < 0.2}
        elif kind == "absorbs":
            among = ("SVGP", "OrthogonalInducing", "CoupledCovariance", "MeanFieldAdditive", "WeightSpace", "SGPR")
            likelihood = r.choice(("normal", "normal", likelihood))
            new["absorbs"] = True
        elif kind == "outliers":
            likelihood = "outliers"
        elif kind == "support":
            among = ("ComputationAware",)
            new |= {"support": r.randint(2, num - 1), "batch": num // 2, "first": "guide"}
        if kind == "outputs" or r.random() < 0.2:
            columns, codes = max(columns, 2), True
        distinct = 1 if self.constant_column and columns - codes == 1 else (num + 1) // (1 + self.duplicates)
        family = draw_family(r, num, distinct, columns, among) if among else self.family
        if columns != self.columns or num != self.num:
            family = draw_family(r, num, distinct, columns, among or (self.family.name,))
        if kind == "joint":  # a count for each site: their kernels have other terms
            options = {
                k: Points(max(v.num, 1), False) if isinstance(v, Points) else v for k, v in family.options.items()
            }
            family = Recipe(family.name, options)
        if kind == "support":
            options = family.options | {"batches": True}
            options["num_actions"] = min(options["num_actions"], new["support"])
            family = Recipe(family.name, options)
        finite, unit = "WeightSpace" in family.name, self.is_plain or kind in ("joint", "outliers")
        kernel = draw_kernel(r, columns, codes and kind != "outputs", finite, family.is_additive, unit)
        if codes and (kind == "outputs" or r.random() < 0.5):
            by_output = Term(
                "Select", (columns - 1,), (Term("Coregionalisation", (r.randrange(100), r.choice((1, 2)))),)
            )
            terms = kernel.parts if kernel.kind == "Sum" else (kernel,)
            terms = tuple(Term("Product", (), (term, by_output)) for term in terms)
            kernel = Term("Sum", (), terms) if len(terms) > 1 else terms[0]
        if likelihood != self.likelihood:
            plain = {"x": 1.0, "length": 1.0, "variance": 1.0, "y": 1.0}
            new |= {"scales": plain, "num_outputs": 0, "missing": "mask" if self.missing and r.random() < 0.5 else ""}
        if kind == "joint" and num > 4 and r.random() < 0.2:
            new["batch"] = num // 2
        return dataclasses.replace(
            self,
            num=num,
            columns=columns,
            codes=codes,
            family=family,
            kernel=kernel,
            likelihood=likelihood,
            **new,
        )

    @classmethod
    def _draw(cls, index: int) -> Configuration:
        r = random.Random(index)
        num = r.choice((r.randint(1, 3), *(r.randint(4, 12) for _ in range(2)), r.randint(4, 20), r.randint(10, 60)))
        columns = r.choice((1, 1, 2, 2, 3, 4))
        codes = columns > 1 and r.random() < 0.3
        duplicates, constant_column = r.random() < 0.12, r.random() < 0.08
        distinct = (num + 1) // 2 if duplicates else num
        if constant_column and columns - codes == 1:  # the others have one value, or few
            distinct = 1
        family = draw_family(r, num, distinct, columns)
        one_value = family.name == "SparseEP" and r.random() < 0.95  # what it integrates over
        possible = [name for name in LIKELIHOODS if not one_value or name not in (*SEVERAL, "heteroscedastic")]
        likelihood = r.choice(("normal",) * (30 if family.spans_data else 8) + tuple(possible))
        extreme = r.random() < 0.15
        scales = draw_scales(r, likelihood) if extreme else {"x": 1.0, "length": 1.0, "variance": 1.0, "y": 1.0}
        finite = "WeightSpace" in family.name and r.random() < 0.95
        unit = scales["x"] == 1
        return cls(
            index=index,
            family=family,
            kernel=draw_kernel(r, columns, codes, finite, family.is_additive, unit),
            likelihood=likelihood,
            num_outputs=r.choice((2, 3)) if likelihood in SEVERAL else 0,
            per_output=r.random() < 0.3,
            latents=draw_latents(r, likelihood),
            points=r.random() < 0.1,
            mean=r.choice(("zero",) * 4 + ("number", "function")),
            offset=r.random() < 0.15,
            missing=draw_missing(r, likelihood),
            num=num,
            columns=columns,
            codes=codes,
            num_new=r.choice((1, 5, 5, num)),
            dtype=torch.float32 if r.random() < 0.2 else torch.float64,
            jitter=r.choice((None,) * 16 + (1e-6, 1e-4)),
            scales=scales,
            duplicates=duplicates,
            constant_column=constant_column,
            origin=r.random() < 0.08,
            weight=r.choice((1.0,) * 16 + (0.5, 3.0)),
            conditioned=r.random() < 0.06,
            first=r.choice(("step", "guide", "no_grad", "evaluate", "posterior")),
            objective=r.choice(("quadrature",) * 5 + ("trace", "mean field")),
            steps=r.choice((0, 1, 1, 2, 3, r.randint(4, 10), r.randint(4, 30))),
            rate=r.choice((0.003, 0.01, 0.03, 0.1)),
            batch=max(1, num // 2) if num > 3 and r.random() < (0.03 if family.on_sites else 0.2) else None,
            again=r.choice(("repeatable", "permuted", "permuted", "shuffled")),
            propagation={
                "damping": r.choice((0.5, 0.5, 0.9, 1.0)),
                "power": r.choice((1.0, 1.0, 0.5)),
                "schedule": r.choice(("inner", "inner", "outer")),
                "gradient": r.choice(("matched", "matched", "exact")),
                "max_sweeps": 20,
            },
            coupled=r.random() < 0.3,
        )

    def data(self, dtype: Optional[torch.dtype] = None) -> tuple[Tensor, Tensor]:
        """Inputs (N, D) and observations, NaN where they are missing."""
        x, y = self._data
        return x.to(dtype or self.dtype), y.to(dtype or self.dtype)

    def new_inputs(self, dtype: Optional[torch.dtype] = None) -> Tensor:
        return self._inputs(self.num_new, 1).to(dtype or self.dtype)

    def inducing(self, num: int) -> Tensor:
        """Inputs that do not depend on the order of the rows."""
        return self._data[0].unique(dim=0).to(self.dtype) if num < 0 else self._inputs(num, 2).to(self.dtype)

    def _inputs(self, num: int, seed: int) -> Tensor:
        generator = torch.Generator().manual_seed(10 * self.index + seed)
        x = torch.rand(num, self.columns, generator=generator, dtype=torch.float64)
        if self.codes:
            x[:, -1] = (NUM_LEVELS * x[:, -1]).floor()
        x[:, : self.columns - self.codes] *= self.scales["x"]
        if self.constant_column:
            x[:, 0] = self.scales["x"]
        if self.origin and seed == 0:
            x[0] = 0.0
        if self.duplicates and seed == 0:
            x[num // 2 :] = x[: num - num // 2].clone()
        return x

    @cached_property
    def _data(self) -> tuple[Tensor, Tensor]:
        x = self._inputs(self.num, 0)
        with torch.random.fork_rng():
            torch.manual_seed(10 * self.index)
            eta = torch.sin(6 * x[:, 0] / self.scales["x"]) + 0.5 * torch.randn(len(x), dtype=torch.float64) / 4
            if self.num_outputs:
                eta = torch.stack([eta * (1 + p / 2) * (-1) ** p for p in range(self.num_outputs)])
            eta = eta * (self.scales["y"] if self.likelihood in LOCATED else 1.0)
            other = torch.full((), float(self.likelihood == "product"))
            if "outliers" in self.likelihood:
                other = (torch.rand(len(x)) < OUTLIERS).double()
            name = self.likelihood.removesuffix(" written out")
            y = DENSITIES[name](eta, 0.2 * self.scales["y"], other).sample().double()
            if self.missing:
                y[torch.rand(len(y)) < 0.3] = math.nan
                y[0] = 1.0
        return x, y

    @property
    def is_exact(self) -> bool:
        """Whether the family is exact under this kernel and likelihood, and rounding and jitter hide nothing."""
        corrected = any(term.kind == "DeepBasis" and term.numbers[2] for term in self.kernel.walk())
        noisy = corrected or "White" in self.kernel.kinds()
        clean = self.dtype == torch.float64 and self.is_plain and self.jitter is None and "local" not in self.latents
        return self.family.spans_data and not noisy and self.likelihood in ("normal", "outputs") and clean

    @property
    def fixed(self) -> bool:
        """Whether there are no other latents."""
        return not self.latents

    @property
    def is_deterministic(self) -> bool:
        """Whether the bound by quadrature has no draws in it."""
        drawn = self.latents or self.num_outputs > 2  # so many axes make no grid
        return not drawn and self.family.options.get("num_columns") is None

    @property
    def noise(self) -> float:
        return 0.2 * self.scales["y"]

    @property
    def level(self) -> float:
        """What the model's site "level" is conditioned on."""
        return 0.7 * self.scales["y"]

    @property
    def sites(self) -> tuple[str, ...]:
        return ("f", "g") if self.likelihood in TWO else ("f",)

    @property
    def is_plain(self) -> bool:
        """Whether scales are ordinary, so that tolerances can be tight."""
        return all(scale == 1 for scale in self.scales.values())

    def describe(self) -> str:
        options = {k: v.num if isinstance(v, Points) else v for k, v in self.family.options.items()}
        family = f"{self.family.name}({', '.join(f'{k}={v}' for k, v in options.items())})"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                with torch.no_grad():
                    kernel = repr(Model(self).kernel(torch.zeros(1, self.columns, dtype=self.dtype), {}))
            except Exception as error:
                kernel = f"{self.kernel} ({type(error).__name__})"
        facts = [
            family,
            kernel,
            self.likelihood + ("" if not self.num_outputs else f" x {self.num_outputs}"),
            f"N={self.num} D={self.columns} {str(self.dtype)[6:]}",
            f"latents={','.join(self.latents)}" if self.latents else "",
            "points" if self.points and self.latents else "",
            "coupled" if self.coupled and self.latents and not self.points else "",
            "one posterior of f and g" if self.joint else "",
            "absorbs" if self.absorbs else "",
            f"actions on {self.support} rows" if self.support else "",
            self.missing,
            "offset" if self.offset else "",
            f"mean={self.mean}" if self.mean != "zero" else "",
            "duplicates" if self.duplicates else "",
            "constant column" if self.constant_column else "",
            "origin" if self.origin else "",
            f"weight={self.weight}" if self.weight != 1 else "",
            "conditioned" if self.conditioned else "",
            "" if self.is_plain else f"scales={self.scales}",
            "" if self.jitter is None else f"jitter={self.jitter:g}",
            f"{self.first}, {self.steps} steps of {self.rate} by {self.objective}",
            f"batches of {self.batch}" if self.batch else "",
            str(self.propagation) if self.family.name == "SparseEP" else "",
        ]
        return "; ".join(fact for fact in facts if fact)


def draw_scales(r: random.Random, likelihood: str) -> dict[str, float]:
    def power(low: int = -4, high: int = 4) -> float:
        return 10.0 ** r.randint(low, high)

    x = power() if r.random() < 0.5 else 1.0
    length = x if r.random() < 0.6 or likelihood in ("poisson", "gamma", "negative binomial") else 1.0
    y = power() if likelihood in LOCATED and r.random() < 0.6 else 1.0
    variance = y**2 if r.random() < 0.6 else power(-4, 4 if likelihood in LOCATED else 0)
    return {"x": x, "length": length, "variance": variance, "y": y}


def draw_missing(r: random.Random, likelihood: str) -> str:
    if likelihood in SEVERAL or r.random() < 0.8:
        return ""
    return r.choice(("mask", "obs_mask")) if likelihood in LOCATED else "mask"


def draw_latents(r: random.Random, likelihood: str) -> tuple[str, ...]:
    if r.random() < 0.45:
        return ()
    known = ["hyperparameters", "intercept", "intercept in the mean", "groups before", "groups after", "local"]
    if likelihood in LOCATED:
        known.append("noise")
    return tuple(sorted(r.sample(known, r.choice((1, 1, 1, 2))), key=known.index))


class Model:
    """The program of a configuration. It can be pickled, and its networks are its own."""

    def __init__(self, c: Configuration) -> None:
        self.c = c
        self.networks: dict[Term, Any] = {}
        for term in c.kernel.walk():
            if term.kind == "DeepBasis":
                self.networks[term] = Network(*term.numbers[:2])
            if term.kind == "FromPyro":
                one = torch.ones((), dtype=c.dtype)
                self.networks[term] = pyro.contrib.gp.kernels.RBF(term.numbers[0], one, c.scales["length"] * one)

    def __call__(self, x: Tensor, y: Optional[Tensor] = None, size: Optional[int] = None) -> Tensor:
        c = self.c
        for i, (term, network) in enumerate(self.networks.items()):
            if term.kind == "FromPyro" or term.numbers[3]:
                pyro.module(f"network{i}", network)
        h = {}
        if "hyperparameters" in c.latents:
            h["scale"] = pyro.sample("scale", dist.LogNormal(x.new_zeros(()), 0.5))
            h["length"] = pyro.sample("length", dist.LogNormal(x.new_zeros(()), 0.3))
        for name in ("intercept", "intercept in the mean"):
            if name in c.latents:
                site = name.replace(" ", "_")
                h[site] = pyro.sample(site, dist.Normal(x.new_zeros(()), 2.0 * c.scales["y"]))
        if c.conditioned:
            pyro.sample("level", dist.Normal(x.new_zeros(()), c.scales["y"]))
        if "groups before" in c.latents:
            h["groups_before"] = self._groups("groups_before", x)
        f = pyro.sample("f", self.process(x, h))
        g = x.new_zeros(())
        if "g" in c.sites:
            g = pyro.sample("g", GaussianProcess(self.other_kernel, x))
        if "groups after" in c.latents:
            h["groups_after"] = self._groups("groups_after", x)
        if "noise" in c.latents:
            h["noise"] = pyro.sample("noise", dist.LogNormal(x.new_full((), math.log(c.noise)), 0.5))
        eta = f + self.shift(x, h)
        weighted = poutine.scale(scale=c.weight) if c.weight != 1 else nullcontext()
        with weighted, pyro.plate("data", size or len(x), subsample=x):
            if "local" in c.latents:
                eta = eta + pyro.sample("local", dist.Normal(x.new_zeros(()), c.scales["y"]))
            if c.likelihood == "outliers":
                indicator = dist.Bernoulli(x.new_full((), OUTLIERS))
                g = pyro.sample("outlier", indicator, infer={"enumerate": "parallel"})
            likelihood = DENSITIES[c.likelihood](eta, h.get("noise", c.noise), g)
            if y is None or not c.missing:
                return pyro.sample("y", likelihood, obs=y)
            seen = y.isfinite()
            y = torch.where(seen, y, 1.0)
            if c.missing == "obs_mask":
                return pyro.sample("y", likelihood, obs=y, obs_mask=seen)
            with poutine.mask(mask=seen):
                return pyro.sample("y", likelihood, obs=y)

    def _groups(self, name: str, x: Tensor) -> Tensor:
        with pyro.plate(f"{name}_plate", NUM_LEVELS):
            return pyro.sample(name, dist.Normal(x.new_zeros(()), self.c.scales["y"]))

    @property
    def other_kernel(self) -> Any:
        """Of g."""
        unit = self.c.scales["x"]
        return kernels.Linear(1.0 / unit**2) if "WeightSpace" in self.c.family.name else kernels.RBF(unit)

    def shift(self, x: Tensor, h: dict[str, Tensor]) -> Tensor:
        """η − f."""
        total = x.new_zeros(len(x))
        if self.c.offset:
            total = total + 0.5 * torch.cos(x.sum(-1) / self.c.scales["x"])
        if self.c.conditioned:
            total = total + self.c.level
        if "intercept" in h:
            total = total + h["intercept"]
        groups = (x[:, 0] / self.c.scales["x"] * NUM_LEVELS).long().clamp(0, NUM_LEVELS - 1)
        for name in ("groups_before", "groups_after"):
            if name in h:
                total = total + h[name][groups]
        return total

    def mean(self, h: dict[str, Tensor]) -> Any:
        level = h.get("intercept_in_the_mean")
        if level is not None:
            return lambda x: level.expand(len(x))
        return {"zero": None, "number": 0.5, "function": _Slope(self.c.scales["x"])}[self.c.mean]

    def process(self, x: Tensor, h: dict[str, Tensor]) -> Any:
        process = GaussianProcess(self.kernel(x, h), x, self.mean(h), self.c.jitter)
        return process.expand([self.c.num_outputs]).to_event(1) if self.c.num_outputs else process

    def kernel(self, like: Tensor, h: dict[str, Tensor]) -> Any:
        kernel = self._build(self.c.kernel, like, h.get("length", 1.0))
        # Inside the sum, so that its terms stay terms.
        parts = list(kernel.terms) if isinstance(kernel, kernels.Sum) else [kernel]
        if self.c.scales["variance"] != 1 or "scale" in h:
            variance = self.c.scales["variance"] * h.get("scale", like.new_ones(()))
            parts = [kernels.Scaled(part, variance) for part in parts]
        if self.c.num_outputs and self.c.per_output:
            parts[0] = kernels.Scaled(parts[0], torch.linspace(1.0, 2.0, self.c.num_outputs).to(like))
        return kernels.Sum(*parts) if len(parts) > 1 else parts[0]

    def _build(self, term: Term, like: Tensor, length: Any) -> Any:
        parts = [self._build(part, like, length) for part in term.parts]
        numbers = term.numbers
        unit = self.c.scales["length"]
        match term.kind:
            case "Sum":
                return kernels.Sum(*parts)
            case "Product":
                return kernels.Product(*parts)
            case "Scaled":
                return kernels.Scaled(parts[0], numbers[0])
            case "Select":
                return kernels.Select(parts[0], numbers)
            case "Anova":
                return kernels.Anova(parts[0], 0.0, self.c.scales["x"])
            case "Linear":
                return kernels.Linear(1.0 / unit**2)
            case "Constant":
                return kernels.Constant(1.0)
            case "White":
                return kernels.White(0.1)
            case "Polynomial":
                return kernels.Polynomial(*numbers)
            case "Categorical":
                return kernels.Categorical(NUM_LEVELS)
            case "Coregionalisation":
                seed, rank = numbers
                generator = torch.Generator().manual_seed(seed)
                mixing = torch.randn(NUM_LEVELS, rank, generator=generator, dtype=torch.float64)
                return kernels.Coregionalisation(mixing.to(like), like.new_full((NUM_LEVELS,), 0.3))
            case "Foreign":
                return Foreign()
            case "FromPyro":
                return kernels.from_pyro(self.networks[term])
            case "DeepBasis":
                network = self.networks[term]
                return kernels.DeepBasis(network if numbers[3] else _Frozen(network), variance_correction=numbers[2])
            case "RandomFourier":
                columns, seed, num, scale = numbers
                generator = torch.Generator().manual_seed(seed)
                omega = torch.randn(num, columns, generator=generator, dtype=torch.float64).to(like)
                return kernels.RandomFourier(omega, unit * like.new_tensor(scale) * length)
        scale = unit * like.new_tensor(numbers[0]) * length
        if term.kind == "Convolutional":
            return kernels.Convolutional(kernels.RBF(scale.mean()), (2, 2), (1, 2))
        if term.kind == "TICK":
            return kernels.TICK(kernels.RBF(scale.mean()), kernels.RBF(1.0), (2, 2), (1, 2))
        if term.kind == "Periodic":
            return kernels.Periodic(like.new_tensor(numbers[0]), scale)
        return getattr(kernels, term.kind)(scale)


class _Slope:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, x: Tensor) -> Tensor:
        return 0.5 * x[..., 0] / self.scale


class _Frozen:
    """A network that does not train."""

    def __init__(self, network: Network) -> None:
        self.first, self.last = network.first.detach(), network.last.detach()

    def __call__(self, x: Tensor) -> Tensor:
        return (x @ self.first.to(x)).tanh() @ self.last.to(x)


# Training.


@dataclass
class Fit:
    """A trained guide and what it was trained on."""

    c: Configuration
    model: Model
    program: Any  # the model, perhaps under a handler
    family: Any
    guide: AutoSparseGP
    x: Tensor
    y: Tensor
    losses: list[float]

    @property
    def x_new(self) -> Tensor:
        return self.c.new_inputs()

    def new_guide(self) -> AutoSparseGP:
        points = True if self.c.points else None
        return AutoSparseGP(self.program, self.family, point_estimates=points, coupled=self.c.coupled)

    @cached_property
    def posteriors(self) -> dict[str, Any]:
        with torch.no_grad():
            return self.guide.posterior(self.x_new)


def build_family(c: Configuration, model: Model) -> Any:
    x, _ = c.data()
    options = dict(c.family.options)
    for name, value in options.items():
        if isinstance(value, Points):
            options[name] = value.num if not value.given else c.inducing(value.num)
    if options.get("num_actions") == -1:
        options["num_actions"] = c.support or len(x)
    if c.family.is_additive and isinstance(options["inducing"], Tensor):
        z = options["inducing"]
        kernel = model.kernel(x, {})
        of_terms = (getattr(term, "columns", None) for term in getattr(kernel, "terms", [kernel]))  # not of Foreign
        options["inducing"] = [z if read is None else z[:, list(read)].unique(dim=0) for read in of_terms]
    family = c.family.kind(**options)
    if c.joint:
        return {("f", "g"): family}
    if "g" in c.sites and isinstance(options.get("inducing"), list):
        return {"f": family, "g": c.family.kind(**{**options, "inducing": z})}
    return family


OBJECTIVES: dict[str, Callable[[], Any]] = {
    "quadrature": lambda: TraceQuadrature_ELBO(10),
    "trace": Trace_ELBO,
    "mean field": TraceMeanField_ELBO,
}


def fit(c: Configuration, order: Optional[Tensor] = None, shuffled: bool = False) -> Fit:
    """Train from the start, on the rows in another order, or in a new one at every step after the first."""
    pyro.set_rng_seed(c.index)
    x, y = c.data()
    order = torch.arange(len(x)) if order is None else order
    x, y = x[order], y[order]
    model = Model(c)
    family = build_family(c, model)
    program: Any = model
    if c.conditioned:
        program = poutine.condition(model, data={"level": x.new_full((), c.level)})
    guide = AutoSparseGP(program, family, point_estimates=True if c.points else None, coupled=c.coupled)
    optim = pyro.optim.Adam({"lr": c.rate})
    fitted = Fit(c, model, program, family, guide, x, y, [])
    if c.family.name == "SparseEP":
        trainer: Any = ExpectationPropagation(program, guide, optim, **c.propagation)
    else:
        trainer = SVI(program, guide, optim, OBJECTIVES[c.objective]())
    if c.batch or c.first == "guide":
        guide(x[: c.support or len(x)], y[: c.support or len(x)])
    elif c.first == "no_grad":
        with torch.no_grad():
            guide(x, y)
    elif c.first == "posterior":
        guide.posterior(x, y)
    elif c.first == "evaluate" or not c.steps:
        fitted.losses.append(trainer.evaluate_loss(x, y))
    randoms = random.Random(c.index)
    for _ in range(c.steps):
        rows = list(range(len(x)))
        if c.batch or (shuffled and fitted.losses):
            randoms.shuffle(rows)
        rows = torch.tensor(rows[: c.batch or len(rows)])
        if c.support and randoms.random() < 0.2:
            rows = torch.arange(c.support)
        more: dict[str, Any] = {"size": len(x)} if c.batch else {}
        if c.batch and c.family.name == "SparseEP":
            more["indices"] = rows
        fitted.losses.append(trainer.step(x[rows], y[rows], **more))
    return fitted


# Checks.


class FaultError(Exception):
    """Something that must hold does not, and nothing said so."""


CHECKS: list[Callable[[Fit], None]] = []


def check(function: Callable[[Fit], None]) -> Callable[[Fit], None]:
    CHECKS.append(function)
    return function


def tolerance(c: Configuration, exact: float, rounded: float) -> float:
    return exact if c.dtype == torch.float64 else rounded


def require_same(found: dict[str, Any], wanted: dict[str, Any], limit: float, why: str = "") -> None:
    """Means to within ``limit`` standard deviations of the prior, variances to within that share of the prior's."""
    for name, q in found.items():
        p = wanted[name]
        prior = p.process.variance.double()
        units = prior.sqrt() + p.mean.double().abs()
        for what, gap in (
            ("mean", ((q.mean.double() - p.mean.double()).abs() / units)),
            ("variance", ((q.variance.double() - p.variance.double()).abs() / prior)),
        ):
            if not gap.max() <= limit:
                told = f"{what}s of {name} differ by {gap.max():.2g} of the prior's scale"
                raise FaultError(f"{why}: {told}" if why else told)


def require_finite(what: str, value: Any) -> None:
    if not torch.as_tensor(value).isfinite().all():
        raise FaultError(f"{what} is not finite")


@contextmanager
def apart() -> Iterator[None]:
    """With an empty parameter store, and the old one again afterwards."""
    with pyro.get_param_store().scope():
        yield


@contextmanager
def untrained(model: Any) -> Iterator[None]:
    """The model's own networks and kernels are afterwards what they were."""
    kept = [(parameter, parameter.detach().clone()) for parameter, *_ in held_parameters(model)]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, value in kept:
                parameter.copy_(value)


@check
def finite(fitted: Fit) -> None:
    require_finite("the loss", fitted.losses)
    for name, parameter in fitted.guide.named_parameters():
        require_finite(name, parameter)
    for name, q in fitted.posteriors.items():
        require_finite(f"the mean of {name}", q.mean)
        require_finite(f"the variance of {name}", q.variance)
        require_finite(f"the divergence of {name}", q.kl)
        if not (q.variance >= 0).all():
            raise FaultError(f"{name} has a negative variance")


@check
def explodes_not(fitted: Fit) -> None:
    """An outcome of its own: see :func:`run`."""
    if fitted.losses and max(fitted.losses) - fitted.losses[0] > 100 * max(abs(fitted.losses[0]), fitted.c.num):
        raise ExplosionError(f"the loss rose from {fitted.losses[0]:.4g} to {max(fitted.losses):.4g}")


class ExplosionError(Exception):
    """The loss rose a hundredfold over its start."""


@check
def subset(fitted: Fit) -> None:
    """Some of the inputs have the marginals that they have among all."""
    rows = torch.arange(0, fitted.c.num_new, 2).flip(0)
    with torch.no_grad():
        some = fitted.guide.posterior(fitted.x_new[rows])
    whole = {name: q.at(fitted.x_new[rows]) for name, q in fitted.posteriors.items()}
    require_same(some, whole, tolerance(fitted.c, 1e-6, 1e-2))
    for name, q in fitted.posteriors.items():
        gap = (q.mean[..., rows] - some[name].mean).abs() + (q.variance[..., rows] - some[name].variance).abs()
        prior = some[name].process.variance
        if not (gap <= tolerance(fitted.c, 1e-6, 1e-2) * (prior + prior.sqrt() + some[name].mean.abs())).all():
            raise FaultError(f"{name} at some inputs is not what it is among all")


@check
def covariance(fitted: Fit) -> None:
    """The covariance's diagonal is the variance, and it has no negative eigenvalues."""
    for name, q in fitted.posteriors.items():
        full, prior = q.covariance_matrix.detach().double(), q.process.variance.double()
        limit = tolerance(fitted.c, 1e-6, 1e-2)
        gap = (full.diagonal(dim1=-2, dim2=-1) - q.variance.double()).abs() / prior
        if not gap.max() <= limit:
            raise FaultError(f"covariance and variance of {name} differ by {gap.max():.2g} of the prior's")
        if not torch.linalg.eigvalsh(full).min() >= -limit * prior.max() * prior.shape[-1]:
            raise FaultError(f"the covariance of {name} has eigenvalue {torch.linalg.eigvalsh(full).min():.2g}")


@check
def components(fitted: Fit) -> None:
    """The components add up to the whole."""
    with torch.no_grad():
        for name, q in fitted.posteriors.items():
            parts, num = q.components, fitted.c.num_new
            mean = q.process.mean + sum(part.mean for part in parts)
            joint = parts.covariance_matrix
            joint = joint.unflatten(-2, (len(parts), num)).unflatten(-1, (len(parts), num)).sum((-4, -2))
            prior, limit = q.process.variance, tolerance(fitted.c, 1e-6, 1e-2)
            if not ((mean - q.mean).abs() <= limit * (prior.sqrt() + q.mean.abs())).all():
                raise FaultError(f"the components' means of {name} do not add up")
            if not ((joint - q.covariance_matrix).abs() <= limit * prior.max()).all():
                raise FaultError(f"the components' covariances of {name} do not add up")
            for part, label in zip(parts, parts.names):
                gap = (part.covariance_matrix.diagonal(dim1=-2, dim2=-1) - part.variance).abs()
                if not (gap <= limit * part.process.variance).all():
                    raise FaultError(f"covariance and variance of {name}'s component {label} differ")


def require_equal_guide(fitted: Fit, other: AutoSparseGP) -> None:
    with torch.no_grad():
        require_same(other.posterior(fitted.x_new), fitted.posteriors, tolerance(fitted.c, 1e-9, 1e-4))
    pyro.set_rng_seed(1)
    ours = predict(fitted.program, fitted.guide, fitted.x_new, num_samples=2)
    pyro.set_rng_seed(1)
    theirs = predict(other.model, other, fitted.x_new, num_samples=2)
    for name, value in ours.items():
        if not torch.allclose(value, theirs[name], rtol=tolerance(fitted.c, 1e-6, 1e-2), equal_nan=True):
            raise FaultError(f"draws of {name} differ at the same seed")


@check
def state(fitted: Fit) -> None:
    """A state saved and loaded into a fresh guide is the same posterior."""
    file = io.BytesIO()
    torch.save(fitted.guide.state_dict(), file)
    file.seek(0)
    other = fitted.new_guide()
    other.load_state_dict(torch.load(file, weights_only=True))
    require_equal_guide(fitted, other)


@check
def deep_copy(fitted: Fit) -> None:
    require_equal_guide(fitted, copy.deepcopy(fitted.guide))


@check
def pickling(fitted: Fit) -> None:
    require_equal_guide(fitted, pickle.loads(pickle.dumps(fitted.guide)))


@check
def other_dtype(fitted: Fit) -> None:
    """The guide in float32 is about the guide in float64."""
    c = fitted.c
    if c.dtype != torch.float64 or "FromPyro" in c.kernel.kinds() or not c.is_plain or c.jitter:
        return
    with torch.no_grad():
        require_same(copy.deepcopy(fitted.guide).float().posterior(c.new_inputs(torch.float32)), fitted.posteriors, 0.1)


@check
def bound(fitted: Fit) -> None:
    """Under a Gaussian likelihood the bound is at most the log evidence."""
    c = fitted.c
    if c.likelihood not in (*GAUSSIAN, "added") or not c.is_deterministic or c.family.name == "SparseEP":
        return
    with torch.no_grad():
        value = -TraceQuadrature_ELBO(4).loss(fitted.program, fitted.guide, fitted.x, fitted.y)
        evidence, slack = log_evidence(fitted)
        slack = slack + tolerance(c, 1e-6, 1e-3) * abs(evidence)
        if not value <= evidence + slack:
            raise FaultError(f"a bound of {value:.6g} on a log evidence of {evidence:.6g}")
        if c.is_exact and not value >= evidence - 10 * slack - 1e-3:
            raise FaultError(f"a bound of {value:.6g} where an exact family reaches the log evidence of {evidence:.6g}")


def log_evidence(fitted: Fit) -> tuple[float, float]:
    """log p(y), dense, and what rounding may make of it."""
    c, model, x, y = fitted.c, fitted.model, fitted.x, fitted.y
    seen = y.isfinite() if c.missing else torch.ones(len(x), dtype=torch.bool)
    kernel, process = model.kernel(x, {}), model.process(x, {})
    K = kernel(x).double()
    mean = (process.mean + model.shift(x, {})).double()
    y = y.double()
    if c.likelihood == "summed":
        K, mean = (K.sum(-3) if K.dim() > 2 else c.num_outputs * K), mean.sum(-2)
    if c.likelihood == "outputs":
        y = y.mT
    if c.likelihood == "added":
        K = K + model.other_kernel(x).double()
    num = int(seen.sum())
    K = K[..., seen, :][..., seen] + c.noise**2 / c.weight * torch.eye(num, dtype=torch.float64)
    evidence = dist.MultivariateNormal(mean[..., seen], K).log_prob(y[..., seen]).sum()
    # A density to the power w is one of variance σ²/w, but for a factor.
    terms = num * (c.num_outputs if c.likelihood == "outputs" else 1)
    evidence = evidence + terms * ((1 - c.weight) * math.log(2 * math.pi * c.noise**2) - math.log(c.weight)) / 2
    diagonal = K.diagonal(dim1=-2, dim2=-1).mean()
    rounding = torch.finfo(c.dtype).eps * float(diagonal / c.noise**2) * len(x) ** 2
    return float(evidence), (1e-8 if c.dtype == torch.float64 else 1e-4) + 100 * rounding


def conditional(fitted: Fit, x_new: Tensor, h: dict[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Mean and variance of f at new inputs given the data and other latents, dense."""
    c, model = fitted.c, fitted.model
    seen = fitted.y.isfinite() if c.missing else torch.ones(len(fitted.x), dtype=torch.bool)
    x, y = fitted.x[seen], (fitted.y.mT if c.likelihood == "outputs" else fitted.y)[..., seen]
    kernel = model.kernel(x, h)
    noise = torch.as_tensor(h.get("noise", c.noise)).double()
    K = kernel(x).double() + noise**2 / c.weight * torch.eye(len(x), dtype=torch.float64)
    cross = kernel(x, x_new).double()
    solved = torch.linalg.solve(K, cross)
    rest = (y - model.process(x, h).mean - model.shift(x, h)).double()
    mean = model.process(x_new, h).mean + (solved.mT @ rest[..., None])[..., 0]
    variance = kernel.diag(x_new).double() - (cross * solved).sum(-2)
    return mean, variance.clamp(min=0)


@check
def exact_posterior(fitted: Fit) -> None:
    """A family that spans the data has the exact posterior, given fixed hyperparameters."""
    c = fitted.c
    if not c.is_exact or not c.fixed:
        return
    with torch.no_grad():
        mean, variance = conditional(fitted, fitted.x_new, {})
        q = fitted.posteriors["f"]
        prior = q.process.variance
        gap = (q.mean - mean).abs() / (prior.sqrt() + mean.abs())
        if not gap.max() <= 0.01:
            raise FaultError(f"the mean is {gap.max():.2g} of the prior's scale off the exact one")
        gap = (q.stddev - variance.sqrt()).abs() / prior.sqrt()
        if not gap.max() <= 0.01:
            raise FaultError(f"the standard deviation is {gap.max():.2g} of the prior's off the exact one")


LATENT_SITES = ("scale", "length", "intercept", "intercept_in_the_mean", "groups_before", "groups_after", "noise")


@check
def draws(fitted: Fit) -> None:
    """Draws of f are as its posterior says, or as the dense one does given the draws of other latents."""
    c = fitted.c
    if not (c.fixed or c.is_exact):
        return
    num = 40
    pyro.set_rng_seed(2)
    with torch.no_grad():
        drawn = predict(fitted.program, fitted.guide, fitted.x_new, num_samples=num)
        for name in c.sites:
            q = fitted.posteriors[name]
            means, variances = [], []
            for s in range(num):
                h = {site: drawn[site][s] for site in LATENT_SITES if site in drawn}
                mean, variance = (q.mean, q.variance) if c.fixed else conditional(fitted, fitted.x_new, h)
                means.append(mean.double())
                variances.append(variance.double().expand(mean.shape))  # of outputs that share a kernel, once
            floor = tolerance(c, 1e-6, 1e-3) + 10 * (c.jitter or 0.0)
            spread = (torch.stack(variances) + floor * q.process.variance).sqrt()
            z = (drawn[name].double() - torch.stack(means)) / spread
            off, square = z.mean(0).abs().max(), z.square().mean(0).max()
            if not off <= 6 / math.sqrt(num) or not square <= 1 + 8 * math.sqrt(2 / num):
                raise FaultError(f"draws of {name}: mean {off:.2g}, mean square {square:.3g} in standard deviations")


@check
def at_least_the_prior(fitted: Fit) -> None:
    """What is optimal given a Gaussian likelihood has a bound no lower than the prior's."""
    c = fitted.c
    optimal = issubclass(c.family.kind, families.OptimalFamily) and c.family.keeps_sites
    if not optimal or not c.steps or c.likelihood not in GAUSSIAN or not c.is_deterministic or c.missing:
        return
    with torch.no_grad():
        process = fitted.model.process(fitted.x, {})
        mean, variance = process.mean + fitted.model.shift(fitted.x, {}), process.variance
        y = fitted.y.mT if c.likelihood == "outputs" else fitted.y
        if c.likelihood == "summed":
            mean, variance = mean.sum(-2), variance.sum(-2)
        prior = c.weight * (dist.Normal(mean, c.noise).log_prob(y) - variance / (2 * c.noise**2)).sum()
        value = -TraceQuadrature_ELBO(4).loss(fitted.program, fitted.guide, fitted.x, fitted.y)
    if not value >= prior - tolerance(c, 1e-6, 1e-2) * abs(prior) - 1e-3:
        raise FaultError(f"a bound of {value:.6g} after {c.steps} steps, where the prior's is {prior:.6g}")


@check
def informed(fitted: Fit) -> None:
    """A first call that shows the data is enough for what is exact in one step, whatever call it was."""
    c = fitted.c
    if c.steps or not c.family.keeps_sites or c.likelihood not in ("normal", "outputs") or not c.fixed or c.missing:
        return
    with apart():
        wanted = fit(dataclasses.replace(c, first="step", steps=1, rate=1e-12)).posteriors
    require_same(fitted.posteriors, wanted, tolerance(c, 1e-3, 0.1))


@check
def forgotten_size(fitted: Fit) -> None:
    """Two halves of the data, one after the other and without their number, are refused or warned of."""
    c, half = fitted.c, fitted.c.num // 2
    one_input = c.constant_column and c.columns - c.codes == 1  # other values at the same inputs may be meant
    if half < 2 or c.family.name == "SparseEP" or c.duplicates or one_input or not c.fixed or c.index % 4:
        return
    with apart(), untrained(fitted.model), warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always", UserWarning)
        svi = SVI(fitted.program, fitted.new_guide(), pyro.optim.Adam({"lr": 0.01}), TraceQuadrature_ELBO(4))
        try:
            svi.step(fitted.x[:half], fitted.y[:half])
            svi.step(fitted.x[half : 2 * half], fitted.y[half : 2 * half])
        except (ValueError, RuntimeError):
            return
    if not any("size" in str(warning.message) for warning in told):
        raise FaultError("other rows without the data's number pass without a word")


@check
def other_columns(fitted: Fit) -> None:
    """Inputs of other columns are refused."""
    x = fitted.x_new[:, :1] if fitted.c.columns > 1 else fitted.x_new.expand(-1, 2)
    try:
        with torch.no_grad():
            fitted.guide.posterior(x)
    except Exception:
        return
    raise FaultError(f"inputs of {x.shape[-1]} columns pass for those of {fitted.c.columns}")


@check
def unobserved(fitted: Fit) -> None:
    """Data that ``obs_mask`` leaves out say as little as data under ``poutine.mask``."""
    c = fitted.c
    masked = dataclasses.replace(c, missing="mask")
    if c.missing == "obs_mask" and masked.is_deterministic and (c.objective == "quadrature" or not c.steps):
        with apart():
            wanted = fit(masked).posteriors
        require_same(fitted.posteriors, wanted, tolerance(c, 1e-3, 0.3))


@check
def together(fitted: Fit) -> None:
    """At new inputs the guide draws function values jointly: at one input twice they agree."""
    c, num = fitted.c, 20
    if not c.fixed:
        return
    x = fitted.x_new[:1].expand(2, -1).clone()
    with torch.no_grad():
        pyro.set_rng_seed(5)
        drawn = [fitted.guide(x) for _ in range(num)]
        for name, q in fitted.guide.posterior(x).items():
            values, C = torch.stack([draw[name] for draw in drawn]).double(), q.covariance_matrix.double()
            variance = C[..., 0, 0] + C[..., 1, 1] - 2 * C[..., 0, 1]
            floor = (tolerance(c, 1e-6, 1e-3) + 10 * (c.jitter or 0.0)) * q.process.variance[..., 0]
            square = (values[..., 0] - values[..., 1]).square().mean(0) / (variance + floor)
            if not square.max() <= 1 + 8 * math.sqrt(2 / num):
                raise FaultError(f"draws of {name} at one input differ by {square.max().sqrt():.3g} sds")


@check
def local_latents(fitted: Fit) -> None:
    """At new rows, though there be as many as in training, latents of single rows come from the prior."""
    c = fitted.c
    if "local" not in c.latents or c.points:
        return
    pyro.set_rng_seed(4)
    for label, draw in (("the guide", fitted.guide), ("predict", lambda x: predict(fitted.program, fitted.guide, x))):
        with torch.no_grad():
            x = fitted.x.flip(0) + 0.0
            found = torch.stack([draw(x)["local"] for _ in range(60)]) if label == "the guide" else draw(x)["local"]
        square = (found / c.scales["y"]).square().mean()
        if not (square - 1).abs() <= 8 * math.sqrt(2 / found.numel()):
            raise FaultError(f"{label} draws local latents of {square.sqrt():.2g} times their prior's sd at new rows")


@check
def paths(fitted: Fit) -> None:
    """A sample function agrees with itself."""
    for name, q in fitted.posteriors.items():
        draw, x = q.paths(2, 64), fitted.x_new
        with torch.no_grad():
            one, other, some = draw(x), draw(x), draw(x[:1])[..., 0]
        units = q.process.variance.max().sqrt() + one.abs().max()
        gap = max((one - other).abs().max(), (one[..., 0] - some).abs().max()) / units
        # Values that are drawn exactly, given those drawn before, have the jitter's noise.
        jitter = fitted.c.jitter or tolerance(fitted.c, 1e-8, 1e-4)
        if not gap <= 10 * math.sqrt(jitter):
            raise FaultError(f"a path of {name} differs from itself by {gap:.2g} prior sds")


@check
def other_data(fitted: Fit) -> None:
    """The loss at other data leaves the posterior as it is."""
    c = fitted.c
    if c.family.name == "SparseEP" or c.num < 2:
        return
    guide = copy.deepcopy(fitted.guide)
    x = c._inputs(c.num, 3).to(c.dtype)
    if "FreeSites" not in c.family.name:
        TraceQuadrature_ELBO(4).loss(guide.model, guide, x, fitted.y)
    with torch.no_grad():
        require_same(guide.posterior(fitted.x_new), fitted.posteriors, tolerance(c, 1e-6, 1e-2))


@check
def evaluation(fitted: Fit) -> None:
    """The loss is the same number with gradients and without."""
    c = fitted.c
    iterated = c.family.keeps_sites and c.likelihood not in GAUSSIAN
    if c.family.name == "SparseEP" or iterated or c.family.options.get("num_columns") is not None:
        return
    if c.family.keeps_sites and not all(status["converged"] for status in fitted.guide.site_status.values()):
        return  # actions that follow the residual are no linear system; the status tells
    objective = TraceQuadrature_ELBO(6)
    pyro.set_rng_seed(3)
    with torch.no_grad():
        plain = objective.loss(fitted.program, fitted.guide, fitted.x, fitted.y)
    pyro.set_rng_seed(3)
    training = float(objective.differentiable_loss(fitted.program, fitted.guide, fitted.x, fitted.y))
    if not abs(plain - training) <= tolerance(c, 1e-6, 1e-2) * max(abs(training), c.num):
        raise FaultError(f"a loss of {plain:.6g} without gradients, {training:.6g} with them")


@check
def summed_out(fitted: Fit) -> None:
    """Indicators that are enumerated make the posterior of the mixture that they are; draws are 0 and 1."""
    c = fitted.c
    if c.likelihood != "outliers":
        return
    with torch.no_grad():
        drawn = predict(fitted.program, fitted.guide, fitted.x_new, num_samples=3)["outlier"]
    if drawn.shape != (3, c.num_new) or not ((drawn == 0) | (drawn == 1)).all():
        raise FaultError(f"draws of the indicator have shape {tuple(drawn.shape)} and values {drawn.unique().tolist()}")
    if c.is_deterministic and not c.batch and (c.objective == "quadrature" or not c.steps):
        with apart():
            wanted = fit(dataclasses.replace(c, likelihood="outliers written out")).posteriors
        require_same(fitted.posteriors, wanted, tolerance(c, 1e-3, 0.3), "written out")


@check
def one_posterior(fitted: Fit) -> None:
    """The joint covariance of f and g has no negative eigenvalues."""
    if not fitted.c.joint:
        return
    with torch.no_grad():
        f, g = (fitted.posteriors[name] for name in ("f", "g"))
        cross = f.covariance_with(g)
        whole = torch.cat(
            [torch.cat([f.covariance_matrix, cross], -1), torch.cat([cross.mT, g.covariance_matrix], -1)], -2
        ).double()
    units = whole.diagonal().clamp(min=1e-12).sqrt()
    least = torch.linalg.eigvalsh(whole / units / units[:, None]).min()
    if not least >= -tolerance(fitted.c, 1e-5, 1e-1) * len(units):
        raise FaultError(f"the covariance of f and g has an eigenvalue of {least:.2g}, their variances being 1")


@check
def absorbing(fitted: Fit) -> None:
    """Rows absorbed at once are rows absorbed in pieces, where the likelihood is Gaussian; they widen nothing there."""
    c, num = fitted.c, min(fitted.c.num, 6)
    if not c.absorbs:
        return
    x, y = c._inputs(num, 4).to(c.dtype), fitted.y[:num]
    at_once, in_pieces = (copy.deepcopy(fitted.guide) for _ in range(2))
    at_once.absorb(x, y)
    for rows in torch.arange(num).chunk(2):
        in_pieces.absorb(x[rows], y[rows])
    with torch.no_grad():
        one, other = (guide.posterior(fitted.x_new) for guide in (at_once, in_pieces))
    for name, q in one.items():
        require_finite(f"the mean of {name}, rows absorbed", q.mean)
        require_finite(f"the variance of {name}, rows absorbed", q.variance)
    if c.likelihood in ("normal", "outputs"):
        require_same(one, other, tolerance(c, 1e-6, 1e-2), "in pieces")
        for name, q in one.items():
            prior = q.process.variance
            if not (q.variance <= fitted.posteriors[name].variance + tolerance(c, 1e-6, 1e-2) * prior).all():
                raise FaultError(f"rows absorbed widen {name}")


def follows_rows(c: Configuration) -> bool:
    """Whether another order of the rows should change rounding alone."""
    drawn = not dataclasses.replace(c, latents=()).is_deterministic or "local" in c.latents
    steady = c.objective == "quadrature" or not c.steps or c.family.name == "SparseEP"
    if c.again == "permuted":
        tied = c.family.name == "ComputationAware" and (c.duplicates or c.constant_column or c.codes)
        steady = steady and not (c.family.depends_on_order or tied)
    return steady and c.is_plain and not (drawn or c.batch)


@check
def again(fitted: Fit) -> None:
    """Trained once more: from the same seed, on rows in another order, or in a new order at every step."""
    c = fitted.c
    if c.again != "repeatable" and not follows_rows(c):
        return
    with apart():
        if c.again == "repeatable":
            wanted, limit, other = fitted, 1e-12, fit(c)
            if other.losses != fitted.losses:
                raise FaultError("losses differ at the same seed")
        else:
            # Training amplifies rounding, so that parameters hardly move, but where they are the sites themselves.
            free = "FreeSites" in c.family.name
            slow, limit = (c, 0.02) if free else (dataclasses.replace(c, rate=1e-6), tolerance(c, 1e-3, 0.3))
            order = torch.randperm(c.num, generator=torch.Generator().manual_seed(c.index))
            wanted = fit(slow)
            _ = wanted.posteriors
            with apart():  # the networks of both have one name
                other = fit(slow, order) if c.again == "permuted" else fit(slow, shuffled=True)
                _ = other.posteriors
        require_same(other.posteriors, wanted.posteriors, limit, c.again)


# Outcomes.


CLEAN, ERROR, EXPLOSION, SILENT, RAW = "clean", "clear error", "explosion", "silent fault", "raw exception"
SEVERITY = (CLEAN, ERROR, EXPLOSION, SILENT, RAW)
_NAMES = "|".join([*families.__all__, *kernels.__all__, *pyro_sparsegp.__all__]) + "|site|GP |kernel|family|guide|model"
_PACKAGE = str(Path(pyro_sparsegp.__file__).parent)


@dataclass
class Finding:
    """What one check, or the training, came to."""

    where: str
    outcome: str
    text: str
    trace: str = ""


@dataclass
class Result:
    """What a configuration came to; its outcome is the worst of its findings'."""

    configuration: Configuration
    findings: list[Finding]
    seconds: float

    @property
    def outcome(self) -> str:
        return max((finding.outcome for finding in self.findings), key=SEVERITY.index, default=CLEAN)

    def __str__(self) -> str:
        worst = [finding for finding in self.findings if finding.outcome == self.outcome]
        told = " | ".join(f"{finding.where}: {finding.text}" for finding in worst)
        return f"{self.configuration.index} {self.outcome}: {told} || {self.configuration.describe()}"


def judge(where: str, error: Exception) -> Finding:
    """Whether an exception is a clear error: raised by the package itself, naming a site or an argument."""
    trace = "".join(traceback.format_exception(error))
    text = " ".join(str(error).split())
    if isinstance(error, FaultError):
        return Finding(where, SILENT, text, trace)
    if isinstance(error, ExplosionError):
        return Finding(where, EXPLOSION, text, trace)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(_PACKAGE)]
    last = traceback.extract_tb(error.__traceback__)[-1]
    ours = last.filename.startswith(_PACKAGE) and linecache.getline(last.filename, last.lineno or 0).lstrip()
    clear = bool(ours) and str(ours).startswith("raise") and isinstance(error, (ValueError, RuntimeError))
    if clear and re.search(_NAMES, text):
        return Finding(where, ERROR, text[:160], trace)
    place = frames[-1] if frames else last
    told = f"{type(error).__name__}: {text[:120]} at {Path(place.filename).name}:{place.lineno} in {place.name}"
    return Finding(where, RAW, told, trace)


def run(index: int) -> Result:
    """Draw a configuration, train it and check it."""
    start = time.perf_counter()
    c = Configuration.draw(index)
    findings: list[Finding] = []
    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with apart(), warnings.catch_warnings():
            warnings.simplefilter("ignore")
            try:
                fitted = fit(c)
            except Exception as error:
                findings.append(judge("fit", error))
            else:
                for one in CHECKS:
                    try:
                        one(fitted)
                    except Exception as error:
                        findings.append(judge(one.__name__, error))
    finally:
        torch.set_default_dtype(before)
    return Result(c, findings, time.perf_counter() - start)


def sweep(start: int, count: int, verbose: bool = False) -> Counter[str]:
    """Run configurations, print what is not clean, and count outcomes."""
    counts: Counter[str] = Counter()
    seconds = 0.0
    for index in range(start, start + count):
        result = run(index)
        counts[result.outcome] += 1
        seconds += result.seconds
        if result.findings or verbose:
            print(result, flush=True)
        if verbose:
            print(result.configuration)
            for finding in result.findings:
                print(f"--- {finding.where}: {finding.outcome}\n{finding.trace}")
    told = ", ".join(f"{counts[outcome]} {outcome}" for outcome in SEVERITY)
    print(f"{count} configurations: {told}; {seconds / count:.2f} s each")
    return counts


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("start", type=int)
    parser.add_argument("count", type=int)
    parser.add_argument("--verbose", action="store_true", help="tell of clean ones too, with tracebacks")
    given = parser.parse_args()
    sweep(given.start, given.count, given.verbose)
