"""Computation-aware GPs in mini-batches of rows, with actions on some rows: dense bounds, and never overconfident."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, fit, kernels
from pyro_sparsegp.families import ComputationAware

from .models import data, gaussian, observed, prepared, refused, restored, train

SUPPORT, ROWS = 40, 120


def batched(actions="sparse", num=10, likelihood=None):
    """A guide whose actions act on 40 of 120 rows, after a few steps on mini-batches of the others, too."""

    def model(x, y=None, size=None):
        length = pyro.param("length", torch.tensor(0.4), constraint=dist.constraints.positive)
        noise = pyro.param("noise", torch.tensor(0.25), constraint=dist.constraints.positive)
        f = pyro.sample("f", GaussianProcess(kernels.Matern32(length), x, mean=0.2))
        return observed(likelihood(f) if likelihood else dist.Normal(f, noise), y, x, size)

    x, y = data(num=ROWS)
    if likelihood:
        y = (y > 0.5).double()
    guide = prepared(model, ComputationAware(num, actions, batches=True), x[:SUPPORT], y[:SUPPORT])
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.05}), TraceQuadrature_ELBO(2 if likelihood is None else 20))
    for i in range(8):
        rows = torch.arange(i, ROWS, 4)
        svi.step(x[rows], y[rows], size=ROWS)
    return model, guide, svi, x, y


@pytest.mark.parametrize("actions", ["sparse", "cg", "random"])
def test_actions_on_some_rows_are_never_overconfident(actions):
    """The variance is at least the exact posterior's given all 120 rows, which 40 actions on 40 rows do not reach."""
    for num in (10, SUPPORT):
        pyro.clear_param_store()
        _, guide, _, x, y = batched(actions, num)
        kernel, noise = kernels.Matern32(pyro.param("length").detach()), pyro.param("noise").detach()
        new = torch.rand(50, 2)
        gram = kernel(x) + noise**2 * torch.eye(ROWS)
        exact = kernel.diag(new) - (kernel(new, x) * torch.linalg.solve(gram, kernel(x, new)).mT).sum(-1)
        q = guide.posterior(new)["f"]
        assert (q.variance >= exact - 1e-9).all()
        assert (q.variance > exact + 1e-4).any()
        if num == SUPPORT and actions != "cg":  # all that these rows say
            some = x[:SUPPORT]
            gram = kernel(some) + noise**2 * torch.eye(SUPPORT)
            mean = 0.2 + kernel(new, some) @ torch.linalg.solve(gram, y[:SUPPORT] - 0.2)
            torch.testing.assert_close(q.mean, mean, atol=1e-6, rtol=0)


def dense_bound(x, y, length, noise, values, order, num):
    """Σ over all rows of E log N(y; f, σ²) − KL[q ‖ p], by matrices of all rows."""
    some, size = x[:SUPPORT], SUPPORT // num
    s = torch.zeros(SUPPORT, num)
    s = s.index_put((order, torch.arange(num).repeat_interleave(size)), values / noise**2)
    kernel = kernels.Matern32(length)
    noisy = s.mT @ (kernel(some) + noise**2 * torch.eye(SUPPORT)) @ s
    cross = kernel(x, some) @ s
    weights = torch.linalg.solve(noisy, s.mT @ (y[:SUPPORT] - 0.2))
    mean = 0.2 + cross @ weights
    variance = 1 - (cross * torch.linalg.solve(noisy, cross.mT).mT).sum(-1)
    fit = dist.Normal(mean, noise).log_prob(y).sum() - 0.5 * variance.sum() / noise**2
    kss, d = s.mT @ kernel(some) @ s, noise**2 * s.mT @ s
    kl = 0.5 * (torch.linalg.solve(noisy, d).trace() - num + weights @ kss @ weights + noisy.logdet() - d.logdet())
    return fit - kl


def test_batches_have_the_bound_of_all_rows_and_its_gradient():
    """Four batches that are a partition: their mean is the dense bound, and so are gradients by kernel and actions."""
    model, guide, _, x, y = batched()
    elbo = TraceQuadrature_ELBO(2)
    policy = guide.gps.f.policy
    values, length, noise = (p.detach().clone() for p in (policy.values, pyro.param("length"), pyro.param("noise")))
    for p in (values, length, noise):
        p.requires_grad_()
    bound = dense_bound(x, y, length, noise, values, policy.order, 10)
    by_length, by_noise, by_values = torch.autograd.grad(bound, (length, noise, values))
    own = [pyro.param(name).unconstrained() for name in ("length", "noise")]
    for p in (*own, policy.values):
        p.grad = None
    losses = []
    for i in range(4):
        rows = torch.arange(i, ROWS, 4)
        losses.append(elbo.loss_and_grads(model, guide, x[rows], y[rows], size=ROWS))
    assert abs(sum(losses) / 4 + bound.item()) < 1e-7
    for p, expected in zip(own, (by_length * length, by_noise * noise)):  # of the logarithms
        torch.testing.assert_close(-p.grad / 4, expected.detach(), atol=1e-6, rtol=1e-6)
    torch.testing.assert_close(-policy.values.grad / 4, by_values, atol=1e-6, rtol=1e-6)
    noisy = kernels.Matern32(length.detach())(x) + noise.detach() ** 2 * torch.eye(ROWS)
    assert bound < dist.MultivariateNormal(torch.full((ROWS,), 0.2), noisy).log_prob(y)


def test_batches_of_classes_settle_the_sites_of_the_first_rows():
    """Sites belong to the first call's rows under today's posterior, whatever batches came between."""
    model, guide, svi, x, y = batched(likelihood=lambda f: dist.Bernoulli(logits=3 * f))
    for i in range(20):
        rows = torch.arange(i % 4, ROWS, 4)
        svi.step(x[rows], y[rows], size=ROWS)
    assert guide.gps.f.sites.inputs.shape == (SUPPORT, 2)
    found = guide.site_status["f"]
    assert found["sites"] == SUPPORT
    assert found["converged"]
    train(model, guide, x[:30], y[:30], size=ROWS, steps=20, lr=0.0, loss=TraceQuadrature_ELBO(20))
    kept = guide.gps.f.sites.precision.clone()
    assert torch.allclose(kept, guide.kind.given_now(guide, median=True).readings["f"].sites.precision, 1e-3, 1e-3)
    with torch.no_grad():
        accuracy = ((guide.posterior(x)["f"].mean > 0) == (y > 0.5)).double().mean()
    assert accuracy > 0.8


def test_what_is_said_where_the_first_call_is_a_batch():
    x, y = data()
    model = gaussian(kernels.Matern32(0.5))
    guide = AutoSparseGP(model, ComputationAware(8, batches=True))
    refused(r"site 'y' observes 20 of the 60 .*on the rows of its actions", guide, x[:20], y[:20], size=60)
    other = prepared(model, ComputationAware(8), x[:20], y[:20])
    refused("trains on all data at once; site 'y' observes 20 of the 60 rows", other, x[20:40], y[20:40], size=60)


def test_fit_takes_batches_once_the_guide_knows_its_rows():
    model, _, _, x, y = batched()
    guide = AutoSparseGP(model, ComputationAware(10, batches=True))
    with pytest.raises(ValueError, match=r"batch_size.*batches=True\), first called on its rows"):
        fit(model, guide, (x, y), batch_size=30, steps=3, progress=False)
    guide(x[:SUPPORT], y[:SUPPORT])
    result = fit(model, guide, (x, y), batch_size=30, steps=3, progress=False)
    assert len(result.losses) == 3


def test_a_loaded_guide_takes_batches_on():
    model, guide, _, x, y = batched()
    other = restored(guide, model, ComputationAware(10, batches=True))
    elbo = TraceQuadrature_ELBO(2)
    assert elbo.loss(model, other, x, y) == elbo.loss(model, guide, x, y)
    SVI(model, other, pyro.optim.Adam({"lr": 0.05}), elbo).step(x[:30], y[:30], size=ROWS)


@pytest.mark.parametrize("likelihood", [None, lambda f: dist.Bernoulli(logits=3 * f)], ids=["normal", "classes"])
def test_a_batch_of_exactly_the_first_rows_is_a_batch(likelihood):
    """What q is conditioned on stays as it is; the loss is that of so many rows, scaled up."""
    model, guide, svi, x, y = batched(likelihood=likelihood)
    rows = torch.arange(SUPPORT)
    num = 2 if likelihood is None else 20
    bound = TraceQuadrature_ELBO(num).loss(model, guide, x[rows], y[rows], size=ROWS)
    kl = guide.posterior(x)["f"].kl
    # As two batches of halves, which are other rows.
    halves = [TraceQuadrature_ELBO(num).loss(model, guide, x[half], y[half], size=ROWS) for half in rows.chunk(2)]
    limit = 1e-6 if likelihood is None else 0.05  # what settles again, or is on its way
    assert abs(bound - sum(halves) / 2) < limit
    assert abs(bound - kl) > 10
    actions = guide.gps.f.policy.order.clone()
    loss = svi.step(x[rows], y[rows], size=ROWS)
    assert abs(loss - bound) < 20 * limit
    svi.step(x[rows][:30], y[rows][:30], size=ROWS)  # and go on
    assert torch.equal(guide.gps.f.policy.order, actions)
    assert torch.equal(guide.gps.f.sites.inputs, x[:SUPPORT])
    assert guide.core.data.kwargs == {}
