"""What a first call does not show: structure is found by NaN, which no zero, flat side or mask hides."""

import dataclasses
import math
import warnings
from contextlib import nullcontext

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO
from torch import nn
from torch.distributions import constraints

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import SGPR, SVGP
from pyro_sparsegp.program.structure import Density, Depends, GPSite, Group, Latent, Role, Structure

from .models import train

NUM = 20


def data():
    x = torch.linspace(0, 1, NUM, dtype=torch.float64)[:, None]
    return x, torch.poisson((1 + torch.sin(6 * x[:, 0])).exp(), generator=torch.Generator().manual_seed(0))


def program(rate, names="fg"):
    """Counts of a rate that is made of functions and of a number that a first call may hide, given as data are."""

    def model(x, t, y=None):
        values = [pyro.sample(name, GaussianProcess(kernels.RBF(0.3), x)) for name in names]
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Poisson(rate(t, *values).exp()), obs=y)

    return model


class Mixed(nn.Module):
    """A layer whose weights start at 0."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 1, bias=False, dtype=torch.float64)
        nn.init.zeros_(self.layer.weight)

    def forward(self, f, g):
        return self.layer(torch.stack([f, g], -1))[..., 0]


MEET = {
    "a time of 0": lambda t, f, g: f + t * g,
    "a flat side": lambda t, f, g: f + (t - 0.5).relu() * g,
    "a product": lambda t, f, g: t * f * g,
    "a sum of rows": lambda t, f, g: 0.05 * t * f.cumsum(-1) + 0 * g,
    "an identity": lambda t, f, g: (torch.eye(2, dtype=f.dtype) @ torch.stack([f, g]))[0],
}


@pytest.mark.quick("a product | a flat side | a sum of rows")
@pytest.mark.filterwarnings("ignore:GP sites .* by their sum")
@pytest.mark.parametrize("how", MEET)
def test_the_bound_of_later_numbers_is_that_of_joint_draws(how):
    x, y = data()
    model = program(MEET[how])
    # One posterior is of affine predictors: for t f g it is asked for anew, test_products_that_come_later_are_told_of.
    guide, elbo = AutoSparseGP(model, SVGP(6), independent=how == "a product"), TraceQuadrature_ELBO()
    train(model, guide, x, torch.zeros(()), y, steps=3, lr=0.01, loss=elbo)
    t, num = torch.ones((), dtype=x.dtype), 80
    with torch.no_grad():
        draws = 1 if how != "a sum of rows" else num
        found = sum(elbo.loss(model, guide, x, t, y) for _ in range(draws)) / draws
        guide.eval()
        joint = torch.tensor([Trace_ELBO().loss(model, guide, x, t, y) for _ in range(num)])
    assert found == pytest.approx(joint.mean().item(), abs=5 * joint.std().item() / math.sqrt(num / 2))


def test_a_structure_is_frozen_printed_and_read_back():
    x, y = data()
    guide = AutoSparseGP(program(MEET["a product"]), SVGP(6), independent=True)
    guide(x, torch.ones((), dtype=x.dtype), y)
    found = guide.structure
    text = """
GP site f: 1 output of 1 column; each density depends on one value.
GP site g: 1 output of 1 column; each density depends on one value.
Observed site y: Poisson of f and g.
GP sites f and g meet in a density."""
    assert str(found) == text.strip()
    assert "\n  GP site f: 1 output" in repr(guide)
    assert Structure.from_json(found.to_json()) == found
    deep = GPSite((2,), 3, Depends.COUPLED, is_inner=True, group=Group(3, "g"))
    latents = {"a": Latent(Role.GROUP, {"k": 3}, (3,), 1), "b": Latent()}
    other = Structure({"f": deep, "g": GPSite()}, latents, {}, {"z": Role.ROW}, (("f", "g"),))
    assert Structure.from_json(other.to_json()) == other
    assert (other.coupled, other.inner, other.local_latents, other.classes) == (("f",), ("f",), ("a",), ())
    with pytest.raises(dataclasses.FrozenInstanceError):
        found.meeting = ()
    for wrong in ({"meeting": (("f", "h"),)}, {"latents": {"f": Latent()}}, {"discrete": {"f": Role.ALL}}):
        with pytest.raises(ValueError, match="a latent site is of one kind, pairs are of GP sites"):
            dataclasses.replace(found, **wrong)


@pytest.mark.parametrize(
    ("part", "why"),
    [
        ({"latents": {"s": Latent()}}, "there is a latent site 's'"),
        (
            {"gps": {"f": GPSite(depends=Depends.DATAWISE), "g": GPSite()}},
            "several outputs at one input of GP site 'f'",
        ),
        ({"gps": {"f": GPSite(is_inner=True), "g": GPSite()}}, "values of GP site 'f' enter another GP site"),
        ({"meeting": (("g", "f"),)}, "GP sites 'g' and 'f' meet"),
        ({}, ""),
    ],
)
def test_what_a_structure_lacks_is_named(part, why):
    known = Structure({"f": GPSite(depends=Depends.ELEMENTWISE), "g": GPSite()}, densities={"y": Density("Normal")})
    found = known.lacks(dataclasses.replace(known, **part))
    assert (why in found[0]) if why else not found
    assert not dataclasses.replace(known, meeting=(("f", "g"),)).lacks(known)
    (told,) = known.has_others(dataclasses.replace(known, densities={"y": Density("Poisson")}))
    assert told == "site 'y' has a Poisson, and had a Normal"


def test_products_that_come_later_are_told_of():
    x, y = data()
    model = program(MEET["a product"])
    guide = AutoSparseGP(model, SVGP(6))
    train(model, guide, x, torch.zeros(()), y, steps=1)
    with pytest.warns(UserWarning, match="Make a new guide, and call it first with these data"):
        train(model, guide, x, torch.ones(()), y, steps=3)


@pytest.mark.parametrize("kind", ["network", "parameter", "mask", "data of 0"])
def test_sites_that_meet_later_meet_at_the_first_call(kind):
    x, y = data()
    network = Mixed()

    def model(x, y, mask):
        f, g = (pyro.sample(name, GaussianProcess(kernels.RBF(0.3), x)) for name in "fg")
        if kind == "network":
            rate = pyro.module("network", network)(f, g).exp()
        elif kind == "parameter":
            mixing = pyro.param("mixing", lambda: torch.eye(2, dtype=x.dtype))
            rate = (mixing @ torch.stack([f, g]))[0].exp()
        else:
            rate = (f * g).exp()
        with pyro.plate("rows", len(x)), pyro.poutine.mask(mask=mask):
            pyro.sample("y", dist.Poisson(rate), obs=y)

    guide = AutoSparseGP(model, SVGP(6))
    hidden = kind == "mask"
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        guide(x, 0 * y if kind == "data of 0" else y, torch.full((NUM,), not hidden))
    assert guide.structure.meeting == (("f", "g"),)


def of_a_latent(like):
    return pyro.sample("gain", dist.Normal(torch.zeros((), dtype=like.dtype), 1.0))


def of_a_parameter(like):
    return pyro.param("gain", torch.zeros((), dtype=like.dtype))


def of_a_bounded_one(like):
    return pyro.param("gain", torch.zeros((), dtype=like.dtype), constraint=constraints.interval(-0.01, 0.01))


@pytest.mark.parametrize("gain", [of_a_latent, of_a_parameter, of_a_bounded_one])
@pytest.mark.parametrize("kind", ["second site", "all rows"])
def test_dependence_is_that_at_other_values(gain, kind):
    """Of a latent or a parameter that is 0 at the first call."""
    second = kind == "second site"

    def model(x, y=None):
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.3), x))
        other = pyro.sample("g", GaussianProcess(kernels.RBF(0.2), x)) if second else f.cumsum(-1)
        rate = (f + gain(x) * other).exp()
        with pyro.plate("rows", len(x)):
            pyro.sample("y", dist.Poisson(rate), obs=y)

    guide = AutoSparseGP(model, SVGP(6))
    guide(*data())
    assert {name: gp.depends for name, gp in guide.structure.gps.items()} == (
        dict.fromkeys("fg", "elementwise") if second else {"f": "coupled"}
    )
    assert guide.structure.meeting == ((("f", "g"),) if second else ())
    if gain is not of_a_latent:
        assert pyro.param("gain") == 0


def fidelities(x, rows, y=None, few=None):
    """Cheap data at all rows, dear ones at some: values of one posterior that meet across rows."""
    f = pyro.sample("f", GaussianProcess(kernels.RBF(0.3), x))
    d = pyro.sample("d", GaussianProcess(0.2 * kernels.RBF(0.5), x[rows]))
    with pyro.plate("cheap", len(x)):
        pyro.sample("lo", dist.Normal(f, 0.1), obs=y)
    with pyro.plate("dear", len(rows)):
        pyro.sample("hi", dist.Normal(1.5 * f[rows] + d, 0.05), obs=few)


def test_one_posterior_of_values_at_different_rows_is_exact():
    x = torch.linspace(0, 1, 24, dtype=torch.float64)[:, None]
    rows = torch.tensor([1, 6, 11, 16, 21])
    y = torch.sin(6 * x[:, 0])
    few = 1.5 * y[rows] + 0.3 * x[rows, 0]
    pick = torch.eye(24, dtype=x.dtype)[rows]
    kernel, extra = kernels.RBF(0.3)(x), (0.2 * kernels.RBF(0.5))(x[rows])
    covariance = torch.cat(
        [
            torch.cat([kernel, 1.5 * kernel @ pick.mT], 1),
            torch.cat([1.5 * pick @ kernel, 2.25 * pick @ kernel @ pick.mT + extra], 1),
        ]
    )
    noise = torch.cat([torch.full((24,), 0.01), torch.full((5,), 0.0025)]).to(x)
    exact = dist.MultivariateNormal(torch.zeros_like(noise), covariance + noise.diag()).log_prob(torch.cat([y, few]))
    guide = AutoSparseGP(fidelities, {("f", "d"): SVGP(x.clone(), trainable=False)})
    svi = SVI(fidelities, guide, pyro.optim.Adam({"lr": 1e-4}), TraceQuadrature_ELBO())
    for _ in range(30):
        loss = svi.step(x, rows, y, few)
    assert loss == pytest.approx(-exact.item(), abs=0.3)


KINKS = {
    "Laplace": lambda f, y: dist.Laplace(f, 0.1).log_prob(y),
    "AsymmetricLaplace": lambda f, y: dist.AsymmetricLaplace(f, 0.1, 1.5).log_prob(y),
    "factor": lambda f, y: torch.minimum(16 * (f - y), 4 * (y - f)),  # of a quantile, which no distribution declares
}


@pytest.mark.quick("Laplace | AsymmetricLaplace-SVGP | factor-SVGP")
@pytest.mark.parametrize("family", [SVGP(8), SGPR(8)], ids=["SVGP", "SGPR"])
@pytest.mark.parametrize("kind", KINKS)
def test_kinks_have_exact_expectations_or_are_told_of(kind, family):
    x = data()[0]
    y, told = torch.sin(6 * x[:, 0]), kind == "factor"

    def model(x, y):
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.3), x))
        with pyro.plate("rows", len(x)):
            if told:
                pyro.factor("y", KINKS[kind](f, y))
            else:
                pyro.sample(
                    "y", dist.Laplace(f, 0.1) if kind == "Laplace" else dist.AsymmetricLaplace(f, 0.1, 1.5), obs=y
                )

    guide = AutoSparseGP(model, family)
    what = pytest.warns(
        UserWarning, match=r"changes by 0\.\d+ nats with more than 20 nodes: a density has a kink .*num_nodes=200"
    )
    with what if told else nullcontext():
        train(model, guide, x, y, steps=64 if told else 16, lr=0.01, loss=TraceQuadrature_ELBO())
    with torch.no_grad():
        q, nodes = guide.posterior(x, y)["f"], torch.linspace(-8, 8, 20001, dtype=x.dtype)[:, None]
        weights = dist.Normal(0.0, 1.0).log_prob(nodes).exp()
        exact = (KINKS[kind](q.mean + q.stddev * nodes, y) * weights).sum() / weights.sum() - q.kl
        few, many = (abs(TraceQuadrature_ELBO(num).loss(model, guide, x, y) + exact) for num in (20, 200))
    assert (0.01 < few < 0.2 and many < 0.1 * few) if told else few < 1e-3
