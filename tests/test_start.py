"""Where free posteriors start: near what data at the first call's inputs would leave of the prior, or at the prior."""

from dataclasses import replace

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import (
    SGPR,
    SVGP,
    CoupledCovariance,
    CoupledPrecision,
    MeanFieldAdditive,
    OrthogonalInducing,
    OrthogonallyDecoupled,
    WeightSpace,
)

from .models import gaussian, observed, prepared, restored, train

SMOOTH = 3.0 * kernels.RBF(0.4)[0] + 2.0 * kernels.Matern52(0.5)[1]
Z = torch.linspace(0, 1, 5, dtype=torch.float64)[:, None]
# Each with the sizes of the groups of coefficients that it has a covariance of, None where the prior's stays.
CASES = {
    "SVGP": (lambda **k: SVGP(7, **k), [(7, True)]),
    "nested": (lambda **k: OrthogonalInducing(5, [4, 3], **k), [(5, True), (4, True), (3, True)]),
    "decoupled": (lambda **k: OrthogonallyDecoupled(5, 4, **k), [(5, True), (4, False)]),
    "mean field": (lambda **k: MeanFieldAdditive([Z, Z], **k), [(5, True), (5, True)]),
    "coupled": (lambda **k: CoupledCovariance([Z, Z], **k), [(10, True)]),
    "weights": (lambda **k: WeightSpace(**k), [(6, True)]),
}


def built(case, outputs, informed, num=80):
    kernel = kernels.Polynomial(2, 0.7) if case == "weights" else SMOOTH
    process = GaussianProcess(kernel, torch.rand(num, 2)).expand(outputs)
    with torch.no_grad():
        module = CASES[case][0]().build(process, "f")
        if informed:
            module.inform(process, "f")
        posterior = module(process, "f")
        return posterior.coefficients, torch.cat(list(posterior.features), -1), process.variance.mean()


@pytest.mark.parametrize("outputs", [(), (3,)])
@pytest.mark.parametrize("case", CASES)
def test_covariance_is_what_noise_as_large_as_the_process_would_leave(case, outputs):
    q, phi, variance = built(case, outputs, True)
    covariance, stop = q.covariance_matrix, 0
    assert covariance.shape == (*outputs, phi.shape[-1], phi.shape[-1])
    expected = torch.zeros_like(covariance)
    for size, free in CASES[case][1]:
        own = slice(stop, stop + size)
        gram = phi[..., own].mT @ phi[..., own] / variance
        expected[..., own, own] = torch.linalg.inv(torch.eye(size) + gram) if free else torch.eye(size)
        stop += size
    torch.testing.assert_close(covariance, expected, rtol=1e-6, atol=1e-8)
    assert all((part == 0).all() for part in q.loc)


def test_some_of_many_rows_stand_for_all():
    q, phi, variance = built("SVGP", (), True, num=20_001)
    precision = torch.eye(7) + phi.mT @ phi / variance
    size = torch.linalg.eigvalsh(precision @ q.covariance_matrix)
    assert ((size > 0.85) & (size < 1.15)).all()  # 4,001 rows show 7 eigenvalues to sqrt(7 / 4001), 4 % or so


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_inputs_that_tell_nothing_or_nearly_everything(dtype):
    nothing = GaussianProcess(kernels.Linear(1.0), torch.zeros(10, 1, dtype=dtype))
    module = WeightSpace().build(nothing, "f")
    module.inform(nothing, "f")
    assert module(nothing, "f").kl == 0
    x = torch.rand(4000, 1, dtype=dtype)
    everything = GaussianProcess(kernels.RBF(100.0) + kernels.Constant(1e4), x)
    for family in (SVGP(4), OrthogonalInducing(2, 2), CoupledPrecision([x[:3], None], rank=2)):
        module = family.build(everything, "f")
        module.inform(everything, "f")
        assert module(everything, "f").kl.isfinite()


def test_a_million_rows_in_float32():
    x = torch.rand(1_000_000, 2, dtype=torch.float32)
    process = GaussianProcess(kernels.RBF(1.0)[0] + kernels.RBF(1.0)[1] + kernels.Constant(1.0), x)
    z = torch.rand(40, 2, dtype=torch.float32)
    for family in (SVGP(z), CoupledPrecision([z[:10, :1], z[:10, 1:], None], rank=8)):
        module = family.build(process, "f")
        module.inform(process, "f")
        with torch.no_grad():
            q = module(GaussianProcess(process.kernel, x[:1000]), "f")
            assert 20 < q.kl < 30
            assert 0 < q.variance.max() < 1e-2
        assert all(p.dtype == torch.float32 for p in module.parameters())


def test_it_saves_steps():
    x = torch.rand(400, 1)
    y = (9 * x[:, 0]).sin() + 0.05 * torch.randn(400)
    model = gaussian(kernels.RBF(0.2), noise=0.05)

    def bound(start):
        guide, elbo = AutoSparseGP(model, SVGP(15, start=start, natural=False)), TraceQuadrature_ELBO(2)
        svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.02}), elbo)
        for _ in range(30):
            svi.step(x, y)
        return -elbo.loss(model, guide, x, y)

    assert bound("data") > bound("prior") + 1000  # nats


def test_inner_layers_start_at_the_prior():
    def model(x, y=None):
        h = pyro.sample("h", GaussianProcess(kernels.RBF(0.5), x, mean=lambda x: x[:, 0]))
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5), h[:, None]))
        observed(dist.Normal(f, 0.1), y)

    x, y = torch.rand(30, 1), torch.randn(30)
    guide = AutoSparseGP(model, SVGP(6))
    guide(x, y)
    start = guide.posterior(x)
    assert abs(start["h"].kl.item()) < 1e-6 < 1 < start["f"].kl.item()


@pytest.mark.parametrize("family", [SVGP, MeanFieldAdditive])
def test_given_inputs_in_the_order_of_a_line(family):
    """Small pivots of L stand first there. Losses went to thousands where sites were about (L + ηsI)w."""
    torch.manual_seed(1)
    x, z = torch.rand(200, 1), torch.linspace(0, 1, 25)[:, None]
    y = torch.sin(8 * x[:, 0]) + 0.1 * torch.randn(200)
    model = gaussian(kernels.RBF(0.3), 0.1)
    guide = AutoSparseGP(model, family(z))
    assert train(model, guide, x, y, steps=25, loss=TraceQuadrature_ELBO(2))[-1] < -130  # the optimum is -144.5
    held = prepared(model, family(z, trainable=False), x, y)
    inputs = held.gps.f.basis.inputs[0] if family is SVGP else held.gps.f.basis.term_0.inputs[0]
    assert torch.equal(inputs.sort(0).values, z)
    parameters = prepared(model, family(z, natural=False), x, y)
    inputs = parameters.gps.f.basis.inputs[0] if family is SVGP else parameters.gps.f.basis.term_0.inputs[0]
    assert torch.equal(inputs, z)


@pytest.mark.parametrize("family", [SVGP(8), SVGP(8, natural=False), MeanFieldAdditive(8), SGPR(8)])
def test_inputs_of_a_small_range(family):
    """Adam moves inducing inputs by its rate a step: on [0, 1/128] they left the data, 10⁴ nats above the optimum."""
    torch.manual_seed(0)
    x = torch.rand(60, 2)
    y = torch.sin(6 * x[:, 0]) + 0.1 * torch.randn(60)
    losses, units = [], torch.tensor([2.0**-7, 1.0])
    for unit in (torch.ones(2), units):  # powers of two, so that all numbers but x's own are the same
        torch.manual_seed(1)
        model = gaussian(kernels.RBF(0.3 * unit[0])[0] + kernels.RBF(0.3 * unit[1])[1], 0.1)
        guide = AutoSparseGP(model, family)
        losses.append(train(model, guide, x * unit, y, steps=8, loss=TraceQuadrature_ELBO(2)))
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)
    before = guide.posterior(x * units)["f"].mean
    other = restored(guide, model, family)
    assert torch.equal(other.posterior(x * units)["f"].mean, before)
    assert train(model, other, x * units, y, steps=1) == train(model, guide, x * units, y, steps=1)
    for trainable in (False, True):  # a state goes from one to the other, units with it
        state, before = other.state_dict(), other.posterior(x * units)["f"].mean
        other = AutoSparseGP(model, replace(family, trainable=trainable))
        other.load_state_dict(state)
        torch.testing.assert_close(other.posterior(x * units)["f"].mean, before)


def test_learned_inputs_have_no_unit_of_their_own():
    """A network's outputs start in a small range and leave it; inducing inputs must follow them."""
    x, network = torch.rand(30, 2), torch.nn.Linear(2, 2)
    with torch.no_grad():
        network.weight.mul_(1e-3)

    def model(x, y=None):
        pyro.module("network", network)
        f = pyro.sample("f", GaussianProcess(kernels.RBF(1e-3), network(x)))
        return observed(dist.Normal(f, 0.1), y)

    guide = AutoSparseGP(model, SVGP(z := network(x)[:5].detach()))
    guide(x, torch.randn(30))
    assert guide.gps.f.basis.units is guide.gps.f.spec()["basis"]["units"] is None
    assert torch.equal(guide.gps.f.basis.inputs[0], z)


def test_unknown_starts():
    for family in (SVGP, MeanFieldAdditive, CoupledPrecision, OrthogonallyDecoupled, WeightSpace):
        with pytest.raises(ValueError, match=f'{family.__name__}\'s start must be "data" or "prior", got \'zero\''):
            family(start="zero")


@pytest.mark.filterwarnings("ignore:latent site 'e' has a value for each datum")
def test_sites_that_meet_where_no_mode_is_found_are_told_of():
    """Data without noise pull the log scale down without end."""
    x = torch.linspace(0, 1, 60)[:, None]

    def model(x, y=None):
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.3), x))
        g = pyro.sample("g", GaussianProcess(kernels.RBF(0.5), x, mean=-1.0))
        with pyro.plate("data", len(x)):
            e = pyro.sample("e", dist.Normal(0.0, 1.0))
            return pyro.sample("y", dist.Normal(f + e, g.exp()), obs=y)

    with pytest.warns(UserWarning, match=r"mode of 'f', 'g' was not found .*as independent"):
        AutoSparseGP(model, SVGP(10))(x, torch.sin(6 * x[:, 0]))
