"""Expectation propagation against closed forms, dense algebra and itself."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.distributions import constraints

from pyro_sparsegp import (
    AutoSparseGP,
    ExpectationPropagation,
    GaussianProcess,
    NumericalWarning,
    TraceQuadrature_ELBO,
    kernels,
    predict,
)
from pyro_sparsegp.distributions import Probit
from pyro_sparsegp.families import SVGP, SparseEP
from pyro_sparsegp.numerics.tilted import tilted

from .models import (
    assert_alike,
    bernoulli,
    data,
    fitc,
    gaussian,
    heteroscedastic,
    maximise,
    observed,
    one_function,
    poisson,
    prepared,
    refused,
    regression,
    restored,
)

Z = torch.linspace(0, 4, 8, dtype=torch.float64)[:, None]


def normal_cdf(f):
    return 0.5 * torch.erfc(-f / math.sqrt(2))


def probit(x, y=None, size=None):
    length = pyro.param("length", x.new_tensor(0.8), constraint=constraints.positive)
    scale = pyro.param("scale", x.new_tensor(1.5), constraint=constraints.positive)
    f = pyro.sample("f", GaussianProcess(scale * kernels.RBF(length), x, mean=x.new_tensor(0.2)))
    return observed(Probit(f), y, x, size)


def classes(num=40, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = 4 * torch.rand(num, 1, generator=generator)
    noise = 0.3 * torch.randn(num, generator=generator)
    return x, (torch.sin(2 * x[:, 0]) + noise > 0).to(x)


def start(model, *args, family=None, **kwargs):
    guide = AutoSparseGP(model, family or SparseEP(Z.to(args[0]), trainable=True))
    return guide, ExpectationPropagation(model, guide, pyro.optim.Adam({"lr": 0.02}), **kwargs)


def converge(ep, *args, **kwargs):
    """The fixed point, which no damping moves."""
    ep.damping, before = max(ep.damping, 0.8), ep.tolerance
    ep.tolerance = 1e-11
    loss = ep.sweep(*args, num=4000, **kwargs)
    assert all(status["converged"] for status in ep.status.values()), ep.status
    ep.tolerance = before
    return loss


def reference(x, y, z, kernel, prior_mean, sweeps=300):
    """Paper 4's EP for the probit over the inducing values, sequential and dense: eq. 14 to 28 with the errata of 20,
    23 and 24, log Z by Gaussians' log normalisers (eq. 3 and 28). The values are of f minus its prior mean.
    """
    k_zz = kernel(z) + 1e-8 * kernel.diag(z).mean() * torch.eye(len(z))
    upsilon = torch.linalg.solve(k_zz, kernel(z, x)).mT  # a row a datum
    s = kernel.diag(x) - (upsilon * kernel(x, z)).sum(-1)
    sign = 2 * y - 1
    nu, mu = torch.zeros(len(x)), torch.zeros(len(x))

    def normaliser(precision, linear):
        return 0.5 * (linear @ torch.linalg.solve(precision, linear) - torch.logdet(precision))

    def natural():
        return k_zz.inverse() + upsilon.mT @ (nu[:, None] * upsilon), upsilon.mT @ mu

    def cavity(i):
        precision, linear = natural()
        precision = precision - nu[i] * torch.outer(upsilon[i], upsilon[i])
        linear = linear - mu[i] * upsilon[i]
        covariance = precision.inverse()
        return precision, linear, upsilon[i] @ covariance @ linear, upsilon[i] @ covariance @ upsilon[i]

    for _ in range(sweeps):
        for i in range(len(x)):
            _, _, m, v = cavity(i)
            b = v + s[i] + 1
            u = sign[i] * (m + prior_mean) / b.sqrt()
            ratio = dist.Normal(0.0, 1.0).log_prob(u).exp() / normal_cdf(u)
            alpha = sign[i] * ratio / b.sqrt()
            beta = ratio * (u + ratio) / b
            nu[i] = 1 / (1 / beta - v)
            mu[i] = (alpha + m * beta) / (1 - v * beta)
    precision, linear = natural()
    log_z = normaliser(precision, linear) - normaliser(k_zz.inverse(), torch.zeros(len(z)))
    for i in range(len(x)):
        without, pull, m, v = cavity(i)
        log_z += normal_cdf(sign[i] * (m + prior_mean) / (v + s[i] + 1).sqrt()).log()
        log_z += normaliser(without, pull) - normaliser(precision, linear)
    return nu, mu, log_z


class TestProbit:
    def test_density(self):
        f = torch.tensor([-60.0, -5.0, -1e-3, 0.0, 1e-3, 4.0, 30.0])
        q = Probit(f)
        torch.testing.assert_close(q.log_prob(torch.ones(7)), torch.special.log_ndtr(f))
        torch.testing.assert_close(q.log_prob(torch.zeros(7)), torch.special.log_ndtr(-f))
        slope = torch.func.vmap(torch.func.grad(lambda f: Probit(f, validate_args=False).log_prob(torch.ones(()))))(f)
        exact = (dist.Normal(0.0, 1.0).log_prob(f) - torch.special.log_ndtr(f)).exp()
        torch.testing.assert_close(slope, exact)
        draws = Probit(torch.full((20_000,), 0.4)).sample()
        assert abs(draws.mean() - q.expand((7,)).mean.new_tensor(0.6554)) < 0.02
        with pytest.raises(ValueError):
            Probit(f, validate_args=True).log_prob(torch.full((7,), 2.0))

    def test_sites_and_log_z_are_the_closed_forms(self):
        x, y = classes()
        guide, ep = start(probit, x, damping=0.8)
        loss = converge(ep, x, y)
        nu, mu, log_z = reference(x, y, Z, 1.5 * kernels.RBF(0.8), 0.2, sweeps=40)
        torch.testing.assert_close(guide.gps.f.precision, nu, atol=1e-8, rtol=1e-8)
        torch.testing.assert_close(guide.gps.f.linear, mu, atol=1e-8, rtol=1e-8)
        assert abs(loss + log_z) < 1e-8

    def test_gradients_are_finite_differences_at_convergence(self):
        x, y = classes(25)

        def model(x, y=None):
            length = pyro.param("length", x.new_tensor(0.8), constraint=constraints.positive)
            noise = pyro.param("noise", x.new_tensor(0.4), constraint=constraints.positive)
            level = pyro.param("level", x.new_tensor(0.2))
            f = pyro.sample("f", GaussianProcess(1.5 * kernels.RBF(length), x, mean=level))
            observed(Probit(f / noise), y)

        _, ep = start(model, x, damping=1.0)
        converge(ep, x, y)
        found = gradients(ep, x, y)
        assert len(found) == 4

        def log_z():
            return -converge(ep, x, y)

        for parts in ([p for p in found if p.dim() == 0], [p for p in found if p.dim()]):  # along a way of each kind
            epsilon, ways = 1e-4, [torch.randn(p.shape) for p in parts]

            def move(by, parts=parts, ways=ways):
                with torch.no_grad():
                    for p, way in zip(parts, ways):
                        p.add_(way, alpha=by)
                    return log_z()

            above, below = move(epsilon), move(-2 * epsilon)
            move(epsilon)
            expected = (above - below) / (2 * epsilon)
            slope = sum((found[p] * way).sum().item() for p, way in zip(parts, ways))
            assert abs(slope + expected) < 1e-5 * max(1, abs(expected))


def gradients(ep, *args, **kwargs):
    """The gradient of the loss by each parameter that the optimiser is given."""
    seen = {}

    class Watch(pyro.optim.PyroOptim):
        def __init__(self):
            super().__init__(torch.optim.SGD, {"lr": 0.0})

        def __call__(self, params, *args, **kwargs):
            seen.update({p: p.grad.clone() for p in params if p.grad is not None})

    optim, ep.optim = ep.optim, Watch()
    sites = {k: v.clone() for k, v in ep.guide.gps.f.state_dict().items()}
    ep.step(*args, **kwargs)
    ep.guide.gps.f.load_state_dict(sites)
    ep.optim = optim
    return seen


class TestGaussianLikelihood:
    kernel = 1.3 * kernels.Matern32(0.9)

    @pytest.mark.parametrize(("power", "noise"), [(1.0, 0.3), (0.5, 0.3), (0.01, 0.3), (1.0, 1e-3)])
    def test_power_ep_is_the_closed_form(self, power, noise):
        """log N(y; μ, Q + αD + σ²I) − (1 − α)/(2α) Σ log(1 + αd/σ²): Bui, Yan and Turner, 2017, section 3.3.

        Also under noise far below the distance of nodes.
        """
        x, _ = classes(30)
        y = torch.sin(2 * x[:, 0]) + noise * torch.randn(30)
        model, limit = gaussian(self.kernel, noise, mean=torch.tensor(0.5)), 1e-6 if noise > 0.1 else 1e-4
        guide, ep = start(model, x, damping=1.0, power=power)
        loss = converge(ep, x, y)
        normal = fitc(self.kernel, x, Z, noise, 0.5, power)
        d = self.kernel.diag(x) - fitc(self.kernel, x, Z, 1e-4, share=0.0).variance + 1e-8
        correction = 0.0 if power == 1 else (1 - power) / (2 * power) * torch.log1p(power * d / noise**2).sum()
        assert abs(-loss - (normal.log_prob(y) - correction)) < limit
        new = torch.linspace(-1, 5, 9)[:, None]
        reach = self.kernel(new, Z) @ torch.linalg.solve(self.kernel(Z) + 1.3e-8 * torch.eye(8), self.kernel(Z, x))
        expected = 0.5 + reach @ torch.linalg.solve(normal.covariance_matrix, y - 0.5)
        torch.testing.assert_close(guide.posterior(new)["f"].mean, expected, atol=limit, rtol=limit)


@pytest.mark.slow
def test_a_learned_noise():
    """Steps are taken at sites that belong to the noise of the step: −log Z is FITC's, and falls to its least."""
    x = torch.linspace(0, 1, 100)[:, None]
    y = torch.sin(6 * x[:, 0]) + (0.05 + 0.5 * x[:, 0]) * torch.randn(100, generator=torch.Generator().manual_seed(0))
    z, kernel = x[::5], kernels.RBF(0.3)

    def noise():
        return (pyro.param("slope", x.new_tensor(0.1)) * x[:, 0] + pyro.param("least", x.new_tensor(1.0))).abs() + 1e-3

    model = one_function(kernel, lambda f: dist.Normal(f, noise()))
    _, ep = start(model, x, family=SparseEP(z, trainable=False))
    ep.optim = pyro.optim.ClippedAdam({"lr": 0.2, "lrd": 0.96})
    ep.step(x, y)
    for _ in range(120):
        exact = -fitc(kernel, x, z, noise()).log_prob(y).item()
        assert abs(ep.step(x, y) - exact) < 0.01 * max(abs(exact), 20)  # 1,585 and 888 where sites were another noise's
    slope, least = (pyro.get_param_store()._params[name] for name in ("slope", "least"))
    trained = fitc(kernel, x, z, noise()).log_prob(y)
    with torch.no_grad():
        slope.fill_(0.5), least.fill_(0.05)
    assert trained > fitc(kernel, x, z, noise()).log_prob(y) - 1.0


class TestFarFromThePrior:
    """A Gaussian's site is exact at once, whatever the damping: FITC."""

    @pytest.mark.parametrize("size", [60, 15])
    @pytest.mark.parametrize(("level", "noise"), [(50.0, 1.0), (100.0, 0.05)])
    def test_two_sweeps(self, size, level, noise):
        x, _ = classes(60)
        y = level + torch.sin(2 * x[:, 0]) + noise * torch.randn(60)
        kernel = kernels.RBF(0.8)
        _, ep = start(gaussian(kernel, noise), x)
        for _ in range(2):
            for rows in torch.arange(60).split(size):
                part = {} if size == 60 else {"size": 60, "indices": rows}
                ep.sweep(x[rows], y[rows], **part)
        assert ep.status["f"]["converged"]
        assert abs(ep.evaluate_loss(x, y) + fitc(kernel, x, Z, noise).log_prob(y)) < 1e-6

    def test_the_tilted_distribution_beyond_the_nodes(self):
        """Narrow and 100 cavity's standard deviations away, from a guess that is wrong and too narrow."""
        target = torch.tensor([100.0, -100.0, 3.0])
        for noise in (0.01, 1.0):
            found = tilted(
                lambda f, noise=noise: dist.Normal(f, noise).log_prob(target),
                torch.zeros(3),
                torch.ones(3),
                torch.full((3,), -2.0),
                torch.full((3,), 0.01),
                passes=1,
            )
            variance = 1 / (1 + noise**-2)
            torch.testing.assert_close(found.mean, variance * target / noise**2, rtol=1e-7, atol=1e-7)
            torch.testing.assert_close(found.variance, torch.full((3,), variance), rtol=1e-6, atol=0)
            exact = dist.Normal(0.0, math.sqrt(1 + noise**2)).log_prob(target)
            torch.testing.assert_close(found.log_z, exact, rtol=1e-7, atol=1e-7)


@pytest.mark.parametrize("model", [bernoulli, poisson])
def test_little_power_is_variational_inference(model):
    x, y = data(model, 40)
    z = x[::5]

    def fixed(x, y=None, size=None):
        values = {"scale": torch.tensor(1.0), "length": torch.tensor([0.3, 0.5])}
        with pyro.condition(data=values):
            return model(x, y, size)

    guide, ep = start(fixed, x, family=SparseEP(z, trainable=False), damping=0.7, power=1e-3)
    ep.tolerance = 1e-7
    ep.sweep(x, y, num=300)
    vi, bound = maximise(fixed, SVGP(z, trainable=False), x, y, num_nodes=30)
    p, q = guide.posterior(x)["f"], vi.posterior(x)["f"]
    assert_alike(p, q, atol=2e-3, rtol=0)
    assert abs(-ep.evaluate_loss(x, y) - bound) < 0.1


class TestTilted:
    @pytest.mark.parametrize("power", [1.0, 0.3])
    @pytest.mark.parametrize(
        "likelihood",
        [
            (lambda f: dist.Normal(f, 0.01).log_prob(torch.tensor([0.4, 1.0, -2.0])), 1e-6),
            (lambda f: dist.StudentT(3.0, f, 0.2).log_prob(torch.tensor([0.4, 6.0, -2.0])), 5e-3),  # two widths
            (lambda f: dist.Poisson(f.exp(), validate_args=False).log_prob(torch.tensor([0.0, 3.0, 400.0])), 1e-6),
            (lambda f: Probit(f * torch.tensor([1.0, -1.0, 1.0])).log_prob(torch.ones(3)), 5e-8),
            (lambda f: Probit(f * torch.tensor([4.0, -4.0, 5.0])).log_prob(torch.ones(3)), 1e-5),
            (lambda f: torch.zeros_like(f), 1e-10),
        ],
        ids=["narrow", "student", "poisson", "probit", "steep", "masked"],
    )
    def test_moments(self, likelihood, power):
        likelihood, tolerance = likelihood
        mean, variance = torch.tensor([0.0, 1.0, -1.5]), torch.tensor([1.0, 0.2, 3.0])
        found = tilted(likelihood, mean, variance, mean, variance.sqrt(), power, 48, passes=5)
        f = torch.linspace(-20, 20, 40_001)[:, None]
        logits = power * likelihood(f.expand(-1, 3)) + dist.Normal(mean, variance.sqrt()).log_prob(f)
        logits = logits.nan_to_num(-math.inf)
        weights = logits.softmax(0)
        expected = (weights * f).sum(0)
        torch.testing.assert_close(found.log_z, logits.logsumexp(0) + math.log(1e-3), atol=tolerance, rtol=0)
        torch.testing.assert_close(found.mean, expected, atol=tolerance, rtol=0)
        torch.testing.assert_close(found.variance, (weights * (f - expected) ** 2).sum(0), atol=tolerance, rtol=0)


def settle(ep, sweep):
    """Sweep over mini-batches until no site moves."""
    for _ in range(100):
        moves = []
        for rows in torch.arange(60).split(15):
            sweep(rows)
            moves.append(ep.status["f"]["change"])
        if max(moves) < 1e-7:
            break


class TestMiniBatches:
    @pytest.mark.parametrize("given", [False, True])
    def test_reach_the_fixed_point_of_all_data(self, given):
        x, y = classes(60)

        def subsampled(x, y=None):
            plate = pyro.plate("data", 60, subsample_size=15)
            with plate as rows:
                pass
            f = pyro.sample("f", GaussianProcess(1.5 * kernels.RBF(0.8), x[rows], mean=x.new_tensor(0.2)))
            with plate:
                pyro.sample("y", Probit(f), obs=y[rows])

        _, whole = start(probit, x)
        loss = converge(whole, x, y)
        guide, ep = start(probit if given else subsampled, x, damping=0.99)
        settle(ep, lambda rows: ep.sweep(x[rows], y[rows], size=60, indices=rows) if given else ep.sweep(x, y))
        precision = whole.guide.gps.f.precision
        torch.testing.assert_close(guide.gps.f.precision, precision, atol=1e-6, rtol=1e-6)
        if given:
            new = torch.linspace(0, 4, 7)[:, None]
            p, q = guide.posterior(new)["f"], whole.guide.posterior(new)["f"]
            assert_alike(p, q, atol=1e-6, rtol=0)
            assert abs(ep.evaluate_loss(x, y) - loss) < 1e-6  # all data at once, after mini-batches

    def test_gradients_of_mini_batches_average_to_that_of_all_data(self):
        """At the sites' fixed point: eq. 6 over inducing values against eq. 4 over whitened ones."""
        x, y = classes(60)
        _, ep = start(probit, x, damping=0.99)
        settle(ep, lambda rows: ep.sweep(x[rows], y[rows], size=60, indices=rows))
        parts = torch.arange(60).split(15)
        found = [gradients(ep, x[rows], y[rows], size=60, indices=rows) for rows in parts]
        whole = gradients(ep, x, y)
        for p, gradient in whole.items():
            torch.testing.assert_close(sum(part[p] for part in found) / 4, gradient, atol=1e-6, rtol=1e-6)

    def test_estimates_of_the_loss_average_to_it(self):
        x, y = classes(60)
        _, ep = start(probit, x, damping=0.9)
        for rows in torch.arange(60).split(15):
            ep.sweep(x[rows], y[rows], size=60, indices=rows)
        whole = ep.evaluate_loss(x, y)
        parts = [ep.evaluate_loss(x[rows], y[rows], size=60, indices=rows) for rows in torch.arange(60).split(15)]
        assert abs(sum(parts) / 4 - whole) < 1e-9

    def test_training_with_moving_hyperparameters(self):
        """The rows added are the rows taken away: no cavity goes wrong while the length scale moves by far."""
        x, y = classes(60)
        guide, ep = start(probit, x, damping=0.99)
        ep.optim = pyro.optim.Adam({"lr": 0.2})
        generator = torch.Generator().manual_seed(0)
        for _ in range(16):
            for rows in torch.randperm(60, generator=generator).split(15):
                ep.step(x[rows], y[rows], size=60, indices=rows)
                assert ep.status["f"]["skipped"] == ep.status["f"]["cut"] == 0
        f = guide.gps.f
        gram, pull = f.sums(f.features_of(f.rows), f.precision, f.linear)
        torch.testing.assert_close(f.gram, gram)
        torch.testing.assert_close(f.pull, pull)
        loss = ep.evaluate_loss(x, y)
        pyro.clear_param_store()
        _, whole = start(probit, x)
        whole.optim = pyro.optim.Adam({"lr": 0.1})
        losses = [whole.step(x, y) for _ in range(30)]
        assert abs(loss - losses[-1]) < 1

    def test_errors(self):
        x, y = classes(60)
        _, ep = start(probit, x)
        refused("keeps a site for each datum", ep.step, x[:10], y[:10], size=60)
        twice = torch.zeros(10, dtype=torch.long)
        refused("distinct row numbers from 0 to 59", ep.step, x[:10], y[:10], size=60, indices=twice)
        refused("must be 10 distinct row numbers", ep.step, x[:10], y[:10], size=60, indices=torch.arange(9))
        refused("no plate holds a part", ep.step, x, y, indices=torch.arange(59))
        ep.step(x, y)
        refused("has sites of 60 data, this call brings 50", ep.step, x[:50], y[:50])


@pytest.mark.quick("dtype0 | dtype2 | dtype3")
@pytest.mark.parametrize(
    ("model", "dtype"),
    [(regression, torch.float64), (regression, torch.float32), (bernoulli, torch.float64), (poisson, torch.float32)],
)
def test_contract(model, dtype, device):
    torch.set_default_dtype(torch.float32 if dtype == torch.float64 else torch.float64)
    x, y = data(model, dtype=dtype, device=device)
    guide = prepared(model, SparseEP(12), x, y)
    ep = ExpectationPropagation(model, guide, pyro.optim.Adam({"lr": 0.02}))
    before = {name: p.detach().clone() for name, p in guide.named_parameters()}
    losses = [ep.step(x, y) for _ in range(8)]
    assert torch.tensor(losses).isfinite().all()
    assert sum(losses[-4:]) < sum(losses[:4])
    assert not any(torch.equal(p, before[name]) for name, p in guide.named_parameters())
    assert all(p.isfinite().all() and p.dtype == dtype and p.device == x.device for p in guide.parameters())
    assert not any(name.startswith("scales") for name, _ in guide.named_parameters())  # points

    new = data(model, 7, dtype, device, seed=2)[0]
    q = guide.posterior(new)["f"]
    assert (q.mean.shape, q.mean.dtype) == ((7,), dtype)
    assert q.kl > 0
    assert (q.variance > 0).all()
    assert q.paths(3, 64)(new).shape == (3, 7)
    assert guide(new)["y"].shape == (7,)
    assert predict(model, guide, new, num_samples=4)["f"].shape == (4, 7)

    other = restored(guide, model, SparseEP(12))
    torch.testing.assert_close(other.posterior(new)["f"].mean, q.mean)  # but for rounding, by memory layout
    again = ExpectationPropagation(model, other, pyro.optim.Adam({"lr": 0.02}))
    rounding = 1e-3 if dtype == torch.float32 else 0.0  # of sums that cancel
    for way in ("evaluate_loss", "step"):
        found, expected = (getattr(each, way)(x, y) for each in (again, ep))
        assert found == pytest.approx(expected, rel=1e-5, abs=rounding)


class TestModels:
    def test_values_seen_several_times(self):
        """Terms that are not one for each value, and a missing row."""
        x, _ = classes(15)

        def grouped(groups, y, direct=False):
            f = pyro.sample("f", GaussianProcess(kernels.RBF(0.8), x[groups] if direct else x))
            with pyro.plate("rows", len(y)), pyro.poutine.mask(mask=~y.isnan()):
                pyro.sample("y", dist.StudentT(5.0, f if direct else f[groups], 0.3), obs=y)

        y = torch.linspace(-1, 1, 11)
        y[4] = torch.nan
        guide, ep = start(grouped, x, family=SparseEP(Z), damping=0.8)
        converge(ep, torch.tensor([0, 3, 3, 7, 9, 9, 9, 14, 2, 2, 5]), y)
        precision = guide.gps.f.precision
        assert (precision[[1, 4, 6, 8]].abs() < 1e-9).all()  # never observed
        assert (precision[[0, 3, 7]] > 0.1).all()
        # Row by row the cavities differ where a value has several terms; without repeats the two are one.
        single = torch.tensor([0, 3, 3, 7, 5, 1, 2, 14, 4, 6, 8]).unique()
        losses = []
        for direct in (False, True):
            _, ep = start(grouped, x, family=SparseEP(Z), damping=0.8)
            losses.append(converge(ep, single, torch.linspace(-1, 1, len(single)), direct))
        assert losses[0] == pytest.approx(losses[1], abs=1e-8)

    def test_replicates_along_a_second_dimension(self):
        x, _ = classes(12)
        y = torch.sin(x) + 0.2 * torch.randn(12, 3)
        kernel = kernels.RBF(0.8)

        def model(y):
            f = pyro.sample("f", GaussianProcess(kernel, x, jitter=1e-10))
            with pyro.plate("data", 12, dim=-2), pyro.plate("replicates", 3, dim=-1):
                pyro.sample("y", dist.Normal(f[:, None], 0.3), obs=y)

        _, ep = start(model, x, family=SparseEP(x, trainable=False), damping=1.0)
        for _ in range(5):
            loss = ep.sweep(y)
        covariance = kernel(x).repeat_interleave(3, 0).repeat_interleave(3, 1) + 0.09 * torch.eye(36)
        assert abs(loss + dist.MultivariateNormal(torch.zeros(36), covariance).log_prob(y.reshape(-1))) < 1e-5

    def test_sums_over_events_are_taken_apart(self):
        x, _ = classes(20)
        y = torch.sin(2 * x[:, 0]) + 0.2 * torch.randn(20)

        def event(y):
            f = pyro.sample("f", GaussianProcess(kernels.RBF(0.8), x))
            pyro.sample("y", dist.Normal(f, 0.3).to_event(1), obs=y)

        def outputs(ys, rows=None):
            rows = torch.arange(20) if rows is None else rows
            f = pyro.sample("f", GaussianProcess(kernels.RBF(0.8), x[rows]).expand([2]).to_event(1))
            with pyro.plate("data", 20, subsample=rows):
                pyro.sample("y", dist.Normal(f.mT, 0.3).to_event(1), obs=ys[rows])

        _, one = start(event, x, damping=1.0)
        guide, two = start(outputs, x, damping=1.0)
        ys = torch.stack([y, y], -1)
        assert converge(two, ys) == pytest.approx(2 * converge(one, y), abs=1e-8)
        part, batches = start(outputs, x, damping=1.0)
        for _ in range(5):  # a Gaussian's sites are exact at once
            for rows in torch.arange(20).split(5):
                batches.sweep(ys, rows)
        torch.testing.assert_close(part.gps.f.precision, guide.gps.f.precision)

    def test_one_density_of_several_values_is_refused(self):
        x, y = classes(20)

        def model(y):
            f = pyro.sample("f", GaussianProcess(kernels.RBF(0.8), x))
            pyro.factor("y", dist.Normal(f, 0.3).log_prob(y).sum())

        refused(r"GP site 'f' .*: one term of a density depends on several of its values", start(model, x)[1].sweep, y)

    def test_a_site_shared_by_two_processes(self):
        """Its terms count once: of one process or of the other."""
        x, y = classes(20)
        first = torch.arange(20) < 8

        def shared(y):
            f = pyro.sample("f", GaussianProcess(kernels.RBF(0.8), x))
            g = pyro.sample("g", GaussianProcess(kernels.Matern32(1.0), x))
            observed(Probit(torch.where(first, f, g)), y)

        def apart(y):
            f = pyro.sample("f", GaussianProcess(kernels.RBF(0.8), x))
            g = pyro.sample("g", GaussianProcess(kernels.Matern32(1.0), x))
            with pyro.plate("data", 20):
                with pyro.poutine.mask(mask=first):
                    pyro.sample("y", Probit(f), obs=y)
                with pyro.poutine.mask(mask=~first):
                    pyro.sample("z", Probit(g), obs=y)

        assert converge(start(shared, x)[1], y) == pytest.approx(converge(start(apart, x)[1], y), abs=1e-9)

    def test_independent_outputs(self):
        x, y = classes(20)
        ys = torch.stack([y, 1 - y])

        def both(ys):
            f = pyro.sample("f", GaussianProcess(kernels.RBF(0.8), x).expand([2]).to_event(1))
            with pyro.plate("outputs", 2, dim=-2), pyro.plate("data", 20, dim=-1):
                pyro.sample("y", Probit(f), obs=ys)

        guide, ep = start(both, x)
        single, alone = start(one_function(kernels.RBF(0.8), Probit), x)
        assert converge(ep, ys) == pytest.approx(2 * converge(alone, x, y), abs=1e-8)
        torch.testing.assert_close(guide.gps.f.precision[0], single.gps.f.precision)

    def test_latents_are_points_at_their_mode(self):
        """Gaussian likelihood, Z = X: the maximum of evidence and prior, by dense algebra."""
        x, _ = classes(30)
        y = torch.sin(2 * x[:, 0]) + 0.3 * torch.randn(30)

        def model(y):
            noise = pyro.sample("noise", dist.LogNormal(0.0, 0.5))
            f = pyro.sample("f", GaussianProcess(kernels.RBF(0.8), x))
            observed(dist.Normal(f, noise), y)

        guide, ep = start(model, x, family=SparseEP(x, trainable=False), damping=1.0)
        for rate in (0.1, 0.02, 0.004):
            ep.optim = pyro.optim.Adam({"lr": rate})
            for _ in range(26):
                loss = ep.step(y)
        grid = torch.linspace(0.1, 1.0, 901)
        covariances = kernels.RBF(0.8)(x) + grid[:, None, None] ** 2 * torch.eye(30)
        joint = dist.MultivariateNormal(torch.zeros(30), covariances).log_prob(y) + dist.LogNormal(0.0, 0.5).log_prob(
            grid
        )
        best = joint.argmax()
        assert abs(guide.median(y)["noise"] - grid[best]) < 2e-3
        assert abs(loss + joint[best]) < 1e-3


class TestRows:
    """A site belongs to its datum: all data come in the same order each time."""

    def test_inducing_inputs_stay_unless_asked(self):
        """log Z is no bound: with all inputs for z, a posterior that is exact EP would leave it."""
        x, y = classes(20)
        for family, moves in ((SparseEP(x), False), (SparseEP(x, trainable=True), True)):
            pyro.clear_param_store()
            guide, ep = start(probit, x, family=family)
            ep.step(x, y)
            before = guide.gps.f.basis.inputs[0].detach().clone()
            ep.step(x, y)
            assert torch.equal(guide.gps.f.basis.inputs[0], before) is not moves

    def test_inputs_that_move_with_parameters(self):
        """A network's outputs: the arguments say which rows they are."""
        x, y = classes(40)
        network = torch.nn.Linear(1, 1)

        def model(x, y=None):
            pyro.module("network", network)
            f = pyro.sample("f", GaussianProcess(kernels.RBF(0.8), network(x)))
            observed(Probit(f), y)

        _, ep = start(model, x)
        ep.step(x, y)
        ep.step(x.clone(), y)
        refused(r"GP site 'f' has a site for each of 40 data.* brings others", ep.step, x.flip(0), y)

    def test_other_rows_are_refused(self):
        x, y = classes(60)
        _, ep = start(probit, x)
        ep.step(x, y)
        for call in ((x, 1 - y), (x + 1e-9, y), (x.flip(0), y.flip(0)), (torch.cat([x[:59], x[:1]]), y)):
            refused(r"GP site 'f' .* others, .* new guide", ep.step, *call)


class TestBeforeAnyStep:
    def test_posteriors_are_refused(self):
        x, y = classes(20)
        guide, ep = start(probit, x)
        message = r"GP site 'f' has the family SparseEP.*ExpectationPropagation\(model, guide, optim\)\.step"
        refused(message, guide.posterior, x, y)
        guide(x, y)
        ep.evaluate_loss(x, y)
        ep.evaluate_loss(x[:5], y[:5], size=20, indices=torch.arange(5))
        loaded = restored(guide, probit, SparseEP(Z))
        for one in (guide, loaded):
            for ask in (one.posterior, one, lambda new, one=one: predict(probit, one, new, num_samples=2)):
                refused(message, ask, x[:3])
        ep.step(x, y)
        guide.posterior(x[:3]), guide(x[:3])

    def test_looking_changes_nothing(self):
        x, y = classes(30)
        losses = []
        for looks in (0, 1):
            _, ep = start(probit, x)
            for _ in range(6):
                ep.sweep(x[:10], y[:10], size=30, indices=torch.arange(10))
                for _ in range(looks):
                    ep.evaluate_loss(x, y)
            losses.append(ep.evaluate_loss(x, y))
        assert losses[0] == losses[1]


class TestRobustness:
    def test_student_t_with_outliers(self):
        x, _ = classes(60)
        y = torch.sin(2 * x[:, 0]) + 0.1 * torch.randn(60)
        y[::10] += 5.0

        model = one_function(kernels.RBF(0.8), lambda f: dist.StudentT(3.0, f, 0.1))
        guide, ep = start(model, x, damping=0.5)
        loss = ep.sweep(x, y, num=100)
        assert math.isfinite(loss)
        status = ep.status["f"]
        assert status["negative"] > 0
        assert status["converged"]
        new = torch.linspace(0.2, 3.8, 30)[:, None]
        assert (guide.posterior(new)["f"].mean - torch.sin(2 * new[:, 0])).square().mean().sqrt() < 0.15

    def test_negative_precisions_that_outweigh_the_rest_are_cut(self):
        x, y = classes(20)
        guide, ep = start(probit, x)
        ep.sweep(x, y, num=3)
        guide.gps.f.precision = torch.full((20,), -5.0)
        with pytest.warns(NumericalWarning, match="dropped sites of negative precision"):
            loss = ep.sweep(x, y)
        assert math.isfinite(loss)
        assert ep.status["f"]["cut"] == 1
        assert abs(converge(ep, x, y) - converge(start(probit, x)[1], x, y)) < 1e-9

    def test_cavities_without_variance_are_skipped(self):
        x, y = classes(20)
        guide, ep = start(probit, x)
        ep.sweep(x, y, num=10)
        precision = guide.gps.f.precision.clone()
        guide.gps.f.precision = torch.where(torch.arange(20) < 10, precision, -0.08)
        loss = ep.sweep(x, y)
        assert math.isfinite(loss)
        assert abs(converge(ep, x, y) - converge(start(probit, x)[1], x, y)) < 1e-9

    def test_a_likelihood_far_from_log_concave_stays_bounded(self):
        torch.manual_seed(0)
        x = torch.linspace(-3, 3, 60)[:, None]
        y, several = torch.sin(2 * x[:, 0]) + torch.randn(60), dist.Categorical(torch.tensor([0.9, 0.1]))
        scales = torch.tensor([0.05, 5.0])

        def outliers(f):
            return dist.MixtureSameFamily(several, dist.Normal(f[..., None], scales))

        model, family = one_function(kernels.RBF(0.8), outliers), SparseEP(torch.linspace(-3, 3, 10)[:, None])
        guide, ep = start(model, x, family=family, damping=0.1)
        assert math.isfinite(ep.sweep(x, y, num=30))
        assert guide.posterior(x)["f"].mean.abs().max() < 2

    def test_nan_changes_nothing(self):
        x, y = classes(20)
        guide, ep = start(probit, x)
        for _ in range(3):
            ep.step(x, y)
        before = {k: v.clone() for k, v in guide.state_dict().items() if torch.is_tensor(v)}
        bad = y.clone()
        bad[3] = torch.nan
        refused(r"Probit's values .* got \[nan\]", ep.step, x, bad)
        for key, value in before.items():
            assert torch.equal(guide.state_dict()[key], value)
        assert math.isfinite(ep.step(x, y))

    @pytest.mark.parametrize("value", [torch.inf, 1.0, -1.0])  # infinite density, or none
    def test_data_outside_of_the_support(self, value):
        x, _ = classes(20)
        y = torch.full((20,), 0.3)

        model = one_function(kernels.RBF(0.8), lambda f: dist.Beta(0.5 + f.exp(), 0.5, validate_args=False))
        bad = y.clone()
        bad[3] = value
        _, ep = start(model, x)
        refused(r"log density of site 'y' is not finite at 1 of 20 values.*support", ep.step, x, bad)
        loss = ep.step(x, y)  # nothing is left of it
        assert ep.evaluate_loss(x, y) < loss

    @pytest.mark.parametrize(("size", "scale"), [(20, 1.0), (5, 1000.0)])
    def test_exponential_links_under_wide_priors(self, scale, size):
        x = torch.linspace(0, 4, 20)[:, None]
        f = torch.sin(2 * x[:, 0])
        counts, times = torch.poisson((3 + f).exp()), f.exp() * (0.2 + torch.rand(20))

        def model(counts, times, x, size=None):
            kernel = scale * kernels.Polynomial(2)
            f, g = pyro.sample("f", GaussianProcess(kernel, x)), pyro.sample("g", GaussianProcess(kernel, x))
            with pyro.plate("data", size or len(x), subsample=x):
                pyro.sample("counts", dist.Poisson(f.exp(), validate_args=False), obs=counts)
                pyro.sample("times", dist.Gamma(2.0, 2.0 * (-g).exp(), validate_args=False), obs=times)

        _, ep = start(model, counts, times, x, family=SparseEP(x[::2], trainable=False))
        losses = []
        for _ in range(10):
            for rows in torch.arange(20).split(size):
                part = {} if size == 20 else {"size": 20, "indices": rows}
                ep.sweep(counts[rows], times[rows], x[rows], **part)
            losses.append(ep.evaluate_loss(counts, times, x))
        assert max(losses) < 2 * losses[-1]
        assert max(status["change"] for status in ep.status.values()) < 1e-2

    def test_masked_batches(self):
        """A batch all of whose rows are masked teaches nothing; the next ones do."""
        x, y = classes(20)
        mask = torch.arange(20) >= 5

        def model(x, y, mask, size=None):
            f = pyro.sample("f", GaussianProcess(kernels.RBF(0.8), x))
            with pyro.plate("data", size or len(x), subsample=x), pyro.poutine.mask(mask=mask):
                pyro.sample("y", Probit(f), obs=y)

        _, whole = start(model, x)
        loss = converge(whole, x, y, mask)
        guide = AutoSparseGP(model, SparseEP(Z))
        ep = ExpectationPropagation(model, guide, pyro.optim.Adam({"lr": 0.02}))
        rows = torch.arange(5)
        ep.sweep(x[rows], y[rows], mask[rows], size=20, indices=rows)
        for _ in range(12):
            for rows in torch.arange(20).split(5):
                ep.sweep(x[rows], y[rows], mask[rows], size=20, indices=rows)
        assert ep.evaluate_loss(x, y, mask) == pytest.approx(loss, abs=1e-4)
        assert (guide.gps.f.precision[:5].abs() < 1e-12).all()


class TestSchedules:
    def test_outer_waits_for_convergence(self):
        x, y = classes(30)
        _, ep = start(probit, x, schedule="outer", tolerance=1e-8)
        first = ep.step(x, y)
        assert ep.status["f"]["converged"]
        _, held = start(probit, x, tolerance=1e-8)
        pyro.clear_param_store()
        assert first == pytest.approx(converge(held, x, y), abs=1e-6)


class TestErrors:
    def test_arguments(self):
        guide = AutoSparseGP(probit, SparseEP(4))
        adam = pyro.optim.Adam({"lr": 0.01})
        for options, message in (
            ({"damping": 0}, "damping must be a number in"),
            ({"power": 1.5}, "power must be a number in"),
            ({"schedule": "both"}, 'schedule must be "inner" or'),
            ({"num_nodes": 2}, "num_nodes must be a whole number of at least 4"),
            ({"group": object()}, "torch.distributed"),
        ):
            refused(message, ExpectationPropagation, probit, guide, adam, **options)
        with pytest.raises(ValueError, match="optim must be a Pyro optimiser"):
            ExpectationPropagation(probit, guide, torch.optim.SGD([torch.zeros(1, requires_grad=True)], 0.1))
        refused("SparseEP", lambda: ExpectationPropagation(probit, AutoSparseGP(probit, SVGP(4)), adam))
        refused("guide's own model", ExpectationPropagation, regression, guide, adam)

    def test_models_it_cannot_integrate(self):
        x, y = data(heteroscedastic)
        guide = AutoSparseGP(heteroscedastic, SparseEP(6))
        ep = ExpectationPropagation(heteroscedastic, guide, pyro.optim.Adam({"lr": 0.01}))
        refused("meets another GP site", ep.step, x, y)

    def test_more_than_points(self):
        x, y = data(regression)
        guide = AutoSparseGP(regression, SparseEP(6), point_estimates=["noise"])
        refused("as points", ExpectationPropagation(regression, guide, pyro.optim.Adam({"lr": 0.01})).step, x, y)

    @pytest.mark.parametrize("loss", [TraceQuadrature_ELBO(), pyro.infer.Trace_ELBO()])
    def test_svi_is_refused(self, loss):
        x, y = data(regression)
        guide = AutoSparseGP(regression, SparseEP(6))
        svi = pyro.infer.SVI(regression, guide, pyro.optim.Adam({"lr": 0.01}), loss)
        refused("ExpectationPropagation", svi.step, x, y)


def test_a_row_whose_prior_variance_is_0():
    x = torch.linspace(-1, 1, 21)[:, None]
    x[10] = 0.0
    y = x[:, 0] + 0.1 * torch.randn(21)
    kernel = kernels.Linear(1.0)
    model = gaussian(kernel, 0.1, jitter=1e-12)
    ep = ExpectationPropagation(model, AutoSparseGP(model, SparseEP(torch.ones(1, 1))), pyro.optim.Adam({"lr": 0.01}))
    assert math.isfinite(ep.step(x, y))
    assert all(parameter.isfinite().all() for parameter in ep.guide.parameters())
    evidence = GaussianProcess(kernel + kernels.White(0.01), x, jitter=0.0).log_prob(y)
    assert -ep.sweep(x, y, num=100) == pytest.approx(evidence.item(), abs=1e-4)


def test_a_scaled_model_is_refused():
    _, ep = start(
        pyro.poutine.scale(one_function(kernels.RBF(0.8), lambda f: dist.Bernoulli(logits=f)), 0.1), *classes()
    )
    refused("'f' is under poutine.scale, 0", lambda: ep.step(*classes()))
