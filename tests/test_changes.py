"""A program that changes after its guide's first call is told of by name, at the step at which it is seen."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, families, kernels
from pyro_sparsegp.guide.state import sums_of

N = 20


def data():
    x = torch.linspace(0, 1, N)[:, None]
    return x, torch.sin(6 * x[:, 0])


def program(density, beside=False):
    def model(x, y=None, flag=True, treat=None):
        b = pyro.sample("b", dist.Normal(0.0, 1.0)) if beside else 0.0
        f = pyro.sample("f", GaussianProcess(kernels.Matern32(0.3), x))
        g = pyro.sample("g", GaussianProcess(kernels.Matern32(0.5), x))
        pyro.sample("z", dist.Normal(g[:3], 1.0).to_event(1), obs=torch.zeros(3))
        with pyro.plate("d", len(x)):
            return pyro.sample("y", density(f + b, g, flag, treat), obs=y)

    return model


def summed(f, g, flag, treat):
    return dist.Normal(f + g if flag else f, 0.1)


def treated(f, g, flag, treat):
    return dist.Normal(torch.where(treat > 0, f + g, f), 0.1)


def smoothed(f, g, flag, treat):
    return dist.Normal(torch.ones(N, N) @ f / N if flag else f, 0.1)


def counts(f, g, flag, treat):
    return dist.Poisson(f.exp()) if flag else dist.Normal(f, 0.1)


def svi_of(model, family):
    return SVI(model, AutoSparseGP(model, family), pyro.optim.Adam({"lr": 0.01}), TraceQuadrature_ELBO())


@pytest.mark.parametrize("family", [families.SVGP(8), families.Exact()], ids=repr)
@pytest.mark.parametrize(
    ("density", "why"),
    [(summed, "GP sites 'f' and 'g' meet"), (smoothed, "values at several inputs of GP site 'f'")],
    ids=["summed", "smoothed"],
)
def test_a_switch_that_shows_more_is_refused(density, why, family):
    svi = svi_of(program(density), family)
    svi.step(*data(), False)
    with pytest.raises(ValueError, match=f"{why}.*call it first with arguments .*flag=True"):
        svi.step(*data(), True)


def test_rows_that_show_more_are_seen_within_a_few_steps():
    svi, nobody = svi_of(program(treated), families.SVGP(8)), torch.zeros(N)
    svi.step(*data(), treat=nobody)

    def train():
        for _ in range(4):
            svi.step(*data(), treat=nobody + 1)

    with pytest.raises(ValueError, match="GP sites 'f' and 'g' meet"):
        train()


def test_a_batch_that_shows_less_goes_on():
    svi, everybody = svi_of(program(treated), families.SVGP(8)), torch.ones(N)
    svi.step(*data(), treat=everybody)
    for _ in range(4):
        svi.step(*data(), treat=0 * everybody)
    svi = svi_of(program(summed), families.SVGP(8))
    svi.step(*data(), True)
    svi.step(*data(), False)


def test_another_likelihood_is_refused_where_latents_are_joint():
    x, y = data()
    svi = svi_of(program(counts, beside=True), families.SVGP(8))
    svi.step(x, y.round().abs(), True)
    with pytest.raises(ValueError, match="site 'y' has a Normal, and had a Poisson"):
        svi.step(x, y, False)


LOST = {  # closed forms, under a flag; and how much of f is in the rate of other data
    "no affine parameter": (lambda f, g, flag: dist.Normal(f**2 if flag else f, 0.3), 1.0),
    "a product": (lambda f, g, flag: dist.Normal(f * (1 + g) if flag else f, (g - 1).exp()), None),
    "another site in the mean": (lambda f, g, flag: dist.Normal(f + g if flag else f, 0.3), 1.0),
    "another site in the scale": (lambda f, g, flag: dist.Normal(f, (g - 1).exp() if flag else 0.3), 1.0),
}


@pytest.mark.parametrize(("density", "share"), LOST.values(), ids=LOST)
def test_a_switch_that_takes_a_closed_form_is_seen(density, share):
    """In a step, and in an evaluation: else the bound is another program's."""

    def model(x, y=None, flag=False):
        f, g = (pyro.sample(name, GaussianProcess(kernels.Matern32(0.3), x)) for name in "fg")
        with pyro.plate("d", len(x)):
            pyro.sample("y", density(f, g, flag), obs=y)
            pyro.sample("z", dist.Poisson((f * share + g if share else g).exp()), obs=y.abs().round())

    (x, y), elbo = data(), TraceQuadrature_ELBO()
    guides = [AutoSparseGP(model, families.SVGP(6), independent=True) for _ in range(3)]
    for _ in range(3):
        elbo.loss_and_grads(model, guides[0], x, y)
    for other in guides[1:]:
        other.load_state_dict(guides[0].state_dict())
    before, wanted = elbo.loss(model, guides[0], x, y), elbo.loss(model, guides[1], x, y, True)
    elbo.loss(model, guides[2], x, y)
    assert elbo.loss(model, guides[0], x, y, True) == pytest.approx(wanted, rel=1e-9)
    assert elbo.differentiable_loss(model, guides[2], x, y, True).item() == pytest.approx(wanted, rel=1e-9)
    assert elbo.loss(model, guides[0], x, y) == pytest.approx(before, rel=1e-6)


def test_a_switch_that_shows_less_leaves_closed_forms():
    """Their sites may be left out, too."""

    def model(x, y=None, flag=True):
        f, g = (pyro.sample(name, GaussianProcess(kernels.Matern32(0.3), x)) for name in "fg")
        with pyro.plate("d", len(x)):
            pyro.sample("z", dist.Laplace(2 * f, 1.0), obs=-y)
            for name in ("y", "w") if flag else ():
                pyro.sample(name, dist.Normal(f, 0.3 if name == "y" else (g - 1).exp()), obs=y)
        if flag:
            pyro.sample("m", dist.MultivariateNormal(f, torch.eye(N)), obs=y)

    guide, elbo, (x, y) = AutoSparseGP(model, families.SVGP(6), independent=True), TraceQuadrature_ELBO(), data()
    elbo.loss_and_grads(model, guide, x, y)
    elbo.loss_and_grads(model, guide, x, y, False)
    q = guide.posterior(x, y)
    loc, sd = 2 * q["f"].mean[:, None], 2 * q["f"].stddev[:, None]
    t = torch.linspace(-9, 9, 4001)
    away = (-y[:, None] - loc - sd * t).abs() @ dist.Normal(0.0, 1.0).log_prob(t).softmax(0)
    dense = (-away - math.log(2)).sum() - sum(p.kl for p in q.values())
    assert elbo.loss(model, guide, x, y, False) == pytest.approx(-dense.item(), abs=1e-4)
    assert (guide.core.forms.sites, guide.core.forms.given) == (("z", "y", "m"), ("w",))


@pytest.mark.parametrize("learns", [True, False])
@pytest.mark.parametrize(
    ("saved", "other", "why"),
    [
        (program(lambda f, g, *_: dist.Normal(f, 0.1)), program(summed), "GP sites 'f' and 'g' meet"),
        (
            program(lambda f, g, *_: dist.Poisson(f.exp()), beside=True),
            program(lambda f, g, *_: dist.Normal(f, 0.1), beside=True),
            "site 'y' has a Normal, and had a Poisson",
        ),
    ],
    ids=["meet", "kinds"],
)
def test_a_state_of_another_program_is_refused_by_name(saved, other, why, learns):
    x, y = data()
    first, second = (AutoSparseGP(model, families.SVGP(8)) for model in (saved, other))
    first(x, y.round().abs())
    second.load_state_dict(first.state_dict())
    with pytest.raises(ValueError, match=why), torch.set_grad_enabled(learns):
        second(x, y.round().abs())
    again = AutoSparseGP(saved, families.SVGP(8))
    again.load_state_dict(first.state_dict())
    again.posterior(x)


def test_a_latent_that_a_switch_leaves_out_is_named():
    def model(x, y=None, flag=True):
        b = pyro.sample("b", dist.Normal(0.0, 1.0)) if flag else 0.0
        f = pyro.sample("f", GaussianProcess(kernels.Matern32(0.3), x))
        with pyro.plate("d", len(x)):
            return pyro.sample("y", dist.Normal(f + b, 0.1), obs=y)

    guide, (x, y) = AutoSparseGP(model, families.SVGP(8)), data()
    guide(x, y)
    with pytest.raises(ValueError, match="no latent site 'b'"):
        guide.posterior(x, None, False)


def binomial(f):
    return dist.Binomial(9, logits=f)


@pytest.mark.parametrize(
    ("density", "why"),
    [
        (lambda f: dist.Poisson(f.exp()), r"a Poisson of \['rate'\], and had \['logits'\]"),
        (lambda f: dist.Binomial(9, torch.special.ndtr(f)), r"a Binomial of .*'probs'\], and had \['logits'\]"),
    ],
    ids=["distribution", "parameter"],
)
def test_another_density_beside_an_intercept_is_refused_at_any_step(density, why):
    """Its links are those of the first one; between looks at the program this was a KeyError."""
    now = binomial

    def model(x, y):
        b = pyro.sample("b", dist.Normal(0.0, 1.0))
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.3), x))
        with pyro.plate("d", len(x)):
            pyro.sample("y", now(f + b), obs=y)

    svi, (x, y) = svi_of(model, families.SVGP(6)), data()
    for _ in range(3):
        svi.step(x, y.exp().round())
    now = density
    for way in (svi.step, svi.evaluate_loss):
        with pytest.raises(ValueError, match=why):
            way(x, y.exp().round())


def test_a_state_without_the_models_own_parameters_is_refused():
    def model(x, y=None):
        a = pyro.param("a", torch.tensor(0.0))
        s = pyro.param("s", torch.tensor(0.1), constraint=dist.constraints.positive)
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.3), x))
        with pyro.plate("d", len(x)):
            return pyro.sample("y", dist.Normal(f + a, s), obs=y)

    svi, (x, y) = svi_of(model, families.SVGP(6)), data()
    for _ in range(3):
        svi.step(x, y)
    saved, store = svi.guide.state_dict(), pyro.get_param_store().get_state()
    mean = svi.guide.posterior(x)["f"].mean
    pyro.clear_param_store()
    guide = AutoSparseGP(model, families.SVGP(6))
    guide.load_state_dict(saved)
    with pytest.raises(ValueError, match=r"the model's own parameters \['a', 's'\]"):
        guide.posterior(x)
    pyro.get_param_store().set_state(store)
    torch.testing.assert_close(guide.posterior(x)["f"].mean, mean)


def test_a_state_knows_parameters_again_in_another_dtype():
    """Numbers whose sum is far smaller than they are: that of rounded ones is another."""
    wide, found = torch.randn(99, dtype=torch.float64), []
    for value in (wide - wide.mean(), (wide - wide.mean()).float()):
        pyro.clear_param_store()
        pyro.param("w", value)
        found.append(sums_of(["w"]))
    assert found[0] == found[1]
