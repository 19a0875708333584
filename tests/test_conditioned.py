"""Families on sites beside other latents: q is q(c) q(f | c, data), wherever the guide is asked."""

import copy
import math
from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels, predict
from pyro_sparsegp.families import SGPR, SVGP, CollapsedOrthogonal, ComputationAware, ExactWeightSpace
from pyro_sparsegp.guide.runs import AtNodes

from .models import assert_alike, estimate, hermite, observed, one_function, prepared, refused, restored, train, trained

KERNEL = kernels.Matern32(0.5)
LINES = kernels.Linear(1.0) + kernels.Constant(0.5)
NOISE = 0.35


def data(num=30, binary=False):
    generator = torch.Generator().manual_seed(3)
    x = torch.rand(num, 1, generator=generator) * 3
    y = torch.sin(2 * x[:, 0]) + 0.8 + NOISE * torch.randn(num, generator=generator)
    return x, (y > 0.8).to(y) if binary else y


def program(place, kernel=KERNEL, binary=False):
    """A model with one latent, c, at a place."""

    def model(x, y=None):
        c = pyro.sample("c", dist.Normal(0.0, 2.0)) if place != "after" else 0.0
        scaled = kernel * torch.as_tensor(c).exp() if place == "kernel" else kernel
        f = pyro.sample("f", GaussianProcess(scaled, x, mean=c if place == "mean" else None))
        if place == "after":
            c = pyro.sample("c", dist.Normal(0.0, 2.0))
        shift = c if place in ("before", "after") else 0.0
        noise = NOISE * torch.as_tensor(c).exp() if place == "noise" else NOISE
        with pyro.plate("data", len(x)):
            likelihood = dist.Bernoulli(logits=f + shift) if binary else dist.Normal(f + shift, noise)
            return pyro.sample("y", likelihood, obs=y)

    return model


def conditional(place, kernel, x, y, new, c):
    """The dense mean and variance of f at new inputs, given c and the data, and log p(y | c)."""
    kernel = kernel * c.exp() if place == "kernel" else kernel
    noise = NOISE * c.exp() if place == "noise" else NOISE
    mean, shift = (c if place == "mean" else 0.0), (c if place in ("before", "after") else 0.0)
    gram = kernel(x) + noise**2 * torch.eye(len(x))
    gain = kernel(new, x) @ torch.linalg.inv(gram)
    evidence = dist.MultivariateNormal((mean + shift) * torch.ones(len(x)), gram).log_prob(y)
    return mean + gain @ (y - shift - mean), kernel.diag(new) - (gain * kernel(new, x)).sum(-1), evidence


def standardised(draws, place, kernel, x, y, new):
    """Draws of f in units of their dense distribution, given their draws of c."""
    found = [conditional(place, kernel, x, y, new, c) for c in draws["c"]]
    means, variances = (torch.stack([part[i] for part in found]) for i in (0, 1))
    return (draws["f"] - means) / variances.sqrt()


def assert_standard(z, far=0.0):
    """Draws standardised by what they should be, (S, N), have mean 0 and mean square 1."""
    assert abs(z.mean()) < 0.25 + far
    assert abs(z.square().mean() - 1) < 0.25 + far


def started(model, family, x, y, loc=0.4, scale=0.7):
    """A guide with q(c) = N(0.4, 0.7²), wide enough for q(f | c) to tell."""
    guide = prepared(model, family, x, y, independent=True)
    with torch.no_grad():
        guide.locs.c = torch.tensor(loc)
        guide.scales.c = torch.tensor(scale)
    return guide


FAMILIES = {
    "SGPR": lambda x: SGPR(x, trainable=False),
    "collapsed": lambda x: CollapsedOrthogonal(x, x[:1] + 5.0, trainable=False),
    "projected": lambda x: ComputationAware(len(x), "eigen"),
    "sparse": lambda x: ComputationAware(len(x)),
    "weights": lambda x: ExactWeightSpace(),
}

# Each place under one family or two, what is conditioned on before and after f under both.
AT = {
    "SGPR": ["before", "after", "kernel"],
    "collapsed": ["before"],
    "projected": ["after", "noise"],
    "sparse": ["mean"],
    "weights": ["kernel"],
}
EVERYWHERE = [(name, place) for name, places in AT.items() for place in places]


@pytest.mark.quick("before | kernel | mean | projected-after")
@pytest.mark.parametrize(("name", "place"), EVERYWHERE)
def test_every_way_to_ask_conditions_on_the_draw(name, place):
    x, y = data()
    kernel = LINES if name == "weights" else KERNEL
    model, new = program(place, kernel), torch.linspace(0.2, 4.0, 7)[:, None]
    guide, exact = started(model, FAMILIES[name](x), x, y), (place, kernel, x, y, new)
    pyro.set_rng_seed(0)
    draws = predict(model, guide, new, num_samples=30, joint=False)
    assert abs(draws["c"].std() - 0.7) < 0.25
    assert_standard(standardised(draws, *exact))
    # guide(...), in training and in eval mode, and single draws, of which nothing is held.
    for ask in (guide, partial(guide.draw, joint=False)):
        each = [ask(new) for _ in range(15)]
        stacked = {k: torch.stack([one[k] for one in each]) for k in ("c", "f")}
        assert 0.3 < stacked["c"].std() < 1.2
        assert_standard(standardised(stacked, *exact), 0.15)
    # At the medians.
    q = guide.posterior(new)["f"]
    mean, variance, _ = conditional(place, kernel, x, y, new, torch.tensor(0.4))
    torch.testing.assert_close(q.mean, mean, atol=2e-5, rtol=1e-4)
    torch.testing.assert_close(q.variance, variance, atol=2e-5, rtol=1e-4)
    # After a state was loaded, and in copies.
    fresh = restored(guide, model, FAMILIES[name](x), independent=True)
    for other in (fresh, copy.deepcopy(guide)):
        pyro.set_rng_seed(0)
        again = predict(model, other, new, num_samples=30, joint=False)
        torch.testing.assert_close(again["f"], draws["f"])


@pytest.mark.parametrize(("name", "place"), EVERYWHERE)
def test_evaluation_is_the_bound_of_training(name, place):
    x, y = data()
    kernel = LINES if name == "weights" else KERNEL
    model = program(place, kernel)
    guide = started(model, FAMILIES[name](x), x, y)
    elbo = TraceQuadrature_ELBO(2)
    for seed in range(3):
        losses = []
        for evaluate in (elbo.loss_and_grads, elbo.loss, SVI(model, guide, pyro.optim.Adam({}), elbo).evaluate_loss):
            pyro.set_rng_seed(seed)
            losses.append(evaluate(*(() if evaluate.__name__ == "evaluate_loss" else (model, guide)), x, y))
        assert losses[1:] == pytest.approx(2 * losses[:1], abs=1e-7)
        # Where q(f | c) is exact, the bound at the draw is log p(y | c) + log p(c) − log q(c).
        pyro.set_rng_seed(seed)
        with torch.no_grad():
            c = guide.at_nodes(AtNodes(guide, nodes={"f": torch.zeros(())}), guide, (x, y), {})[0].nodes["c"]["value"]
            bound = conditional(place, kernel, x, y, x, c)[2]
            bound = bound + dist.Normal(0.0, 2.0).log_prob(c) - dist.Normal(0.4, 0.7).log_prob(c)
        assert -losses[0] == pytest.approx(float(bound), abs=1e-3)


@pytest.mark.parametrize("name", ["SGPR", "collapsed", "weights", "projected"])
def test_importance_weights_do_not_depend_on_f(name):
    """With the exact q(f | c), log p/q of a draw is log p(c) + log p(y | c) − log q(c), whatever f."""
    x, y = data(12)
    kernel = LINES if name == "weights" else KERNEL
    model = program("before", kernel)
    guide = started(model, FAMILIES[name](x), x, y)
    guide.eval()
    for _ in range(5):
        with torch.no_grad():
            draw = guide(x, y)
            p, q = (trace.log_prob_sum() for trace in guide.get_traces())
        c = draw["c"]
        expected = conditional("before", kernel, x, y, x, c)[2] + dist.Normal(0.0, 2.0).log_prob(c)
        assert float(p - q) == pytest.approx(float(expected - dist.Normal(0.4, 0.7).log_prob(c)), abs=0.02)
    guide(x[:4] + 0.01)
    if name == "projected":
        refused("values at the training inputs", lambda: guide.get_traces()[1].log_prob_sum())


def test_an_intercept_leaves_the_predictor_its_width():
    """The plainest hierarchical model: trained, and set against the exact Gaussian posterior."""
    x, y = data()
    model = program("before")
    guide = AutoSparseGP(model, SGPR(x, trainable=False), independent=True)
    train(model, guide, x, y, steps=40, lr=0.1, loss=TraceQuadrature_ELBO(2))
    both = kernels.Matern32(0.5) + kernels.Constant(4.0)
    gain = both(x) @ torch.linalg.inv(both(x) + NOISE**2 * torch.eye(30))
    exact = (both.diag(x) - (gain * both(x)).sum(-1)).sqrt()
    draws = predict(model, guide, x, num_samples=100, joint=False)
    found = (draws["f"] + draws["c"][:, None]).std(0)
    assert ((found / exact - 1).abs() < 0.25).all()
    assert abs((found / exact).mean() - 1) < 0.1
    evidence = dist.MultivariateNormal(torch.zeros(30), both(x) + NOISE**2 * torch.eye(30)).log_prob(y)
    loss, error = estimate(TraceQuadrature_ELBO(2), model, guide, x, y, num=20)
    assert abs(loss + evidence) < 0.1 + 3 * error


def dense_bernoulli(x, y, new, c):
    """The optimum of the bound over Gaussian q(f), given c, by dense conjugate-computation VI."""
    nodes, weights = hermite(20)
    k, eye = KERNEL(x), torch.eye(len(x))
    precision, linear = torch.zeros(len(x)), torch.zeros(len(x))
    for _ in range(40):
        covariance = torch.linalg.solve(eye + k * precision, k)
        mean, variance = covariance @ linear, covariance.diagonal()
        f = mean[:, None] + variance.sqrt()[:, None] * nodes
        slope = y[:, None] - torch.sigmoid(f + c)
        gradient = slope @ weights
        curvature = -(slope * nodes) @ weights / variance.sqrt()
        precision, linear = curvature, gradient + curvature * mean
    covariance = torch.linalg.solve(eye + k * precision, k)
    across = KERNEL(new, x)
    mean = across @ torch.linalg.solve(k, covariance @ linear)
    reduced = torch.linalg.solve(k + torch.diag(1 / precision), across.mT)
    return mean, KERNEL.diag(new) - (across * reduced.mT).sum(-1)


def test_classes_condition_on_the_draw():
    x, y = data(20, binary=True)
    model, new = program("before", binary=True), torch.linspace(0.2, 4.0, 7)[:, None]
    guide = started(model, SGPR(x, trainable=False), x, y)
    pyro.set_rng_seed(1)
    draws = predict(model, guide, new, num_samples=25, joint=False)
    found = [dense_bernoulli(x, y, new, c) for c in draws["c"]]
    means, variances = (torch.stack(parts) for parts in zip(*found))
    assert_standard((draws["f"] - means) / variances.sqrt(), 0.05)
    q = guide.posterior(new)["f"]
    mean, variance = dense_bernoulli(x, y, new, torch.tensor(0.4))
    torch.testing.assert_close(q.mean, mean, atol=2e-3, rtol=2e-3)
    torch.testing.assert_close(q.variance, variance, atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("name", ["SGPR", "projected"])
def test_a_density_with_kinks_is_read_off_a_state_as_it_was(name):
    x, y = data(20)
    noise = dist.HalfNormal(1.0)
    model, family = one_function(KERNEL, lambda f: dist.Laplace(f, pyro.sample("noise", noise))), FAMILIES[name](x)
    guide = trained(model, family, x, y, steps=3, independent=True)
    q = guide.posterior(x)["f"]
    for given in ((), (x[:3] + 0.1,)):  # the loaded guide is first asked at rows of training, or at others
        fresh = restored(guide, model, family, independent=True)
        fresh.posterior(*given)
        assert_alike(fresh.posterior(x)["f"], q)


def test_the_state_holds_the_data_and_says_when_it_cannot():
    x, y = data(12)

    class Odd:
        rows = x

    def model(x, y=None, odd=None):
        return program("before")(x, y)

    new = torch.rand(3, 1)
    plain = started(model, SGPR(6), x, y)
    assert torch.equal(plain.state_dict()["_extra_state"]["data"]["args"][0], x)
    guide = prepared(model, SGPR(6), x, y, Odd(), independent=True)
    state = guide.state_dict()
    assert "data" not in state["_extra_state"]
    fresh = AutoSparseGP(model, SGPR(6), independent=True)
    fresh.load_state_dict(state)
    refused(r"holds no training data.*'f'.*guide\(x, y\)", predict, model, fresh, new, num_samples=2)
    fresh(x, y)
    torch.testing.assert_close(fresh.posterior(new)["f"].mean, guide.posterior(new)["f"].mean)


def test_handlers_around_are_seen_as_the_objective_sees_them():
    """poutine.scale, condition, do, mask, reparam and infer_config, round the model, the data and the step."""
    x, y = data(20)
    at, rest, model = torch.tensor(0.3), TraceQuadrature_ELBO(2), program("before")
    mean, _, evidence = conditional("before", KERNEL, x, y, x, at)
    prior, family = dist.Normal(0.0, 2.0).log_prob(at), SGPR(x, trainable=False)
    for handler in (pyro.poutine.condition, pyro.poutine.do):
        wrapped = handler(model, {"c": at})
        guide = AutoSparseGP(wrapped, family, independent=True)
        loss = rest.loss(wrapped, guide, x, y)
        if handler is pyro.poutine.condition:
            assert -loss == pytest.approx(float(evidence + prior), abs=1e-3)
        torch.testing.assert_close(guide.posterior(x)["f"].mean, mean, atol=1e-4, rtol=1e-3)

    plain = one_function(KERNEL, lambda f: dist.Normal(f, NOISE))

    def weighted(x, y=None):
        f = pyro.sample("f", GaussianProcess(KERNEL, x))
        with pyro.poutine.scale(scale=4.0), pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(f, NOISE), obs=y)

    sharp = KERNEL(x) @ torch.linalg.solve(KERNEL(x) + NOISE**2 / 4 * torch.eye(20), y)
    guide = AutoSparseGP(weighted, family, independent=True)
    rest.loss(weighted, guide, x, y)
    torch.testing.assert_close(guide.posterior(x)["f"].mean, sharp, atol=1e-4, rtol=1e-3)
    for configured in (
        pyro.poutine.infer_config(plain, lambda site: {}),
        pyro.poutine.mask(plain, mask=torch.tensor(True)),
        pyro.poutine.scale(plain, scale=1.0),
    ):
        losses = [rest.loss_and_grads(m, AutoSparseGP(m, family, independent=True), x, y) for m in (configured, plain)]
        assert losses[0] == pytest.approx(losses[1])
    # A handler open around the step.
    guide = started(model, family, x, y)
    with pyro.poutine.condition(data={"c": at}):
        loss = rest.loss(model, guide, x, y)
    assert -loss == pytest.approx(float(evidence + prior), abs=1e-3)
    from pyro.infer.reparam import LocScaleReparam

    centred = pyro.poutine.reparam(model, config={"c": LocScaleReparam(0.0)})
    guide = AutoSparseGP(centred, SGPR(x, trainable=False), independent=True)
    assert math.isfinite(train(centred, guide, x, y, steps=3)[-1])


@pytest.mark.parametrize("family", [SGPR, partial(SVGP, natural=False)])
@pytest.mark.parametrize("objective", [TraceQuadrature_ELBO, Trace_ELBO])
def test_a_latent_held_by_a_handler_around_the_step_has_its_prior_density(family, objective):
    """Not that of its posterior, of which the guide learns nothing then; where the bound runs the model once, too."""
    x, y = data(20)

    def model(x, y=None):
        c = pyro.sample("c", dist.Normal(0.0, 2.0))
        f = pyro.sample("f", GaussianProcess(KERNEL * c.exp(), x))
        return observed(dist.Normal(f, NOISE), y)

    guide = started(model, family(x, trainable=False), x, y)
    held = AutoSparseGP(
        pyro.poutine.condition(model, {"c": torch.tensor(0.3)}), family(x, trainable=False), independent=True
    )
    held(x, y)
    losses = []
    for each in (guide, held):
        torch.manual_seed(0)
        with pyro.poutine.condition(data={"c": torch.tensor(0.3)}), torch.no_grad():
            losses.append(objective().loss(each.model, each, x, y))
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)


@pytest.mark.parametrize("family", [SVGP(6), SGPR(6)], ids=lambda family: type(family).__name__)
def test_a_latent_that_training_held_is_not_drawn_from_its_prior_in_silence(family):
    """Data held by pyro.condition are another matter: they are to be predicted."""
    x, y = data()
    held = pyro.condition(program("before"), {"c": torch.tensor(0.0)})
    guide = prepared(held, family, x, y, independent=True)
    refused("site 'c' is held at a value in the guide's model", predict, program("before"), guide, x, num_samples=2)
    free = prepared(program("before"), family, x, y, independent=True)
    refused("site 'c' is held at a value in the guide's model", predict, held, free, x, num_samples=2)
    predict(held, guide, x, num_samples=2)
    pyro.clear_param_store()
    guide = prepared(pyro.condition(program("before"), {"y": y}), family, x, independent=True)
    predict(program("before"), guide, x[:3], num_samples=2)
