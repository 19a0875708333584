"""GP sites that have one posterior, against dense joint Gaussians."""

import copy
import pickle
import re
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, families, kernels, predict
from pyro_sparsegp.diagnostics.sources import GuideSource
from pyro_sparsegp.distributions import RobustMax
from pyro_sparsegp.gaussians import FullCholesky
from pyro_sparsegp.gaussians.product import JointPosterior

from .models import cross_covariance, observed

N, NOISE = 14, 0.3
KF, KG = kernels.RBF(0.4), 0.7 * kernels.Matern32(0.6)
EXACT = {"inducing": N, "trainable": False}  # Z = X
AT_ONCE = EXACT | {"rate": 1.0}


def slowly(step):
    """A rate for steps by draws, whose noise is averaged over ever more of them."""
    return 0.2 / (1 + step / 10)


def _data():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(N, 2, generator=generator)
    return x, torch.sin(6 * x[:, 0]) + x[:, 1] + 0.2 * torch.randn(N, generator=generator)


def _model(meet=lambda f, g: f + g, outputs=None):
    def model(x, y=None, size=None):
        f, g = GaussianProcess(KF, x[:, :1]), GaussianProcess(KG, x[:, 1:])
        if outputs:
            f, g = (process.expand([outputs]).to_event(1) for process in (f, g))
        f, g = pyro.sample("f", f), pyro.sample("g", g)
        with pyro.plate("data", size or len(x), subsample=x):
            value = meet(f, g)
            likelihood = dist.Normal(value.mT, NOISE).to_event(1) if outputs else dist.Normal(value, NOISE)
            return pyro.sample("y", likelihood, obs=y)

    return model


def _exact(to_data):
    """The joint posterior of (f, g) and the evidence, of y = to_data (f, g) + noise."""
    x, y = _data()
    prior = torch.block_diag(KF(x[:, :1]), KG(x[:, 1:]))
    marginal = to_data @ prior @ to_data.T + NOISE**2 * torch.eye(N)
    gain = torch.linalg.solve(marginal, to_data @ prior).T
    evidence = dist.MultivariateNormal(torch.zeros(N), marginal).log_prob(y)
    return gain @ y, prior - gain @ to_data @ prior, evidence.item()


EYE = torch.eye(N, dtype=torch.float64)
SUM = torch.cat([EYE, EYE], 1)


def _trained(model, family, *data, steps=3, loss=None, lr=0.05, names=("f", "g"), **kwargs):
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    guide = AutoSparseGP(model, {names: family}, **kwargs)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": lr}), loss or TraceQuadrature_ELBO(2))
    for _ in range(steps):
        svi.step(*data)
    return guide


def _bound(guide, *data, nodes=2):
    return -TraceQuadrature_ELBO(nodes).loss(guide.model, guide, *data)


SHAREABLE = {
    "SVGP": (families.SVGP(**AT_ONCE), 2, 1e-5),
    "CoupledCovariance": (families.CoupledCovariance(**AT_ONCE), 2, 1e-5),
    "CoupledPrecision": (families.CoupledPrecision(**AT_ONCE, rank=N), 22, 1e-4),
    "gradients": (families.SVGP(**EXACT, natural=False), 50, 0.5),  # independent posteriors are 3 nats short
}


@pytest.mark.parametrize(
    ("kind", "sign"), [("SVGP", 1.0), ("CoupledCovariance", -1.0), ("CoupledPrecision", -1.0), ("gradients", 1.0)]
)
def test_two_functions_that_are_added_have_the_dense_posterior(kind, sign):
    family, steps, short = SHAREABLE[kind]
    mean, covariance, evidence = _exact(torch.cat([EYE, sign * EYE], 1))
    data = _data()
    lr = 0.1 if kind == "gradients" else 0.05
    guide = _trained(_model(lambda f, g: f + sign * g), family, *data, steps=steps, lr=lr)
    assert _bound(guide, *data) == pytest.approx(evidence, abs=short)
    q = guide.posterior(data[0])
    near = {"rtol": 0.0, "atol": 0.15 if kind == "gradients" else 1e-3}
    torch.testing.assert_close(torch.cat([q["f"].mean, q["g"].mean]), mean, **near)
    torch.testing.assert_close(q["g"].covariance_matrix, covariance[N:, N:], **near)
    torch.testing.assert_close(cross_covariance(q["f"], q["g"]), covariance[:N, N:], **near)
    torch.testing.assert_close(cross_covariance(q["g"], q["f"]), covariance[N:, :N], **near)
    # What is known is the sum: the parts are anti-correlated, and each alone is far less certain.
    assert sign * covariance[:N, N:].diagonal().mean() < -0.1


@pytest.mark.parametrize("likelihood", ["both", "counts", "sigmoid", "softplus", "odd", "rows"])
def test_one_run_has_the_bound_of_a_mapped_one(likelihood):
    x, y = _data()
    made = {
        "both": lambda f, g: dist.StudentT(4.0, f, g.exp()),
        "counts": lambda f, g: dist.NegativeBinomial(3.0, logits=f),
        "sigmoid": lambda f, g: dist.Bernoulli(g.sigmoid()),
        "softplus": lambda f, g: dist.Gamma(torch.nn.functional.softplus(f), 1.0),
        "odd": lambda f, g: dist.StudentT(4.0, f * g, 1.0),
        "rows": lambda f, g: dist.StudentT(4.0, f[torch.arange(N)], 1.0),  # which may be others at other data
    }[likelihood]

    def model(x, y=None):
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.3), x))
        g = pyro.sample("g", GaussianProcess(kernels.RBF(0.5), x, mean=-1.0))
        return observed(made(f, g), y)

    y = y.sigmoid().round() if likelihood == "sigmoid" else y.abs().round() + 1
    guide = AutoSparseGP(model, families.SVGP(**AT_ONCE), independent=True)
    elbo = TraceQuadrature_ELBO(5)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), elbo)
    for _ in range(3):
        svi.step(x, y)
    assert ("predictor" in str(elbo.plan(guide))) == (likelihood not in ("odd", "rows"))
    losses = [elbo.differentiable_loss(model, guide, x, y)]
    guide.core.forms = guide.core.forms.opened(guide.facts)  # all at nodes
    losses.append(elbo.differentiable_loss(model, guide, x, y))
    torch.testing.assert_close(*losses, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(*(torch.autograd.grad(loss, list(guide.parameters())) for loss in losses))


def test_draws_are_joint_and_weigh_the_evidence():
    mean, covariance, evidence = _exact(SUM)
    x, y = _data()
    guide = _trained(_model(), families.SVGP(**AT_ONCE), x, y)
    pyro.set_rng_seed(1)
    draws = predict(guide.model, guide, x, num_samples=50)
    assert (draws["f"] + draws["g"]).var(0).mean() < 0.3 * draws["f"].var(0).mean()
    q = guide.posterior(x)
    f, g = q["f"].rsample((4000,)), q["g"].rsample((4000,))
    both = torch.cat([f, g], -1)
    torch.testing.assert_close(both.mean(0), mean, rtol=0.0, atol=0.06)
    torch.testing.assert_close(both.T.cov(), covariance, rtol=0.0, atol=0.08)
    assert not torch.equal(f, q["f"].rsample((4000,)))
    paths = q["f"].paths(500)(x[:, :1]) + q["g"].paths(500)(x[:, 1:])
    torch.testing.assert_close(paths.std(0), (SUM @ covariance @ SUM.T).diagonal().sqrt(), rtol=0.0, atol=0.06)
    guide.eval()
    for _ in range(3):  # the divergence, and the density of a draw, are told once
        guide(x, y)
        model_trace, guide_trace = guide.get_traces()
        assert (model_trace.log_prob_sum() - guide_trace.log_prob_sum()).item() == pytest.approx(evidence, abs=0.01)


def _group_model(x, y=None):
    f = pyro.sample("f", GaussianProcess(KF, x[:, :1]))
    g = pyro.sample("g", GaussianProcess(KG, x[: N // 2, 1:]))
    return observed(dist.Normal(f + g[torch.arange(N) // 2], NOISE), y)


@pytest.mark.filterwarnings("ignore:GP sites .* by their sum")
@pytest.mark.parametrize(
    ("model", "steps"), [(_model(lambda f, g: f + g.flip(0)), 5), (_group_model, 80)], ids=["flipped", "groups"]
)
def test_sites_that_meet_across_rows_have_the_bound_of_joint_draws(model, steps):
    x, y = _data()
    pyro.set_rng_seed(0)
    guide = _trained(model, families.SVGP(7, trainable=False, rate=slowly), x, y, steps=steps)
    assert list(guide.joint.field) == ["f", "g"]
    losses = torch.tensor([_bound(guide, x, y) for _ in range(15)])
    guide.eval()
    with torch.no_grad():
        joint = torch.tensor([-Trace_ELBO().loss(model, guide, x, y) for _ in range(15)])
    error = (losses.var() / 15 + joint.var() / 15).sqrt()
    assert abs(losses.mean() - joint.mean()) < 4 * error
    if steps > 5:
        apart = AutoSparseGP(model, families.SVGP(7, trainable=False), independent=True)
        assert losses.mean() > _best(apart, model, x, y, steps=22) + 0.3


def _best(guide, model, *data, steps=150, nodes=2):
    pyro.set_rng_seed(0)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), TraceQuadrature_ELBO(nodes))
    return -sum([svi.step(*data) for _ in range(steps)][-20:]) / 20


def test_what_meets_across_rows_in_a_product_has_one_posterior():
    guide = AutoSparseGP(_model(lambda f, g: f * g.flip(0)), {("f", "g"): families.SVGP(4)})
    guide(*_data())
    assert ({*guide.joint.field}, guide.joint.drawn) == ({"f", "g"}, ("y",))


def _noisy(num, seed):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(num, 1, generator=generator)
    noise = (0.05 + 0.4 * x[:, 0] ** 2) * torch.randn(num, generator=generator)
    return x, torch.sin(8 * x[:, 0]) + noise


def _mean_and_noise(x, y=None, size=None):
    f = pyro.sample("f", GaussianProcess(kernels.RBF(0.25), x))
    g = pyro.sample("g", GaussianProcess(kernels.RBF(0.5), x, mean=-1.5))
    return observed(dist.Normal(f, g.exp()), y, x, size)


def test_a_mean_and_its_noise_begin_together():
    """Of y ~ N(f, exp g) each row has a negative curvature across the two, along which there is a slope."""
    x, y = _noisy(60, seed=9)
    pyro.set_rng_seed(0)
    guide = AutoSparseGP(_mean_and_noise, {("f", "g"): families.SVGP(8, trainable=False)})
    svi = SVI(_mean_and_noise, guide, pyro.optim.Adam({"lr": 0.02}), TraceQuadrature_ELBO(20))
    prior, losses = svi.evaluate_loss(x, y), [svi.step(x, y) for _ in range(10)]
    assert max(losses) < 0.1 * prior
    assert losses[-1] < -7


TOLD = "GP sites 'f', 'g' enter densities by their sum, weighted or not, and have independent posteriors"


@pytest.mark.parametrize(
    ("meet", "family", "is_sum"),
    [
        (lambda f, g: f + g, families.SVGP(4), True),
        (lambda f, g: f + g, families.SGPR(4), True),
        (lambda f, g: (f + g).exp(), families.SVGP(4), True),
        (lambda f, g: f + g, {("f", "g"): families.SVGP(4)}, False),
        (lambda f, g: f + 2 * g, families.SVGP(4), True),
        (lambda f, g: (0.3 * f - g).exp(), families.SVGP(4), True),
        (lambda f, g: f * g, families.SVGP(4), False),
        (lambda f, g: f + g.exp(), families.SVGP(4), False),
        (lambda f, g: f + g.flip(0), families.SVGP(4), True),
    ],
)
def test_separate_posteriors_of_a_sum_are_told_of(meet, family, is_sum):
    """Each thinks that it knows the other: sd of 0.018 for 0.51."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        AutoSparseGP(_model(meet), family, independent=not isinstance(family, dict))(*_data())
    assert [bool(re.match(TOLD, str(warning.message))) for warning in caught] == [True] * is_sum


def test_a_mean_made_of_another_sites_values_is_told_of():
    """Its sd is 0.2 to 0.4 of the exact one, which f + d, d ~ GP(0, k), has; layers' inputs are another matter."""

    def model(x, y=None):
        f = pyro.sample("f", GaussianProcess(KF, x[:, :1]))
        g = pyro.sample("g", GaussianProcess(KF, x[:, :1], mean=2 * f))
        return observed(dist.Normal(g, 0.2), y)

    with pytest.warns(UserWarning, match="the prior mean of GP site 'g' is made of values of GP site 'f'"):
        AutoSparseGP(model, families.SVGP(4))(*_data())


def test_a_sum_inside_indices():
    """f0 at each place and a deviation of each group there, as sites or as outputs of one: the dense posterior."""
    row, noise = torch.arange(20), 0.2
    places, group = row % 10, row % 2
    x, y = torch.linspace(0.0, 1.0, 10)[:, None], torch.randn(20, generator=torch.Generator().manual_seed(0))
    shared, own = kernels.RBF(0.4), kernels.RBF(0.3)

    def model(x, y=None):
        f0 = pyro.sample("f0", GaussianProcess(shared, x))
        g = torch.stack([pyro.sample(f"g{i}", GaussianProcess(own, x)) for i in range(2)])
        return observed(dist.Normal(f0[places] + g[group, places], noise), y)

    def of_one_site(x, y=None):
        f0 = pyro.sample("f0", GaussianProcess(shared, x))
        g = pyro.sample("g", GaussianProcess(own, x).expand([2]).to_event(1))
        return observed(dist.Normal(f0[places] + g[group, places], noise), y)

    A = torch.zeros(20, 30)
    A[row, places] = A[row, 10 + 10 * group + places] = 1.0
    K = torch.block_diag(shared(x), own(x), own(x))
    gain = K @ A.mT @ torch.linalg.inv(A @ K @ A.mT + noise**2 * torch.eye(20))
    family = families.SVGP(x, trainable=False)
    for program, given in ((model, {("f0", "g0", "g1"): family}), (of_one_site, family)):
        guide = AutoSparseGP(program, given)
        svi = pyro.infer.SVI(program, guide, pyro.optim.Adam({"lr": 0.0}), TraceQuadrature_ELBO(2))
        for _ in range(8):
            svi.step(x, y)
        q = guide.posterior(x)["f0"]
        torch.testing.assert_close(q.mean, (gain @ y)[:10], rtol=0, atol=1e-3)
        torch.testing.assert_close(q.stddev, (K - gain @ A @ K).diagonal()[:10].sqrt(), rtol=0, atol=1e-3)


def hierarchical(x, y=None):
    """Hyperparameters of either function, g's drawn after f."""
    length = pyro.sample("length", dist.LogNormal(-1.0, 0.3))
    f = pyro.sample("f", GaussianProcess(kernels.RBF(length), x[:, :1]))
    scale = pyro.sample("scale", dist.LogNormal(0.0, 0.3))
    g = pyro.sample("g", GaussianProcess(scale * kernels.Matern32(0.6), x[:, 1:]))
    noise = pyro.sample("noise", dist.LogNormal(-1.0, 0.3))
    return observed(dist.Normal(f + g, noise), y)


@pytest.fixture(scope="module")
def trained():
    torch.set_default_dtype(torch.float64)
    return _trained(hierarchical, families.CoupledPrecision(8, rank=6), *_data(), steps=28, lr=0.1)


def test_hyperparameters_between_the_sites(trained):
    x, y = _data()
    joint = sum(_bound(trained, x, y) for _ in range(3)) / 3
    alone = AutoSparseGP(hierarchical, {"f": families.SVGP(8), "g": families.SVGP(8)}, independent=True)
    with pytest.warns(UserWarning, match=TOLD):
        alone(x, y)
    assert joint > _best(alone, hierarchical, x, y, steps=22) + 0.5
    new = torch.rand(5, 2, generator=torch.Generator().manual_seed(1))
    draws = predict(hierarchical, trained, new, num_samples=40)
    assert (draws["f"] + draws["g"]).var(0).mean() < 0.8 * (draws["f"].var(0) + draws["g"].var(0)).mean()
    rows = predict(hierarchical, trained, new, num_samples=40, joint=False)
    ratio = (rows["f"] + rows["g"]).std(0) / (draws["f"] + draws["g"]).std(0)
    torch.testing.assert_close(ratio, torch.ones(5), rtol=0.0, atol=0.5)
    q = trained.posterior(new)["g"]  # for one site alone
    assert q.mean.shape == (5,)
    assert q.covariance_matrix.diagonal().allclose(q.variance)
    assert q.components[0].variance.shape == (5,)


def test_states_and_copies(trained):
    x, y = _data()
    family = families.CoupledPrecision(8, rank=6)
    fresh, apart = AutoSparseGP(hierarchical, {("f", "g"): family}), AutoSparseGP(hierarchical, family)
    for other in (fresh, apart):  # the state says what is joint
        other.load_state_dict(trained.state_dict())
    for other in (fresh, apart, copy.deepcopy(trained), pickle.loads(pickle.dumps(trained))):
        mine, its = (guide.posterior(x) for guide in (trained, other))
        for name in ("f", "g"):
            torch.testing.assert_close(mine[name].mean, its[name].mean)
        torch.testing.assert_close(cross_covariance(mine["f"], mine["g"]), cross_covariance(its["f"], its["g"]))
        before = its["g"].mean.clone()
        svi = SVI(other.model, other, pyro.optim.Adam({"lr": 0.1}), TraceQuadrature_ELBO(2))
        for _ in range(2):
            svi.step(x, y)
        assert not torch.equal(other.posterior(x)["g"].mean, before)


def test_mini_batches():
    x, y = _data()
    model = _model()
    guide = AutoSparseGP(model, {("f", "g"): families.SVGP(**EXACT)})
    guide(x, y)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), TraceQuadrature_ELBO(2))
    for step in range(25):
        rows = torch.randperm(N, generator=torch.Generator().manual_seed(step))[:7]
        svi.step(x[rows], y[rows], size=N)
    assert _bound(guide, x, y) == pytest.approx(_exact(SUM)[2], abs=1.0)


def test_draws_of_a_run_are_shared_and_new_for_who_has_had_them():
    pyro.set_rng_seed(0)
    whole = JointPosterior(FullCholesky((2, 3), (), torch.zeros(()))(), {"f": [0], "g": [1]})
    f, g = whole.view("f"), whole.view("g")
    (first,), (second,) = f.rsample(torch.Size()), g.rsample(torch.Size())
    torch.testing.assert_close(f.log_ratio([first]), whole.q.log_ratio([first, second]))
    assert g.log_ratio([second]) == 0.0
    assert not torch.equal(first, f.rsample(torch.Size())[0])
    assert g.rsample(torch.Size([4]))[0].shape == (4, 3)


@pytest.mark.parametrize(
    ("given", "match"),
    [
        ({("f", "f"): families.SVGP(4)}, "get one posterior. Got"),
        ({("f", "g"): families.SVGP(4), "g": families.SVGP(4)}, "get one posterior. Got 'g'"),
        ({("f", 3): families.SVGP(4)}, "tuple of names"),
    ],
)
def test_names_that_are_no_groups(given, match):
    with pytest.raises(ValueError, match=match):
        AutoSparseGP(_model(), given)


@pytest.mark.parametrize(
    ("names", "model", "match"),
    [
        (("f", "k"), _model(), r"no family is given for GP site 'g'.*\['f', 'k'\]"),
        (("f", "g", "k"), _model(), r"families names \['k'\]"),
        (("f", "g", "y"), _model(), r"families names \['y'\]"),
        (("f", "g"), "deep", "can't have one posterior here"),
    ],
)
def test_sites_that_can_not_have_one_posterior(names, model, match):
    def deep(x, y=None):
        f = pyro.sample("f", GaussianProcess(KF, x))
        g = pyro.sample("g", GaussianProcess(KG, f[:, None]))
        observed(dist.Normal(g, NOISE), y)

    with pytest.raises(ValueError, match=match):
        AutoSparseGP(deep if model == "deep" else model, {names: families.SVGP(4)})(*_data())


@pytest.mark.parametrize("of", [RobustMax, lambda both: dist.Normal(both.sum(-1).round(), 1.0)])
def test_what_takes_sites_to_be_independent_refuses_them(of):
    x, y = _data()

    def jumps(x, y=None):
        f = pyro.sample("f", GaussianProcess(KF, x[:, :1]))
        observed(of(torch.stack([f, pyro.sample("g", GaussianProcess(KG, x[:, 1:]))], -1)), y)

    with pytest.raises(ValueError, match=r"'f', 'g'.* can't have one posterior here"):
        AutoSparseGP(jumps, {("f", "g"): families.SVGP(4)})(x, (y > 0.5).long())


def test_pointwise_densities_are_of_joint_draws():
    x, y = _data()
    guide = _trained(_model(), families.SVGP(**AT_ONCE), x, y)
    source = GuideSource(guide, (x, y), {})
    _, _, evidence = _exact(SUM)
    pyro.set_rng_seed(0)
    for draws in source.draws(3):
        of_data = source.reader(draws.held, draws.moments).towards["vfe"]
        weights = sum(draws.log_prior.values(), of_data) - draws.sample_stats["log_q"]
        assert weights.tolist() == pytest.approx([evidence] * len(weights), abs=0.05)
