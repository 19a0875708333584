"""The robust-max likelihood, and distributions that bring their own expectations to the quadrature bound."""

import math

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO

from pyro_sparsegp import AutoSparseGP, ExpectationPropagation, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.distributions import Probit, RobustMax
from pyro_sparsegp.families import SGPR, SVGP, SparseEP
from pyro_sparsegp.numerics.functions import log_ndtr

from .models import estimate, observed, one_function, prepared, refused, trained

KERNEL = kernels.RBF(0.4)


def classes(num=60, num_classes=3, seed=1):
    """Inputs (N, 2) and bands of classes."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(num, 2, generator=generator)
    return x, (num_classes * x[:, 0]).long().clamp(max=num_classes - 1)


def multiclass(num_classes=3, epsilon=1e-2, kernel=KERNEL, parameter=lambda f: f.mT):
    def model(x, y=None, size=None):
        f = pyro.sample("f", GaussianProcess(kernel, x).expand([num_classes]).to_event(1))
        return observed(RobustMax(parameter(f), epsilon), y, x, size)

    return model


def guide_for(model, *args, family=None, steps=15, **kwargs):
    return trained(model, family or SVGP(8), *args, steps=steps, lr=0.05, loss=TraceQuadrature_ELBO(), **kwargs)


class PoissonOfLog(dist.Poisson):
    """A count with log-rate f: E[y f − exp f − log y!] = y m − exp(m + v/2) − log y!."""

    arg_constraints = {"log_rate": torch.distributions.constraints.real}  # noqa: RUF012
    normal_parameter = "log_rate"

    def __init__(self, log_rate, validate_args=None):
        self.log_rate = log_rate
        super().__init__(log_rate.exp(), validate_args=False)

    def expand(self, batch_shape, _instance=None):
        return PoissonOfLog(self.log_rate.expand(batch_shape))

    def expected_log_prob(self, value, variance):
        return value * self.log_rate - (self.log_rate + variance / 2).exp() - torch.lgamma(value + 1)


class TestRobustMax:
    @pytest.mark.parametrize("num_classes", [2, 3, 4, 6, 10])
    def test_expectations_by_a_fine_grid(self, num_classes):
        generator = torch.Generator().manual_seed(num_classes)
        mean = torch.randn(4, num_classes, generator=generator)
        variance = 0.2 + torch.rand(4, num_classes, generator=generator)
        y = torch.randint(num_classes, (4,), generator=generator)
        t = torch.linspace(-9, 9, 4001)[:, None, None, None]
        sd = variance.sqrt()
        below = torch.special.ndtr((mean[:, :, None] + sd[:, :, None] * t - mean[:, None]) / sd[:, None])
        below.diagonal(dim1=-2, dim2=-1).fill_(1.0)
        density = torch.exp(-t[..., 0].square() / 2) * (18 / 4000) / math.sqrt(2 * math.pi)
        share, error = (below.prod(-1) * density).sum(0), 5e-6
        q = RobustMax(mean, 0.02)
        expected = q.expected_probs(variance)
        assert ((expected - 0.98 * share - 0.02 / (num_classes - 1) * (1 - share)).abs() <= error).all()
        torch.testing.assert_close(expected.sum(-1), torch.ones(4), atol=1e-6, rtol=0)
        hit, miss = math.log(0.98), math.log(0.02 / (num_classes - 1))
        own = share.gather(-1, y[:, None])[:, 0]
        log_prob = q.expected_log_prob(y, variance)
        assert ((log_prob - own * hit - (1 - own) * miss).abs() <= error * (hit - miss)).all()

    def test_gradients_by_finite_differences(self):
        mean = torch.randn(3, 4).requires_grad_()
        variance = (0.1 + torch.rand(3, 4)).requires_grad_()
        epsilon = torch.tensor(0.05).requires_grad_()
        y = torch.tensor([0, 3, 1])

        def expected(mean, variance, epsilon):
            q = RobustMax(mean, epsilon, validate_args=False)
            return q.expected_log_prob(y, variance), q.expected_probs(variance)

        assert torch.autograd.gradcheck(expected, (mean, variance, epsilon))

    def test_expectations_are_mapped(self):
        """torch warns, an error here, where what is mapped is computed one by one; and log Φ has its slopes far out."""
        y, variances = torch.tensor([0, 2]), 0.2 + torch.rand(5, 2, 3)

        def expected(variance):
            return RobustMax(variance.log() ** 2).expected_log_prob(y, variance)

        both = [torch.stack([function(v) for v in variances]) for function in (expected, torch.func.jacrev(expected))]
        found = [torch.func.vmap(function)(variances) for function in (expected, torch.func.jacfwd(expected))]
        torch.testing.assert_close(found, both)
        x = torch.tensor([-1e4, -30.0, -1.0, 0.0, 3.0, 30.0], requires_grad=True)
        slope = torch.autograd.grad(log_ndtr(x).sum(), x, create_graph=True)[0]
        far, near = (
            torch.tensor([1e4, 30.0, 0.0]),
            (dist.Normal(0.0, 1.0).log_prob(x) - torch.special.log_ndtr(x)).exp(),
        )
        torch.testing.assert_close(slope[:2], far[:2] + 1 / far[:2], rtol=1e-5, atol=0)
        torch.testing.assert_close(slope[2:], near[2:], rtol=1e-12, atol=1e-30)
        curve = torch.autograd.grad(slope.sum(), x)[0]
        torch.testing.assert_close(curve[2:], (-slope * (x + slope))[2:], rtol=1e-10, atol=1e-30)

    def test_density_and_draws(self):
        f = torch.tensor([[0.0, 2.0, 1.0], [3.0, -1.0, 0.0]])
        q = RobustMax(f, 0.1)
        torch.testing.assert_close(q.probs, torch.tensor([[0.05, 0.9, 0.05], [0.9, 0.05, 0.05]]))
        every = torch.stack([q.log_prob(torch.full((2,), c)) for c in range(3)], -1)
        torch.testing.assert_close(every, q.probs.log())
        draws = q.sample((20_000,))
        assert draws.dtype == torch.int64
        share = torch.nn.functional.one_hot(draws, 3).double().mean(0)
        torch.testing.assert_close(share, q.probs, atol=0.01, rtol=0)
        assert RobustMax(f[0], torch.tensor([0.1, 0.2])).batch_shape == (2,)

    def test_fixed_values_have_no_variance(self):
        mean = torch.tensor([[1.0, 0.0, 0.5]]).requires_grad_()
        for dtype in (torch.float64, torch.float32):
            for given in ([0.0, 0.0, 0.0], [1.0, 0.5, 0.0], [0.0, 1.0, 1.0]):
                variance = torch.tensor([given], dtype=dtype).requires_grad_()
                q = RobustMax(mean.to(dtype), 0.1)
                probs = q.expected_probs(variance)
                assert abs(float(probs.detach().sum()) - 1) < 2e-2
                assert all(g.isfinite().all() for g in torch.autograd.grad(probs.log().sum(), (mean, variance)))
                if not any(given):
                    torch.testing.assert_close(probs, torch.tensor([[0.9, 0.05, 0.05]], dtype=dtype))

    def test_refusals(self):
        refused("P ≥ 2 classes", RobustMax, torch.randn(5, 1))
        refused("epsilon", RobustMax, torch.randn(5, 3), 1.5, validate_args=True)
        refused("from 0 to 2, got", RobustMax(torch.randn(5, 3), 0.5, validate_args=True).log_prob, torch.full((5,), 3))


def by_hand(guide, x, y, epsilon=1e-2, order=None, scale=1.0, shift=0.0):
    q = guide.posterior(x)["f"]
    order = list(range(q.mean.shape[0])) if order is None else order
    mean, variance = (scale * q.mean.mT + shift)[:, order], (scale**2 * q.variance.mT)[:, order]
    return RobustMax(mean, epsilon).expected_log_prob(y, variance).sum() - q.kl.sum()


class TestBound:
    @pytest.mark.quick("2 | 3")
    @pytest.mark.parametrize("num_classes", [2, 3, 10])
    def test_value(self, num_classes):
        x, y = classes(num_classes=num_classes)
        model = multiclass(num_classes)
        guide = guide_for(model, x, y)
        losses = [TraceQuadrature_ELBO().loss(model, guide, x, y) for _ in range(2)]
        assert losses[0] == losses[1]
        torch.testing.assert_close(-torch.tensor(losses[0]), by_hand(guide, x, y))
        with torch.no_grad():
            mean, error = estimate(Trace_ELBO(), model, guide, x, y, num=25)
        assert abs(mean - losses[0]) < 5 * error
        assert TraceQuadrature_ELBO(3).loss(model, guide, x, y) == pytest.approx(losses[0])

    def test_how_the_model_writes_its_parameter(self):
        x, y = classes()
        shift = torch.tensor([0.1, -0.3, 0.2])
        writes = [
            (lambda f: f.mT[:, [2, 0, 1]], {"order": [2, 0, 1]}),
            (lambda f: -1.5 * f.mT + shift, {"scale": -1.5, "shift": shift}),
            (lambda f: torch.stack([f[1], f[0], f[2]], -1), {"order": [1, 0, 2]}),
        ]
        for write, change in writes:
            model = multiclass(parameter=write)
            guide = guide_for(model, x, y)
            loss = TraceQuadrature_ELBO().loss(model, guide, x, y)
            torch.testing.assert_close(-torch.tensor(loss), by_hand(guide, x, y, **change))

    def test_rows_by_index_and_a_constant_class(self):
        x, y = classes(30)
        rows = torch.tensor([0, 3, 3, 7])

        def model(x, y=None):
            f = pyro.sample("f", GaussianProcess(KERNEL, x).expand([2]).to_event(1))
            with pyro.plate("data", 4):
                theta = torch.cat([f.mT[rows], f.new_zeros(4, 1)], -1)
                return pyro.sample("y", RobustMax(theta, 0.05), obs=y)

        guide = guide_for(model, x, y[rows])
        q = guide.posterior(x)["f"]
        zero = torch.zeros(4, 1)
        theta = RobustMax(torch.cat([q.mean.mT[rows], zero], -1), 0.05)
        exact = theta.expected_log_prob(y[rows], torch.cat([q.variance.mT[rows], zero], -1)).sum() - q.kl.sum()
        torch.testing.assert_close(-torch.tensor(TraceQuadrature_ELBO().loss(model, guide, x, y[rows])), exact)

    def test_several_sites(self):
        x, y = classes()

        def model(x, y=None):
            f = [pyro.sample(name, GaussianProcess((i + 1.0) * KERNEL, x)) for i, name in enumerate("abc")]
            return observed(RobustMax(torch.stack(f, -1), 0.01), y)

        guide = guide_for(model, x, y)
        q = guide.posterior(x)
        mean, variance = (torch.stack([getattr(q[name], part) for name in "abc"], -1) for part in ("mean", "variance"))
        exact = RobustMax(mean, 0.01).expected_log_prob(y, variance).sum() - sum(q[name].kl for name in "abc")
        torch.testing.assert_close(-torch.tensor(TraceQuadrature_ELBO().loss(model, guide, x, y)), exact)

    def test_masks_and_events(self):
        x, y = classes()
        keep = torch.arange(len(x)) % 3 > 0

        def masked(how):
            def model(x, y=None):
                f = pyro.sample("f", GaussianProcess(KERNEL, x).expand([3]).to_event(1))
                q = RobustMax(f.mT, 0.01)
                if how == "event":
                    return pyro.sample("y", q.mask(keep).to_event(1), obs=y)
                with pyro.plate("data", len(x)):
                    if how == "distribution":
                        return pyro.sample("y", q.mask(keep), obs=y)
                    with poutine.mask(mask=keep):
                        return pyro.sample("y", q, obs=y)

            return model

        for how in ("event", "distribution", "poutine"):
            model = masked(how)
            guide = guide_for(model, x, y)
            q = guide.posterior(x)["f"]
            terms = RobustMax(q.mean.mT, 0.01).expected_log_prob(y, q.variance.mT)
            exact = terms[keep].sum() - q.kl.sum()
            torch.testing.assert_close(-torch.tensor(TraceQuadrature_ELBO().loss(model, guide, x, y)), exact)

    @pytest.mark.parametrize("meet", [False, True])
    def test_beside_other_densities(self, meet):
        """The rest of the model is integrated as ever: by nodes, or drawn."""
        x, y = classes()
        z = torch.randn(len(x))

        def model(x, y=None):
            f = pyro.sample("f", GaussianProcess(KERNEL, x).expand([3]).to_event(1))
            g = pyro.sample("g", GaussianProcess(KERNEL, x))
            with pyro.plate("data", len(x)):
                pyro.sample("count", dist.Poisson(g.exp()), obs=y.double())
                pyro.sample("y", RobustMax(f.mT, 0.01), obs=y)
                pyro.sample("sum", dist.Normal(f.sum(0) if meet else f[1], 0.5), obs=z)

        guide = prepared(model, SVGP(8), x, y) if meet else guide_for(model, x, y)
        q = guide.posterior(x, y)
        f, g = q["f"], q["g"]
        exact = RobustMax(f.mean.mT, 0.01).expected_log_prob(y, f.variance.mT).sum() - f.kl.sum() - g.kl
        exact = exact + (y * g.mean - (g.mean + g.variance / 2).exp() - torch.lgamma(y + 1.0)).sum()
        mean, variance = (f.mean.sum(0), f.variance.sum(0)) if meet else (f.mean[1], f.variance[1])
        exact = exact + dist.Normal(mean, 0.5).log_prob(z).sum() - variance.sum() / (2 * 0.25)
        assert -TraceQuadrature_ELBO().loss(model, guide, x, y) == pytest.approx(exact.item(), rel=1e-7)

    def test_refused_where_it_needs_a_gradient(self):
        x, y = classes()
        model = multiclass()
        refused(r"'f' has the family SGPR.*'y' is piecewise constant", lambda: AutoSparseGP(model, SGPR(8))(x, y))
        guide = AutoSparseGP(model, SVGP(8))
        with pytest.raises(ValueError, match=r"'y' has a piecewise constant density.*TraceQuadrature_ELBO"):
            Trace_ELBO().loss_and_grads(model, guide, x, y)
        for write in (
            lambda f: f.mT.square(),
            lambda f: f.mT - f.mT.mean(-1, keepdim=True),
            lambda f: f.mT[:, [0, 0, 1]],
            lambda f: torch.stack([f[0], f[0].roll(1), f[1]], -1),  # correlated
        ):
            wrong = multiclass(parameter=write)
            with pytest.raises(ValueError, match=r"site 'y' has the distribution RobustMax.*not an affine function"):
                TraceQuadrature_ELBO().loss(wrong, AutoSparseGP(wrong, SVGP(8)), x, y)
        wrong = AutoSparseGP(model, SparseEP(8))
        with pytest.raises(ValueError, match="one term of a density depends on several of its values"):
            ExpectationPropagation(model, wrong, pyro.optim.Adam({"lr": 0.01})).step(x, y)


@pytest.mark.parametrize(
    ("likelihood", "labels", "message"),
    [
        (lambda f: Probit(f[0]), [-1.0, 1.0], r"site 'y'.*Probit's values must be .* 0 to 1, got \[-1.0\].*\(y > 0\)"),
        (lambda f: RobustMax(f.mT), [1, 3], r"site 'y'.*RobustMax's classes must be .* 0 to 2, got \[3.0\].*y - 1"),
        (lambda f: RobustMax(f.mT), [0.0, 1.5], r"site 'y'.*RobustMax's classes must be .*, got \[1.5\]"),
        (lambda f: dist.Categorical(logits=f.mT), [1, 3], r"(?s)site 'y'.*support.*count from 0.*y - 1"),
    ],
)
def test_labels(likelihood, labels, message):
    """Of classes that are counted otherwise, inside a plate, where distributions expand."""

    def model(x, y=None):
        f = pyro.sample("f", GaussianProcess(KERNEL, x).expand([3]).to_event(1))
        return observed(likelihood(f), y)

    x, y = torch.rand(10, 1), torch.tensor(labels * 5)
    guide = AutoSparseGP(model, SVGP(4))
    refused(message, guide, x, y)
    guide = prepared(model, SVGP(4), x, torch.zeros_like(y))
    if "RobustMax" in message:  # whose expectations would index by them
        refused(message.replace("site 'y'.*", ""), lambda: TraceQuadrature_ELBO().loss(model, guide, x, y))
    elif "Probit" in message:  # it would train towards another model
        with pytest.raises(ValueError, match=r"NaN: the log density of site 'y' \(\d+ of \d+ values"):
            TraceQuadrature_ELBO().loss_and_grads(model, guide, x, y)


def test_a_distribution_of_the_users():
    x, _ = classes(40)
    y = torch.poisson(torch.exp(2 * x[:, 0]))
    model = one_function(KERNEL, lambda f: PoissonOfLog(0.5 + 2 * f))
    guide = guide_for(model, x, y)
    q = guide.posterior(x)["f"]
    m, v = 0.5 + 2 * q.mean, 4 * q.variance
    exact = ((y * m - (m + v / 2).exp() - torch.lgamma(y + 1)).sum() - q.kl).item()
    assert -TraceQuadrature_ELBO(1).loss(model, guide, x, y) == pytest.approx(exact)  # one node would not do


def test_predictive_scores_see_the_same_probabilities():
    """The diagnostics' generic reading of the likelihood, by points, against the distribution's own probabilities."""
    pytest.importorskip("arviz_base")
    from pyro_sparsegp import diagnostics

    x, y = classes(60)
    model = multiclass(epsilon=0.05)
    guide = guide_for(model, x, y)
    q = guide.posterior(x)["f"]
    own = RobustMax(q.mean.mT, 0.05).expected_probs(q.variance.mT).gather(-1, y[:, None])[:, 0]
    scores = diagnostics.predictive_scores(model, guide, x, y, num_samples=2, seed=0)
    read = torch.from_numpy(scores.pointwise["log_score"].values).exp()
    assert (read - own).abs().max() < 0.06  # 128 Sobol points of a function with a jump
    assert (read - own).abs().mean() < 0.02
