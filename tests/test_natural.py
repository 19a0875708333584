"""Natural steps: the optimum in one of them, what they leave alone, and that q's own gradients pass through."""

import contextlib
import copy
import dataclasses
import pickle

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels, predict
from pyro_sparsegp.bases.inducing import Values, features_of
from pyro_sparsegp.families import (
    SGPR,
    SVGP,
    AdditiveSGPR,
    CollapsedOrthogonal,
    CoupledCovariance,
    CoupledPrecision,
    ExactWeightSpace,
    MeanFieldAdditive,
    OrthogonalInducing,
    OrthogonallyDecoupled,
    WeightSpace,
    additive,
)
from pyro_sparsegp.gaussians import Diagonal, NaturalGaussian, NaturalLowRank, Product
from pyro_sparsegp.gaussians.anchors import turned_sums
from pyro_sparsegp.gaussians.factors import LowRankFactor
from pyro_sparsegp.gaussians.product import from_natural
from pyro_sparsegp.gaussians.steps import recording, steppers
from pyro_sparsegp.guide.runs import AtNodes

from .models import (
    FAMILIES,
    assert_alike,
    data,
    gaussian,
    lbfgs,
    maximise,
    observed,
    one_function,
    poisson,
    prepared,
    refused,
    restored,
    train,
)

KERNEL = kernels.Matern32(0.5)
ADDITIVE = kernels.RBF(0.4)[0] + kernels.Matern32(0.5)[1] + kernels.Constant(2.0)


def svi_of(model, family, elbo=None, lr=0.02):
    guide = family if isinstance(family, AutoSparseGP) else AutoSparseGP(model, family)
    return guide, SVI(model, guide, pyro.optim.Adam({"lr": lr}), elbo or TraceQuadrature_ELBO(2))


def coefficients(guide, name="f"):
    return getattr(guide.gps, name).coefficients


def state(guide):
    found = coefficients(guide)
    return found.gram.clone(), found.loc.detach().clone()


def step(module, phi, loss, anchor=None):
    """One natural step of a module by the marginals at these features."""
    with recording(phi[0]) as record:
        q = module(anchor)
        total = loss(*q.moments(phi)) + q.kl()
    record.differentiate(total)
    record.step(1.0)


FEATURES = kernels.Polynomial(2, 1.0)  # finite features alone


OPTIMA = {
    "SVGP": (SVGP, SGPR, KERNEL),
    "orthogonal": (
        lambda z, **kw: OrthogonalInducing(z[:6], z[6:], **kw),
        lambda z, **kw: CollapsedOrthogonal(z[:6], z[6:], **kw),
        KERNEL,
    ),
    "CoupledCovariance": (
        lambda z, **kw: CoupledCovariance([z[:, :1], z[:, 1:], None], **kw),
        lambda z, **kw: AdditiveSGPR([z[:, :1], z[:, 1:], None], **kw),
        ADDITIVE,
    ),
    "WeightSpace": (lambda z, trainable, **kw: WeightSpace(**kw), lambda z, trainable: ExactWeightSpace(), FEATURES),
}


def assert_same(guide, best, x, **how):
    """That two guides have one posterior, to 1e-8."""
    q, p = guide.posterior(x)["f"], best.posterior(x)["f"]
    assert_alike(q, p, **({"atol": 1e-8, "rtol": 0} | how))


@pytest.mark.parametrize("name", OPTIMA)
def test_one_step_on_all_rows_of_a_gaussian_problem_is_the_optimum(name):
    x, y = data()
    natural, optimal, kernel = OPTIMA[name]
    model = gaussian(kernel)
    guide, svi = svi_of(model, natural(x[:12], natural=True, trainable=False))
    svi.step(x, y)
    best = prepared(model, optimal(x[:12], trainable=False), x, y)
    assert_same(guide, best, x)
    losses = [TraceQuadrature_ELBO(2).loss(model, g, x, y) for g in (guide, best)]
    assert abs(losses[0] - losses[1]) < 1e-8


@pytest.mark.parametrize("family", [MeanFieldAdditive, OrthogonallyDecoupled], ids=["mean field", "decoupled"])
def test_one_step_is_where_the_gradient_of_independent_blocks_vanishes(family):
    """Σ_b S_b restricted: S_b = (P_bb)⁻¹, or the prior's, and the mean of the whole system."""
    x, y = data()
    z = x[:12]
    if family is MeanFieldAdditive:
        model, declared = gaussian(ADDITIVE), family([z[:, :1], z[:, 1:], None], natural=True, trainable=False)
    else:
        model, declared = gaussian(KERNEL), family(z[:6], z[6:], natural=True, trainable=False)
    guide, svi = svi_of(model, declared)
    svi.step(x, y)
    q = guide.posterior(x)["f"]
    phi = torch.cat(q.features, -1)
    whole = torch.eye(phi.shape[-1]) + phi.mT @ phi / 0.04
    torch.testing.assert_close(torch.cat(q.coefficients.loc), torch.linalg.solve(whole, phi.mT @ y / 0.04))
    blocks = [torch.linalg.inv(part) for part in _diagonal(whole, q.coefficients.sizes)]
    if family is OrthogonallyDecoupled:
        blocks[1] = torch.eye(len(blocks[1]))
    torch.testing.assert_close(q.coefficients.covariance_matrix, torch.block_diag(*blocks), atol=1e-9, rtol=0)


def _diagonal(matrix, sizes):
    start = 0
    for size in sizes:
        yield matrix[start : start + size, start : start + size]
        start += size


@pytest.mark.parametrize("kept", ["in one matrix", "in blocks"])
def test_coupled_blocks_do_not_diverge(kept, monkeypatch):
    """Plain kernels share their level: steps with each block's own mean blow up, these fall to the optimum."""
    monkeypatch.setattr(additive, "_DENSE", 1000 if kept == "in one matrix" else 0)
    x, y = data(num=200)
    kernel = sum((kernels.RBF(0.5)[i % 2] for i in range(5)), 4.0 * kernels.RBF(1.0)[0])
    model = gaussian(kernel, 0.05)
    guide, svi = svi_of(model, MeanFieldAdditive(6, natural=True, trainable=False, rate=1.0))
    losses = [svi.step(x, y) for _ in range(12)]
    assert max(losses[2:]) < losses[1] + 1e-3 * abs(losses[1])
    assert losses[-1] == pytest.approx(losses[3], rel=1e-4)
    assert isinstance(coefficients(guide), NaturalGaussian if kept == "in one matrix" else NaturalLowRank)


def masked(x, y=None):
    f = pyro.sample("f", GaussianProcess(KERNEL, x))
    seen = torch.arange(len(x)) % 3 > 0 if y is None else y.isfinite()
    with pyro.plate("data", len(x)), poutine.mask(mask=seen):
        return pyro.sample("y", dist.Normal(f, 0.2), obs=None if y is None else y.nan_to_num())


def weighted(x, y=None):
    f = pyro.sample("f", GaussianProcess(KERNEL, x))
    with pyro.plate("data", len(x)), poutine.scale(scale=3.0):
        return pyro.sample("y", dist.Normal(f, 0.2), obs=y)


@pytest.mark.parametrize("case", ["one row", "fewer rows than points", "missing values", "weighted rows"])
def test_one_step_of_unusual_data_is_the_optimum(case):
    x, y = data()
    model, z = gaussian(KERNEL), x[:12]
    if case == "one row":
        x, y, z = x[:1], y[:1], x[:1]
    elif case == "fewer rows than points":
        x, y = x[20:25], y[20:25]
    elif case == "missing values":
        model, y = masked, torch.where(torch.arange(len(y)) % 4 == 0, torch.nan, y)
    else:
        model = weighted
    guide, svi = svi_of(model, SVGP(z, trainable=False))
    svi.step(x, y)
    assert_same(guide, prepared(model, SGPR(z, trainable=False), x, y), x)


@pytest.mark.filterwarnings("ignore:GP sites .* enter densities by their sum")
def test_sites_that_meet_in_one_density():
    """Each site's step has the other's mean before it: together they overshoot at first, then near the optimum."""
    x, y = data()

    def model(x, y=None):
        f = pyro.sample("f", GaussianProcess(KERNEL, x))
        g = pyro.sample("g", GaussianProcess(kernels.RBF(1.0), x[:, :1]))
        return observed(dist.Normal(f + g, 0.2), y)

    def families(kind):
        return {"f": kind(x[:10], trainable=False, rate=0.5), "g": kind(x[:5, :1], trainable=False, rate=0.5)}

    _, svi = svi_of(model, AutoSparseGP(model, families(SVGP), independent=True))
    losses = [svi.evaluate_loss(x, y), *(svi.step(x, y) for _ in range(24))]
    best = prepared(model, families(SGPR), x, y, independent=True)
    assert -1e-6 < losses[-1] - TraceQuadrature_ELBO(2).loss(model, best, x, y) < 6
    assert losses[0] - losses[-1] > 500


def test_q_meets_the_data_before_a_gradient_reaches_hyperparameters():
    """Else Adam's second moments remember gradients under the prior, and the mean stays where it starts."""
    x = torch.rand(60, 1)
    y = 5 + torch.sin(6 * x[:, 0]) + 0.1 * torch.randn(60)

    def model(x, y=None):
        mean = pyro.param("mean", torch.zeros(()))
        noise = pyro.param("noise", torch.ones(()), constraint=dist.constraints.positive)
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.3), x, mean=mean))
        observed(dist.Normal(f, noise), y)

    guide, svi = svi_of(model, SVGP(10), lr=0.03)
    losses = [svi.step(x, y) for _ in range(120)]
    assert coefficients(guide).steps == 120  # those before the first gradient do not count
    assert losses[0] < 100  # 850 under the prior
    assert losses[-1] < -20  # 47 where q meets the data together with them


@pytest.mark.parametrize("known", [False, True])
@pytest.mark.parametrize("nothing", [False, "rows"])
def test_q_waits_for_a_batch_that_is_not_masked(nothing, known):
    """Its first steps, at which its rates are the largest, are by data."""
    x, y = data()
    seen = torch.ones(len(x), dtype=torch.bool)

    def model(x, seen):
        mean = pyro.param("mean", torch.zeros(()))
        f = pyro.sample("f", GaussianProcess(KERNEL, x, mean=mean))
        with pyro.plate("data", len(x)), poutine.mask(mask=seen):
            pyro.sample("y", dist.Poisson(f.exp()), obs=(5 + y).round().abs())

    losses = []
    for empty in (0, 3):
        pyro.clear_param_store()
        guide, svi = svi_of(model, SVGP(x[:12], trainable=False), lr=0.0)  # masked batches move the mean, too
        if known:
            guide(x, seen)
        for _ in range(empty):
            svi.step(x, ~seen if nothing == "rows" else False)
            assert coefficients(guide).steps == 0
        losses.append([svi.step(x, seen) for _ in range(3)])
        assert coefficients(guide).steps == 3
    assert losses[1] == pytest.approx(losses[0], rel=1e-9)


def test_q_that_is_at_the_optimum_meets_the_data_no_further(monkeypatch):
    """Under a Gaussian likelihood one step leads there: an evaluation after it shows that, and is the first step's."""
    x, y = data()
    model = gaussian(KERNEL)
    found, evaluated = [], TraceQuadrature_ELBO._evaluated

    def counted(*args):
        found.append(evaluated(*args))
        return found[-1]

    monkeypatch.setattr(TraceQuadrature_ELBO, "_evaluated", counted)
    guide, svi = svi_of(model, SVGP(x[:12], trainable=False))
    first = svi.step(x, y)
    assert len(found) == 3  # of the prior, of the optimum, and that it stays
    assert first == found[-1][1]
    assert coefficients(guide).steps == 1  # those before it do not count
    best = prepared(model, SGPR(x[:12], trainable=False), x, y)
    assert first == pytest.approx(TraceQuadrature_ELBO(2).loss(model, best, x, y), abs=1e-6)


def test_each_backward_pass_is_a_step_with_or_without_an_optimiser():
    x, y = data()
    model = gaussian(KERNEL)
    guide, svi = svi_of(model, SVGP(x[:8]))
    guide(x, y)
    for _ in range(3):  # gradients that add up
        svi.loss_and_grads(model, guide, x, y)
    assert coefficients(guide).steps == 3
    assert guide.gps.f.basis.inputs_0_unconstrained.grad.abs().sum() > 0


def test_what_has_no_natural_steps_takes_gradients():
    decoupled = OrthogonallyDecoupled(6, 6, num_columns=3)
    assert not decoupled.is_natural
    assert SVGP(6).is_natural
    for family, more in ((OrthogonallyDecoupled, {"num_columns": 3}), (OrthogonallyDecoupled, {"natural": False})):
        refused("rate is that of natural steps", family, 6, 6, rate=0.5, **more)

    class MeanField(SVGP):
        def new_coefficients(self):
            return Diagonal

    x, y = data()
    assert not MeanField(6).is_natural
    _, svi = svi_of(gaussian(KERNEL), MeanField(6))
    assert svi.step(x, y) > svi.step(x, y)
    refused("MeanField's natural steps are of .* full covariance or the prior's", MeanField, 6, natural=True)


def test_independent_outputs_each_take_their_own_step():
    x, y = data()
    ys = torch.stack([y, y.sin()])

    def model(x, y=None):
        f = pyro.sample("f", GaussianProcess(KERNEL, x).expand([2]).to_event(1))
        return observed(dist.Normal(f.mT, 0.2).to_event(1), y)

    guide, svi = svi_of(model, SVGP(x[:10], natural=True, trainable=False))
    svi.step(x, ys.mT)
    q = guide.posterior(x)["f"]
    for i in range(2):
        best = prepared(gaussian(KERNEL), SGPR(x[:10], trainable=False), x, ys[i])
        torch.testing.assert_close(q.mean[i], best.posterior(x)["f"].mean, atol=1e-8, rtol=0)
        torch.testing.assert_close(q.variance[i], best.posterior(x)["f"].variance, atol=1e-8, rtol=0)


def test_particles_of_one_objective_are_one_step():
    """Two passes before one backward pass: the step is that of their mean, not two steps."""
    x, y = data()
    model = gaussian(KERNEL)
    guide, svi = svi_of(model, SVGP(x[:12], natural=True, trainable=False), TraceQuadrature_ELBO(2, num_particles=3))
    svi.step(x, y)
    assert_same(guide, prepared(model, SGPR(x[:12], trainable=False), x, y), x)
    assert coefficients(guide).steps == 1


def test_mini_batches_average_to_the_optimum():
    x, y = data(num=300)
    model = gaussian(KERNEL)
    guide, svi = svi_of(model, SVGP(x[:12], natural=True, trainable=False, rate=lambda t: 1 / (1 + t)))
    for _ in range(10):  # epochs: after each, 1/t averages are those over all rows
        for rows in torch.randperm(300).split(50):
            svi.step(x[rows], y[rows], size=300)
    assert_same(guide, prepared(model, SGPR(x[:12], trainable=False), x, y), x)


def test_gradients_of_hyperparameters_pass_through_q():
    """Against autograd through the plain formulas, when hyperparameters have left those that q was stepped at."""
    x, y = data()

    def model(x, y=None):
        length = pyro.param("length", torch.tensor(0.5))
        f = pyro.sample("f", GaussianProcess(pyro.param("scale", torch.tensor(1.3)) * kernels.Matern32(length), x))
        return observed(dist.Normal(f, 0.2), y)

    guide, svi = svi_of(model, SVGP(x[:8] + 0.01, natural=True))
    for _ in range(3):
        svi.step(x, y)
    gram, loc = state(guide)
    anchor, before = coefficients(guide).anchor.clone(), coefficients(guide).inputs.clone().view(8, 2)
    with torch.no_grad():
        for parameter in (pyro.get_param_store()._params["length"], guide.gps.f.basis.inputs_0_unconstrained):
            parameter.add_(0.05)
    leaves = [*dict(pyro.get_param_store().named_parameters()).values()]
    for leaf in leaves:
        leaf.grad = None
    TraceQuadrature_ELBO(2).differentiable_loss(model, guide, x, y).backward()
    z = guide.gps.f.basis.inputs_0.detach().clone().requires_grad_()
    length = pyro.get_param_store()._params["length"].detach().clone().requires_grad_()
    scale = pyro.get_param_store()._params["scale"].detach().clone().requires_grad_()
    kernel = scale * kernels.Matern32(length)
    k = kernel(z)
    lower = torch.linalg.cholesky(k + 1e-8 * k.detach().diagonal().mean() * torch.eye(8))
    # sites are about f's values where inducing inputs were
    there = lower + torch.linalg.solve(lower, (kernel(before, z) - k).mT).mT
    turn = torch.linalg.solve(anchor, there)
    p = torch.eye(8) + turn.mT @ gram @ turn
    m, s = torch.linalg.solve(p, turn.mT @ (loc + gram @ loc)), torch.linalg.inv(p)
    phi = torch.linalg.solve(lower, kernel(z, x)).mT
    variance = kernel.diag(x) + ((phi @ (s - torch.eye(8))) * phi).sum(-1)
    fit = dist.Normal(phi @ m, 0.2).log_prob(y).sum() - variance.sum() / (2 * 0.04)
    loss = 0.5 * (s.trace() + m @ m - 8 - torch.logdet(s)) - fit
    expected = torch.autograd.grad(loss, [z, length, scale])
    store = pyro.get_param_store()._params
    found = [guide.gps.f.basis.inputs_0_unconstrained.grad, store["length"].grad, store["scale"].grad]
    for one, other in zip(found, expected):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)


def test_a_failed_factorisation_names_the_site():
    x, y = data()
    guide, svi = svi_of(gaussian(KERNEL), SVGP(x[:8], natural=True))
    svi.step(x, y)
    coefficients(guide).gram[0] = torch.nan
    with pytest.raises(RuntimeError, match=r"not positive-definite|not finite|NaN"):
        svi.step(x, y)


def test_negative_curvatures_that_another_anchor_magnifies_are_cut():
    """As if K had become 25 times larger: u = Lw is where it was, and no variance above twice the prior's."""
    x, y = data()
    guide, svi = svi_of(gaussian(KERNEL), SVGP(x[:8], natural=True, trainable=False))
    svi.step(x, y)
    module = coefficients(guide)
    before = guide.posterior(x)["f"].mean
    mean = guide.posterior(x)["f"].coefficients.loc[0]
    module.gram = -0.4 * torch.eye(8)
    module._set("loc", 5 * mean)
    module.anchor = module.anchor / 5
    q = guide.posterior(x)["f"]
    torch.testing.assert_close(q.coefficients.covariance_matrix, 2 * torch.eye(8))
    torch.testing.assert_close(q.mean, before)
    svi.step(x, y)
    best = prepared(guide.model, SGPR(x[:8], trainable=False), x, y)
    torch.testing.assert_close(guide.posterior(x)["f"].mean, best.posterior(x)["f"].mean, atol=0.3, rtol=0)


@pytest.mark.parametrize("how", ["state_dict", "pickle"])
def test_training_goes_on_where_it_was(how):
    x, y = data(poisson)
    guide, svi = svi_of(poisson, SVGP(8), TraceQuadrature_ELBO(8))
    for _ in range(5):
        svi.step(x, y)
    other = restored(guide, poisson, SVGP(8)) if how == "state_dict" else pickle.loads(pickle.dumps(guide))
    assert all(map(torch.equal, state(guide), state(other)))
    assert coefficients(other).next_rate() == coefficients(guide).next_rate()
    torch.testing.assert_close(guide.posterior(x)["f"].mean, other.posterior(x)["f"].mean)
    losses = []
    for g in (guide, copy.deepcopy(other)):
        svi = SVI(poisson, g, pyro.optim.SGD({"lr": 1e-5}), TraceQuadrature_ELBO(8))
        pyro.set_rng_seed(1)
        losses.append([svi.step(x, y) for _ in range(4)])
    assert losses[0] == pytest.approx(losses[1])


@pytest.mark.parametrize("natural", [True, False])
def test_a_state_says_how_q_is_learned(natural):
    x, y = data()
    model = gaussian(KERNEL)
    guide, svi = svi_of(model, SVGP(x[:8], natural=natural))
    svi.step(x, y)
    other = restored(guide, model, SVGP(x[:8], natural=not natural))
    torch.testing.assert_close(other.posterior(x)["f"].mean, guide.posterior(x)["f"].mean)
    assert isinstance(other.gps.f.coefficients, NaturalGaussian) == natural
    SVI(model, other, pyro.optim.Adam({"lr": 0.01}), TraceQuadrature_ELBO(2)).step(x, y)


@pytest.mark.parametrize("factor", [0.01, 3.0])
def test_a_guide_under_scale_takes_the_same_steps(factor):
    x, y = data(num=20)
    guides = []
    for wrap in (lambda guide: guide, lambda guide: poutine.scale(guide, factor)):
        guide = AutoSparseGP(gaussian(KERNEL), SVGP(x[:6], trainable=False))
        train(guide.model, wrap(guide), x, y, steps=3, lr=0.01, loss=TraceQuadrature_ELBO(2))
        guides.append(guide)
    assert_same(*guides, x, rtol=1e-7)


def test_counts_far_from_where_q_starts():
    """Newton's first step for exp(f) would be to f = y."""
    x, _ = data()
    y = torch.poisson((7 + x[:, 0]).exp())
    _, svi = svi_of(poisson, SVGP(8, start="prior"), TraceQuadrature_ELBO(8))
    losses = [svi.evaluate_loss(x, y), *(svi.step(x, y) for _ in range(20))]
    assert max(losses[1:]) < 1.01 * losses[0]
    assert losses[-1] < losses[0] / 100


@pytest.mark.filterwarnings("ignore:the bound changes")
def test_negative_curvature_of_heavy_tails():
    """With it, q reaches the bound's stationary point; with curvatures cut at 0 it would stay beside it."""
    x, y = data(num=100)
    y[::7] += 3.0
    model = one_function(KERNEL, lambda f: dist.StudentT(3.0, f, 0.1))
    _, svi = svi_of(model, SVGP(x[:10], trainable=False, rate=0.2), TraceQuadrature_ELBO(20))
    loss = [svi.step(x, y) for _ in range(40)][-1]
    best = -maximise(model, SVGP(x[:10], trainable=False), x, y, num_nodes=20)[1]
    assert loss == pytest.approx(best, abs=1e-3)


def test_the_way_back_to_a_factor_that_moves_is_autograds():
    """Through moments and divergence, which know S itself, and through its root, of which draws are made."""
    phi, lower = torch.randn(7, 5), torch.randn(2, 5, 5).tril(-1) + torch.eye(5)
    weights = torch.randn(7), torch.randn(7), torch.randn(5, 5)
    module = NaturalGaussian([5], (), torch.zeros(()))
    module.start(lower[0], [phi])
    module._set("loc", torch.randn(5))
    anchor = lower[1].requires_grad_()

    def value(q):
        mean, change = q.moments([phi])
        covariance = q.covariance_matrix + 2 * q.factors[0].root @ q.factors[0].root.mT
        return (weights[0] * mean.sin()).sum() + (weights[1] * change).sum() + (weights[2] * covariance).sum()

    sums = module.gram, module.loc.detach() + module.gram @ module.loc.detach(), module.anchor
    expected = from_natural(*turned_sums(*sums, module._anchored(anchor).kept), [5])
    with recording(phi):
        q = module(anchor)
    for one, other in ((value(q), value(expected)), (q.kl(), expected.kl())):
        torch.testing.assert_close(one, other)
        found, wanted = (torch.autograd.grad(part, anchor, retain_graph=True)[0].tril() for part in (one, other))
        torch.testing.assert_close(found, wanted)


@pytest.mark.quick("80 | 30")
@pytest.mark.parametrize(
    ("rate", "of_all", "of_a_batch", "steps"),
    [({}, 0.25, 0.1, 80), ({"rate": lambda t: max(0.05, 1 / (1 + t))}, 0.05, 0.05, 120), ({"rate": 0.3}, 0.3, 0.3, 30)],
)
def test_the_floor_of_the_rate_is_higher_on_all_rows(rate, of_all, of_a_batch, steps):
    """Of other data q takes the share ρ of the way to what they alone would have it be."""
    x, y = data()
    model = gaussian(KERNEL)
    guide, svi = svi_of(model, SVGP(x[:12], trainable=False, **rate), TraceQuadrature_ELBO(2))
    for size, share in ((len(x), of_all), (3 * len(x), of_a_batch), (len(x), of_all)):
        for _ in range(steps):
            svi.step(x, y, size)
        before = coefficients(guide).loc.clone()
        svi.step(x, 0.8 * y, size)  # under -y, more than a nat a datum would be lost, and q meets the data anew
        torch.testing.assert_close(coefficients(guide).loc, (1 - 0.2 * share) * before, rtol=1e-3, atol=0)


@pytest.mark.parametrize("coupled", [False, True])
def test_sites_with_one_posterior_know_that_they_have_all_rows(coupled):
    x, y = data()

    def model(x, y, size=None):
        c = pyro.sample("c", dist.Normal(0.0, 1.0))
        f, g = (pyro.sample(name, GaussianProcess(KERNEL, x)) for name in "fg")
        observed(dist.Normal(f + g + c, 0.5), y, x, size)

    guide, svi = svi_of(model, AutoSparseGP(model, {("f", "g"): SVGP(5)}, independent=not coupled))
    for size, share in ((len(x), 1.0), (2 * len(x), 0.5)):
        for _ in range(12):
            svi.step(x, y, size)
        assert guide.row_share == share


def shares(model, *steps):
    """The shares of all rows that a guide's steps are told, each step's as its natural step has it."""
    guide, svi = svi_of(model, SVGP(5))
    found = []
    for arguments in steps:
        svi.step(*arguments)
        found.append(guide.row_share)
    return found


def rows_under(plate):
    """A model whose data stand under what ``plate(x, size)`` gives."""

    def model(x, y, size=None):
        f = pyro.sample("f", GaussianProcess(KERNEL, x))
        with plate(x, size):
            pyro.sample("y", dist.Normal(f, 0.3), obs=y)

    return model


@pytest.mark.filterwarnings("ignore:site 'y' observes")
def test_batches_are_not_all_rows():
    """Scaled by a handler, or by nobody: of the first alone it is not known then."""
    x, y = data()
    half = len(x) // 2

    @contextlib.contextmanager
    def scaled(x, size):
        with poutine.scale(scale=(size or len(x)) / len(x)), pyro.plate("data", len(x)):
            yield

    plain = rows_under(lambda x, size: pyro.plate("data", len(x)))
    batches = [(x[i : i + half], y[i : i + half]) for i in (0, 1, 2, 3)]
    assert shares(rows_under(scaled), *((*batch, len(x)) for batch in batches[:2])) == [0.0, 0.0]
    assert shares(rows_under(scaled), (x, y), (x, y)) == [1.0, 1.0]
    assert shares(poutine.scale(plain, 0.1), (x, y)) == [1.0]
    assert shares(plain, *batches) == [1.0, 0.0, 0.0, 0.0]
    assert shares(plain, batches[0], (x, y)) == [1.0, 0.0]


@pytest.mark.filterwarnings("error")
def test_data_beside_a_batch_that_is_scaled_are_told_of_by_nobody():
    x, y = data()
    batched = rows_under(lambda x, size: pyro.plate("data", size, subsample=x))

    def model(x, y, size):
        batched(x, y, size)
        with pyro.plate("other", 5):
            pyro.sample("z", dist.Normal(torch.zeros(5), 1.0), obs=torch.ones(5))

    half = len(x) // 2
    batches = [(x[i : i + half], y[i : i + half], 2 * half) for i in (0, 1, 2)]
    assert shares(model, *batches) == [0.5, 0.5, 0.5]


@pytest.mark.parametrize("rate", [0.0, 1.5, -1])
def test_rates_stay_in_their_range(rate):
    refused(r"SVGP's rate must be a number in \(0, 1\]", SVGP, 4, natural=True, rate=rate)
    x, y = data(num=10)
    _, svi = svi_of(gaussian(KERNEL), SVGP(4, rate=lambda step: rate or float("nan")))
    refused(r"rate must be in \[0, 1\]", svi.step, x, y)


PLAIN = sum((10.0 * kernels.RBF(0.5)[i] for i in range(4)), kernels.Constant(30.0))


def additive_data():
    x = torch.rand(400, 4)
    return x, torch.sin(6 * x).sum(-1) + 0.1 * torch.randn(400)


def dense_optimum(phi, noise, y):
    """log-determinant and mean of the one full covariance, and what q loses against it: KL[q ‖ optimum]."""
    joined = torch.cat(phi, -1)
    precision = torch.eye(joined.shape[-1]) + joined.mT @ joined / noise**2
    mean = torch.linalg.solve(precision, joined.mT @ y / noise**2)

    def loss(q):
        s, apart = q.covariance_matrix, torch.cat(q.loc, -1) - mean
        both = precision @ s
        return 0.5 * (both.trace() - len(s) - torch.logdet(both) + apart @ precision @ apart)

    return loss


def test_low_rank_steps_close_the_gap_to_one_full_covariance():
    """Plain kernels share a level: independent blocks lose nats by it, and L-BFGS on rank 6 some."""
    x, y = additive_data()
    z = [None, *[torch.linspace(0, 1, 6)[:, None]] * 4]
    model = gaussian(PLAIN, 0.1)
    lost = {}
    for family in (
        CoupledPrecision(z, rank=6, natural=True, trainable=False, rate=1.0),
        MeanFieldAdditive(z, natural=True, trainable=False, rate=1.0),
    ):
        guide, svi = svi_of(model, family)
        for _ in range(5):
            svi.step(x, y)
        q = guide.posterior(x)["f"]
        lost[type(family).__name__] = float(dense_optimum(q.features, 0.1, y)(q.coefficients).detach())
    assert lost["CoupledPrecision"] < 0.2
    assert lost["MeanFieldAdditive"] > 5


def test_low_rank_mini_batches():
    x, y = additive_data()
    z = [None, *[torch.linspace(0, 1, 6)[:, None]] * 4]
    guide, svi = svi_of(gaussian(PLAIN, 0.1), CoupledPrecision(z, rank=6, natural=True, trainable=False))
    guide(x, y)
    for _ in range(40):
        rows = torch.randperm(400)[:100]
        svi.step(x[rows], y[rows], size=400)
    q = guide.posterior(x)["f"]
    assert float(dense_optimum(q.features, 0.1, y)(q.coefficients).detach()) < 3.0


@pytest.mark.parametrize("base", [True, False], ids=["block", "identity"])
def test_sweeps_reach_the_best_precision_of_the_form(base):
    """Against L-BFGS over (L, B), which maximises the same bound."""
    phi = list((2 * torch.randn(30, 9)).split([4, 5], -1))
    y = torch.randn(30)
    loss = dense_optimum(phi, 1.0, y)
    module = NaturalLowRank([4, 5], (), torch.zeros(()), rank=2, base=base, rate=1.0)
    module.sweeps = 300
    for _ in range(4):
        step(module, phi, lambda mean, change: 0.5 * (mean - y).square().sum() + 0.5 * change.sum())
    with torch.no_grad():
        q = module()
    found = q.factors[0]
    b = [part.detach().clone().requires_grad_() for part in found.stack.blocks(found.b)]
    trils = [part.detach().clone().requires_grad_() for part in found.stack.blocks(found.tril)] if base else None

    def of():
        lower = found.tril.detach() if trils is None else found.stack.squares([part.tril() for part in trils])
        factor = LowRankFactor(found.stack, found.loc.detach(), found.stack.rows(b), lower)
        return loss(Product([4, 5], [factor], [(0, 1)]))

    before = of().item()
    assert before < lbfgs(of, [*b, *(trils or [])], max_iter=100, tolerance_grad=1e-10).item() + 1e-3
    joined = torch.cat(phi, -1)
    apart = torch.cat(q.loc).detach() - torch.linalg.solve(torch.eye(9) + joined.mT @ joined, joined.mT @ y)
    assert apart.abs().max() < 1e-8


def test_low_rank_sites_keep_their_meaning_under_another_l():
    """Against the dense precision, and the hyperparameters' gradient through it."""
    sizes = [4, 5, 1]
    module = NaturalLowRank(sizes, (), torch.zeros(()), rank=2, rate=1.0)
    one, other = ([torch.eye(n) + 0.3 * torch.randn(n, n).tril() for n in sizes[:2]] for _ in range(2))
    phi, y = list(torch.randn(30, 10).split(sizes, -1)), torch.randn(30)
    module.start([*one, None], phi)
    for _ in range(3):
        step(module, phi, lambda mean, change: 2 * (mean - y).square().sum() + 2 * change.sum(), [*one, None])
    precision = torch.linalg.inv(module([*one, None]).covariance_matrix)
    pull = precision @ torch.cat(module([*one, None]).loc)

    def dense(lowers):
        turn = torch.block_diag(*[torch.linalg.solve(a, b) for a, b in zip(one, lowers)], torch.eye(1))
        whole = torch.eye(10) + turn.mT @ (precision - torch.eye(10)).detach() @ turn
        return torch.linalg.solve(whole, turn.mT @ pull.detach()), torch.linalg.inv(whole)

    def value(mean, covariance):
        return mean.sin().sum() + (covariance * torch.arange(100.0).reshape(10, 10).sin()).sum()

    leaves = [lower.requires_grad_() for lower in other]
    mean, covariance = dense(leaves)
    q = module([*leaves, None])
    torch.testing.assert_close(torch.cat(q.loc), mean)
    torch.testing.assert_close(q.covariance_matrix, covariance)
    expected = torch.autograd.grad(value(mean, covariance), leaves)
    found = torch.autograd.grad(value(torch.cat(q.loc), q.covariance_matrix), leaves)
    for a, b in zip(found, expected):
        torch.testing.assert_close(a.tril(), b.tril(), rtol=1e-6, atol=1e-8)


@pytest.mark.parametrize("family", [pytest.param(CoupledCovariance, marks=pytest.mark.slow), CoupledPrecision])
def test_hyperparameters_of_a_small_effect_beside_a_large_one(family):
    """They go where the collapsed bound has them go; with its sites softened by the large one's size, half as far."""
    x = torch.rand(200, 2)
    y = 20 * torch.cos(9 * x[:, 0]) + 4 * x[:, 1] ** 2 + 0.3 * torch.randn(200)
    z = torch.linspace(0, 1, 8)[:, None]

    def model(x, y):
        scale = pyro.param("scale", torch.tensor(1.0), constraint=dist.constraints.positive)
        length = pyro.param("length", torch.tensor(0.3), constraint=dist.constraints.positive)
        kernel = 1000.0 * kernels.RBF(0.3)[0] + scale * kernels.RBF(length)[1]
        f = pyro.sample("f", GaussianProcess(kernel, x))
        observed(dist.Normal(f, 0.3), y)

    found = []
    for each in (family, AdditiveSGPR):
        pyro.clear_param_store()
        guide = AutoSparseGP(model, each([z, z], trainable=False))
        optim = pyro.optim.ClippedAdam({"lr": 0.05, "lrd": 0.03 ** (1 / 60)})
        svi = SVI(model, guide, optim, TraceQuadrature_ELBO(2))
        for _ in range(60):
            svi.step(x, y)
        found.append([pyro.param(name).item() for name in ("scale", "length")])
    assert found[0] == pytest.approx(found[1], rel=0.02)
    assert found[1][0] > 1.5


@pytest.mark.parametrize("family", [SVGP(8), OrthogonalInducing(5, 4), CoupledCovariance(6), MeanFieldAdditive(6)])
def test_sites_stay_about_f_where_a_constant_mean_moves(family):
    """q stays at its optimum, and the mean's gradient is that of the bound with q moving along."""
    x = torch.rand(20, 2)
    y = (6 * x[:, 0]).sin() + x[:, 1] ** 2
    kernel = kernels.RBF(0.4)[0] + kernels.RBF(0.5)[1] + kernels.Linear(1.0)[0]

    def model(x, y=None):
        f = pyro.sample("f", GaussianProcess(kernel, x, mean=pyro.param("level", torch.tensor(0.0))))
        return observed(dist.Normal(f, 0.1), y)

    guide, svi = svi_of(model, dataclasses.replace(family, trainable=False, rate=1.0), lr=0.0)
    guide(x, y)
    for _ in range(2):
        svi.step(x, y)

    def loss(level):
        pyro.param("level").data.fill_(level)
        with torch.no_grad():
            return TraceQuadrature_ELBO(2).loss(model, guide, x, y)

    moved = loss(0.5)
    TraceQuadrature_ELBO(2).differentiable_loss(model, guide, x, y).backward()
    found = pyro.param("level").grad.clone()
    torch.testing.assert_close(found, torch.tensor((loss(0.501) - loss(0.499)) / 0.002), rtol=1e-5, atol=1e-5)
    loss(0.5)
    for _ in range(2):
        svi.step(x, y)
    assert loss(0.5) - 1e-6 < moved < loss(0.5) + 2  # 250 more where sites stay about f - μ


@pytest.mark.parametrize(
    "family",
    [SVGP(10), OrthogonalInducing(6, 4), CoupledCovariance(8), MeanFieldAdditive(8), CoupledPrecision(8)],
    ids=lambda family: type(family).__name__,
)
def test_sites_stay_about_f_where_inducing_inputs_move(family):
    """Values at the next place are others: q of them stays near the optimum where inputs move by 0.02."""
    x = torch.linspace(0, 1, 60)[:, None].expand(60, 2) * torch.tensor([1.0, 0.3])
    y = torch.sin(6 * x[:, 0]) + 0.02 * torch.randn(60)
    model = gaussian(kernels.RBF(0.3)[0] + kernels.RBF(0.5)[1], 0.02)
    guide, svi = svi_of(model, dataclasses.replace(family, rate=1.0), lr=0.0)
    for _ in range(2):
        svi.step(x, y)
    with torch.no_grad():
        for name, inputs in guide.named_parameters():
            if "inputs" in name:
                inputs += 0.02 * torch.linspace(0, 7, inputs.numel()).sin().view(inputs.shape)
    moved = svi.evaluate_loss(x, y)
    for _ in range(2):
        svi.step(x, y)
    assert moved < svi.evaluate_loss(x, y) + 1


@pytest.mark.parametrize("noise", [0.0, 0.3])
def test_values_at_former_inputs(noise):
    """A = cov(u₀, u)L⁻ᵀ with u₀ at former inputs, and its gradient; noise of the kernel's own goes with the inputs."""
    z, before = torch.rand(2, 6, 1)
    leaves = [z.requires_grad_(), torch.tensor(0.4, requires_grad=True), torch.tensor(0.3, requires_grad=True)]

    def kernel(length, white):
        return kernels.RBF(length) + noise * kernels.White(white) if noise else kernels.RBF(length)

    def found(z, length, white):
        basis = features_of(kernel(length, white), [Values(z, True)], 1e-10, "f")
        return basis.anchor_at(before)

    def expected(z, length, white):
        smooth, own = kernels.RBF(length), (noise * white + 1e-10) * torch.eye(6)
        root = torch.linalg.cholesky(smooth(z) + own)
        return torch.linalg.solve_triangular(root, (smooth(before, z) + own).mT, upper=False).mT

    weight = torch.randn(6, 6)
    (one, first), (other, second) = (
        (value := function(*leaves), torch.autograd.grad((weight * value).sum(), leaves[: 3 if noise else 2]))
        for function in (found, expected)
    )
    torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    for mine, its in zip(first, second):
        torch.testing.assert_close(mine, its, rtol=1e-5, atol=1e-5)


def test_hyperparameters_that_are_drawn_have_the_width_of_the_posterior():
    """On a grid of the dense evidence: inducing points suffice, so that the bound falls beside q(θ)'s mean as the
    evidence does. With sites about Lw of inputs that move it is 0.5 to 0.75 times.
    """
    torch.manual_seed(0)
    x = torch.rand(60, 1)
    y = torch.sin(3 * x[:, 0]) + 0.1 * torch.randn(60)

    def model(x, y):
        length = pyro.sample("length", dist.LogNormal(-0.5, 0.5))
        f = pyro.sample("f", GaussianProcess(kernels.RBF(length), x))
        pyro.sample("y", dist.Normal(f, 0.1).to_event(1), obs=y)

    guide, svi = svi_of(model, SVGP(24))
    for _ in range(200):
        svi.step(x, y)
    grid = torch.linspace(-2.5, 1.5, 401)
    covariance = torch.stack([kernels.RBF(z.exp())(x) for z in grid]) + 0.01 * torch.eye(60)
    log_density = dist.MultivariateNormal(torch.zeros(60), covariance).log_prob(y) - 2 * (grid + 0.5).square()
    weights = torch.softmax(log_density, 0)
    mean = weights @ grid
    sd = (weights @ (grid - mean).square()).sqrt()
    assert abs(guide.together.mean[0] - mean) < 0.1 * sd
    assert 0.9 * sd < guide.together.tril[0, 0] < 1.07 * sd


def test_sites_by_draws_are_held_near_w():
    """Where a density couples values; about u, a moving L magnifies their noise. In a loaded state, too."""
    torch.manual_seed(8)
    x, a = torch.linspace(0, 1, 60)[:, None], torch.randn(20, 60) / 60**0.5
    y = a @ (torch.sin(6 * x[:, 0]) + x[:, 0]) + 0.3 * torch.randn(20)

    def model(a, y=None):
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.3), x))
        pyro.sample("y", dist.MultivariateNormal(a @ f, 0.09 * torch.eye(len(y))), obs=y)

    guide, svi = svi_of(model, SVGP(10))
    for _ in range(10):
        svi.step(a, y)
    again = restored(guide, model, SVGP(10))
    assert coefficients(guide).softness == coefficients(again).softness == 0.03
    one, other = (each.posterior(a, y)["f"] for each in (guide, again))
    torch.testing.assert_close(one.mean, other.mean)


FREE = [SVGP(6), OrthogonalInducing(4, 4), MeanFieldAdditive(5), CoupledCovariance(4), CoupledPrecision(4)]


def with_latents(x, y=None):
    length = pyro.sample("length", dist.LogNormal(0.0, 1.0))
    noise = pyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    f = pyro.sample("f", GaussianProcess(ADDITIVE + kernels.Matern32(length)[0], x))
    return observed(dist.StudentT(4.0, f, noise), y)


def everything(guide):
    return {name: value.clone() for name, value in guide.state_dict().items() if isinstance(value, torch.Tensor)}


@pytest.mark.quick("family2-True | family3-True | family4-True | family0-False | family1-False")
@pytest.mark.parametrize("coupled", [False, True])
@pytest.mark.parametrize("family", FREE)
def test_nothing_moves_q_but_a_step(family, coupled):
    """Bit for bit: losses, gradients, predictions."""
    x, y = data(num=20)
    guide, svi = svi_of(with_latents, AutoSparseGP(with_latents, family, independent=not coupled))
    svi.step(x, y)
    before = everything(guide)
    svi.evaluate_loss(x, y)
    loss = TraceQuadrature_ELBO(2).differentiable_loss(with_latents, guide, x, y)
    torch.autograd.grad(loss, list(guide.parameters()), allow_unused=True)
    Trace_ELBO().differentiable_loss(with_latents, guide, x, y).backward()
    TraceQuadrature_ELBO(2)(with_latents, guide)(x, y).backward()
    predict(with_latents, guide, x, num_samples=2)
    guide.posterior(x)["f"].mean.sum().backward()
    after = everything(guide)
    assert before.keys() == after.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)
    svi.step(x, y)
    assert not torch.equal(
        after["locs.length_unconstrained" if not coupled else "together.loc"],
        everything(guide)["locs.length_unconstrained" if not coupled else "together.loc"],
    )
    # A start at the mode counts for 9; of a field the members' own take none.
    assert {module.steps % 9 for module in steppers(guide)} - {0} == {2}


@pytest.mark.quick("family1 | family2 | family4 | family5")
@pytest.mark.parametrize(("family", "objective"), [*((f, Trace_ELBO) for f in FREE), (FREE[0], TraceMeanField_ELBO)])
def test_pyros_objectives_train_q_by_plain_gradients(family, objective):
    """And natural steps go on where these have led."""
    x, y = data(num=20)
    guide, svi = svi_of(gaussian(ADDITIVE), family, objective(), lr=0.1)
    guide(x, y)
    elbo = TraceQuadrature_ELBO(2)
    before = elbo.loss(guide.model, guide, x, y)
    for _ in range(70):
        svi.step(x, y)
    led = elbo.loss(guide.model, guide, x, y)
    assert led < before / 2
    assert coefficients(guide).steps == 0
    again = restored(guide, guide.model, family)
    assert elbo.loss(again.model, again, x, y) == pytest.approx(led, rel=1e-9)
    with recording(x):
        same_q = guide.at_nodes(AtNodes(guide, nodes={"f": None}), guide, (x, y), {})[1].nodes["f"]["fn"]
    assert_alike(same_q, guide.posterior(x)["f"])
    _, svi = svi_of(guide.model, guide)
    assert svi.step(x, y) < led + 1


def test_a_trace_of_torch_jit_trains_q():
    objective = pyro.infer.JitTrace_ELBO(ignore_jit_warnings=True)
    _, svi = svi_of(gaussian(kernels.RBF(0.5), 0.1), SVGP(4), objective, lr=0.05)
    x = torch.rand(10, 1)
    losses = [svi.step(x, x[:, 0]) for _ in range(60)]
    assert losses[-1] < losses[0] - 1


@pytest.mark.quick("family0 | family1 | family2")
@pytest.mark.parametrize("family", [*FREE[:4], pytest.param(FREE[4], marks=pytest.mark.slow)])
def test_lbfgs_wants_no_closure_of_its_own(family):
    """The bound is one function of the parameters, to the optimum that natural steps have for these hyperparameters."""
    x, y = data(num=20)
    model = gaussian(ADDITIVE)
    guide = prepared(model, dataclasses.replace(family, trainable=False), x, y)
    _, svi = svi_of(model, copy.deepcopy(guide), lr=0.0)
    for _ in range(30):
        svi.step(x, y)
    bound = TraceQuadrature_ELBO(2)(model, guide)
    found = lbfgs(lambda: bound(x, y), guide.parameters(), max_iter=500, max_eval=800)
    assert found.item() == pytest.approx(svi.evaluate_loss(x, y), abs=0.05)


@pytest.mark.quick("one set-all rows | nested sets-batches")
@pytest.mark.parametrize("size", [None, 50], ids=["all rows", "batches"])
@pytest.mark.parametrize("family", [SVGP(20), OrthogonalInducing(12, 8)], ids=["one set", "nested sets"])
def test_inducing_inputs_move_under_a_precise_posterior(family, size):
    """They take f nowhere: of 458 nats a step of Adam left −530,000, and the last one −55,000 for evaluations."""
    pyro.set_rng_seed(0)
    x, model = torch.rand(100, 1), gaussian(kernels.RBF(0.2), 1e-3)
    y = model(x)
    guide, svi = svi_of(model, family)
    guide(x, y)
    rows = (torch.randperm(100)[:size] if size else torch.arange(100) for _ in range(100))
    losses = [svi.step(x[some], y[some], size=size and 100) for some in rows]
    assert max(losses) < losses[0] + len(x)
    assert svi.evaluate_loss(x, y) < losses[0] + 20


@pytest.mark.parametrize("size", [5, 25])
def test_batches_meet_the_rows_of_the_first_call(size):
    """A guide that was called on all rows knows those that no batch had: the second one's loss was 3,373,047."""
    pyro.set_rng_seed(0)
    x, model = torch.rand(100, 1), gaussian(kernels.RBF(0.2), 1e-3)
    y = model(x)
    guide, svi = svi_of(model, SVGP(20))
    guide(x, y)
    rows = (torch.randperm(100)[:size] for _ in range(20))
    assert max(svi.step(x[some], y[some], size=100) for some in rows) < 0
    assert guide.gps.f.coefficients.steps == 100 // size + 20


class Warped:
    """Data's inputs are moved by parameters of the program, such as a network's."""

    def __init__(self, columns=1, outputs=0, has_level=False):
        self.columns, self.outputs, self.has_level = columns, outputs, has_level

    def __call__(self, x, y=None, size=None):
        moved = x + pyro.param("shift", torch.zeros(())) + pyro.param("bend", torch.zeros(())) * x**2
        terms = [kernels.RBF(0.2)[i] for i in range(self.columns)]
        process = GaussianProcess(kernels.Sum(*terms) if self.columns > 1 else terms[0], moved)
        process = process.expand([self.outputs]).to_event(1) if self.outputs else process
        f = pyro.sample("f", process)
        f = f + pyro.sample("level", dist.Normal(x.new_zeros(()), 1.0)) if self.has_level else f
        likelihood = dist.Normal(f.mT, 1e-3).to_event(1) if self.outputs else dist.Normal(f, 1e-3)
        return observed(likelihood, y, x, size)


@pytest.mark.quick(
    "one set-batches | nested sets-all rows | terms-batches | outputs-batches",
    "field-batches | outputs in a field-batches",
)
@pytest.mark.parametrize("size", [None, 25], ids=["all rows", "batches"])
@pytest.mark.parametrize(
    ("family", "model"),
    [
        (SVGP(20), Warped()),
        (OrthogonalInducing(12, 8), Warped()),
        (CoupledCovariance(15), Warped(columns=2)),
        (SVGP(20), Warped(outputs=2)),
        (SVGP(20), Warped(has_level=True)),
        (SVGP(40), Warped(outputs=2, has_level=True)),
    ],
    ids=["one set", "nested sets", "terms", "outputs", "field", "outputs in a field"],
)
def test_inputs_move_under_a_precise_posterior(family, model, size):
    """q stays about f at the data: a step of Adam left 21,878,824 of 1,449 nats, in evaluations too."""
    pyro.set_rng_seed(0)
    x = torch.rand(300 if model.has_level else 100, model.columns)
    y = torch.sin(6 * x).sum(-1) + 1e-3 * torch.randn(len(x))
    y = torch.stack([y, -y], -1) if model.outputs else y
    guide, svi = svi_of(model, family)
    guide(x, y)
    rows = [torch.randperm(len(x))[:size] if size else torch.arange(len(x)) for _ in range(30)]
    losses = [svi.step(x[some], y[some], size=size and len(x)) for some in rows]
    assert max(losses) < losses[0] + len(x)
    assert (led := svi.evaluate_loss(x, y)) < losses[0] + 20
    for other in (restored(guide, model, family), copy.deepcopy(guide)):
        assert TraceQuadrature_ELBO(2).loss(other.model, other, x, y) == pytest.approx(led, rel=1e-6)


def test_what_moves_under_a_precise_posterior():
    """Where a step moves the data's inputs under a q that was right for the old ones, and does not follow them, natural
    steps bring q to all data anew.
    """
    pyro.set_rng_seed(0)
    x, model = torch.rand(100, 2), Warped(columns=2)
    y = model(x).detach()
    guide, svi = svi_of(model, CoupledPrecision(12))
    losses = [svi.step(x, y) for _ in range(30)]
    assert max(losses) < losses[0] + 2 * len(x)
    assert guide.gps.f.coefficients.steps == 30


def test_other_data_are_met_at_the_rate_that_was_given():
    """A loss that rises since the data are others is no q that was left behind."""
    rates, x = [], torch.rand(40, 1)

    def rate(step):
        rates.append(step)
        return 0.1

    guide, svi = svi_of(gaussian(kernels.RBF(0.2), 1e-2), SVGP(20, rate=rate), lr=1e-6)
    for shift in (0.0, 1.0, 2.0):
        num = len(rates)
        svi.step(x, torch.sin(6 * x[:, 0]) + shift)
    assert len(rates) == num + 1
    assert guide.gps.f.coefficients.steps == 3


@pytest.mark.parametrize("name", FAMILIES)
def test_draws_are_the_same_with_gradients_and_without(name):
    """At a seed: the root of S is the same in all calls."""
    x = torch.rand(20, 2)
    y = (6 * x[:, 0]).sin() + x[:, 1] ** 2

    def model(x, y=None):
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.4)[0] + kernels.RBF(0.5)[1], x))
        return observed(dist.Normal(f, 0.1), y)

    guide, svi = svi_of(model, FAMILIES[name])
    svi.step(x, y)
    drawn = []
    for trains in (True, False):
        with torch.set_grad_enabled(trains):
            torch.manual_seed(1)
            drawn.append([guide.posterior(x[:5])["f"].rsample(torch.Size([3])), guide(x, y)["f"]])
    torch.testing.assert_close(*drawn)
