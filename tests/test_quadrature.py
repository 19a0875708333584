"""The quadrature bound: values, axes, what is drawn, and agreement with Pyro's ELBOs."""

import copy
import math
import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Importance, RenyiELBO, Trace_ELBO, TraceMeanField_ELBO
from pyro.nn import PyroModule, PyroParam
from pyro.poutine import Trace
from torch.distributions import constraints

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import SGPR, SVGP, OrthogonalInducing
from pyro_sparsegp.program.reader import normal_nodes
from pyro_sparsegp.program.structure import Depends, GPSite, Structure

from .models import (
    bernoulli,
    data,
    estimate,
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
    train,
)

RBF = kernels.RBF(0.5)
LOSSES = (Trace_ELBO, TraceMeanField_ELBO, TraceQuadrature_ELBO)


def two(likelihood):
    """Observations of two functions."""

    def model(x, y=None):
        f = pyro.sample("f", GaussianProcess(RBF, x))
        g = pyro.sample("g", GaussianProcess(0.3 * RBF, x))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", likelihood(f, g), obs=y)

    return model


def close(one, other, errors=5):
    """Whether two estimates, each with its standard error, agree."""
    return abs(one[0] - other[0]) < errors * (one[1] ** 2 + other[1] ** 2) ** 0.5


def test_nodes_of_five_axes_have_a_standard_normals_moments():
    """Those of a golden had not: its means of three logits were .041 off, and are .004 off those of 16,384 nodes."""
    nodes, weights = normal_nodes(5, torch.zeros((), dtype=torch.float64))
    torch.testing.assert_close(nodes.mT @ (weights[:, None] * nodes), torch.eye(5, dtype=torch.float64))


def fitted(model, *args, family=None, steps=10, **options):
    guide = AutoSparseGP(model, family or SVGP(8), **options)
    train(model, guide, *args, steps=steps, lr=0.05)
    return guide


def test_three_elbos_agree_in_gradient():
    x, y = data(bernoulli, 30)
    model = LOGITS
    guide = fitted(model, x, y, family=SVGP(8, natural=False), steps=5)  # natural steps would follow each gradient
    parameters = list(guide.parameters())

    def gradient(loss, num):
        total = sum(loss.differentiable_loss(model, guide, x, y) for _ in range(num)) / num
        return torch.cat([g.flatten() for g in torch.autograd.grad(total, parameters)])

    exact = gradient(TraceQuadrature_ELBO(), 1)
    for loss in (Trace_ELBO(), TraceMeanField_ELBO()):
        torch.testing.assert_close(gradient(loss, 80), exact, atol=0.25 * exact.abs().max().item(), rtol=0.1)


LOGITS = one_function(RBF, lambda f: dist.Bernoulli(logits=f))


@pytest.mark.parametrize(
    ("like", "likelihood"),
    [(bernoulli, lambda f: dist.Bernoulli(logits=f)), (poisson, lambda f: dist.Poisson(f.exp()))],
)
def test_quadrature_against_a_fine_grid(like, likelihood):
    x, y = data(like, 20)
    model = one_function(RBF, likelihood)
    guide = fitted(model, x, y)
    q = guide.posterior(x)["f"]
    t = torch.linspace(-9, 9, 4001)[:, None]
    f = q.mean + q.stddev * t
    weights = torch.exp(-0.5 * t**2) * (t[1] - t[0]) / (2 * torch.pi) ** 0.5
    exact = (weights * likelihood(f).log_prob(y)).sum() - q.kl
    assert abs(-TraceQuadrature_ELBO(30).loss(model, guide, x, y) - exact) < 1e-8


def test_two_sites_use_the_product_grid():
    x, y = data(heteroscedastic, 20)
    model = two(lambda f, g: dist.Normal(f, g.exp()))
    guide = fitted(model, x, y, independent=True)
    assert guide.structure.meeting == (("f", "g"),)
    f, g = (guide.posterior(x)[name] for name in "fg")
    # E log N(y; f, e^g) = −E g − ½ log 2π − ½ E[(y − f)²] E[e^(−2g)]
    square = (y - f.mean).square() + f.variance
    decay = torch.exp(-2 * g.mean + 2 * g.variance)
    exact = (-g.mean - 0.5 * torch.log(torch.tensor(2 * torch.pi)) - 0.5 * square * decay).sum() - f.kl - g.kl
    assert abs(-TraceQuadrature_ELBO(20).loss(model, guide, x, y) - exact) < 1e-6 * abs(exact)


def _structure(dependence, shapes=None, inner=(), interactions=()):
    gps = {
        name: GPSite((shapes or {}).get(name, ()), 1, Depends(kind), is_inner=name in inner)
        for name, kind in dependence.items()
    }
    return Structure(gps, meeting=tuple((f, g) for f, g in interactions))


@pytest.mark.parametrize(
    ("structure", "axes"),
    [
        (_structure({"f": "elementwise"}), {"f": (0,)}),
        (_structure({"f": "elementwise", "g": "elementwise"}), {"f": (0,), "g": (0,)}),
        (_structure({"f": "elementwise", "g": "elementwise"}, interactions=["fg"]), {"f": (0,), "g": (1,)}),
        (_structure({"f": "datawise"}, {"f": (2,)}), {"f": (0, 1)}),
        (_structure({"f": "datawise"}, {"f": (3,)}), {}),
        (_structure({"f": "coupled", "g": "elementwise"}), {"g": (0,)}),
        (_structure({"f": "datawise", "g": "elementwise"}, {"f": (3,)}, inner="f"), {"g": (0,)}),
        (_structure(dict.fromkeys("fgh", "elementwise"), interactions=["fg", "gh", "fh"]), {}),
        (_structure(dict.fromkeys("fghk", "elementwise"), interactions=["fg", "gh", "fh"]), {"k": (0,)}),
        (_structure(dict.fromkeys("fgh", "elementwise"), interactions=["fg", "gh"]), {"f": (0,), "g": (1,), "h": (0,)}),
    ],
)
def test_axes(structure, axes):
    assert structure.axes() == axes


def test_vector_valued_softmax_and_separate_outputs():
    x, y = data(num=25)
    label = (y > y.median()).long()

    def softmax(x, y=None, outputs=2):
        f = pyro.sample("f", GaussianProcess(RBF, x).expand([outputs]).to_event(1))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Categorical(logits=f.mT), obs=y)

    guide = fitted(softmax, x, label)
    assert guide.structure.axes() == {"f": (0, 1)}
    sampled = estimate(Trace_ELBO(), softmax, guide, x, label, num=40)
    assert abs(TraceQuadrature_ELBO(15).loss(softmax, guide, x, label) - sampled[0]) < 5 * sampled[1]

    def separate(x, y=None):
        f = pyro.sample("f", GaussianProcess(RBF, x).expand([3]).to_event(1))
        with pyro.plate("outputs", 3, dim=-2), pyro.plate("data", len(x), dim=-1):
            return pyro.sample("y", dist.Normal(f, 0.2), obs=y)

    guide = fitted(separate, x, torch.stack([y, -y, 2 * y]))
    assert guide.structure.axes() == {"f": (0,)}
    with pytest.warns(UserWarning, match="more than 2 function values.*Monte Carlo"):
        fitted(lambda x, y=None: softmax(x, y, 3), x, label, steps=2, independent=True)


def test_coupled_likelihood_is_drawn_jointly():
    """E_q log N(y; Af, σ²) needs the covariances of q: −½ tr(AΣAᵀ)/σ²."""
    x, _ = data(num=20)
    a = torch.randn(4, 20)
    seen = torch.randn(4)

    def model(x, y=None):
        f = pyro.sample("f", GaussianProcess(RBF, x))
        pyro.factor("y", dist.Normal(a @ f, 0.7).log_prob(seen).sum())

    guide = fitted(model, x, None)
    assert guide.structure.coupled == ("f",)
    q = guide.posterior(x)["f"]
    fit = dist.Normal(a @ q.mean, 0.7).log_prob(seen).sum()
    exact = fit - (a @ q.covariance_matrix @ a.mT).trace() / (2 * 0.7**2) - q.kl
    assert all(close(estimate(loss(), model, guide, x, None, num=40), (-exact, 0.0)) for loss in LOSSES)


@pytest.mark.filterwarnings("ignore:latent site .* has a value for each datum")
def test_groups_other_plates_and_local_latents():
    x, y = data(num=20)
    group = torch.randint(0, 20, (50,))

    def model(x, y=None):
        f = pyro.sample("f", GaussianProcess(RBF, x))
        with pyro.plate("levels", 4):
            level = pyro.sample("level", dist.Normal(0.0, 1.0))
        with pyro.plate("data", 50):
            z = pyro.sample("z", dist.Normal(f[group] + level[group % 4], 0.5))
            return pyro.sample("y", dist.Normal(z, 0.2), obs=y)

    guide = fitted(model, x, y[group])
    assert guide.structure.gps["f"].depends == "elementwise"
    drawn = estimate(Trace_ELBO(), model, guide, x, y[group], num=15)
    integrated = estimate(TraceQuadrature_ELBO(2), model, guide, x, y[group], num=15)
    assert close(drawn, integrated)


def test_masks_scales_and_factors():
    x, y = data(num=20)
    observed = torch.rand(20) < 0.5

    def model(x, y=None):
        f = pyro.sample("f", GaussianProcess(RBF, x))
        with pyro.plate("data", len(x)), pyro.poutine.mask(mask=observed), pyro.poutine.scale(scale=0.5):
            pyro.sample("y", dist.Normal(f, 0.3), obs=y)
        with pyro.plate("rows", len(x)):
            pyro.factor("pull", -f.square())

    guide = fitted(model, x, y)
    q = guide.posterior(x)["f"]
    fit = dist.Normal(q.mean, 0.3).log_prob(y) - q.variance / (2 * 0.3**2)
    exact = 0.5 * fit[observed].sum() - (q.mean.square() + q.variance).sum() - q.kl
    assert abs(-TraceQuadrature_ELBO(3).loss(model, guide, x, y) - exact) < 1e-8 * abs(exact)


@pytest.mark.parametrize("seen", [slice(None), slice(9)])
def test_a_mask_of_the_distribution_is_kept(seen):
    x, y = data(poisson, 20)
    mask = torch.arange(20) < len(y[seen])
    model = one_function(RBF, lambda f: dist.Poisson(f.exp()).mask(mask) if seen.stop else dist.Poisson(f.exp()))
    elbo, guide = TraceQuadrature_ELBO(), fitted(model, x, y)
    loss = elbo.differentiable_loss(model, guide, x, y).item()
    assert loss == pytest.approx(elbo.loss(model, guide, x, y), rel=1e-10)


class OldStyle(torch.autograd.Function):
    """A function without setup_context, which functorch refuses wherever it stands."""

    @staticmethod
    def forward(ctx, x):
        return 1 * x

    @staticmethod
    def backward(ctx, gradient):
        return gradient


@pytest.mark.filterwarnings("ignore:latent site .* has a value for each datum")
@pytest.mark.parametrize("where", ["before f", "after f"])
def test_a_model_that_vmap_refuses(where):
    x, y = data(num=20)

    class Old(kernels.RBF):
        def __call__(self, x, z=None):
            return OldStyle.apply(super().__call__(x, z))

    def model(x, y=None, old=True):
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        plate = pyro.plate("data", len(x), subsample_size=15)
        kernel = Old(scale) if old and where == "before f" else kernels.RBF(scale)
        f = pyro.sample("f", GaussianProcess(kernel, x[plate.indices]))
        if old and where == "after f":
            f = OldStyle.apply(f)
        with plate:
            z = pyro.sample("z", dist.StudentT(4.0, f, scale))
            return pyro.sample("y", dist.Normal(z, scale), obs=y[plate.indices])

    guide = fitted(lambda x, y: model(x, y, old=False), x, y, steps=5)
    slow = restored(guide, model, SVGP(8))
    elbo = TraceQuadrature_ELBO(4)
    pyro.set_rng_seed(5)
    first = elbo.loss(model, slow, x, y)
    pyro.set_rng_seed(5)
    assert abs(first - TraceQuadrature_ELBO(4).loss(guide.model, guide, x, y)) < 1e-9
    assert torch.tensor(train(model, slow, x, y, steps=3, loss=elbo)).isfinite().all()
    assert elbo.plan(slow).refused


def test_deterministic_without_other_latents_and_keeps_no_graph():
    x, y = data(bernoulli, 20)
    guide = fitted(LOGITS, x, y)
    elbo = TraceQuadrature_ELBO()
    assert elbo.loss(LOGITS, guide, x, y) == elbo.loss(LOGITS, guide, x, y)
    assert len(guide.trace.nodes) == len(Trace().nodes)
    assert elbo(LOGITS, guide)(x, y).requires_grad


def test_other_latents_are_one_draw_a_particle():
    x, y = data(num=20)
    guide = fitted(regression, x, y, independent=True)
    many = estimate(TraceQuadrature_ELBO(2, num_particles=6), regression, guide, x, y, num=12)
    one = estimate(TraceQuadrature_ELBO(2), regression, guide, x, y, num=30)
    assert close(many, one)
    assert many[1] * 12**0.5 < 0.7 * one[1] * 30**0.5


def test_nan_observations_raise_and_spare_the_parameters():
    x, y = data(num=20)
    model = gaussian(RBF)
    bad = y.clone()
    bad[3] = torch.nan
    refused("site 'y' has no density at its value", fitted, model, x, bad)
    guide = fitted(model, x, y, steps=3)
    before = {name: value.clone() for name, value in guide.state_dict().items() if "extra" not in name}
    with pytest.raises(
        ValueError, match=r"bound is NaN: the log density of site 'y' \(1 of 20 values, the first at \d+\)"
    ):
        train(model, guide, x, bad, steps=1)
    assert all(torch.equal(value, guide.state_dict()[name]) for name, value in before.items())
    train(model, guide, x, y, steps=2)


def test_an_infinite_bound_raises_and_spares_the_parameters():
    x, y = data(poisson, 20)
    guide = fitted(poisson, x, y, family=SVGP(8, natural=False), steps=2)
    before = {name: value.clone() for name, value in guide.named_parameters()}
    elsewhere = torch.full_like(guide.gps.f.coefficients.loc_0, 5000.0)
    kept, guide.gps.f.coefficients.loc_0 = guide.gps.f.coefficients.loc_0.detach().clone(), elsewhere
    message = r"bound is (NaN|infinite): the log density of site 'y' \(\d+ of 20 values, the first at \d+\)"
    refused(message, lambda: TraceQuadrature_ELBO(2).loss(poisson, guide, x, y))
    refused(message, train, poisson, guide, x, y, steps=1)
    guide.gps.f.coefficients.loc_0 = kept
    assert all(torch.equal(value, before[name]) for name, value in guide.named_parameters())


def test_the_loss_as_a_module_has_no_parameters_before_the_guide_has():
    class Model(PyroModule):
        def __init__(self):
            super().__init__()
            self.noise = PyroParam(torch.tensor(0.3), constraints.positive)

        def forward(self, x, y=None):
            return gaussian(RBF, self.noise)(x, y)

    x, y = data(num=20)
    model = Model()
    guide = AutoSparseGP(model, SVGP(5))
    loss = TraceQuadrature_ELBO(2)(model, guide)
    refused(r"has not been called: call it with the data, guide\(x, y\)", torch.optim.Adam, loss.parameters())
    loss(x, y)
    names = {name for name, _ in loss.named_parameters()}
    assert names == {"model.noise_unconstrained", *(f"guide.{name}" for name, _ in guide.named_parameters())}


def test_bad_arguments():
    x, y = data(num=20)
    refused("num_nodes", TraceQuadrature_ELBO, 0)
    many = TraceQuadrature_ELBO(400).loss
    refused(
        "num_nodes must be at most 350, got 400", many, bernoulli, AutoSparseGP(bernoulli, SVGP(5)), *data(bernoulli, 9)
    )
    refused("vectorize_particles=True", TraceQuadrature_ELBO, vectorize_particles=True, num_particles=3)
    normal = pyro.infer.autoguide.AutoNormal(regression)
    with pytest.raises(ValueError, match="needs an AutoSparseGP guide, got AutoNormal"):
        SVI(regression, normal, pyro.optim.Adam({}), TraceQuadrature_ELBO()).step(x, y)

    class Discrete(AutoSparseGP):
        def get_posterior(self, name, prior):
            if name == "z":
                return dist.Poisson(torch.ones(()))
            return super().get_posterior(name, prior)

    def model(x, y=None):
        z = pyro.sample("z", dist.Normal(0.0, 1.0))
        pyro.sample("y", dist.Normal(z + pyro.sample("f", GaussianProcess(RBF, x)), 1.0).to_event(1), obs=y)

    guide = Discrete(model, OrthogonalInducing(3, 3))
    refused("site 'z' has a posterior without reparameterised draws", TraceQuadrature_ELBO().loss, model, guide, x, y)


class TestMissing:
    @staticmethod
    def model(x, y=None):
        noise = pyro.sample("noise", dist.LogNormal(-1.0, 0.5))
        f = pyro.sample("f", GaussianProcess(RBF, x))
        mask = x.new_ones(len(x), dtype=torch.bool) if y is None else ~y.isnan()
        with pyro.plate("data", len(x)), pyro.poutine.mask(mask=mask):
            return pyro.sample("y", dist.Normal(f, noise), obs=y)

    @pytest.mark.quick("True-TraceQuadrature_ELBO | False-TraceMeanField_ELBO")
    @pytest.mark.parametrize("loss", [TraceQuadrature_ELBO, Trace_ELBO, TraceMeanField_ELBO])
    @pytest.mark.parametrize("validate", [True, False])
    def test_masked_nan_is_left_out_of_value_and_gradient(self, loss, validate):
        x, y = data(num=30)
        y[[3, 20]] = torch.nan
        known = ~y.isnan()
        with pyro.validation_enabled(validate):
            trained = fitted(self.model, x, y, steps=10)
            gradients = []
            for args in ((x, y), (x[known], y[known])):
                guide = copy.deepcopy(trained)  # a backward pass moves q
                guide.warned.add(("rows", "y"))  # fewer rows, and no mini-batch
                pyro.set_rng_seed(0)
                for p in guide.parameters():
                    p.grad = None
                elbo = TraceQuadrature_ELBO() if loss is TraceQuadrature_ELBO else loss(num_particles=5)
                elbo.loss_and_grads(self.model, guide, *args)
                found = [p.grad.flatten() for p in guide.parameters() if p.grad is not None]  # not q's, which steps
                gradients.append(torch.cat(found))
            assert all(g.isfinite().all() for g in gradients)
            if loss is TraceQuadrature_ELBO:
                torch.testing.assert_close(*gradients)


def test_a_nan_gradient_never_reaches_the_parameters():
    x, y = data(num=30)
    # The hidden branch has no gradient.
    model = one_function(RBF, lambda f: dist.Normal(f, torch.where(f < 50.0, 0.2, (f - 60.0).sqrt())))
    guide = prepared(model, SVGP(6), x, y)
    before = [p.detach().clone() for p in guide.parameters()]
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), TraceQuadrature_ELBO())
    refused(r"gradient is not, at gps\.f", svi.step, x, y)
    assert all(torch.equal(a, b) and a.grad is None for a, b in zip(guide.parameters(), before))


class TestHandlers:
    @pytest.mark.parametrize("adapted", [False, True])
    def test_scale_around_the_guide_or_the_step(self, adapted):
        x, y = data(num=30)
        kernel = RBF
        if adapted:  # a program that vmap refuses before f: two runs
            module = pytest.importorskip("gpytorch").kernels.RBFKernel()
            kernel = kernels.from_gpytorch(module.requires_grad_(False))
        model = gaussian(kernel)
        guide = fitted(model, x, y, steps=5)
        elbo = TraceQuadrature_ELBO()
        whole = elbo.loss(model, guide, x, y)
        assert elbo.loss(model, pyro.poutine.scale(guide, 0.5), x, y) == pytest.approx(0.5 * whole)
        with pyro.poutine.scale(scale=0.5):
            assert elbo.loss(model, guide, x, y) == pytest.approx(0.5 * whole)

    def test_another_model_is_refused(self):
        x, y = data(num=30)
        model = gaussian(RBF)
        guide = fitted(model, x, y, steps=1)
        refused("runs the guide's own model", TraceQuadrature_ELBO().loss, pyro.poutine.scale(model, 0.5), guide, x, y)


class TestImportanceWeights:
    """Objectives that exponentiate densities need joint draws; Pyro's two-run samplers are refused."""

    def test_weights_and_renyi(self):
        x, y = data(num=20)
        model = gaussian(RBF)
        guide, _ = maximise(model, SVGP(20, trainable=False), x, y, iterations=60)
        evidence = dist.MultivariateNormal(torch.zeros(20), RBF(x) + 0.04 * torch.eye(20)).log_prob(y).item()
        renyi = RenyiELBO(alpha=0, num_particles=60)
        refused(r"weighs draws.*RenyiELBO.*guide.eval\(\)", renyi.loss, model, guide, x, y)
        guide.eval()
        assert -renyi.loss(model, guide, x, y) == pytest.approx(evidence, abs=0.25)
        weights = []
        for _ in range(60):
            guide(x, y)
            model_trace, guide_trace = guide.get_traces()
            weights.append(model_trace.log_prob_sum() - guide_trace.log_prob_sum())
        estimate = torch.stack(weights).logsumexp(0).item() - math.log(60)
        assert estimate == pytest.approx(evidence, abs=0.25)

    @pytest.mark.parametrize("training", [True, False])
    def test_samplers_that_replay_the_model_are_refused(self, training):
        x, y = data(num=20)
        model = gaussian(RBF)
        guide = prepared(model, SVGP(5), x, y)
        guide.train(training)
        refused("GP site 'f' has a density relative to the prior process only", Importance(model, guide, 5).run, x, y)


VANISHING = {
    "linear": kernels.Linear(1.0),
    "polynomial": kernels.Polynomial(2, 0.0),
    "product": kernels.Linear(1.0) * kernels.RBF(0.5),
}


# Each kernel in each family, each loss in each family and under each kernel but one.
@pytest.mark.quick("polynomial | product-0")
@pytest.mark.parametrize(("i", "family"), enumerate((SVGP, SGPR)))
@pytest.mark.parametrize(("j", "kernel"), enumerate(VANISHING))
def test_a_row_whose_prior_variance_is_0_trains(i, family, j, kernel):
    x = torch.linspace(-1, 1, 21)[:, None]
    x[10] = 0.0
    y = x[:, 0] + 0.1 * torch.randn(21)

    def model(x, y=None):
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        gaussian(scale * VANISHING[kernel], 0.1, jitter=1e-6)(x, y)

    guide = AutoSparseGP(model, family(x[2::4]))
    losses = train(model, guide, x, y, steps=2, loss=LOSSES[(i + j) % 3]())
    assert torch.tensor(losses).isfinite().all()
    assert all(parameter.isfinite().all() for parameter in guide.parameters())
    variance = guide.posterior(x)["f"].variance
    assert 0 < variance[10] < 1e-20 * variance.max()


@pytest.mark.parametrize("family", [SVGP(8), SGPR(8)], ids=["SVGP", "SGPR"])
def test_a_step_that_is_taken_back_leaves_nothing_behind(family):
    # Flags of factorisations are read at the end of a step, which is run anew where one failed; a first step's are not.
    x, y = data(bernoulli, num=30)

    def model(x, y, length):
        scale = pyro.sample("scale", dist.LogNormal(0.0, 0.5))
        one_function(scale * kernels.RBF(length), lambda f: dist.Bernoulli(logits=f), jitter=1e-16)(x, y)

    found = []
    for fresh in (True, False):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        guide, loss, losses = AutoSparseGP(model, family), TraceQuadrature_ELBO(4), []
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of more jitter
            for length in (0.3, 0.3, 1e4, 0.3, 0.3):
                loss = TraceQuadrature_ELBO(4) if fresh else loss
                losses.append(loss.loss_and_grads(model, guide, x, y, x.new_full((), length)))
        found.append((losses, [p.grad for p in guide.parameters()]))
    assert found[0][0] == pytest.approx(found[1][0], rel=1e-12)
    for one, other in zip(found[0][1], found[1][1]):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9)


# Normal likelihoods around f, whose expectation is taken in closed form, against quadrature.


class Other(dist.Normal):
    """The same density under a name of its own: it is integrated by quadrature."""


class Own(dist.TorchDistribution):
    """The same density and its expectation, as a user wrote them who says no ranges of parameters."""

    support, normal_parameter = dist.constraints.real, "loc"

    def __init__(self, loc, s):
        self.loc, self.s = torch.broadcast_tensors(loc, torch.as_tensor(s))
        super().__init__(self.loc.shape, validate_args=False)

    def log_prob(self, value):
        return dist.Normal(self.loc, self.s).log_prob(value)

    def expected_log_prob(self, value, variance):
        return self.log_prob(value) - variance / (2 * self.s**2)


class Renamed(Own):
    def __init__(self, loc, scale):  # kept by another name, so that nothing shows what else the density is made of
        super().__init__(loc, scale)


def plain(normal, x, y):
    f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5), x))
    noise = pyro.sample("noise", dist.LogNormal(-1.0, 0.1))
    with pyro.plate("data", 200, subsample=x):
        pyro.sample("y", normal(f, noise), obs=y)


def masked(normal, x, y):
    f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5), x, mean=0.3))
    with pyro.plate("data", len(x)), pyro.poutine.mask(mask=y > 0):
        pyro.sample("y", normal(f, 0.2 + x[:, 0]), obs=torch.where(y > 0, y, torch.nan))


def several_outputs(normal, x, y):
    f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5), x).expand([2]).to_event(1))
    noise = pyro.sample("noise", dist.LogNormal(torch.zeros(2), 0.1).to_event(1))
    pyro.sample("y", normal(f, noise[:, None]).to_event(2), obs=torch.stack([y, -y]))


def two_sites(normal, x, y):
    f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5), x))
    g = pyro.sample("g", GaussianProcess(kernels.RBF(0.8), x))
    with pyro.plate("data", len(x)):
        pyro.sample("y", normal(f, 0.3), obs=y)
        pyro.sample("z", normal(g, 0.4), obs=y.square())


def noise_by_f(normal, x, y):
    f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5), x))
    observed(normal(f, 0.3 + f.square()), y)


def noise_by_another(normal, x, y):
    f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5), x))
    g = pyro.sample("g", GaussianProcess(kernels.RBF(0.5), x))
    observed(normal(f, g.exp()), y)


def another_density(normal, x, y):
    f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5), x))
    with pyro.plate("data", len(x)):
        pyro.sample("y", normal(f, 0.3), obs=y)
        pyro.sample("z", dist.Poisson(f.exp()), obs=y.abs().round())


def shifted(normal, x, y):
    f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5), x))
    observed(normal(2 * f + 1, 0.3), y)


def bent(normal, x, y):
    f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5), x))
    observed(normal(torch.sin(2 * f), 0.3), y)


CASES = [plain, masked, several_outputs, two_sites, noise_by_f, noise_by_another, another_density, shifted, bent]


@pytest.mark.parametrize("model", CASES)
def test_closed_form_is_quadrature(model):
    x, y = data(num=25)

    def one(x, y):
        model(normal, x, y)

    normal, found = dist.Normal, []
    pyro.set_rng_seed(1)
    guide = prepared(one, SVGP(6, natural=False), x, y, independent=True)
    for kind in (dist.Normal, Own, Renamed, Other):
        normal = kind
        guide.zero_grad()
        pyro.set_rng_seed(2)
        loss = TraceQuadrature_ELBO(12).loss_and_grads(one, guide, x, y)
        found.append((loss, [None if p.grad is None else p.grad.clone() for p in guide.parameters()]))
    for one_loss, one_grads in found[:-1]:
        assert one_loss == pytest.approx(found[-1][0], rel=1e-12)
        for a, b in zip(one_grads, found[-1][1]):
            torch.testing.assert_close(a, b, rtol=1e-11, atol=1e-11)


def test_an_expectation_of_all_data_is_refused():
    class Sum(Own):
        def expected_log_prob(self, value, variance):
            return super().expected_log_prob(value, variance).sum()

    def model(x, y):
        observed(Sum(pyro.sample("f", GaussianProcess(RBF, x)), 0.3), y)

    refused(
        r"'y': Sum's expected_log_prob has the shape \(\), its log_prob \(25,\)",
        prepared,
        model,
        SVGP(6),
        *data(num=25),
    )


def test_an_expectation_that_no_variance_moves():
    class Affine(Own):
        def log_prob(self, value, variance=0.0):
            return 0.1 * value * self.loc

        expected_log_prob = log_prob

    guide = prepared(lambda x, y: plain(Affine, x, y), SVGP(6), *data(num=25))
    assert guide.check() == []


def test_replicates_are_no_nodes():
    """As many replicates, in a plate beside the rows', as nodes."""
    x, _ = data(num=8)
    y = torch.poisson((1 + torch.sin(6 * x[:, 0])).exp().expand(20, 8))

    def model(x, y):
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.3), x))
        with pyro.plate("replicates", len(y), dim=-2), pyro.plate("data", len(x), dim=-1):
            pyro.sample("y", dist.Poisson(f.exp()), obs=y)

    guide = prepared(model, SVGP(6), x, y)
    elbo = TraceQuadrature_ELBO()
    assert elbo.differentiable_loss(model, guide, x, y).item() == pytest.approx(elbo.loss(model, guide, x, y))


@pytest.mark.filterwarnings("ignore:the bound changes")
@pytest.mark.parametrize("shift", [0.0, 0.5])  # what is observed may move, too
@pytest.mark.parametrize("hides", [torch.detach, torch.zeros_like, lambda f: (f > 0).to(f)])
def test_what_the_graph_hides_is_mapped(hides, shift):
    x, y = data(num=8)

    def model(x, y):
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.3), x))
        observed(dist.StudentT(4.0, f, 0.2 + 0.8 * torch.sigmoid(hides(f))), y - shift * f)

    guide, elbo = prepared(model, SVGP(6), x, y), TraceQuadrature_ELBO()
    assert elbo.differentiable_loss(model, guide, x, y).item() == pytest.approx(elbo.loss(model, guide, x, y))


def _with_intercept(x):
    return pyro.sample("a", dist.Normal(0.0, 2.0)) + _function("f", x), 0.05


def _function(name, x):
    return pyro.sample(name, GaussianProcess(RBF, x))


LAPLACE = {  # the location and the scale
    "f": lambda x: (_function("f", x), 0.05),
    "affine": lambda x: (2 * _function("f", x) + x[:, 0], 0.05),
    "intercept": _with_intercept,
    "two functions": lambda x: (_function("f", x) + _function("g", x), 0.05),
    "two predictors": lambda x: (_function("f", x), (_function("g", x) - 3).exp()),
    "a drawn scale": lambda x: (_function("f", x), pyro.sample("scale", dist.LogNormal(-3.0, 0.1))),
}


@pytest.mark.quick("a drawn scale | f-SVGP | affine-SGPR | intercept-SVGP | two predictors-SGPR")
@pytest.mark.parametrize("family", [SVGP(6), SGPR(6)], ids=["SVGP", "SGPR"])
@pytest.mark.parametrize("kind", LAPLACE)
def test_nodes_meet_no_kink_of_laplaces_density(kind, family):
    """E[log p] is in closed form, so that the number of nodes does not matter."""
    x = torch.rand(12, 1)
    y = torch.sin(6 * x[:, 0]) + 0.05 * torch.randn(12)

    def model(x, y=None):
        loc, scale = LAPLACE[kind](x)
        return observed(dist.Laplace(loc, scale), y)

    guide, found = AutoSparseGP(model, family), []
    train(model, guide, x, y, steps=3, lr=1e-3)
    for num_nodes in (20, 21, 200):
        pyro.set_rng_seed(1)
        found.append(TraceQuadrature_ELBO(num_nodes).loss(model, guide, x, y))
    assert found == pytest.approx(found[:1] * 3, abs=1e-6)


def _of_three(x):
    return _function("f", x), (_function("g", x) - 3).exp() + (_function("h", x) - 3).exp()


@pytest.mark.parametrize("scale", [_of_three, LAPLACE["two predictors"]], ids=["a sum of two", "one"])
def test_a_density_is_known_at_each_value_of_other_functions(scale):
    """Laplace(2f + x, exp(g)) has a kink in f, and none once f is integrated at each node of g, in training, too."""
    x = torch.rand(12, 1)
    y = torch.sin(6 * x[:, 0]) + 0.05 * torch.randn(12)

    def model(x, y=None):
        f, spread = scale(x)
        return observed(dist.Laplace(2 * f + x[:, 0], spread), y)

    guide, found = AutoSparseGP(model, SVGP(6), independent=True), []
    train(model, guide, x, y, steps=3, lr=1e-3)
    for num_nodes in (20, 30):
        elbo = TraceQuadrature_ELBO(num_nodes)
        found += [elbo.loss(model, guide, x, y), elbo.differentiable_loss(model, guide, x, y).item()]
    with torch.no_grad():
        q = guide.posterior(x)
        # f over many small intervals, all others at nodes
        nodes, weights = map(torch.tensor, np.polynomial.hermite_e.hermegauss(20))
        t = torch.linspace(-9, 9, 20_001)
        mass = dist.Normal(0.0, 1.0).log_prob(t).softmax(0)
        at = {name: p.mean[:, None] + p.stddev[:, None] * nodes for name, p in q.items()}
        spread = (at["g"] - 3).exp()[..., None]
        spread = spread + (at["h"] - 3).exp()[:, None] if "h" in at else spread
        f = q["f"].mean[:, None] + q["f"].stddev[:, None] * t
        away = (y[:, None] - 2 * f - x).abs() @ mass
        share = weights / weights.sum()
        share = share[:, None] * share if "h" in at else share[:, None]
        dense = ((-away[:, None, None] / spread - (2 * spread).log()) * share).sum() - sum(p.kl for p in q.values())
    assert found == pytest.approx([-dense.item()] * 4, abs=1e-5)
