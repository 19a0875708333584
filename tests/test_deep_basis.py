"""Deep basis kernels in weight space: closed forms, variance correction, streaming, mini-batches, state, errors."""

import math
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import Predictive
from pyro.nn import PyroModule, PyroSample
from torch import nn
from torch.distributions import MultivariateNormal, constraints

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels, predict
from pyro_sparsegp.bases import features
from pyro_sparsegp.families import (
    SGPR,
    SVGP,
    ComputationAware,
    ExactWeightSpace,
    MeanFieldAdditive,
    OrthogonalInducing,
    SparseEP,
    WeightSpace,
)
from pyro_sparsegp.kernels import DeepBasis
from pyro_sparsegp.numerics import functions as blocks

from .models import data, gaussian, maximise, observed, prepared, refused, restored, train, trained

NOISE = 0.2


def mlp(inputs=2, outputs=5, width=16, dtype=torch.float64, seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(inputs, width), nn.Tanh(), nn.Linear(width, outputs)).to(dtype)


def deep(network, correction=True, likelihood=None, wrap=lambda k: k, outputs=False):
    """A model with a registered network and a Gaussian likelihood of known noise, unless another is given."""

    def model(x, y=None, size=None):
        if isinstance(network, nn.Module):
            pyro.module("network", network)
        process = GaussianProcess(wrap(DeepBasis(network, correction)), x)
        f = pyro.sample("f", process.to_event(1) if outputs else process)
        return observed((likelihood or (lambda f: dist.Normal(f, NOISE)))(f), y, x, size)

    return model


def squares(network, x):
    return network(x).square().sum(-1)


def correction(network, x):
    return squares(network, x).max() - squares(network, x)


def elbo(model, guide, *args, **kwargs):
    return -TraceQuadrature_ELBO(2).loss(model, guide, *args, **kwargs)


def test_kernel_is_the_gram_matrix_with_a_level_diagonal():
    network, x, z = mlp(), torch.rand(7, 2), torch.rand(4, 2)
    k = DeepBasis(network)
    torch.testing.assert_close(k(x), network(x) @ network(x).mT + torch.diag(correction(network, x)))
    torch.testing.assert_close(k(x, z), network(x) @ network(z).mT)
    torch.testing.assert_close(k.diag(x), squares(network, x).max().expand(7))
    plain = DeepBasis(network, variance_correction=False)
    torch.testing.assert_close(plain(x), network(x) @ network(x).mT)
    torch.testing.assert_close(plain.diag(x), squares(network, x))
    assert not plain.depends_on_rows
    assert plain.relative_to(x) is plain
    assert "Sequential" in repr(k)
    assert "variance_correction=False" in repr(plain)


def test_level_of_prediction_is_over_the_rows_and_each_input_by_itself():
    network, x = mlp(), torch.rand(7, 2)
    new = torch.cat([3 * torch.rand(5, 2), x[:1]])  # some of them above the level, one a training row
    k = DeepBasis(network).relative_to(x)
    top = squares(network, x).max()
    torch.testing.assert_close(k.diag(new), torch.maximum(top, squares(network, new)))
    assert (k.diag(new) > top + 1e-6).any()
    residual = k(new) - network(new) @ network(new).mT
    torch.testing.assert_close(residual, torch.diag((top - squares(network, new)).clamp(min=0)), atol=1e-12, rtol=1e-9)
    # It is of the network as it is now, with its gradient.
    with torch.no_grad():
        network[2].weight.mul_(1.5)
    torch.testing.assert_close(DeepBasis(network).relative_to(x).level, squares(network, x).max())
    found = torch.autograd.grad(DeepBasis(network).relative_to(x).level, list(network.parameters()))
    expected = torch.autograd.grad(squares(network, x).max(), list(network.parameters()))
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other)


ALGEBRA = {
    "scaled": lambda k, other: 2.5 * k,
    "sum": lambda k, other: k + kernels.Linear(0.7) + other,
    "white": lambda k, other: k + kernels.White(0.3),
    "product": lambda k, other: k * kernels.Linear(0.7),
    "deep product": lambda k, other: k * other,
    "scaled sum": lambda k, other: 0.3 * (k + kernels.Constant(2.0)),
}


@pytest.mark.parametrize("name", ALGEBRA)
def test_algebra_carries_the_diagonal(name):
    network, second, x = mlp(), mlp(seed=3, outputs=3), torch.rand(8, 2)
    new = 2 * torch.rand(5, 2)
    kernel = ALGEBRA[name](DeepBasis(network), DeepBasis(second))

    def dense(rows, own):  # from matrices alone
        parts = []
        for net in (network, second):
            level = squares(net, rows).max()
            parts.append(net(own) @ net(own).mT + torch.diag((level - squares(net, own)).clamp(min=0)))
        a, b = parts
        linear = 0.7 * own @ own.mT
        return {
            "scaled": 2.5 * a,
            "sum": a + linear + b,
            "white": a + 0.3 * torch.eye(len(own)),
            "product": a * linear,
            "deep product": a * b,
            "scaled sum": 0.3 * (a + 2.0),
        }[name]

    for k, rows, own in ((kernel, x, x), (kernel.relative_to(x), x, new)):
        torch.testing.assert_close(k(own), dense(rows, own))
        torch.testing.assert_close(k.diag(own), dense(rows, own).diagonal())
        phi, diagonal = k.explicit(own)
        torch.testing.assert_close(diagonal, k.diag(own))
        torch.testing.assert_close(phi, k.features(own))
        torch.testing.assert_close(phi @ phi.mT, k(own, own.clone()))
        rest = k(own) - phi @ phi.mT
        torch.testing.assert_close(rest, torch.diag(rest.diagonal()), atol=1e-12, rtol=0)
        assert (rest.diagonal() > -1e-12).all()
    assert kernel.depends_on_rows
    assert not kernel.relative_to(x).depends_on_rows


def test_exact_process_needs_no_more_than_the_kernel():
    network, x, y = mlp(), *data(num=12)
    process = GaussianProcess(DeepBasis(network), x, jitter=0.0)
    covariance = network(x) @ network(x).mT + torch.diag(correction(network, x))
    shift = 1e-8 * torch.eye(12)
    regular = GaussianProcess(DeepBasis(network) + kernels.White(1e-8), x, jitter=0.0)
    torch.testing.assert_close(process.covariance_matrix, covariance)
    expected = MultivariateNormal(torch.zeros(12), covariance + shift).log_prob(y)
    torch.testing.assert_close(regular.log_prob(y), expected, rtol=1e-6, atol=1e-6)
    # Conditioned on values, the diagonal is that in the company of these inputs.
    new = 2 * torch.rand(1, 2)
    given = regular.given(x, y).at(new)
    k = DeepBasis(network).relative_to(x)
    gain = k(new, x) @ torch.linalg.inv(covariance + shift)
    torch.testing.assert_close(given.mean, gain @ y, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(given.variance, (k(new) - gain @ k(x, new))[0] + 1e-8, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("correcting", [False, True])
def test_exact_evidence_and_predictions_are_dense_algebra(correcting):
    network, (x, y) = mlp(), data(num=40)
    model = deep(network, correcting)
    guide = AutoSparseGP(model, ExactWeightSpace())
    phi, c = network(x), correction(network, x) * correcting
    dense = MultivariateNormal(torch.zeros(40), phi @ phi.mT + NOISE**2 * torch.eye(40)).log_prob(y)
    dense = dense - c.sum() / (2 * NOISE**2)
    assert abs(elbo(model, guide, x, y) - dense) < 1e-8
    new = torch.cat([3 * torch.rand(9, 2), x[:2]])
    q = guide.posterior(new)["f"]
    at = network(new)
    own = (squares(network, x).max() - squares(network, new)).clamp(min=0) * correcting
    gain = at @ phi.mT @ torch.linalg.inv(phi @ phi.mT + torch.diag(c) + NOISE**2 * torch.eye(40))
    covariance = at @ at.mT + torch.diag(own) - gain @ phi @ at.mT
    torch.testing.assert_close(q.mean, gain @ y, atol=1e-8, rtol=0)
    torch.testing.assert_close(q.variance, covariance.diagonal(), atol=1e-8, rtol=0)
    torch.testing.assert_close(q.covariance_matrix, covariance, atol=1e-8, rtol=0)
    torch.testing.assert_close(q.mathematical_variance, q.variance, atol=1e-7, rtol=0)
    # Predictions leave training's posterior alone.
    assert abs(elbo(model, guide, x, y) - dense) < 1e-8


def test_gradient_of_the_bound_is_that_of_equation_11():
    network, (x, y) = mlp(), data(num=30)

    def model(x, y):
        pyro.module("network", network)
        noise = pyro.param("noise", torch.tensor(NOISE), constraint=constraints.positive)
        f = pyro.sample("f", GaussianProcess(DeepBasis(network), x))
        observed(dist.Normal(f, noise), y)

    TraceQuadrature_ELBO(2).loss_and_grads(model, AutoSparseGP(model, ExactWeightSpace()), x, y)
    found = [p.grad.clone() for p in network.parameters()]
    by_noise = pyro.get_param_store()._params["noise"].grad
    network.zero_grad()
    noise = torch.tensor(NOISE).log().requires_grad_()
    variance = (2 * noise).exp()
    dense = MultivariateNormal(torch.zeros(30), network(x) @ network(x).mT + variance * torch.eye(30)).log_prob(y)
    (correction(network, x).sum() / (2 * variance) - dense).backward()
    for one, p in zip(found, network.parameters()):
        torch.testing.assert_close(one, p.grad, rtol=1e-7, atol=1e-7)
    torch.testing.assert_close(by_noise, noise.grad, rtol=1e-7, atol=1e-7)


def test_free_posterior_reaches_the_exact_one_for_a_fixed_network():
    network, (x, y) = mlp().requires_grad_(False).eval(), data(num=40)
    model = deep(network)
    exact = AutoSparseGP(model, ExactWeightSpace())
    bound = elbo(model, exact, x, y)
    free, best = maximise(model, WeightSpace(), x, y)
    assert bound - 1e-4 < best <= bound + 1e-8
    plain = prepared(deep(network, False), ExactWeightSpace(), x, y)
    one, other = free.posterior(x)["f"], plain.posterior(x)["f"]
    # Eq. 10: q(w) is the uncorrected one's, and the variance has c(x) on top.
    torch.testing.assert_close(one.mean, other.mean, atol=1e-3, rtol=0)
    torch.testing.assert_close(one.variance, other.variance + correction(network, x), atol=1e-3, rtol=0)


def _table(x, y, start):
    def model(x, y=None):
        table = pyro.param("table", start)
        kernel = DeepBasis(lambda x: table[x[:, 0].long()], variance_correction=False)
        return observed(dist.Normal(pyro.sample("f", GaussianProcess(kernel, x)), 0.1), y)

    return model


def test_features_collapse_to_rank_one_without_correction():
    """Theorem 1, with features that are free at each row: the optimum is φ ∝ y, ‖Φ‖² = ‖y‖² − σ²."""
    x = torch.arange(30.0)[:, None]
    y = torch.sin(x[:, 0] / 4) + 0.5 + 0.1 * torch.randn(30)
    maximise(_table(x, y, torch.randn(30, 6)), ExactWeightSpace(), x, y, iterations=600)
    u, s, _ = torch.linalg.svd(pyro.param("table").detach())
    assert s[0] ** 2 / s.square().sum() > 1 - 1e-9
    assert abs(u[:, 0] @ y) / y.norm() > 1 - 1e-9
    torch.testing.assert_close(s[0] ** 2, y.square().sum() - 0.01, rtol=1e-4, atol=0)


def test_q_follows_features_that_turn():
    """φ ← Uφ for an orthogonal U is the same process: what was learned of f stays."""
    network, (x, y) = mlp().eval(), data(num=40)
    model = deep(network)
    guide = trained(model, WeightSpace(), x, y, steps=2, lr=1e-12)
    before, bound = guide.posterior(x)["f"], elbo(model, guide, x, y)
    turn = torch.linalg.qr(torch.randn(5, 5)).Q
    with torch.no_grad():
        for parameter in (network[2].weight, network[2].bias):
            parameter.copy_(turn @ parameter)
    after = guide.posterior(x)["f"]
    torch.testing.assert_close(after.mean, before.mean, atol=0.02, rtol=0)
    torch.testing.assert_close(after.variance, before.variance, atol=1e-3, rtol=0)
    assert abs(elbo(model, guide, x, y) - bound) < 0.1


class EvenRows(nn.Module):
    """The network of the class docstring: outputs of one learned norm."""

    def __init__(self, network):
        super().__init__()
        self.network, self.log_norm = network, nn.Parameter(torch.zeros(()))

    def forward(self, x):
        return self.log_norm.exp() * nn.functional.normalize(self.network(x), dim=-1)


def test_natural_steps_keep_up_with_a_network():
    """The bound is near that of the optimal q all the way, by all rows or by batches."""
    losses = []
    for family, size in ((ExactWeightSpace(), 120), (WeightSpace(), 120), (WeightSpace(), 40)):
        pyro.clear_param_store()
        torch.manual_seed(4)
        x = 2 * torch.rand(120, 1) - 1
        y = torch.sign(torch.sin(8 * x[:, 0])) + NOISE * torch.randn(120)
        model = deep(EvenRows(mlp(1, outputs=8, seed=4)))
        guide = prepared(model, family, x, y)
        svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), TraceQuadrature_ELBO(2))
        found = []
        for step in range(40):
            rows = torch.arange(120).roll(size * step)[:size]
            svi.step(x[rows], y[rows], size=120)
            if step >= 30:
                found.append(-elbo(model, guide, x, y))
        losses.append(sorted(found)[5])  # a network's training jumps
    exact, whole, batches = losses
    assert whole < exact + 20
    assert batches < exact + 60


class Watched(nn.Module):
    """Remembers the largest number of rows it was given."""

    def __init__(self, network):
        super().__init__()
        self.network, self.rows = network, 0

    def forward(self, x):
        self.rows = max(self.rows, len(x))
        return self.network(x)


STREAMED = {
    "normal": (lambda f: dist.Normal(f, NOISE), lambda k: k),
    "poisson": (lambda f: dist.Poisson(f.exp()), lambda k: k),
    "sum": (lambda f: dist.Normal(f, NOISE), lambda k: 0.5 * k + kernels.Linear(0.3) + 2.0 * k),
    "outputs": (lambda f: dist.Normal(f.mT, NOISE).to_event(1), lambda k: torch.tensor([1.0, 0.5]) * k),
}


@pytest.mark.quick("True-poisson | False-outputs | True-sum-exact")
@pytest.mark.parametrize("family", [ExactWeightSpace(), WeightSpace(start="prior")], ids=["exact", "free"])
@pytest.mark.parametrize("case", STREAMED)
@pytest.mark.parametrize("correcting", [False, True])
def test_blocks_change_nothing(case, correcting, family, monkeypatch):
    likelihood, wrap = STREAMED[case]
    x, y = data(num=45)
    y = y.abs().round() if case == "poisson" else y
    order = squares(mlp(), x).argsort()  # the largest row is in the last block, not the first
    x, y = x[order], y[order]
    y = torch.stack([y, torch.cos(5 * x[:, 1])], -1) if case == "outputs" else y
    results = []
    monkeypatch.setattr(features, "_ROWS", 8)  # which are passed whole
    monkeypatch.setattr(features, "_EACH", 0)
    for whole in (1000, 16):
        monkeypatch.setattr(blocks, "_KEPT", whole * blocks._ROW)
        monkeypatch.setattr(blocks, "_PIECE", 8 * blocks._ROW)
        pyro.clear_param_store()
        network = Watched(mlp())
        model = deep(network, correcting, likelihood, wrap, case == "outputs")
        guide = AutoSparseGP(model, family)
        loss = TraceQuadrature_ELBO(20)
        losses = [loss.loss_and_grads(model, guide, x, y) for _ in range(2)]
        gradients = [p.grad.clone() for p in (*network.parameters(), *guide.parameters()) if p.grad is not None]
        q = guide.posterior(2 * x)["f"]
        results.append((torch.tensor(losses), *gradients, q.mean.detach(), q.variance.detach()))
        assert network.rows == (45 if whole == 1000 else 8)
    for one, other in zip(*results):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8)


def batches(model, guide, x, y, steps=30, size=16):
    svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.02}), TraceQuadrature_ELBO(10))
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        rows = torch.randint(0, len(x), (size,), generator=generator)
        svi.step(x[rows], y[rows], size=len(x))


def corrected(network, q, x, new):
    """Eq. 10 with c relative to x."""
    phi = network(new)
    s = q.coefficients.covariance_matrix
    own = (squares(network, x).max() - squares(network, new)).clamp(min=0)
    return (phi @ s * phi).sum(-1) + own


def test_mini_batches_and_the_level_of_all_rows():
    network, (x, y) = mlp(), data(num=80)
    model = deep(network)
    guide = prepared(model, WeightSpace(), x, y)
    first = elbo(model, guide, x, y)
    batches(model, guide, x, y)
    assert elbo(model, guide, x, y) > first + 100
    new = torch.rand(6, 2)
    q = guide.posterior(new)["f"]
    torch.testing.assert_close(q.variance, corrected(network, q, x, new))
    torch.testing.assert_close(q.covariance_matrix.diagonal(), q.variance)
    # One input by itself has its correction too, whatever way it is asked for.
    one = squares(network, x).argmin().item()
    expected = corrected(network, q, x, x[[one]]).item()
    phi = network(x[[one]])
    assert expected > 1.2 * (phi @ q.coefficients.covariance_matrix * phi).sum()
    torch.testing.assert_close(guide.posterior(x[[one]])["f"].variance.item(), expected)
    for draw in (
        lambda: torch.stack([guide(x[[one]])["f"] for _ in range(60)]),
        lambda: Predictive(model, guide=guide, num_samples=60)(x[[one]])["f"],
        lambda: torch.stack([guide.draw(x[[one]])["f"] for _ in range(60)]),
    ):
        with torch.no_grad():
            assert math.isclose(draw().var().item(), expected, rel_tol=0.55)  # three standard errors
    # A step's own level is that of the batch.
    q, phi = guide.posterior(x[:10])["f"], network(x[:10])
    m, s = q.coefficients.loc[0], q.coefficients.covariance_matrix
    variance = (phi @ s * phi).sum(-1) + correction(network, x[:10])
    fit = (dist.Normal(phi @ m, NOISE).log_prob(y[:10]) - variance / (2 * NOISE**2)).sum()
    assert elbo(model, guide, x[:10], y[:10], size=80) == pytest.approx((8 * fit - q.kl).item(), rel=1e-9)


def test_the_level_is_that_of_training_beside_an_intercept():
    network, (x, y), new = mlp(), data(num=40), torch.rand(6, 2)
    model = deep(network, likelihood=lambda f: dist.Normal(f + pyro.sample("mu", dist.Normal(0.0, 1.0)), NOISE))
    q = prepared(model, WeightSpace(), x, y).posterior(new)["f"]
    torch.testing.assert_close(q.variance, corrected(network, q, x, new))


def test_rows_of_a_subsampling_plate_are_all_known():
    network, (x, y) = mlp(), data(num=80)

    def model(x, y=None):
        pyro.module("network", network)
        plate = pyro.plate("data", len(x), subsample_size=8)
        f = pyro.sample("f", GaussianProcess(DeepBasis(network), x[plate.indices]))
        with plate:
            return pyro.sample("y", dist.Normal(f, NOISE), obs=None if y is None else y[plate.indices])

    guide = trained(model, WeightSpace(), x, y, steps=20)
    new = torch.rand(6, 2)
    q = guide.posterior(new)["f"]
    torch.testing.assert_close(q.variance, corrected(network, q, x, new))


def test_unseen_rows_are_told_of_and_one_call_mends_it():
    network, (x, y) = mlp(), data(num=80)
    model = deep(network)
    guide = AutoSparseGP(model, WeightSpace())
    batches(model, guide, x, y, steps=3)
    with pytest.warns(UserWarning, match="seen 16 of these 80"):
        guide.posterior(x)
    loaded = restored(guide, model, WeightSpace())
    with pytest.warns(UserWarning, match="seen 16 of these 80") as told:
        loaded.posterior(x)
    assert told[0].filename == __file__
    guide(x, y)
    again = restored(guide, model, WeightSpace())
    for q in (guide.posterior(x[:3])["f"], again.posterior(x[:3])["f"]):
        torch.testing.assert_close(q.variance, corrected(network, q, x, x[:3]))
    guide(torch.rand(200, 2))  # no data: nothing to learn of
    with torch.no_grad():
        guide(torch.rand(200, 2), torch.rand(200))  # looking changes nothing
    assert guide.gps.f.rows.shape == (80, 2)


@pytest.mark.parametrize("family", [ExactWeightSpace(), WeightSpace()], ids=["exact", "free"])
def test_predictions_visit_the_training_rows_once(family, monkeypatch):
    network, (x, y) = mlp(), data(num=30)
    model = deep(network)
    guide = trained(model, family, x, y, steps=3, independent=True)
    visits = []
    plain = DeepBasis.relative_to
    monkeypatch.setattr(DeepBasis, "relative_to", lambda k, rows: visits.append(1) or plain(k, rows))
    new = torch.rand(3, 2)
    with torch.no_grad():
        before = guide.posterior(new)["f"]
        again = before.at(new + 0.1)
        assert (before.mean - again.mean).abs().max() > 1e-6
        assert len(visits) == 1
        predict(model, guide, new, num_samples=5)
    assert len(visits) <= 3  # the draws' mapped run among them
    torch.testing.assert_close(again.variance, guide.posterior(new + 0.1)["f"].variance)
    for change in ("weights", "rows", "training"):
        with torch.no_grad():
            before = guide.posterior(new)["f"]
            if change == "weights":
                network[2].weight.mul_(1.1)
            elif change == "rows" and isinstance(family, WeightSpace):
                guide.gps.f.rows = 4.0 * guide.gps.f.rows
            elif change == "rows":
                continue  # they are the training data's
        if change == "training":
            train(model, guide, x, y, steps=1)
        with torch.no_grad():
            assert (guide.posterior(new)["f"].variance - before.variance).abs().max() > 1e-8


@pytest.mark.parametrize("family", [WeightSpace(), MeanFieldAdditive(5)], ids=["weight space", "additive"])
def test_an_outer_layer_that_ignores_the_inner_ones_values(family):
    """Its inputs hold them nonetheless, at quadrature nodes, under vmap."""
    x, y = data()
    network = mlp()

    def model(x, y=None):
        pyro.module("network", network)
        g = pyro.sample("g", GaussianProcess(kernels.RBF(0.3), x))
        f = pyro.sample("f", GaussianProcess(DeepBasis(network)[0, 1], torch.cat([x, g[:, None]], -1)))
        return observed(dist.Normal(f, NOISE), y)

    guide = AutoSparseGP(model, {"g": SVGP(6, start="prior"), "f": family})
    loss = TraceQuadrature_ELBO(2).loss(model, guide, x, y)
    one = AutoSparseGP(deep(network), family)
    assert loss == pytest.approx(TraceQuadrature_ELBO(2).loss(one.model, one, x, y), rel=1e-9)
    train(model, guide, x, y, steps=2)
    q = guide.posterior(x[:4])["f"]
    other = AutoSparseGP(model, {"g": SVGP(6, start="prior"), "f": family})
    other.load_state_dict(pickle.loads(pickle.dumps(guide.state_dict())))
    torch.testing.assert_close(other.posterior(x[:4])["f"].variance, q.variance)


# One contract for kernels with features.

KERNELS = {
    "deep": lambda net: DeepBasis(net),
    "uncorrected": lambda net: DeepBasis(net, variance_correction=False),
    "deep + linear": lambda net: 0.5 * DeepBasis(net) + kernels.Linear(1.0),
    "deep * polynomial": lambda net: DeepBasis(net) * kernels.Polynomial(2),
    "fourier": lambda net: kernels.RandomFourier(torch.linspace(-2, 2, 12).reshape(6, 2), 0.3),
    "linear": lambda net: kernels.Linear(1.0) + kernels.Constant(1.0),
    "polynomial": lambda net: kernels.Polynomial(3),
}


@pytest.mark.quick(
    "dtype0-fourier-free | dtype1-linear-exact | dtype1-deep + linear-exact | dtype1-deep * polynomial-free"
)
@pytest.mark.parametrize("family", [WeightSpace(), ExactWeightSpace()], ids=["free", "exact"])
@pytest.mark.parametrize("kernel", KERNELS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_contract(family, kernel, dtype, device):
    torch.set_default_dtype(torch.float32 if dtype == torch.float64 else torch.float64)
    x, y = data(dtype=dtype, device=device)
    network = mlp(dtype=dtype).to(device)

    def model(x, y=None, size=None):
        pyro.module("network", network)
        noise = pyro.sample("noise", dist.HalfNormal(1.0))
        f = pyro.sample("f", GaussianProcess(KERNELS[kernel](network), x))
        return observed(dist.Normal(f, noise), y, x, size)

    guide = AutoSparseGP(model, family, independent=True)
    before = [p.detach().clone() for p in network.parameters()]
    losses = train(model, guide, x, y, steps=16)
    assert torch.tensor(losses).isfinite().all()
    assert sum(losses[-8:]) < sum(losses[:8])
    moved = [not torch.equal(p, old) for p, old in zip(network.parameters(), before)]
    assert all(moved) if "deep" in kernel or kernel == "uncorrected" else not any(moved)
    new = data(num=7, dtype=dtype, device=device, seed=2)[0]
    q = guide.posterior(new)["f"]
    assert q.mean.shape == q.variance.shape == (7,)
    assert (q.mean.dtype, q.mean.device) == (dtype, new.device)
    assert q.kl > 0
    assert (q.variance > 0).all()
    torch.testing.assert_close(q.covariance_matrix.diagonal(), q.variance, rtol=1e-3, atol=1e-4)
    assert q.paths(3)(new).shape == (3, 7)
    assert guide(new)["y"].shape == (7,)
    assert torch.equal(restored(guide, model, family).posterior(new)["f"].variance, q.variance)


@pytest.mark.parametrize("family", [WeightSpace(), ExactWeightSpace()], ids=["free", "exact"])
def test_components_of_a_sum(family):
    network, (x, y) = mlp(), data(num=30)
    model = deep(network, wrap=lambda k: kernels.Constant(1.0) + 0.5 * k + kernels.White(0.1) + kernels.Linear(2.0))
    guide = trained(model, family, x, y, steps=20)
    new = torch.rand(6, 2)
    q = guide.posterior(new)["f"]
    assert len(q.components) == 4
    torch.testing.assert_close(sum(part.mean for part in q.components), q.mean)
    m, s = q.coefficients.loc[0], q.coefficients.covariance_matrix
    phi = 0.5**0.5 * network(new)
    deep_one = q.components[1]
    level = 0.5 * (squares(network, x).max() - squares(network, new)).clamp(min=0)
    torch.testing.assert_close(deep_one.mean, phi @ m[1:6])
    torch.testing.assert_close(deep_one.variance, (phi @ s[1:6, 1:6] * phi).sum(-1) + level)
    torch.testing.assert_close(q.components[2].variance, torch.full((6,), 0.1))
    torch.testing.assert_close(q.components[2].mean, torch.zeros(6))
    torch.testing.assert_close(q.components[3].variance, (2 * new @ s[6:, 6:] * new).sum(-1))


@pytest.mark.parametrize("family", [SVGP(6), SGPR(6), OrthogonalInducing(3, 3), SparseEP(6)])
def test_inducing_points_refuse_the_correction(family):
    """That of K_ZZ would be another in training than in prediction."""
    network, (x, y) = mlp(outputs=12), data(num=40)
    refused(r"kernel of site 'f' has a variance correction.*Take WeightSpace", prepared, deep(network), family, x, y)


def test_forgotten_network_raises():
    network, (x, y) = mlp(), data(num=20)
    model = gaussian(DeepBasis(network), NOISE)
    for family in (WeightSpace(), ExactWeightSpace()):
        refused(r"would not train: .*0.weight.*pyro.module", train, model, AutoSparseGP(model, family), x, y, steps=1)
    blocked = AutoSparseGP(model, ExactWeightSpace())
    refused("would not train", lambda: with_blocks(lambda: train(model, blocked, x, y, steps=1)))


@pytest.mark.parametrize("family", [WeightSpace(), ExactWeightSpace()], ids=["free", "exact"])
def test_another_network_of_that_name_in_the_parameter_store_is_told_of(family):
    """As when a notebook's cell that makes a network is run twice."""
    (x, y), new = data(num=20), torch.rand(3, 2)
    model = deep(mlp())
    train(model, AutoSparseGP(model, family), x, y, steps=1)
    for outputs in (5, 3):
        model = deep(mlp(outputs=outputs, seed=1))
        with pytest.raises(ValueError, match=r"would not train: .*Sequential.0.weight.*another.*clear_param_store"):
            train(model, AutoSparseGP(model, family), x, y, steps=1)

    def updated(x, y=None):
        pyro.module("network", network, update_module_params=True)
        return deep(lambda x: network(x))(x, y)

    network = mlp(seed=1)
    train(updated, AutoSparseGP(updated, family), x, y, steps=1)
    pyro.clear_param_store()
    guide = trained(model, family, x, y, steps=1)
    assert guide.posterior(new)["f"].mean.isfinite().all()


@pytest.mark.parametrize("family", [WeightSpace(), ExactWeightSpace()], ids=["free", "exact"])
@pytest.mark.parametrize("way", ["posterior", "predict", "call"])
def test_a_loaded_guide_checks_its_network_at_the_first_prediction(family, way):
    network, (x, y), new = mlp(), data(num=20), torch.rand(3, 2)
    model = deep(network)
    guide = trained(model, family, x, y, steps=1)
    expected = guide.posterior(new)["f"].mean.detach()
    fresh = mlp(seed=1)  # not the one that the parameter store holds

    def ask(model, state):
        other = AutoSparseGP(model, family)
        other.load_state_dict(state)
        pyro.set_rng_seed(3)
        with torch.no_grad():
            if way == "posterior":
                return other.posterior(new)["f"].mean
            return predict(model, other, new, num_samples=2)["f"] if way == "predict" else other(new)["f"]

    for other in (deep(fresh), lambda x, y=None: deep(lambda x: fresh(x))(x, y)):
        refused(r"would not train: .*Sequential.0.weight.*pyro.module", ask, other, guide.state_dict())
    found = ask(deep(network), guide.state_dict())
    if way == "posterior":
        torch.testing.assert_close(found, expected)


def with_blocks(call):
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(blocks, "_KEPT", 4 * blocks._ROW)
        patch.setattr(blocks, "_PIECE", 4 * blocks._ROW)
        return call()


@pytest.mark.parametrize(
    ("network", "message"),
    [
        (lambda x: x.sum(), r"features of shape \(20, 'r'\).*returned shape \(\)"),
        (lambda x: x.sum(-1), r"returned shape \(20,\)"),
        (lambda x: x[:5], r"returned shape \(5, 2\)"),
        (lambda x: x[:, :0], r"returned shape \(20, 0\)"),
        (lambda x: [x], "returned list"),
        (torch.rand(3, 2), "network must be a module or a callable"),
        (nn.Linear, "network must be a module or a callable"),
    ],
)
def test_networks_of_other_shapes_raise(network, message):
    refused(message, lambda: DeepBasis(network)(torch.rand(20, 2)))


def test_networks_that_differ_from_call_to_call_raise():
    for layer in (nn.Dropout(0.5), nn.BatchNorm1d(16)):
        network = nn.Sequential(nn.Linear(2, 16), layer, nn.Linear(16, 3))
        refused(rf"{type(layer).__name__} in training mode at '1'.*network.eval\(\)", DeepBasis, network)
        DeepBasis(network.eval())

    class Bayesian(PyroModule):
        def __init__(self):
            super().__init__()
            self.weight = PyroSample(dist.Normal(torch.zeros(2, 3), 1.0).to_event(2))

        def forward(self, x):
            return x @ self.weight

    refused(r"draws \['weight'\] anew at each call.*pyro.sample", lambda: DeepBasis(Bayesian()))


def test_projections_refuse_the_correction():
    x, y = data(num=20)
    with pytest.raises(ValueError, match="site 'f' has a diagonal term, such as White or a DeepBasis' correction"):
        AutoSparseGP(deep(mlp()), ComputationAware(5))(x, y)
    pyro.clear_param_store()
    AutoSparseGP(deep(mlp(), False), ComputationAware(5))(x, y)


@pytest.mark.parametrize("family", [WeightSpace(), ExactWeightSpace()], ids=["free", "exact"])
def test_one_row(family):
    x, y = data(num=1)
    model = deep(mlp())
    guide = AutoSparseGP(model, family)
    assert torch.tensor(train(model, guide, x, y, steps=3)).isfinite().all()
    assert (guide.posterior(torch.rand(3, 2))["f"].variance > 0).all()
