"""Discrete latents beside a GP site, summed out: against the same model with the mixture written out."""

import functools
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS, Trace_ELBO, config_enumerate

from pyro_sparsegp import (
    AutoSparseGP,
    ExpectationPropagation,
    GaussianProcess,
    TraceQuadrature_ELBO,
    Whitening,
    class_probabilities,
    kernels,
    predict,
)
from pyro_sparsegp.families import SGPR, SVGP, SparseEP

from .models import observed, refused, restored, train

PARALLEL = {"enumerate": "parallel"}


def outliers(x, y=None, size=None, noise=None):
    noise = pyro.sample("noise", dist.LogNormal(-1.5, 0.3)) if noise is None else noise
    f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5), x))
    with pyro.plate("data", size or len(x), subsample=x):
        z = pyro.sample("z", dist.Bernoulli(0.2), infer=PARALLEL)
        return pyro.sample("y", dist.Normal(f, torch.where(z == 1, 10.0, 1.0) * noise), obs=y)


def outliers_written_out(x, y=None, size=None, noise=None):
    noise = pyro.sample("noise", dist.LogNormal(-1.5, 0.3)) if noise is None else torch.tensor(noise)
    f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5), x))
    with pyro.plate("data", size or len(x), subsample=x):
        parts = dist.Normal(f[:, None], torch.stack([noise, 10 * noise]))
        weights = dist.Categorical(torch.tensor([0.8, 0.2]).expand(len(x), 2))
        return pyro.sample("y", dist.MixtureSameFamily(weights, parts), obs=y)


fixed = functools.partial(outliers, noise=0.2)


def two(x, y=None):
    share = pyro.sample("share", dist.Dirichlet(torch.tensor([2.0, 3.0])))
    f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5), x).expand([2]).to_event(1))
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Categorical(share), infer=PARALLEL)
        return pyro.sample("y", dist.Normal(f[z, torch.arange(len(x))], 0.2), obs=y)


def two_written_out(x, y=None):
    share = pyro.sample("share", dist.Dirichlet(torch.tensor([2.0, 3.0])))
    f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5), x).expand([2]).to_event(1))
    with pyro.plate("data", len(x)):
        weights = dist.Categorical(share.expand(len(x), 2))
        return pyro.sample("y", dist.MixtureSameFamily(weights, dist.Normal(f.mT, 0.2)), obs=y)


def shared(x, y=None, c=None):
    """Two observed sites and two discrete ones, of which one depends on the other."""
    f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5), x))
    with pyro.plate("data", len(x)):
        a = pyro.sample("a", dist.Bernoulli(0.3), infer=PARALLEL)
        b = pyro.sample(
            "b", dist.Categorical(torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]])[a.long()]), infer=PARALLEL
        )
        pyro.sample("y", dist.Normal(f + b, 0.5 + a), obs=y)
        pyro.sample("c", dist.Bernoulli(logits=f - b), obs=c)


def shared_written_out(x, y=None, c=None):
    f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5), x))
    with pyro.plate("data", len(x)):
        table = torch.tensor([[0.5, 0.3, 0.2], [0.1, 0.1, 0.8]]).log()
        terms = []
        for a in range(2):
            for b in range(3):
                prior = dist.Bernoulli(0.3).log_prob(torch.tensor(float(a))) + table[a, b]
                likelihood = dist.Normal(f + b, 0.5 + a).log_prob(y) + dist.Bernoulli(logits=f - b).log_prob(c)
                terms.append(prior + likelihood)
        pyro.sample("y", dist.Normal(0.0, 1.0), obs=y)
        pyro.factor("rest", torch.stack(terms).logsumexp(0) - dist.Normal(0.0, 1.0).log_prob(y))


def data(num=30):
    generator = torch.Generator().manual_seed(0)
    x = torch.linspace(-1, 1, num)[:, None]
    y = torch.sin(4 * x[:, 0]) + 0.2 * torch.randn(num, generator=generator)
    y[::7] += 3
    return x, y


def bound(model, family, *args, objective=None, **kwargs):
    pyro.set_rng_seed(0)
    guide = AutoSparseGP(model, family)
    guide(*args, **kwargs)
    pyro.set_rng_seed(1)
    loss = (objective or TraceQuadrature_ELBO(12)).loss_and_grads(model, guide, *args, **kwargs)
    return loss, {name: p.grad for name, p in guide.named_parameters()}, guide


def assert_same(one, other):
    assert abs(one[0] - other[0]) < 1e-8 * max(1, abs(other[0]))
    for name, gradient in one[1].items():
        torch.testing.assert_close(gradient, other[1][name], atol=1e-7, rtol=1e-7)


def apart(x, y=None):
    """Two discrete sites that first meet in the data."""
    f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5), x))
    with pyro.plate("data", len(x)):
        a = pyro.sample("a", dist.Bernoulli(0.3), infer=PARALLEL)
        b = pyro.sample("b", dist.Categorical(torch.tensor([0.5, 0.3, 0.2])), infer=PARALLEL)
        pyro.sample("y", dist.Normal(f + b, 0.5 + a), obs=y)


def apart_written_out(x, y=None):
    f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5), x))
    with pyro.plate("data", len(x)):
        weights = (torch.tensor([0.7, 0.3])[:, None] * torch.tensor([0.5, 0.3, 0.2])).flatten()
        loc, scale = f[:, None] + torch.arange(3.0).repeat(2), torch.tensor([0.5, 1.5]).repeat_interleave(3)
        parts = dist.Normal(loc, scale)
        pyro.sample("y", dist.MixtureSameFamily(dist.Categorical(weights.expand(len(x), 6)), parts), obs=y)


@pytest.mark.parametrize(
    ("model", "written_out", "family", "objective"),
    [
        (outliers, outliers_written_out, SVGP(8), None),
        (outliers, outliers_written_out, SGPR(8), None),
        (outliers, outliers_written_out, SVGP(8), Trace_ELBO()),
        (two, two_written_out, SVGP(8), None),
        (shared, shared_written_out, SVGP(8), None),
        (apart, apart_written_out, SVGP(8), None),
    ],
    ids=["outliers-SVGP", "outliers-SGPR", "outliers-drawn", "two", "shared", "apart"],
)
def test_mixtures(model, written_out, family, objective):
    x, y = data()
    args = (x, y, (y > 0).to(y)) if model is shared else (x, y)
    assert_same(
        bound(model, family, *args, objective=objective), bound(written_out, family, *args, objective=objective)
    )


def test_a_loop_over_rows():
    def looped(x, y=None):
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5), x))
        for i in pyro.plate("data", len(x)):
            z = pyro.sample(f"z_{i}", dist.Bernoulli(0.2), infer=PARALLEL)
            pyro.sample(f"y_{i}", dist.Normal(f[i], torch.where(z == 1, 2.0, 0.2)), obs=None if y is None else y[i])

    assert_same(bound(looped, SVGP(4), *data(5)), bound(fixed, SVGP(4), *data(5)))


def test_mini_batches():
    x, y = data()
    guide, other = (AutoSparseGP(model, SVGP(8)) for model in (outliers, outliers_written_out))
    losses = []
    for one in (guide, other):
        pyro.set_rng_seed(0)
        one(x, y)
        losses.append(TraceQuadrature_ELBO(8).loss(one.model, one, x[:10], y[:10], size=30))
    assert abs(losses[0] - losses[1]) < 1e-8


def test_expectation_propagation():
    x, y = data()
    found = []
    for model in (fixed, functools.partial(outliers_written_out, noise=0.2)):
        guide = AutoSparseGP(model, SparseEP(x[::4]))
        ep = ExpectationPropagation(model, guide, pyro.optim.Adam({"lr": 0.0}))
        for _ in range(3):
            ep.step(x, y)
        found.append(ep.evaluate_loss(x, y))
    assert abs(found[0] - found[1]) < 1e-8


def test_missing_rows():
    x, y = data()
    y[3] = torch.nan

    def holes(x, y):
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5), x))
        with pyro.plate("data", len(x)), poutine.mask(mask=~y.isnan()):
            z = pyro.sample("z", dist.Bernoulli(0.2), infer=PARALLEL)
            pyro.sample("y", dist.Normal(f, torch.where(z == 1, 2.0, 0.2)), obs=y)
            pyro.sample("again", dist.Normal(f, torch.where(z == 1, 2.0, 0.2)), obs=y)

    keep = ~y.isnan()
    family = SVGP(x[::4], start="prior")
    assert_same(bound(holes, family, x, y), bound(holes, family, x[keep], y[keep]))


def test_draws_have_the_indicators_of_new_rows():
    x, y = data()
    guide = AutoSparseGP(fixed, SVGP(8))
    train(fixed, guide, x, y, steps=3, lr=0.05, loss=TraceQuadrature_ELBO(8))
    assert "z" not in {*guide(x, y), *guide.median()}
    draws = predict(fixed, guide, x[:6] + 0.01, num_samples=150)
    assert draws["z"].shape == draws["y"].shape == (150, 6)
    assert abs(draws["z"].mean() - 0.2) < 4 * (0.16 / 900) ** 0.5
    away = draws["y"] - draws["f"]
    assert abs(away[draws["z"] == 1].std() - 2.0) < 0.5
    assert abs(away[draws["z"] == 0].std() - 0.2) < 0.02
    assert guide(x[:6])["z"].shape == (6,)


def test_draws_at_rows_with_data_have_the_indicators_that_these_give():
    x, y = data()
    y = torch.where(torch.arange(len(y)) % 8 == 0, y + 4.0, y)

    def program(x, y=None):
        sd = pyro.sample("sd", dist.LogNormal(-1.6, 0.1))
        f = pyro.sample("f", GaussianProcess(kernels.Matern32(0.5), x))
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Bernoulli(0.2), infer=PARALLEL)
            wide = pyro.deterministic("wide", torch.where(z == 1, 2.0, sd))
            return pyro.sample("y", dist.Normal(f, wide), obs=y)

    guide = AutoSparseGP(program, SVGP(8), start=None)
    train(program, guide, x, y, steps=30, lr=0.05, loss=TraceQuadrature_ELBO(8))
    guide.eval()
    latents = [{name: value for name, value in guide(x, y).items() if name in ("f", "sd")} for _ in range(100)]
    exact = torch.stack([class_probabilities(program, each, x, y)["z"][:, 1] for each in latents]).mean(0)
    assert exact[0] > 0.9
    assert exact.min() < 0.1
    for model in (program, lambda *args: program(*args)):
        draws = predict(model, guide, x, y, num_samples=100)
        assert ((draws["z"].mean(0) - exact).abs() < 5 * (exact * (1 - exact) / 100 + 1e-3) ** 0.5).all()
        assert torch.equal(draws["wide"], torch.where(draws["z"] == 1, 2.0, draws["sd"][:, None]))
        assert torch.equal(draws["y"][0], y)
    samples = {name: draws[name] for name in ("f", "sd")}  # as MCMC's
    again = predict(program, samples, x, y, data=(x, y))
    assert ((again["z"].mean(0) - exact).abs() < 5 * (exact * (1 - exact) / 100 + 1e-3) ** 0.5).all()
    assert guide.draw(x, y).keys() == guide.draw(x).keys()


def test_states_copies_and_config_enumerate():
    x, y = data()
    first, _, guide = bound(fixed, SVGP(8), x, y)
    other = restored(guide, fixed, SVGP(8))
    loss = TraceQuadrature_ELBO(8).loss
    assert loss(fixed, other, x, y) == loss(fixed, guide, x, y)
    assert other.structure.discrete == {"z": "row"}
    again = pickle.loads(pickle.dumps(guide))
    torch.testing.assert_close(again.posterior(x)["f"].mean, guide.posterior(x)["f"].mean)

    @config_enumerate
    def program(x, y=None):
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5), x))
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Bernoulli(0.2))
            return pyro.sample("y", dist.Normal(f, torch.where(z == 1, 2.0, 0.2)), obs=y)

    assert bound(program, SVGP(8), x, y)[0] == pytest.approx(first, rel=1e-12)


def test_nuts_and_trees():
    diagnostics = pytest.importorskip("pyro_sparsegp.diagnostics")
    pytest.importorskip("xarray")
    x, y = data(8)
    white = poutine.reparam(fixed, config=Whitening())
    kernel = NUTS(white, max_plate_nesting=1, max_tree_depth=2, step_size=0.05, adapt_step_size=False)
    mcmc = MCMC(kernel, num_samples=4, warmup_steps=2, disable_progbar=True)
    mcmc.run(x, y)
    assert predict(fixed, mcmc, x[:3])["z"].shape == (4, 3)
    _, _, guide = bound(fixed, SVGP(8), x, y)
    for result in (mcmc, guide):
        tree = diagnostics.to_datatree(fixed, result, x, y, num_samples=4, predict=x[:3], seed=0)
        assert set(tree.log_likelihood.data_vars) == {"y"}
        assert "z" not in tree.posterior
        assert tree.predictions["z"].shape == (1, 4, 3)
        assert tree.posterior_predictive["y"].shape == (1, 4, 8)


def of_a_process(of):
    def body(x, y):
        z = pyro.sample("z", dist.Bernoulli(0.5), infer=PARALLEL)
        mean, length = (3.0 * z, 0.3) if of == "mean" else (None, 0.3 + z)
        f = pyro.sample("f", GaussianProcess(kernels.RBF(length), x, mean=mean))
        observed(dist.Normal(f, 0.1), y)

    return body


def indicator(prior, scale=1.0, infer=PARALLEL, noise=0.2):
    def body(x, y):
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5), x))
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", prior, infer=infer)
            with poutine.scale(scale=scale):
                pyro.sample("y", dist.Normal(f + z, noise), obs=y)

    return body


@pytest.mark.parametrize(
    ("match", "body"),
    [
        (r"site 'f' has a distribution .* where \['z'\] are enumerated", of_a_process("mean")),
        (r"site 'f' has a distribution .* where \['z'\] are enumerated", of_a_process("kernel")),
        ("site 'z' is to be enumerated, but Poisson cannot list its values", indicator(dist.Poisson(1.0))),
        (
            "site 'y' has a distribution of shape .*left of all plates'",
            indicator(dist.Bernoulli(0.2), noise=torch.ones(3, 1, 1, 1, 1, 1)),
        ),
        ("site 'y' is not scaled as the discrete site 'z'", indicator(dist.Bernoulli(0.2), 2.0)),
        # As written Σ_z p(z) p(y | z)²; where it was (Σ_z p(z) p(y | z))², a loss was 27.657 for 27.587.
        ("site 'y' is not scaled as the discrete site 'z'", indicator(dist.Bernoulli(0.2), torch.full((8,), 2.0))),
        (
            "site 'z' is discrete and not observed.*infer={'enumerate': 'parallel'}",
            indicator(dist.Bernoulli(0.2), infer=None),
        ),
    ],
)
def test_what_cannot_be_summed_out(match, body):
    x, y = data(8)
    refused(match, lambda: AutoSparseGP(body, SVGP(4))(x, y))


def test_probabilities_are_of_one_draw():
    x, y = data(8)
    with pytest.raises(ValueError, match=r"site 'f' has shape \(3, 8\), its distribution \(8,\)"):
        class_probabilities(fixed, {"f": torch.zeros(3, 8)}, x, y)
