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
import io
import math
import pickle
import random
import re
import sys
import time
import traceback
import warnings
from collections import Counter
from contextlib import nullcontext
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from types import SimpleNamespace
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

import pyro  # noqa: E402
import pyro.contrib.gp  # noqa: E402
import pyro.distributions as dist  # noqa: E402
import torch  # noqa: E402
from pyro import poutine  # noqa: E402
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO  # noqa: E402

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
from tests.models import cross_covariance  # noqa: E402

NUM_LEVELS = 3  # of the column of codes, and of the groups
ANEW = {False: 1e-6, True: 1e-5}  # relative: what updates of sites may leave where a family on sites finds them anew
LATER = 1000  # the first configuration that may hold what came later: those before stay as they were
OUTLIERS = 0.1  # their share


# Kernels.


@dataclass(frozen=True)
class Term:
    """A kernel as it was drawn; Python numbers alone, so that it can be built in any dtype."""

    kind: str
    numbers: tuple = ()
    parts: tuple[Term, ...] = ()

    def walk(self):
        yield self
        for part in self.parts:
            yield from part.walk()

    def kinds(self):
        return {term.kind for term in self.walk()}


SMOOTH = ("RBF", "Matern12", "Matern32", "Matern52", "RationalQuadratic", "Periodic")
FINITE = ("Linear", "Constant", "Polynomial", "RandomFourier", "Categorical", "DeepBasis")
RARE = ("White", "Anova", "Convolutional", "TICK", "Foreign", "FromPyro")


def draw_length(r, columns):
    one = lambda: round(math.exp(r.uniform(-2, 1)), 3)  # noqa: E731
    return tuple(one() for _ in range(columns)) if r.random() < 0.4 else one()


def draw_leaf(r, columns, codes, finite, unit):
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


def summed(terms):
    return Term("Sum", (), tuple(terms)) if len(terms) > 1 else terms[0]


def draw_kernel(r, columns, codes, finite, additive, unit):
    def leaf():
        term = draw_leaf(r, columns, codes, finite, unit)
        return Term("Scaled", (round(math.exp(r.uniform(-2, 1.5)), 3),), (term,)) if r.random() < 0.4 else term

    def factor():
        return Term("Product", (), (leaf(), leaf())) if r.random() < 0.15 else leaf()

    count = r.choice((1, 2, 2, 3, 4)) if additive else r.choice((1, 1, 1, 2, 3))
    return summed([factor() for _ in range(count)])


class Network(torch.nn.Module):
    """Features of a DeepBasis, in the dtype of its inputs."""

    def __init__(self, columns, seed):
        super().__init__()
        generator = torch.Generator().manual_seed(seed)
        self.first = torch.nn.Parameter(torch.randn(columns, 6, generator=generator, dtype=torch.float64))
        self.last = torch.nn.Parameter(torch.randn(6, 3, generator=generator, dtype=torch.float64) / 2)

    def forward(self, x):
        return (x @ self.first.to(x)).tanh() @ self.last.to(x)


class Frozen:
    """A network that does not train."""

    def __init__(self, network):
        self.first, self.last = network.first.detach(), network.last.detach()

    __call__ = Network.forward


class Foreign:
    """A kernel of the user's own: a callable with a method ``diag``."""

    def __call__(self, x, z=None):
        z = x if z is None else z
        return (-(x[..., :, None, :] - z[..., None, :, :]).abs().sum(-1)).exp()

    def diag(self, x):
        return x.new_ones(x.shape[:-1])

    def __repr__(self):
        return "Foreign()"


def random_fourier(b, columns, seed, num, scale):
    omega = torch.randn(num, columns, generator=torch.Generator().manual_seed(seed), dtype=torch.float64)
    return kernels.RandomFourier(omega.to(b.like), b.scale(scale))


def coregionalisation(b, seed, rank):
    generator = torch.Generator().manual_seed(seed)
    mixing = torch.randn(NUM_LEVELS, rank, generator=generator, dtype=torch.float64)
    return kernels.Coregionalisation(mixing.to(b.like), b.like.new_full((NUM_LEVELS,), 0.3))


# How a term is built, of what it is built for, its parts and its numbers; others have a length scale.
KERNELS = {
    "Sum": lambda b, parts: kernels.Sum(*parts),
    "Product": lambda b, parts: kernels.Product(*parts),
    "Scaled": lambda b, parts, scale: kernels.Scaled(parts[0], scale),
    "Select": lambda b, parts, *dims: kernels.Select(parts[0], dims),
    "Anova": lambda b, parts: kernels.Anova(parts[0], 0.0, b.c.scales["x"]),
    "Linear": lambda b, parts, _: kernels.Linear(1.0 / b.unit**2),
    "Constant": lambda b, parts, _: kernels.Constant(1.0),
    "White": lambda b, parts, _: kernels.White(0.1),
    "Polynomial": lambda b, parts, degree, bias: kernels.Polynomial(degree, bias),
    "Categorical": lambda b, parts: kernels.Categorical(NUM_LEVELS),
    "Coregionalisation": lambda b, parts, *numbers: coregionalisation(b, *numbers),
    "Foreign": lambda b, parts, _: Foreign(),
    "FromPyro": lambda b, parts, _: kernels.from_pyro(b.network),
    "DeepBasis": lambda b, parts, columns, seed, corrected, trains: kernels.DeepBasis(
        b.network if trains else Frozen(b.network), variance_correction=corrected
    ),
    "RandomFourier": lambda b, parts, *numbers: random_fourier(b, *numbers),
    "Convolutional": lambda b, parts, s: kernels.Convolutional(kernels.RBF(b.scale(s).mean()), (2, 2), (1, 2)),
    "TICK": lambda b, parts, s: kernels.TICK(kernels.RBF(b.scale(s).mean()), kernels.RBF(1.0), (2, 2), (1, 2)),
    "Periodic": lambda b, parts, s: kernels.Periodic(b.like.new_tensor(s), b.scale(s)),
}


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
    def kind(self):
        return getattr(families, self.name)

    @property
    def on_sites(self):
        return issubclass(self.kind, families.SiteFamily)

    @property
    def is_additive(self):
        return "Additive" in self.name or "Coupled" in self.name

    @property
    def points(self):
        return [value for value in self.options.values() if isinstance(value, Points)]

    @property
    def spans_data(self):
        """Whether the posterior of a Gaussian likelihood is exact."""
        if self.name == "ComputationAware":
            whole = self.options["num_actions"] == -1 and not self.options.get("batches")
            return whole and self.options["actions"] != "cg"
        fixed = self.points == [Points(-1, True)] and not self.options["trainable"]
        return self.name == "ExactWeightSpace" or (fixed and self.name in ("SGPR", "ConditionalSGPR", "AdditiveSGPR"))

    @property
    def depends_on_order(self):
        """Whether another order of the rows makes another start."""
        return self.options.get("actions") == "random" or any(not points.given for points in self.points)


# Options by what they are of, drawn for rows (N, of which some are distinct) and columns.


def placed(r, n, distinct, columns):
    init = r.choice(("greedy",) * 4 + ("kmeans",) + ("grid",) * (columns < 3))
    whole = r.random() < 0.35
    points = Points(-1, True) if whole else Points(r.randint(1, max(1, min(distinct, 12))), r.random() < 0.4)
    return {"inducing": points, "init": init, "trainable": r.random() < (0.15 if points.num < 0 else 0.6)}


def nested(r, n, distinct, columns):
    num = max(1, min(distinct // 2, 5))
    first, more = (Points(r.randint(1, num), distinct < 2 or r.random() < 0.4) for _ in range(2))
    return {**placed(r, n, distinct, columns), "inducing": first, "orthogonal": more}


def actions(r, n, distinct, columns):
    count = -1 if r.random() < 0.5 else r.randint(1, max(1, n // 2))
    return {"num_actions": count, "actions": r.choice(("sparse", "sparse", "cg", "eigen", "random"))}


def chosen(**options):
    """One of some values for each."""
    return lambda r, *_: {name: r.choice(values) for name, values in options.items()}


FREE = chosen(start=("data", "data", "prior"))
SITES = chosen(rate=(0.3, 0.7, 0.7, 1.0), updates=(1, 1, 3))
FAMILIES = {
    "SVGP": (placed, FREE),
    "SGPR": (placed, SITES),
    "OrthogonalInducing": (nested, FREE),
    "OrthogonallyDecoupled": (nested, FREE, chosen(num_columns=(None, None, 1, 3))),
    "CollapsedOrthogonal": (nested, SITES),
    "SemiCollapsedOrthogonal": (nested, SITES, chosen(covariance=("free", "prior"))),
    "ConditionalSGPR": (placed, SITES),
    "MeanFieldAdditive": (placed, FREE),
    "CoupledCovariance": (placed, FREE),
    "CoupledPrecision": (placed, FREE, chosen(rank=(None, 1, 3), base=("block", "identity"))),
    "AdditiveSGPR": (placed, SITES),
    "ComputationAware": (actions, SITES),
    "WeightSpace": (FREE,),
    "ExactWeightSpace": (SITES,),
    "SparseEP": (placed,),
}


def draw_family(r, num, distinct, columns, among=None):
    """A family for some rows, fewer of them distinct."""
    name = r.choice(among or [*FAMILIES, "SVGP", "SGPR", "ComputationAware"])
    options: dict[str, Any] = {}
    for part in FAMILIES[name]:
        options |= part(r, num, distinct, columns)
    return Recipe(name, options)


# Configurations.


def written_out(eta, scale):
    """The mixture of outliers and others."""
    each = torch.stack(torch.broadcast_tensors(*[eta * 0 + scale * s for s in (1, 10)]), -1)
    shares = eta.new_tensor([1 - OUTLIERS, OUTLIERS]).expand(*eta.shape, 2)
    return dist.MixtureSameFamily(dist.Categorical(shares), dist.Normal(eta[..., None], each))


LIKELIHOODS = {  # of η, a scale and the second GP
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
NEW_LIKELIHOODS = {  # from LATER on
    "added": lambda eta, scale, g: dist.Normal(eta + g, scale),
    "product": lambda eta, scale, g: dist.Normal(eta * g, scale),
    "outliers": lambda eta, scale, g: dist.Normal(eta, scale * (1 + 9 * g)),  # g is the indicator
    "outliers written out": lambda eta, scale, g: written_out(eta, scale),
}
DENSITIES = LIKELIHOODS | NEW_LIKELIHOODS
TWO = ("heteroscedastic", "added", "product")  # GP sites
GAUSSIAN = ("normal", "outputs", "summed")
LOCATED = (*GAUSSIAN, "student", "heteroscedastic", *NEW_LIKELIHOODS)  # η is in the units of y
SEVERAL = ("categorical", "outputs", "summed")
PLAIN = {"x": 1.0, "length": 1.0, "variance": 1.0, "y": 1.0}
# What comes from LATER on, and the families of each.
NEWS = {
    "joint": ("SVGP", "CoupledPrecision", "CoupledPrecision", "CoupledCovariance", "WeightSpace"),
    "absorbs": ("SVGP", "OrthogonalInducing", "CoupledCovariance", "MeanFieldAdditive", "WeightSpace", "SGPR"),
    "outliers": None,
    "support": ("ComputationAware",),
    "outputs": None,
}


class Configuration(SimpleNamespace):
    """All that was drawn; the data follow from it."""

    @classmethod
    def draw(cls, index):
        """The configuration of a number."""
        drawn = cls(**cls._draw(random.Random(index), index))
        return drawn if index < LATER else drawn._later(random.Random(-index))

    def replace(self, **new):
        """The same but for some."""
        return Configuration(**vars(self) | new)

    def _later(self, r):
        """With something of what came later."""
        new: dict[str, Any] = {}
        kind = r.choice(("joint", *NEWS))
        columns, codes, likelihood = self.columns, self.codes, self.likelihood
        num, among = max(self.num, 4), NEWS[kind]
        if kind == "joint":
            likelihood = r.choice(TWO)
            new |= {"joint": likelihood != "product", "absorbs": r.random() < 0.2}  # which has no linear predictor
        elif kind == "absorbs":
            likelihood = r.choice(("normal", "normal", likelihood))
            new["absorbs"] = True
        elif kind == "outliers":
            likelihood = "outliers"
        elif kind == "support":
            new |= {"support": r.randint(2, num - 1), "batch": num // 2, "first": "guide"}
        if kind == "outputs" or r.random() < 0.2:
            columns, codes = max(columns, 2), True
        distinct = 1 if self.constant_column and columns - codes == 1 else (num + 1) // (1 + self.duplicates)
        family = draw_family(r, num, distinct, columns, among) if among else self.family
        if columns != self.columns or num != self.num:
            family = draw_family(r, num, distinct, columns, among or (self.family.name,))
        options = dict(family.options)
        if kind == "joint":  # a count for each site: their kernels have other terms
            options = {k: Points(max(v.num, 1), False) if isinstance(v, Points) else v for k, v in options.items()}
        if kind == "support":
            options |= {"batches": True, "num_actions": min(options["num_actions"], new["support"])}
        family = Recipe(family.name, options)
        finite, unit = "WeightSpace" in family.name, self.is_plain or kind in ("joint", "outliers")
        kernel = draw_kernel(r, columns, codes and kind != "outputs", finite, family.is_additive, unit)
        if codes and (kind == "outputs" or r.random() < 0.5):
            mixing = Term("Coregionalisation", (r.randrange(100), r.choice((1, 2))))
            by_output = Term("Select", (columns - 1,), (mixing,))
            terms = kernel.parts if kernel.kind == "Sum" else (kernel,)
            kernel = summed([Term("Product", (), (term, by_output)) for term in terms])
        if likelihood != self.likelihood:
            new |= {"scales": PLAIN, "num_outputs": 0, "missing": "mask" if self.missing and r.random() < 0.5 else ""}
        if kind == "joint" and num > 4 and r.random() < 0.2:
            new["batch"] = num // 2
        new |= {"num": num, "columns": columns, "codes": codes, "family": family, "kernel": kernel}
        return self.replace(likelihood=likelihood, **new)

    @staticmethod
    def _draw(r, index):
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
        scales = draw_scales(r, likelihood) if r.random() < 0.15 else PLAIN
        finite = "WeightSpace" in family.name and r.random() < 0.95
        return {  # in the order in which they are drawn
            "index": index,
            "family": family,
            "kernel": draw_kernel(r, columns, codes, finite, family.is_additive, scales["x"] == 1),
            "likelihood": likelihood,
            "num_outputs": r.choice((2, 3)) if likelihood in SEVERAL else 0,  # 0 is one function, without a batch
            "per_output": r.random() < 0.3,  # hyperparameters of each output
            "latents": draw_latents(r, likelihood),
            "points": r.random() < 0.1,  # other latents are points
            "mean": r.choice(("zero",) * 4 + ("number", "function")),
            "offset": r.random() < 0.15,
            "missing": draw_missing(r, likelihood),
            "num": num,
            "columns": columns,
            "codes": codes,
            "num_new": r.choice((1, 5, 5, num)),
            "dtype": torch.float32 if r.random() < 0.2 else torch.float64,
            "jitter": r.choice((None,) * 16 + (1e-6, 1e-4)),
            "scales": scales,  # of inputs, length scales, the prior variance and the observations
            "duplicates": duplicates,
            "constant_column": constant_column,
            "origin": r.random() < 0.08,  # the first row is 0
            "weight": r.choice((1.0,) * 16 + (0.5, 3.0)),  # of the data, by poutine.scale in the model
            "conditioned": r.random() < 0.06,  # the model is under poutine.condition
            "first": r.choice(("step", "guide", "no_grad", "evaluate", "posterior")),  # call of the guide
            "objective": r.choice(("quadrature",) * 5 + ("trace", "mean field")),
            "steps": r.choice((0, 1, 1, 2, 3, r.randint(4, 10), r.randint(4, 30))),
            "rate": r.choice((0.003, 0.01, 0.03, 0.1)),
            "batch": max(1, num // 2) if num > 3 and r.random() < (0.03 if family.on_sites else 0.2) else None,
            "again": r.choice(("repeatable", "permuted", "permuted", "permuted")),  # how it trains a second time
            "propagation": {
                "damping": r.choice((0.5, 0.5, 0.9, 1.0)),
                "power": r.choice((1.0, 1.0, 0.5)),
                "schedule": r.choice(("inner", "inner", "outer")),
                "max_sweeps": 20,
            },
            "coupled": r.random() < 0.3,  # other latents with each other and with the coefficients
            "joint": False,  # both GP sites have one posterior
            "absorbs": False,  # further rows
            "support": 0,  # rows that actions act on, of more
        }

    def data(self):
        """Inputs (N, D) and observations, NaN where they are missing."""
        x = self.inputs(self.num, 0, torch.float64)
        with torch.random.fork_rng():
            torch.manual_seed(10 * self.index)
            eta = torch.sin(6 * x[:, 0] / self.scales["x"]) + 0.5 * torch.randn(len(x), dtype=torch.float64) / 4
            if self.num_outputs:
                eta = torch.stack([eta * (1 + p / 2) * (-1) ** p for p in range(self.num_outputs)])
            eta = eta * (self.scales["y"] if self.likelihood in LOCATED else 1.0)
            other = torch.full((), float(self.likelihood == "product"))
            if "outliers" in self.likelihood:
                other = (torch.rand(len(x)) < OUTLIERS).double()
            y = DENSITIES[self.likelihood.removesuffix(" written out")](eta, self.noise, other).sample().double()
            if self.missing:
                y[torch.rand(len(y)) < 0.3] = math.nan
                y[0] = 1.0
        return x.to(self.dtype), y.to(self.dtype)

    def inducing(self, num):
        """Inputs that do not depend on the order of the rows."""
        return self.inputs(self.num, 0).unique(dim=0) if num < 0 else self.inputs(num, 2)

    def inputs(self, num, seed, dtype=None):
        x = torch.rand(
            num, self.columns, generator=torch.Generator().manual_seed(10 * self.index + seed), dtype=torch.float64
        )
        if self.codes:
            x[:, -1] = (NUM_LEVELS * x[:, -1]).floor()
        x[:, : self.columns - self.codes] *= self.scales["x"]
        if self.constant_column:
            x[:, 0] = self.scales["x"]
        if self.origin and seed == 0:
            x[0] = 0.0
        if self.duplicates and seed == 0:
            x[num // 2 :] = x[: num - num // 2].clone()
        return x.to(dtype or self.dtype)

    @property
    def is_exact(self):
        """Whether the family is exact under this kernel and likelihood, and rounding and jitter hide nothing."""
        corrected = any(term.kind == "DeepBasis" and term.numbers[2] for term in self.kernel.walk())
        noisy = corrected or "White" in self.kernel.kinds()
        clean = self.dtype == torch.float64 and self.is_plain and self.jitter is None and "local" not in self.latents
        return self.family.spans_data and not noisy and self.likelihood in ("normal", "outputs") and clean

    @property
    def fixed(self):
        """Whether there are no other latents."""
        return not self.latents

    @property
    def is_deterministic(self):
        """Whether the bound by quadrature has no draws in it."""
        drawn = self.latents or self.num_outputs > 2  # so many axes make no grid
        return not drawn and self.family.options.get("num_columns") is None

    @property
    def noise(self):
        return 0.2 * self.scales["y"]

    @property
    def level(self):
        """What the model's site "level" is conditioned on."""
        return 0.7 * self.scales["y"]

    @property
    def sites(self):
        return ("f", "g") if self.likelihood in TWO else ("f",)

    @property
    def is_plain(self):
        """Whether scales are ordinary, so that tolerances can be tight."""
        return all(scale == 1 for scale in self.scales.values())


def draw_scales(r, likelihood):
    def power(low=-4, high=4):
        return 10.0 ** r.randint(low, high)

    x = power() if r.random() < 0.5 else 1.0
    length = x if r.random() < 0.6 or likelihood in ("poisson", "gamma", "negative binomial") else 1.0
    y = power() if likelihood in LOCATED and r.random() < 0.6 else 1.0
    variance = y**2 if r.random() < 0.6 else power(-4, 4 if likelihood in LOCATED else 0)
    return {"x": x, "length": length, "variance": variance, "y": y}


def draw_missing(r, likelihood):
    if likelihood in SEVERAL or r.random() < 0.8:
        return ""
    return r.choice(("mask", "own mask")) if likelihood in LOCATED else "mask"


def draw_latents(r, likelihood):
    if r.random() < 0.45:
        return ()
    known = ["hyperparameters", "intercept", "intercept in the mean", "groups before", "groups after", "local"]
    known += ["noise"] * (likelihood in LOCATED)
    return tuple(sorted(r.sample(known, r.choice((1, 1, 1, 2))), key=known.index))


# Programs.

# Latents by site: what asks for them, and their prior, of the configuration and a zero.
BEFORE = {
    "scale": ("hyperparameters", lambda c, zero: dist.LogNormal(zero, 0.5)),
    "length": ("hyperparameters", lambda c, zero: dist.LogNormal(zero, 0.3)),
    "intercept": ("intercept", lambda c, zero: dist.Normal(zero, 2.0 * c.scales["y"])),
    "intercept_in_the_mean": ("intercept in the mean", lambda c, zero: dist.Normal(zero, 2.0 * c.scales["y"])),
    "level": ("conditioned", lambda c, zero: dist.Normal(zero, c.scales["y"])),
    "groups_before": ("groups before", lambda c, zero: dist.Normal(zero, c.scales["y"])),
}
AFTER = {
    "groups_after": ("groups after", lambda c, zero: dist.Normal(zero, c.scales["y"])),
    "noise": ("noise", lambda c, zero: dist.LogNormal(zero + math.log(c.noise), 0.5)),
}


class Slope:
    """A mean function."""

    def __init__(self, scale):
        self.scale = scale

    def __call__(self, x):
        return 0.5 * x[..., 0] / self.scale


class Model:
    """The program of a configuration. It can be pickled, and its networks are its own."""

    def __init__(self, c):
        self.c, self.networks = c, {}
        for term in c.kernel.walk():
            if term.kind == "DeepBasis":
                self.networks[term] = Network(*term.numbers[:2])
            if term.kind == "FromPyro":
                one = torch.ones((), dtype=c.dtype)
                self.networks[term] = pyro.contrib.gp.kernels.RBF(term.numbers[0], one, c.scales["length"] * one)

    def __call__(self, x, y=None, size=None):
        c = self.c
        for i, (term, network) in enumerate(self.networks.items()):
            if term.kind == "FromPyro" or term.numbers[3]:
                pyro.module(f"network{i}", network)
        h = self.latents(BEFORE, x)
        f = pyro.sample("f", self.process(x, h))
        g = pyro.sample("g", GaussianProcess(self.other_kernel, x)) if "g" in c.sites else x.new_zeros(())
        h |= self.latents(AFTER, x)
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
            if c.missing == "own mask":
                return pyro.sample("y", likelihood.mask(seen), obs=y)
            with poutine.mask(mask=seen):
                return pyro.sample("y", likelihood, obs=y)

    def latents(self, table, x):
        found, asked = {}, (*self.c.latents, *["conditioned"] * self.c.conditioned)
        for site, (asks, prior) in table.items():
            if asks in asked:
                with pyro.plate(f"{site}_plate", NUM_LEVELS) if "groups" in site else nullcontext():
                    found[site] = pyro.sample(site, prior(self.c, x.new_zeros(())))
        return found

    @property
    def other_kernel(self):
        """Of g."""
        unit = self.c.scales["x"]
        return kernels.Linear(1.0 / unit**2) if "WeightSpace" in self.c.family.name else kernels.RBF(unit)

    def shift(self, x, h):
        """η − f."""
        total = x.new_zeros(len(x)) + self.c.conditioned * self.c.level + h.get("intercept", 0.0)
        if self.c.offset:
            total = total + 0.5 * torch.cos(x.sum(-1) / self.c.scales["x"])
        groups = (x[:, 0] / self.c.scales["x"] * NUM_LEVELS).long().clamp(0, NUM_LEVELS - 1)
        for name in ("groups_before", "groups_after"):
            total = total + h[name][groups] if name in h else total
        return total

    def process(self, x, h):
        level = h.get("intercept_in_the_mean")
        mean = {"zero": None, "number": 0.5, "function": Slope(self.c.scales["x"])}[self.c.mean]
        mean = mean if level is None else lambda x: level.expand(len(x))
        process = GaussianProcess(self.kernel(x, h), x, mean, self.c.jitter)
        return process.expand([self.c.num_outputs]).to_event(1) if self.c.num_outputs else process

    def kernel(self, like, h):
        kernel = self._build(self.c.kernel, like, h.get("length", 1.0))
        # Inside the sum, so that its terms stay terms.
        parts = list(kernel.terms) if isinstance(kernel, kernels.Sum) else [kernel]
        if self.c.scales["variance"] != 1 or "scale" in h:
            variance = self.c.scales["variance"] * h.get("scale", like.new_ones(()))
            parts = [kernels.Scaled(part, variance) for part in parts]
        if self.c.num_outputs and self.c.per_output:
            parts[0] = kernels.Scaled(parts[0], torch.linspace(1.0, 2.0, self.c.num_outputs).to(like))
        return kernels.Sum(*parts) if len(parts) > 1 else parts[0]

    def _build(self, term, like, length):
        unit = self.c.scales["length"]
        built = SimpleNamespace(c=self.c, like=like, unit=unit, network=self.networks.get(term))
        built.scale = lambda number: unit * like.new_tensor(number) * length
        parts = [self._build(part, like, length) for part in term.parts]
        if term.kind in KERNELS:
            return KERNELS[term.kind](built, parts, *term.numbers)
        return getattr(kernels, term.kind)(built.scale(*term.numbers))


# Training.


@dataclass
class Fit:
    """A trained guide and what it was trained on."""

    c: Configuration
    model: Model
    program: Any  # the model, perhaps under a handler
    family: Any
    guide: AutoSparseGP
    x: torch.Tensor
    y: torch.Tensor
    losses: list[float]

    @property
    def x_new(self):
        return self.c.inputs(self.c.num_new, 1)

    def new_guide(self):
        return new_guide(self.program, self.family, self.c)

    @cached_property
    def posteriors(self):
        with torch.no_grad():
            return self.guide.posterior(self.x_new)


def new_guide(program, family, c):
    return AutoSparseGP(program, family, point_estimates=True if c.points else None, independent=not c.coupled)


def build_family(c, model):
    x, _ = c.data()
    options = dict(c.family.options)
    for name, value in options.items():
        if isinstance(value, Points):
            options[name] = value.num if not value.given else c.inducing(value.num)
    if options.get("num_actions") == -1:
        options["num_actions"] = c.support or len(x)
    if c.family.is_additive and isinstance(options["inducing"], torch.Tensor):
        z, kernel = options["inducing"], model.kernel(x, {})
        of_terms = (getattr(term, "columns", None) for term in getattr(kernel, "terms", [kernel]))  # not of Foreign
        # torch.unique takes no rows without columns, as of a constant's.
        options["inducing"] = [
            z if read is None else z[:, [*read]].unique(dim=0) if read else z[:1, :0] for read in of_terms
        ]
    family = c.family.kind(**options)
    if c.joint:
        return {("f", "g"): family}
    if "g" in c.sites and isinstance(options.get("inducing"), list):
        return {"f": family, "g": c.family.kind(**{**options, "inducing": z})}
    return family


OBJECTIVES = {"quadrature": lambda: TraceQuadrature_ELBO(10), "trace": Trace_ELBO, "mean field": TraceMeanField_ELBO}


def fit(c, order=None):
    """Train from the start, perhaps on the rows in another order."""
    pyro.set_rng_seed(c.index)
    x, y = c.data()
    order = torch.arange(len(x)) if order is None else order
    x, y = x[order], y[order]
    model = Model(c)
    family = build_family(c, model)
    program = poutine.condition(model, data={"level": x.new_full((), c.level)}) if c.conditioned else model
    guide, optim = new_guide(program, family, c), pyro.optim.Adam({"lr": c.rate})
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
        rows: Any = list(range(len(x)))
        if c.batch:
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


class ExplosionError(Exception):
    """The loss rose a hundredfold over its start."""


CHECKS: list[Any] = []


def check(function):
    CHECKS.append(function)
    return function


def tolerance(c, exact, rounded):
    return exact if c.dtype == torch.float64 else rounded


def require(held, told):
    if not held:
        raise FaultError(told)


def require_same(found, wanted, limit, why=""):
    """Means to within ``limit`` standard deviations of the prior, variances to within that share of the prior's."""
    for name, q in found.items():
        p = wanted[name]
        prior = p.process.variance.double()
        units = {"mean": prior.sqrt() + p.mean.double().abs(), "variance": prior}
        for what, unit in units.items():
            gap = ((getattr(q, what).double() - getattr(p, what).double()).abs() / unit).max()
            require(gap <= limit, f"{why}: {what}s of {name} differ by {gap:.2g} of the prior's scale")


def require_finite(what, value):
    require(torch.as_tensor(value).isfinite().all(), f"{what} is not finite")


def apart():
    """With an empty parameter store, and the old one again afterwards."""
    return pyro.get_param_store().scope()


def bound_of(fitted, nodes=4):
    with torch.no_grad():
        return -TraceQuadrature_ELBO(nodes).loss(fitted.program, fitted.guide, fitted.x, fitted.y)


@check
def finite(fitted):
    require_finite("the loss", fitted.losses)
    for name, parameter in fitted.guide.named_parameters():
        require_finite(name, parameter)
    for name, q in fitted.posteriors.items():
        for what in ("mean", "variance", "kl"):
            require_finite(f"the {what} of {name}", getattr(q, what))
        require((q.variance >= 0).all(), f"{name} has a negative variance")


@check
def explodes_not(fitted):
    """An outcome of its own: see :func:`judge`."""
    if fitted.losses and max(fitted.losses) - fitted.losses[0] > 100 * max(abs(fitted.losses[0]), fitted.c.num):
        raise ExplosionError(f"the loss rose from {fitted.losses[0]:.4g} to {max(fitted.losses):.4g}")


@check
def subset(fitted):
    """Some of the inputs have the marginals that they have among all."""
    rows, limit = torch.arange(0, fitted.c.num_new, 2).flip(0), tolerance(fitted.c, 1e-6, 1e-2)
    with torch.no_grad():
        some = fitted.guide.posterior(fitted.x_new[rows])
    require_same(some, {name: q.at(fitted.x_new[rows]) for name, q in fitted.posteriors.items()}, limit)
    for name, q in fitted.posteriors.items():
        gap = (q.mean[..., rows] - some[name].mean).abs() + (q.variance[..., rows] - some[name].variance).abs()
        prior = some[name].process.variance
        held = (gap <= limit * (prior + prior.sqrt() + some[name].mean.abs())).all()
        require(held, f"{name} at some inputs is not what it is among all")


@check
def covariance(fitted):
    """The covariance's diagonal is the variance, and it has no negative eigenvalues."""
    limit = tolerance(fitted.c, 1e-6, 1e-2)
    for name, q in fitted.posteriors.items():
        full, prior = q.covariance_matrix.detach().double(), q.process.variance.double()
        gap = ((full.diagonal(dim1=-2, dim2=-1) - q.variance.double()).abs() / prior).max()
        require(gap <= limit, f"covariance and variance of {name} differ by {gap:.2g} of the prior's")
        least = torch.linalg.eigvalsh(full).min()
        require(least >= -limit * prior.max() * prior.shape[-1], f"the covariance of {name} has eigenvalue {least:.2g}")


@check
@torch.no_grad()
def components(fitted):
    """The components add up to the whole, less a prior mean that is made of latents."""
    num, limit = fitted.c.num_new, tolerance(fitted.c, 1e-6, 1e-2)
    for name, q in fitted.posteriors.items():
        parts = q.components
        if len({block for *_, blocks in q.basis.components() for block in blocks}) < len(q.basis.sizes):
            continue  # test_a_posterior_whose_mean_is_made_of_latents
        mean = q.process.mean + sum(part.mean for part in parts)
        joint = parts.covariance_matrix.unflatten(-2, (len(parts), num)).unflatten(-1, (len(parts), num)).sum((-4, -2))
        prior = q.process.variance
        held = ((mean - q.mean).abs() <= limit * (prior.sqrt() + q.mean.abs())).all()
        require(held, f"the components' means of {name} do not add up")
        held = ((joint - q.covariance_matrix).abs() <= limit * prior.max()).all()
        require(held, f"the components' covariances of {name} do not add up")
        for part, label in zip(parts, parts.names):
            gap = (part.covariance_matrix.diagonal(dim1=-2, dim2=-1) - part.variance).abs()
            held = (gap <= limit * part.process.variance).all()
            require(held, f"covariance and variance of {name}'s component {label} differ")


def loaded(fitted):
    """A fresh guide with the state."""
    file, other = io.BytesIO(), fitted.new_guide()
    torch.save(fitted.guide.state_dict(), file)
    file.seek(0)
    other.load_state_dict(torch.load(file, weights_only=True))
    return other


@check
def copies(fitted):
    """A guide that was saved and loaded, copied or pickled is the same posterior, and draws the same."""
    copied = {"loaded": loaded, "copied": lambda _: copy.deepcopy(fitted.guide)}
    copied["pickled"] = lambda _: pickle.loads(pickle.dumps(fitted.guide))
    anew = tolerance(fitted.c, ANEW[fitted.c.family.on_sites], 1e-2)
    pyro.set_rng_seed(1)
    ours = predict(fitted.program, fitted.guide, fitted.x_new, num_samples=2)
    for how, make in copied.items():
        other = make(fitted)
        with torch.no_grad():
            require_same(other.posterior(fitted.x_new), fitted.posteriors, tolerance(fitted.c, 1e-9, 1e-4), how)
        pyro.set_rng_seed(1)
        theirs = predict(other.model, other, fitted.x_new, num_samples=2)
        for name, value in ours.items():
            same = torch.allclose(value, theirs[name], rtol=anew, equal_nan=True)
            require(same, f"draws of {name} differ at the same seed, {how}")


@check
def other_dtype(fitted):
    """The guide in float32 is about the guide in float64."""
    c = fitted.c
    if c.family.on_sites and not all(status["converged"] for status in fitted.guide.site_status.values()):
        return  # where updates stop, rounding decides where: a warning tells
    if c.dtype == torch.float64 and "FromPyro" not in c.kernel.kinds() and c.is_plain and not c.jitter:
        with torch.no_grad():
            found = copy.deepcopy(fitted.guide).float().posterior(c.inputs(c.num_new, 1, torch.float32))
        require_same(found, fitted.posteriors, 0.1)


@check
def bound(fitted):
    """Under a Gaussian likelihood the bound is at most the log evidence."""
    c = fitted.c
    if c.likelihood not in (*GAUSSIAN, "added") or not c.is_deterministic or c.family.name == "SparseEP":
        return
    value, (evidence, slack) = bound_of(fitted), log_evidence(fitted)
    slack = slack + tolerance(c, 1e-6, 1e-3) * abs(evidence)
    require(value <= evidence + slack, f"a bound of {value:.6g} on a log evidence of {evidence:.6g}")
    reached = not c.is_exact or value >= evidence - 10 * slack - 1e-3
    require(reached, f"a bound of {value:.6g} where an exact family reaches the log evidence of {evidence:.6g}")


@torch.no_grad()
def log_evidence(fitted):
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


def conditional(fitted, x_new, h):
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
@torch.no_grad()
def exact_posterior(fitted):
    """A family that spans the data has the exact posterior, given fixed hyperparameters."""
    if fitted.c.is_exact and fitted.c.fixed:
        mean, variance = conditional(fitted, fitted.x_new, {})
        q = fitted.posteriors["f"]
        sd = q.process.variance.sqrt()
        gap = ((q.mean - mean).abs() / (sd + mean.abs())).max()
        require(gap <= 0.01, f"the mean is {gap:.2g} of the prior's scale off the exact one")
        gap = ((q.stddev - variance.sqrt()).abs() / sd).max()
        require(gap <= 0.01, f"the standard deviation is {gap:.2g} of the prior's off the exact one")


@check
@torch.no_grad()
def draws(fitted):
    """Draws of f are as its posterior says, or as the dense one does given the draws of other latents."""
    c, num = fitted.c, 40
    if not (c.fixed or c.is_exact):
        return
    pyro.set_rng_seed(2)
    drawn = predict(fitted.program, fitted.guide, fitted.x_new, num_samples=num)
    for name in c.sites:
        q = fitted.posteriors[name]
        means, variances = [], []
        for s in range(num):
            h = {site: drawn[site][s] for site in (*BEFORE, *AFTER) if site in drawn}
            mean, variance = (q.mean, q.variance) if c.fixed else conditional(fitted, fitted.x_new, h)
            means.append(mean.double())
            variances.append(variance.double().expand(mean.shape))  # of outputs that share a kernel, once
        floor = tolerance(c, 1e-6, 1e-3) + 10 * (c.jitter or 0.0)
        spread = (torch.stack(variances) + floor * q.process.variance).sqrt()
        z = (drawn[name].double() - torch.stack(means)) / spread
        off, square = z.mean(0).abs().max(), z.square().mean(0).max()
        held = off <= 6 / math.sqrt(num) and square <= 1 + 8 * math.sqrt(2 / num)
        require(held, f"draws of {name}: mean {off:.2g}, mean square {square:.3g} in standard deviations")


@check
def at_least_the_prior(fitted):
    """What is optimal given a Gaussian likelihood has a bound no lower than the prior's."""
    c = fitted.c
    optimal = issubclass(c.family.kind, families.OptimalFamily) and c.family.on_sites
    if not optimal or not c.steps or c.likelihood not in GAUSSIAN or not c.is_deterministic or c.missing:
        return
    with torch.no_grad():
        process = fitted.model.process(fitted.x, {})
        mean, variance = process.mean + fitted.model.shift(fitted.x, {}), process.variance
        y = fitted.y.mT if c.likelihood == "outputs" else fitted.y
        if c.likelihood == "summed":
            mean, variance = mean.sum(-2), variance.sum(-2)
        prior = c.weight * (dist.Normal(mean, c.noise).log_prob(y) - variance / (2 * c.noise**2)).sum()
    value = bound_of(fitted)
    held = value >= prior - tolerance(c, 1e-6, 1e-2) * abs(prior) - 1e-3
    require(held, f"a bound of {value:.6g} after {c.steps} steps, where the prior's is {prior:.6g}")


@check
def informed(fitted):
    """A first call that shows the data is enough for what is exact in one step, whatever call it was."""
    c = fitted.c
    exact = c.family.on_sites and c.likelihood in ("normal", "outputs") and c.fixed
    if exact and not c.steps and not c.missing:
        with apart():
            wanted = fit(c.replace(first="step", steps=1, rate=1e-12)).posteriors
        require_same(fitted.posteriors, wanted, tolerance(c, 1e-3, 0.1))


@check
@torch.no_grad()
def together(fitted):
    """At new inputs the guide draws function values jointly: at one input twice they agree."""
    c, num = fitted.c, 20
    if not c.fixed:
        return
    x = fitted.x_new[:1].expand(2, -1).clone()
    pyro.set_rng_seed(5)
    drawn = [fitted.guide(x) for _ in range(num)]
    for name, q in fitted.guide.posterior(x).items():
        values, C = torch.stack([draw[name] for draw in drawn]).double(), q.covariance_matrix.double()
        variance = C[..., 0, 0] + C[..., 1, 1] - 2 * C[..., 0, 1]
        floor = (tolerance(c, 1e-6, 1e-3) + 10 * (c.jitter or 0.0)) * q.process.variance[..., 0]
        square = ((values[..., 0] - values[..., 1]).square().mean(0) / (variance + floor)).max()
        held = square <= 1 + 8 * math.sqrt(2 / num)
        require(held, f"draws of {name} at one input differ by {square.sqrt():.3g} sds")


@check
def paths(fitted):
    """A sample function agrees with itself."""
    for name, q in fitted.posteriors.items():
        draw, x = q.paths(2, 64), fitted.x_new
        with torch.no_grad():
            one, other, some = draw(x), draw(x), draw(x[:1])[..., 0]
        units = q.process.variance.max().sqrt() + one.abs().max()
        gap = max((one - other).abs().max(), (one[..., 0] - some).abs().max()) / units
        # Values that are drawn exactly, given those drawn before, have the jitter's noise.
        jitter = fitted.c.jitter or tolerance(fitted.c, 1e-8, 1e-4)
        require(gap <= 10 * math.sqrt(jitter), f"a path of {name} differs from itself by {gap:.2g} prior sds")


@check
def evaluation(fitted):
    """The loss is the same number with gradients and without."""
    c = fitted.c
    iterated = c.family.on_sites and c.likelihood not in GAUSSIAN
    if c.family.name == "SparseEP" or iterated or c.family.options.get("num_columns") is not None:
        return
    if c.family.on_sites and not all(status["converged"] for status in fitted.guide.site_status.values()):
        return  # actions that follow the residual are no linear system; the status tells
    pyro.set_rng_seed(3)
    plain = -bound_of(fitted, 6)
    pyro.set_rng_seed(3)
    training = float(TraceQuadrature_ELBO(6).differentiable_loss(fitted.program, fitted.guide, fitted.x, fitted.y))
    held = abs(plain - training) <= tolerance(c, ANEW[c.family.on_sites], 1e-2) * max(abs(training), c.num)
    require(held, f"a loss of {plain:.6g} without gradients, {training:.6g} with them")


@check
def summed_out(fitted):
    """Indicators that are enumerated make the posterior of the mixture that they are; draws are 0 and 1."""
    c = fitted.c
    if c.likelihood != "outliers":
        return
    with torch.no_grad():
        drawn = predict(fitted.program, fitted.guide, fitted.x_new, num_samples=3)["outlier"]
    held = drawn.shape == (3, c.num_new) and ((drawn == 0) | (drawn == 1)).all()
    require(held, f"draws of the indicator have shape {tuple(drawn.shape)} and values {drawn.unique().tolist()}")
    if c.is_deterministic and not c.batch and (c.objective == "quadrature" or not c.steps):
        with apart():
            wanted = fit(c.replace(likelihood="outliers written out")).posteriors
        require_same(fitted.posteriors, wanted, tolerance(c, 1e-3, 0.3), "written out")


@check
@torch.no_grad()
def one_posterior(fitted):
    """The joint covariance of f and g has no negative eigenvalues."""
    if fitted.c.joint:
        f, g = (fitted.posteriors[name] for name in ("f", "g"))
        cross = cross_covariance(f, g)
        rows = [[f.covariance_matrix, cross], [cross.mT, g.covariance_matrix]]
        whole = torch.cat([torch.cat(row, -1) for row in rows], -2).double()
        units = whole.diagonal().clamp(min=1e-12).sqrt()
        least = torch.linalg.eigvalsh(whole / units / units[:, None]).min()
        held = least >= -tolerance(fitted.c, 1e-5, 1e-1) * len(units)
        require(held, f"the covariance of f and g has an eigenvalue of {least:.2g}, their variances being 1")


@check
def absorbing(fitted):
    """Rows absorbed at once are rows absorbed in pieces, where the likelihood is Gaussian; they widen nothing there."""
    c, num = fitted.c, min(fitted.c.num, 6)
    if not c.absorbs or not c.steps:  # a start is no posterior of rows
        return
    x, y, limit = c.inputs(num, 4), fitted.y[:num], tolerance(c, 1e-6, 1e-2)
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
        require_same(one, other, limit, "in pieces")
        for name, q in one.items():
            held = (q.variance <= fitted.posteriors[name].variance + limit * q.process.variance).all()
            require(held, f"rows absorbed widen {name}")


def follows_rows(c):
    """Whether another order of the rows should change rounding alone."""
    drawn = not c.replace(latents=()).is_deterministic or "local" in c.latents
    steady = c.objective == "quadrature" or not c.steps or c.family.name == "SparseEP"
    tied = c.family.name == "ComputationAware" and (c.duplicates or c.constant_column or c.codes)
    steady = steady and not (c.family.depends_on_order or tied)
    return steady and c.is_plain and not (drawn or c.batch)


@check
def again(fitted):
    """Trained once more: from the same seed, or on rows in another order."""
    c = fitted.c
    if c.again != "repeatable" and not follows_rows(c):
        return
    with apart():
        if c.again == "repeatable":
            wanted, limit, other = fitted, 1e-12, fit(c)
            require(other.losses == fitted.losses, "losses differ at the same seed")
        else:
            # Training amplifies rounding, so that parameters hardly move.
            slow, limit = c.replace(rate=1e-6), tolerance(c, 1e-3, 0.3)
            order = torch.randperm(c.num, generator=torch.Generator().manual_seed(c.index))
            wanted = fit(slow)
            _ = wanted.posteriors
            with apart():  # the networks of both have one name
                other = fit(slow, order)
                _ = other.posteriors
        require_same(other.posteriors, wanted.posteriors, limit, c.again)


# Outcomes.


CLEAN, ERROR, EXPLOSION, SILENT, RAW = "clean", "clear error", "explosion", "silent fault", "raw exception"
SEVERITY = (CLEAN, ERROR, EXPLOSION, SILENT, RAW)
_NAMES = "|".join([*families.__all__, *kernels.__all__, *pyro_sparsegp.__all__]) + "|site|GP |kernel|family|guide|model"
_PACKAGE = str(Path(pyro_sparsegp.__file__).parent)
# as they were imported: whoever edits the package while this runs moves its lines
_SOURCES = {str(path): path.read_text().splitlines() for path in Path(_PACKAGE).rglob("*.py")}


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
    def outcome(self):
        return max((finding.outcome for finding in self.findings), key=SEVERITY.index, default=CLEAN)

    def __str__(self):
        worst = [finding for finding in self.findings if finding.outcome == self.outcome]
        told = " | ".join(f"{finding.where}: {finding.text}" for finding in worst)
        return f"{self.configuration.index} {self.outcome}: {told} || {self.configuration}"


def judge(where, error):
    """Whether an exception is a clear error: raised by the package itself, naming a site or an argument."""
    trace = "".join(traceback.format_exception(error))
    text = " ".join(str(error).split())
    if isinstance(error, (FaultError, ExplosionError)):
        return Finding(where, SILENT if isinstance(error, FaultError) else EXPLOSION, text, trace)
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(_PACKAGE)]
    last = traceback.extract_tb(error.__traceback__)[-1]
    ours = last.filename in _SOURCES and _SOURCES[last.filename][(last.lineno or 1) - 1].lstrip()
    clear = bool(ours) and str(ours).startswith("raise") and isinstance(error, (ValueError, RuntimeError))
    if clear and re.search(_NAMES, text):
        return Finding(where, ERROR, text[:160], trace)
    place = frames[-1] if frames else last
    told = f"{type(error).__name__}: {text[:120]} at {Path(place.filename).name}:{place.lineno} in {place.name}"
    return Finding(where, RAW, told, trace)


def run(index):
    """Draw a configuration, train it and check it."""
    start, findings = time.perf_counter(), []
    c, before = Configuration.draw(index), torch.get_default_dtype()
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


def sweep(start, count, verbose=False):
    """Run configurations, print what is not clean, and count outcomes."""
    counts, seconds = Counter(), 0.0
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
