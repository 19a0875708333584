"""Programs in whatever form they are written: posteriors of latents beside f, against dense references."""

import itertools
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import (
    SVGP,
    ComputationAware,
    CoupledPrecision,
    InducingFamily,
    MeanFieldAdditive,
    OrthogonallyDecoupled,
)
from pyro_sparsegp.gaussians import Diagonal
from pyro_sparsegp.guide.predictors import Likelihoods, predictors_of

from .models import draws_of, observed, restored

N, NOISE, KERNEL = 20, 0.3, kernels.Matern32(0.3)


def _inputs():
    return torch.linspace(0, 1, N)[:, None]


def _trained(model, family, data, steps, lr=0.02):
    pyro.set_rng_seed(0)
    guide = AutoSparseGP(model, family)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": lr}), TraceQuadrature_ELBO())
    losses = [svi.step(*data) for _ in range(steps)]
    return guide, sum(losses[-20:]) / len(losses[-20:])


def _on_a_grid(grid, log_joint):
    """The mean, sd and log evidence of one latent, of its log joint density with the data."""
    log_joint = torch.stack([log_joint(value) for value in grid])
    weights = log_joint.softmax(0)
    mean = weights @ grid
    return mean, (weights @ (grid - mean).square()).sqrt(), (log_joint.logsumexp(0) + (grid[1] - grid[0]).log())


def test_outputs_of_one_site_with_correlated_noise_are_joint():
    """Whitened, data are affine in both outputs: independent ones had .74 of the width."""
    x, noise = _inputs(), torch.tensor([[0.3, 0.0], [0.2, 0.2]])
    y = torch.stack([torch.sin(6 * x[:, 0]), x[:, 0]], -1) + torch.randn(N, 2) @ noise.mT

    def model(x, y=None):
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.3), x, jitter=1e-8).expand([2]).to_event(1))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.MultivariateNormal(f.mT, scale_tril=noise), obs=y)

    guide, loss = _trained(model, SVGP(12), (x, y), 20)
    prior = torch.kron(torch.eye(2), kernels.RBF(0.3)(x))
    data, values = prior + torch.kron(noise @ noise.mT, torch.eye(N)), y.mT.reshape(-1)
    mean = prior @ torch.linalg.solve(data, values)
    sd = (prior - prior @ torch.linalg.solve(data, prior)).diagonal().sqrt()
    q = guide.posterior(x)["f"]
    torch.testing.assert_close(q.mean.reshape(-1), mean, atol=1e-3, rtol=0)
    torch.testing.assert_close(q.stddev.reshape(-1), sd, rtol=1e-3, atol=0)
    assert loss == pytest.approx(-float(dist.MultivariateNormal(0 * mean, data).log_prob(values)), abs=1e-2)


def test_a_product_is_no_predictor():
    """y ~ N(f), t ~ N(b f): at x = 0 either factor hides the other."""
    generator = torch.Generator().manual_seed(0)
    x = _inputs()
    f = torch.linalg.cholesky(KERNEL(x) + 1e-9 * torch.eye(N)) @ torch.randn(N, generator=generator)
    y, t = f + NOISE * torch.randn(N, generator=generator), 1.5 * f + NOISE * torch.randn(N, generator=generator)

    def model(x, y=None, t=None):
        b = pyro.sample("b", dist.Normal(0.0, 2.0))
        f = pyro.sample("f", GaussianProcess(KERNEL, x))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(f, NOISE), obs=y)
            pyro.sample("t", dist.Normal(b * f, NOISE), obs=t)

    def log_joint(b):
        loadings = torch.stack([torch.ones(()), b])
        cover = torch.kron(torch.outer(loadings, loadings), KERNEL(x)) + NOISE**2 * torch.eye(2 * N)
        density = dist.MultivariateNormal(torch.zeros(2 * N), cover).log_prob(torch.cat([y, t]))
        return density + dist.Normal(0.0, 2.0).log_prob(b)

    mean, sd, evidence = _on_a_grid(torch.linspace(0.5, 3, 200), log_joint)
    guide, loss = _trained(model, SVGP(N, trainable=False), (x, y, t), 60)
    b = draws_of(guide, "b", x)
    assert loss == pytest.approx(-evidence.item(), abs=0.1)
    assert b.mean().item() == pytest.approx(mean.item(), abs=0.2 * sd.item())
    assert b.std().item() == pytest.approx(sd.item(), rel=0.15)


def test_slopes_of_groups_whose_scale_may_be_0():
    """b ~ N(1, tau) as a part of θ has an infinite density at tau = 0, where q was, 7 nats below the best."""
    generator = torch.Generator().manual_seed(7)
    x, group = torch.rand(48, 1, generator=generator).sort(0).values, torch.arange(48) % 8
    slopes = 1 + 0.4 * torch.randn(8, generator=generator)
    y = torch.poisson((1.2 + slopes[group] * torch.sin(6 * x[:, 0])).exp(), generator=generator)

    def model(x, y=None):
        mu, tau = pyro.sample("mu", dist.Normal(0.0, 2.0)), pyro.sample("tau", dist.HalfNormal(0.5))
        with pyro.plate("groups", 8):
            b = pyro.sample("b", dist.Normal(1.0, tau))
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.3), x))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Poisson((mu + b[..., group] * f).exp()), obs=y)

    guide, _ = _trained(model, SVGP(12), (x, y), 30)
    assert guide.joint.hyper == ("tau",)
    assert guide.median()["tau"] > 0.05


@pytest.mark.slow
def test_a_product_of_processes_does_not_diverge():
    """Curvatures by points have noise, which lengths that move magnify where the kernel matrix is ill conditioned."""
    generator = torch.Generator().manual_seed(19)
    x = torch.rand(60, 1, generator=generator).sort(0).values
    shape = torch.sin(7 * x[:, 0]) * (1 + 0.7 * torch.cos(3 * x[:, 0]))
    y = 0.5 + shape + 0.2 * torch.randn(60, generator=generator)

    def model(x, y=None):
        mu, noise = pyro.sample("mu", dist.Normal(0.0, 1.0)), pyro.sample("noise", dist.HalfNormal(0.5))
        short, long = (pyro.sample(name, dist.LogNormal(at, 0.4)) for name, at in (("short", -1.5), ("long", -0.5)))
        f = pyro.sample("f", GaussianProcess(kernels.RBF(short), x))
        g = pyro.sample("g", GaussianProcess(0.25 * kernels.RBF(long), x, mean=1.0))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(mu + f * g, noise), obs=y)

    pyro.set_rng_seed(0)
    guide = AutoSparseGP(model, {"f": SVGP(16), "g": SVGP(8)})
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.02}), TraceQuadrature_ELBO())
    losses = [svi.step(x, y) for _ in range(120)]
    assert guide.joint.drawn == ("y",)
    assert max(losses[20:]) < min(losses) + 10


@pytest.mark.slow
def test_training_keeps_the_width_of_a_weight_of_f():
    """Of rho in rho f + d: f's posterior moves with rho, or q(rho) would be that given f, a quarter as wide."""
    generator = torch.Generator().manual_seed(1)
    x, high = torch.cat([_inputs(), torch.linspace(0, 1, 7)[:, None]]), torch.arange(N + 7) >= N
    scale, short, long = 0.07, 2.25 * kernels.RBF(0.2), 2.5 * kernels.RBF(0.8)
    bend = torch.where(high, 1.7, 1.0) * torch.sin(9 * x[:, 0]) + high * (1 + x[:, 0])
    y = bend + scale * torch.randn(N + 7, generator=generator)

    def model(x, y=None):
        rho = pyro.sample("rho", dist.Normal(1.0, 1.0))
        f, d = pyro.sample("f", GaussianProcess(short, x)), pyro.sample("d", GaussianProcess(long, x))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(torch.where(high, rho * f + d, f), scale), obs=y)

    def log_joint(rho):
        by_f = torch.where(high, rho, 1.0)
        cover = torch.outer(by_f, by_f) * short(x) + torch.outer(high, high) * long(x) + scale**2 * torch.eye(N + 7)
        return dist.MultivariateNormal(torch.zeros(N + 7), cover).log_prob(y) + dist.Normal(1.0, 1.0).log_prob(rho)

    mean, sd, _ = _on_a_grid(torch.linspace(1.0, 2.4, 200), log_joint)
    guide, _ = _trained(model, {"f": SVGP(12), "d": SVGP(6)}, (x, y), 300)
    rho = draws_of(guide, "rho", x)
    assert guide.joint.intercepts == ("rho",)
    assert rho.mean().item() == pytest.approx(mean.item(), abs=0.3 * sd.item())
    assert rho.std().item() == pytest.approx(sd.item(), rel=0.25)


@pytest.mark.slow
def test_training_keeps_the_width_of_noise():
    """Of few data: their precision falls as noise rises, in whichever way f is told of it."""
    generator, x = torch.Generator().manual_seed(0), _inputs()
    y = torch.sin(12 * x[:, 0]) + 0.3 * torch.randn(N, generator=generator)

    def model(x, y=None):
        noise, mu = pyro.sample("noise", dist.LogNormal(-1.0, 1.0)), pyro.sample("mu", dist.Normal(0.0, 1.0))
        f = pyro.sample("f", GaussianProcess(KERNEL, x))
        with pyro.plate("data", N):
            pyro.sample("y", dist.Normal(mu + f, noise), obs=y)

    def log_joint(log_noise):
        cover = KERNEL(x) + 1 + (2 * log_noise).exp() * torch.eye(N)
        return dist.MultivariateNormal(torch.zeros(N), cover).log_prob(y) + dist.Normal(-1.0, 1.0).log_prob(log_noise)

    mean, sd, _ = _on_a_grid(torch.linspace(-3, 0.5, 300), log_joint)
    guide, _ = _trained(model, SVGP(N, trainable=False), (x, y), 300)
    noise = draws_of(guide, "noise", x, num=2000).log()
    assert noise.mean().item() == pytest.approx(mean.item(), abs=0.15 * sd.item())
    assert noise.std().item() == pytest.approx(sd.item(), rel=0.1)


FEW = torch.tensor([[0.0], [0.3], [0.7], [1.0]], dtype=torch.float64)
FIRST, SECOND = torch.tensor([0, 0, 1, 2, 3, 3, 1]), torch.tensor([1, 2, 2, 3, 0, 1, 3])
WON = torch.tensor([1, 1, 0, 1, 0, 1, 1]).double()
TIMES, COUNTS = torch.tensor([0.5, 1.2, 2.0, 0.8], dtype=torch.float64), torch.tensor([2, 1, 4]).double()


def _preferences(mu, f):
    """Between pairs of f's values, which a clamp bends."""
    gap = torch.special.ndtr(f[..., FIRST] - f[..., SECOND]).clamp(1e-9, 1 - 1e-9)
    pyro.sample("won", dist.Bernoulli(gap).to_event(1), obs=WON)
    pyro.sample("level", dist.Normal(mu + f[..., 0], 0.5), obs=torch.tensor(0.7))


def _survival(mu, f):
    with pyro.plate("data", 4):
        pyro.sample("alive", dist.Bernoulli(probs=(-TIMES * (mu + f).exp()).exp()), obs=torch.tensor([1.0, 0, 1, 1]))


def _sums(mu, f):
    rate = (mu[..., None] + f).exp()
    with pyro.plate("data", 3):
        pyro.sample("y", dist.Poisson(rate[..., 1:] + 0.5 * rate[..., :-1]), obs=COUNTS)


def _factor(mu, f):
    pyro.factor("y", -2 * ((mu + f[..., 1] - 0.5) ** 2) - f[..., 0].exp() - 0.1 * f[..., 3] ** 4)


def _recursion(mu, f):
    states = [mu.exp()]
    for step in range(1, 4):
        states.append((0.5 * states[-1] + 0.3) * (0.7 * f[..., step]).exp())
    with pyro.plate("data", 3):
        pyro.sample("y", dist.Poisson(torch.stack(states[1:], -1)), obs=COUNTS)


FORMS = [_preferences, _survival, _sums, _factor, _recursion]


@pytest.mark.quick("preferences | survival | factor | recursion")
@pytest.mark.parametrize("form", FORMS, ids=lambda form: form.__name__[1:])
def test_latents_and_f_are_joint_in_whatever_form_a_density_is_written(form):
    """Against prior draws that are weighted by the likelihood."""

    def model(x):
        mu = pyro.sample("mu", dist.Normal(0.0, 1.0))
        form(mu, pyro.sample("f", GaussianProcess(kernels.RBF(0.4), x)))

    generator = torch.Generator().manual_seed(0)
    noise = torch.randn(400_000, 5, generator=generator)
    root = torch.linalg.cholesky(kernels.RBF(0.4)(FEW) + 1e-8 * torch.eye(4))
    prior = {"mu": noise[:, 0], "f": noise[:, 1:] @ root.mT}

    def log_likelihood(mu, f):
        with pyro.validation_enabled(False):
            nodes = pyro.poutine.trace(form).get_trace(mu, f).nodes.values()
            return sum(site["fn"].log_prob(site["value"]).sum() for site in nodes if site["type"] == "sample")

    logs = torch.cat([torch.vmap(log_likelihood)(*part) for part in zip(*(v.split(50_000) for v in prior.values()))])
    weights = logs.softmax(0)
    guide, loss = _trained(model, SVGP(FEW.clone(), trainable=False), (FEW,), 40)
    assert {*guide.joint.field} == {"mu", "f"}
    # The best Gaussian's bound is below the evidence by what of the posterior is none.
    assert loss == pytest.approx(-(logs.logsumexp(0) - torch.tensor(400_000.0).log()).item(), abs=0.1)
    draws = {name: draws_of(guide, name, FEW).reshape(400, -1) for name in prior}
    for name, values in prior.items():
        values = values.reshape(len(values), -1)
        mean = weights @ values
        sd = (weights @ (values - mean).square()).sqrt()
        assert ((draws[name].mean(0) - mean).abs() < 0.25 * sd).all()
        assert ((draws[name].std(0) / sd - 1).abs() < 0.25).all()


def test_correlated_noise_beside_an_intercept():
    """The first step is at the evidence: a density that is quadratic in all has its expectation over the points."""
    x, generator = _inputs(), torch.Generator().manual_seed(0)
    cover = 0.01 * torch.eye(N) + 0.02 * kernels.Matern12(0.1)(x)
    y = 2 + torch.sin(6 * x[:, 0]) + 0.1 * torch.randn(N, generator=generator)

    def model(x, y=None):
        mu, f = pyro.sample("mu", dist.Normal(0.0, 3.0)), pyro.sample("f", GaussianProcess(KERNEL, x))
        return pyro.sample("y", dist.MultivariateNormal(mu + f, cover), obs=y)

    guide, loss = _trained(model, SVGP(N, trainable=False), (x, y), 1)
    whole, ones = KERNEL(x) + 9 + cover, torch.full((N,), 9.0)
    gain = torch.linalg.solve(whole, ones)
    mu = draws_of(guide, "mu", x)
    evidence = dist.MultivariateNormal(torch.zeros(N), whole).log_prob(y)
    assert loss == pytest.approx(-evidence.item(), abs=0.01)
    assert mu.mean().item() == pytest.approx((gain @ y).item(), abs=0.1)
    assert mu.std().item() == pytest.approx((9 - gain @ ones).sqrt().item(), rel=0.1)


def _weighted_sum(f, c, dose, y):
    with pyro.plate("data", N):
        pyro.sample("y", dist.Normal(f[..., 0, :] * dose + f[..., 1, :], 0.1), obs=y[0])


def _plain_sum(f, c, dose, y):
    with pyro.plate("data", N):
        pyro.sample("y", dist.Normal(f.sum(-2) + c[..., :1], 0.1), obs=y[0])


def _a_level_each(f, c, dose, y):
    with pyro.plate("data", N):
        pyro.sample("y", dist.Normal(f.mT + c[..., None, :], 0.1).to_event(1), obs=y.mT)


OUTPUTS = [(_weighted_sum, False), (_plain_sum, True), (_a_level_each, True)]


@pytest.mark.parametrize(("form", "levels"), OUTPUTS, ids=lambda value: getattr(value, "__name__", "")[1:])
def test_outputs_of_one_site_that_meet_are_joint(form, levels):
    """Two functions of one site, with levels of their own or a sum: the first step is at the exact posterior."""
    generator, x = torch.Generator().manual_seed(0), _inputs()
    dose, y = torch.rand(N, generator=generator), torch.randn(2, N, generator=generator)

    def model(x, y):
        c = pyro.sample("c", dist.Normal(torch.zeros(2), 3.0).to_event(1)) if levels else torch.zeros(2)
        form(pyro.sample("f", GaussianProcess(KERNEL, x).expand([2]).to_event(1)), c, dose, y)

    zero = torch.zeros(2 * N + 2, requires_grad=True)

    def means(values):
        with pyro.poutine.trace() as trace:
            form(values[: 2 * N].reshape(2, N), values[2 * N :] * levels, dose, y)
        site = trace.trace.nodes["y"]
        return getattr(site["fn"], "base_dist", site["fn"]).loc.reshape(-1), site["value"].reshape(-1)

    slopes, value = torch.autograd.functional.jacobian(lambda v: means(v)[0], zero), means(zero)[1]
    prior = torch.block_diag(KERNEL(x), KERNEL(x), 9 * torch.eye(2))
    cover = slopes @ prior @ slopes.mT + 0.01 * torch.eye(len(value))
    gain = torch.linalg.solve(cover, slopes @ prior).mT
    mean, sd = gain @ value, (prior - gain @ slopes @ prior).diagonal().sqrt()
    guide, loss = _trained(model, SVGP(N, trainable=False), (x, y), 1)
    evidence = dist.MultivariateNormal(torch.zeros(len(value)), cover).log_prob(value)
    assert loss == pytest.approx(-evidence.item(), abs=0.01)
    with torch.no_grad():
        q = guide.posterior(x, y)["f"]
        assert torch.allclose(q.mean.reshape(-1), mean[: 2 * N], atol=0.01)
        assert torch.allclose(q.stddev.reshape(-1), sd[: 2 * N], rtol=0.01)
    for name, own in (("f", slice(0, 2 * N)), ("c", slice(2 * N, None)))[: 1 + levels]:
        draws = draws_of(guide, name, x, y).reshape(400, -1)
        used = slopes.any(0)[own]
        assert ((draws.mean(0) - mean[own]).abs() < 0.25 * sd[own])[used].all()
        assert ((draws.std(0) / sd[own] - 1).abs() < 0.2)[used].all()


@pytest.mark.parametrize(("classes", "points", "rows"), [(3, 8, 8), (5, 57, 8), (4, 8, 4)])
def test_logits_of_classes_are_joint(classes, points, rows):
    """A level that all logits share is not seen by a softmax: independent outputs had .85 of the width."""
    x, inducing = torch.linspace(0, 1, 8)[:, None], torch.linspace(0, 1, points)[:, None]
    y = torch.tensor([0, 0, 1, 1, 2, classes - 2, classes - 1, 0])
    prior = torch.block_diag(*[4 * kernels.RBF(0.3)(x) + 1e-6 * torch.eye(8)] * classes)

    def log_joint(f):
        f = f.unflatten(-1, (classes, 8))
        quadratic = -0.5 * (f.flatten(-2) * torch.linalg.solve(prior, f.flatten(-2).mT).mT).sum(-1)
        return quadratic + dist.Categorical(logits=f.mT).log_prob(y).sum(-1)

    def model(x, y=None):
        plate = pyro.plate("data", 8, subsample_size=rows)
        gp = GaussianProcess(4 * kernels.RBF(0.3), x[plate.indices])
        f = pyro.sample("f", gp.expand([classes]).to_event(1))
        with plate:
            pyro.sample("y", dist.Categorical(logits=f.mT), obs=None if y is None else y[plate.indices])

    family = SVGP(inducing, trainable=False, rate=lambda step: 1 / (1 + step / 2))
    guide, _ = _trained(model, family, (x, y), 30 if rows == 8 else 120)
    assert guide.joint.links == {"y": {"logits": "contrast"}}
    q = guide.posterior(x)["f"]
    draws = guide.posterior(x)["f"].rsample((20_000,)).flatten(-2)
    proposal = dist.MultivariateNormal(draws.mean(0), draws.mT.cov() + 1e-6 * torch.eye(8 * classes))
    f = proposal.sample((40_000,))
    weights = (log_joint(f) - proposal.log_prob(f)).softmax(0)
    assert 1 / weights.square().sum() > 4_000
    mean = weights @ f
    sd = (weights @ (f - mean).square()).sqrt()
    assert ((q.mean.reshape(-1) - mean).abs() < 0.15 * sd).all()
    assert ((q.stddev.reshape(-1) / sd).log().abs() < 0.15).all()


VECTORS = {
    "classes": (lambda f: dist.Categorical(logits=f.mT), {"logits": "contrast"}),
    "two classes": (lambda f: dist.Categorical(logits=f[:2].mT), {"logits": "contrast"}),
    "probabilities": (lambda f: dist.Categorical(probs=f.mT.softmax(-1)), {"probs": "log odds"}),
    "one-hot": (lambda f: dist.OneHotCategorical(logits=f.mT), {"logits": "contrast"}),
    "counts": (lambda f: dist.Multinomial(7, logits=f.mT), {"logits": "contrast"}),
    "shares": (lambda f: dist.Dirichlet((f.mT + 1).exp()), {"concentration": "log"}),
    "vectors": (lambda f: dist.MultivariateNormal(f.mT, torch.eye(4)), {"loc": "identity"}),
    "three": (
        lambda f: dist.StudentT((f[0] + 2).exp(), f[1], f[2].exp()),
        {"df": "log", "loc": "identity", "scale": "log"},
    ),
    "ordered": (
        lambda f: dist.OrderedLogistic(f[0], f[1, :, None] + torch.tensor([-1.0, 0.0, 1.2])),
        {"predictor": "identity", "cutpoints": "identity"},
    ),
    "products": (lambda f: dist.Normal(f[0] * f[1] + f[2].sin(), 0.5), None),
}


@pytest.mark.parametrize("kind", VECTORS)
def test_expectations_over_predictors_of_each_row(kind):
    """Normal ones with any covariance, against draws; of what is quadratic in them to rounding."""
    x, (of, links) = _inputs(), VECTORS[kind]
    f = 0.5 * torch.randn(4, N)
    y = of(f).sample()

    def model(x):
        f = pyro.sample("f", GaussianProcess(KERNEL, x).expand([4]).to_event(1))
        return observed(of(f), y)

    guide, _ = _trained(model, SVGP(6), (x,), 1)
    assert guide.joint.links.get("y") == links
    if links is None:
        return
    likelihoods = Likelihoods(pyro.poutine.trace(lambda: observed(of(f), y)).get_trace().nodes, guide.joint.links, None)
    eta = predictors_of(likelihoods.sites, likelihoods.links)
    root = 0.5 * torch.randn(N, len(eta), len(eta)).tril()
    if kind == "ordered":
        root[:, 2:] = root[:, 1:2]  # cut points move as one: predictors of rank two
    covariance = {(a, b): (root @ root.mT)[:, i, j] for (i, a), (j, b) in itertools.product(enumerate(eta), repeat=2)}
    draws = torch.einsum("njk,snk->jsn", root, torch.randn(20_000, N, len(eta)))
    draws = torch.cat([draws, -draws], 1)
    each = likelihoods.log_prob("y", {place: eta[place] + move for place, move in zip(eta, draws)})
    found, drawn, there = likelihoods.expected(eta, covariance, 20), each.mean(0).sum(), of(f).log_prob(y).sum()
    assert abs(found - drawn) < 0.05 * abs(drawn - there)
    if kind == "vectors":
        exact = there - 0.5 * root.square().sum()
        assert found == pytest.approx(exact.item(), rel=1e-9)


def _plain(mu, x):
    return mu + pyro.sample("f", GaussianProcess(KERNEL, x))


def _two(mu, x):
    return _plain(mu + pyro.sample("slope", dist.Normal(0.0, 1.0)) * x[:, 0], x)


def _deep(mu, x):
    inner = pyro.sample("inner", GaussianProcess(KERNEL, x))
    return mu + pyro.sample("f", GaussianProcess(KERNEL, inner[..., None]))


def _without_level(mu, x):
    return pyro.sample("f", GaussianProcess(KERNEL, pyro.sample("inner", GaussianProcess(KERNEL, x))[..., None]))


APART = {
    "deep": (_deep, SVGP(8), "values of GP site 'inner' enter another one. Compare with NUTS."),
    "family": (_plain, OrthogonallyDecoupled(4, 4, num_columns=2), "has the family OrthogonallyDecoupled. Take SVGP"),
    "large": (_plain, SVGP(12), "GP site 'f' has 12 coefficients. Take up to 10, by fewer inducing points."),
    "given f": (_two, ComputationAware(8), "of each other: where data correlate them, their intervals are"),
    "followed": (_plain, ComputationAware(8), ""),
    "joint": (_plain, SVGP(8), ""),
    "no part": (_without_level, SVGP(8), ""),
}


@pytest.mark.parametrize(("form", "family", "why"), APART.values(), ids=APART)
def test_latents_that_are_not_joint_with_f_are_named_with_the_reason(form, family, why, monkeypatch):
    monkeypatch.setattr("pyro_sparsegp.guide.start.LARGEST", 10)

    def model(x, y):
        mu = pyro.sample("mu", dist.Normal(0.0, 3.0))
        loc = form(mu, x)
        with pyro.plate("data", N):
            pyro.sample("y", dist.Normal(loc, 0.3), obs=y)

    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        _trained(model, family, (_inputs(), torch.sin(6 * _inputs()[:, 0])), 1)
    told = [str(one.message) for one in caught if "the guide treats them as independent" in str(one.message)]
    assert len(told) == bool(why)
    assert all("latents 'mu'" in line and why in line for line in told)


class _OwnFamily(InducingFamily):
    def new_coefficients(self):
        return Diagonal


KEPT = {
    "MeanFieldAdditive": (lambda z: MeanFieldAdditive(z, trainable=False), "blocks", 30),
    "CoupledPrecision": (lambda z: CoupledPrecision(z, trainable=False), "all", 20),
    "free": (lambda z: SVGP(z, trainable=False, natural=False), "all", 20),
    "own": (lambda z: _OwnFamily(z, trainable=False), "entries", 400),
}


@pytest.mark.parametrize("kind", [pytest.param(kind, marks=[pytest.mark.slow] * (kind == "own")) for kind in KEPT])
def test_a_family_keeps_its_own_posterior_beside_an_intercept(kind):
    """The bound is the evidence less the divergence of the best q(w) of its kind, w's marginal being known."""
    x, kernel = torch.rand(N, 2, generator=torch.Generator().manual_seed(0)), KERNEL[0] + KERNEL[1]
    made, groups, steps = KEPT[kind]
    z = x[:4] if kind in ("free", "own") else [x[:4, :1], x[:4, 1:]]
    y = 2 + torch.sin(6 * x[:, 0]) + x[:, 1]

    def model(x, y=None):
        mu, f = pyro.sample("mu", dist.Normal(0.0, 3.0)), pyro.sample("f", GaussianProcess(kernel, x))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(mu + f, 0.3), obs=y)

    guide, loss = _trained(model, made(z), (x, y), steps)
    assert guide.joint.followed == ("f",)
    with torch.no_grad():
        phi = torch.cat(guide.posterior(x, y)["f"].features, -1)
    left = kernel.diag(x) - phi.square().sum(-1)
    cover = phi @ phi.mT + 9 + 0.09 * torch.eye(N)
    evidence = dist.MultivariateNormal(torch.zeros(N), cover).log_prob(y) - 0.5 * left.sum() / 0.09
    marginal = torch.eye(phi.shape[1]) + phi.mT @ torch.linalg.solve(9 + 0.09 * torch.eye(N), phi)
    sizes = {"all": [len(marginal)], "blocks": [4, 4], "entries": [1] * len(marginal)}[groups]
    parts = [part.logdet() for part in _diagonal_blocks(marginal, sizes)]
    assert loss == pytest.approx(-(evidence - 0.5 * (sum(parts) - marginal.logdet())).item(), abs=0.08)
    inverses = [torch.linalg.inv(part) for part in _diagonal_blocks(marginal, sizes)]
    gain = torch.linalg.solve(0.09 * torch.eye(N) + 9, torch.full((N,), 9.0))
    sd = (9 - gain @ torch.full((N,), 9.0) + gain @ phi @ torch.block_diag(*inverses) @ phi.mT @ gain).sqrt()
    assert draws_of(guide, "mu", x).std().item() == pytest.approx(sd.item(), rel=0.12)
    again = restored(guide, model, made(z)).posterior(x, y)["f"]
    torch.testing.assert_close(again.variance, guide.posterior(x, y)["f"].variance)


def _diagonal_blocks(matrix, sizes):
    edges = torch.tensor([0, *sizes]).cumsum(0).tolist()
    return [matrix[a:b, a:b] for a, b in itertools.pairwise(edges)]
