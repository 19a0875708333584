"""Rows that arrive after training: absorbed in pieces they make the posterior of all."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI, Trace_ELBO

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import SGPR, SVGP, CoupledPrecision, MeanFieldAdditive, SparseEP

from .models import (
    data,
    gaussian,
    heteroscedastic,
    observed,
    one_function,
    prepared,
    refused,
    regression,
    restored,
    train,
)
from .test_natural import ADDITIVE, KERNEL, OPTIMA

PIECES = (slice(0, 20), slice(20, 35), slice(35, 60))
MORE = OPTIMA | {
    "independent blocks": (lambda z, **kw: MeanFieldAdditive([z[:, :1], z[:, 1:], None], **kw), None, ADDITIVE)
}


def svi_of(model, guide):
    return SVI(model, guide, pyro.optim.Adam({"lr": 0.02}), TraceQuadrature_ELBO(2))


def same_posterior(one, other, x, atol=1e-8):
    p, q = one.posterior(x)["f"], other.posterior(x)["f"]
    torch.testing.assert_close(p.mean, q.mean, atol=atol, rtol=0)
    torch.testing.assert_close(p.covariance_matrix, q.covariance_matrix, atol=atol, rtol=0)


@pytest.mark.parametrize("name", MORE)
def test_pieces_make_the_posterior_of_all_rows(name):
    """Against a step on all rows at once, and against the family whose q(w) is optimal."""
    x, y = data()
    natural, optimal, kernel = MORE[name]
    model = gaussian(kernel, mean=0.3)
    pieces = AutoSparseGP(model, natural(x[:12], trainable=False))
    for piece in PIECES:
        pieces.absorb(x[piece], y[piece])
    whole = AutoSparseGP(model, natural(x[:12], trainable=False))
    svi_of(model, whole).step(x, y)
    same_posterior(pieces, whole, x)
    if optimal is not None:
        same_posterior(pieces, prepared(model, optimal(x[:12], trainable=False), x, y), x)


def test_rows_are_added_to_what_mini_batches_taught():
    """Under hyperparameters that were learned: P = P₀ + ΦᵀΦ/σ², Pm = P₀m₀ + Φᵀ(y − μ)/σ², and nothing else moves."""
    x, y = data()
    guide = AutoSparseGP(regression, SVGP(8))
    svi = svi_of(regression, guide)
    for _ in range(5):
        for batch in (slice(0, 20), slice(20, 40)):
            svi.step(x[batch], y[batch], size=40)
    before = guide.posterior(x[40:])["f"]
    parameters = {name: p.detach().clone() for name, p in guide.named_parameters()}
    noise = guide.median(x, y)["noise"].item()
    guide.absorb(x[40:], y[40:])
    after = guide.posterior(x[40:])["f"]
    phi = before.features[0]
    p0, p1 = (torch.linalg.inv(q.coefficients.covariance_matrix) for q in (before, after))
    torch.testing.assert_close(p1, p0 + phi.mT @ phi / noise**2, atol=1e-6, rtol=1e-6)
    r0, r1 = p0 @ before.coefficients.loc[0], p1 @ after.coefficients.loc[0]
    torch.testing.assert_close(r1, r0 + phi.mT @ y[40:] / noise**2, atol=1e-6, rtol=1e-6)
    kept = {name: p for name, p in guide.named_parameters() if ".coefficients." not in name}
    assert all(torch.equal(p, parameters[name]) for name, p in kept.items())


def test_rows_are_added_to_what_plain_gradients_taught():
    (x, y), model = data(), gaussian(KERNEL, noise=0.2)
    guide = AutoSparseGP(model, SVGP(8))
    SVI(model, guide, pyro.optim.Adam({"lr": 0.02}), Trace_ELBO()).step(x[:40], y[:40])
    before = guide.posterior(x[40:])["f"]
    guide.absorb(x[40:], y[40:])
    after, phi = guide.posterior(x[40:])["f"], before.features[0]
    p0, p1 = (torch.linalg.inv(q.coefficients.covariance_matrix) for q in (before, after))
    assert torch.allclose(p1, p0 + phi.mT @ phi / 0.04, atol=1e-6, rtol=1e-6)


def test_several_outputs():
    x, y = data()
    y = torch.stack([y, -y, y.square()])

    def model(x, y=None):
        f = pyro.sample("f", GaussianProcess(KERNEL, x).expand([3]).to_event(1))
        with pyro.plate("outputs", 3, dim=-2), pyro.plate("data", len(x), dim=-1):
            return pyro.sample("y", dist.Normal(f, 0.2), obs=y)

    pieces, best = (AutoSparseGP(model, family(x[:12], trainable=False)) for family in (SVGP, SGPR))
    for piece in PIECES:
        pieces.absorb(x[piece], y[:, piece])
    best(x, y)
    same_posterior(pieces, best, x)


def test_other_likelihoods_have_the_old_sum_for_a_prior():
    """Against dense iterations for counts: E e^f = exp(m + v/2), λ = E e^f, the slope y − E e^f."""
    x, y = data()
    y = torch.poisson((1 + y).exp())
    model = one_function(KERNEL, lambda f: dist.Poisson(f.exp()))
    guide = prepared(model, SVGP(x[::5], trainable=False), x, y)
    z = guide.gps.f.basis.inputs[0]
    gram, pull = torch.zeros(12, 12), torch.zeros(12)
    root = torch.linalg.cholesky(KERNEL(z))
    for piece in PIECES:
        guide.absorb(x[piece], y[piece])
        phi = torch.linalg.solve_triangular(root, KERNEL(z, x[piece]), upper=False).mT
        rest = 1 - phi.square().sum(-1)
        precision, linear = torch.zeros(len(phi)), torch.zeros(len(phi))
        for _ in range(300):
            s = torch.linalg.inv(torch.eye(12) + gram + phi.mT @ (phi * precision[:, None]))
            m = phi @ s @ (pull + phi.mT @ linear)
            rate = (m + 0.5 * (rest + ((phi @ s) * phi).sum(-1))).exp()
            precision = 0.5 * precision + 0.5 * rate
            linear = 0.5 * linear + 0.5 * (y[piece] - rate + rate * m)
        gram, pull = gram + phi.mT @ (phi * precision[:, None]), pull + phi.mT @ linear
    q = guide.posterior(x)["f"].coefficients
    s = torch.linalg.inv(torch.eye(12) + gram)
    torch.testing.assert_close(q.covariance_matrix, s, atol=1e-5, rtol=1e-4)
    torch.testing.assert_close(q.loc[0], s @ pull, atol=1e-5, rtol=1e-4)


def test_two_functions_that_meet_settle_together():
    """All rows absorbed at once are the optimum that natural steps go to."""
    x, y = data()
    families = {"f": SVGP(x[:12], trainable=False, rate=0.5), "g": SVGP(x[:6], trainable=False, rate=0.5)}
    model = pyro.condition(heteroscedastic, {"scale": torch.tensor(1.0), "length": torch.ones(2)})

    guide, stepped = (AutoSparseGP(model, families, independent=True) for _ in range(2))
    guide.absorb(x, y)
    elbo = TraceQuadrature_ELBO(6)
    train(model, stepped, x, y, steps=20, lr=0.0, loss=elbo)
    assert abs(elbo.loss(model, guide, x, y) - elbo.loss(model, stepped, x, y)) < 0.01


def test_forgetting_scales_the_old_sums():
    x, y = data()
    model = gaussian(KERNEL)
    guides = [AutoSparseGP(model, SVGP(x[:12], trainable=False)) for _ in range(3)]
    for guide, forget in zip(guides, (0.0, 0.25, 1.0)):
        guide.absorb(x[:30], y[:30])
        before = guide.posterior(x)["f"].coefficients.covariance_matrix
        guide.absorb(x[30:], y[30:], forget=forget)
        phi = guide.posterior(x[30:])["f"].features[0]
        gram = torch.linalg.inv(before) - torch.eye(12)
        after = torch.linalg.inv(guide.posterior(x)["f"].coefficients.covariance_matrix)
        torch.testing.assert_close(after, torch.eye(12) + (1 - forget) * gram + phi.mT @ phi / 0.04)
    fresh = AutoSparseGP(model, SVGP(x[:12], trainable=False))
    fresh.absorb(x[30:], y[30:])
    same_posterior(guides[-1], fresh, x)


def test_a_step_after_rows_were_absorbed_goes_a_tenth_of_the_way_to_its_own_rows():
    x, y = data()
    model = gaussian(KERNEL)
    guide, alone = (AutoSparseGP(model, SVGP(x[:12], trainable=False)) for _ in range(2))
    guide.absorb(x[:30], y[:30])
    alone.absorb(x[30:], y[30:])
    old, new = (torch.linalg.inv(g.posterior(x)["f"].coefficients.covariance_matrix) for g in (guide, alone))
    with pytest.warns(UserWarning, match="others than the 30 before"):
        svi_of(model, guide).step(x[30:], y[30:])
    now = torch.linalg.inv(guide.posterior(x)["f"].coefficients.covariance_matrix)
    torch.testing.assert_close(now, 0.9 * old + 0.1 * new)


def test_a_plate_that_draws_its_rows_gives_all_and_a_loaded_guide_goes_on():
    x, y = data()

    def model(x, y=None):
        plate = pyro.plate("data", len(x), subsample_size=10)
        f = pyro.sample("f", GaussianProcess(KERNEL, x[plate.indices]))
        with plate:
            return pyro.sample("y", dist.Normal(f, 0.2), obs=None if y is None else y[plate.indices])

    guide = AutoSparseGP(model, SVGP(x[:8], trainable=False))
    whole = AutoSparseGP(gaussian(KERNEL), SVGP(x[:8], trainable=False))
    for g in (guide, whole):
        g.absorb(x[:30], y[:30])
    same_posterior(guide, whole, x)
    other = restored(whole, whole.model, SVGP(x[:8], trainable=False))
    for g in (whole, other):
        g.absorb(x[30:], y[30:])
    same_posterior(whole, other, x, atol=0)


def local(x, y=None):
    f = pyro.sample("f", GaussianProcess(KERNEL, x))
    with pyro.plate("data", len(x)):
        e = pyro.sample("e", dist.Normal(0.0, 1.0))
        return pyro.sample("y", dist.Normal(f + e, 0.2), obs=y)


def totals(x, y=None):
    f = pyro.sample("f", GaussianProcess(KERNEL, x))
    return pyro.sample("y", dist.Normal(f.sum(), 0.2), obs=None if y is None else y.sum())


def deep(x, y=None):
    g = pyro.sample("g", GaussianProcess(KERNEL, x))
    f = pyro.sample("f", GaussianProcess(kernels.RBF(1.0), g[:, None]))
    return observed(dist.Normal(f, 0.2), y)


@pytest.mark.filterwarnings("ignore:latent site .* has a value for each datum")
@pytest.mark.parametrize(
    ("model", "family", "words"),
    [
        (gaussian(KERNEL), SGPR(8), r"'f' has the family SGPR.*forget_data\(\); or take SVGP"),
        (gaussian(KERNEL), SVGP(8, natural=False), "family SVGP.* natural=True"),
        (gaussian(ADDITIVE), CoupledPrecision(4), "family CoupledPrecision.* CoupledCovariance with natural=True"),
        (local, SVGP(8), "'e' has a value for each row, .* Train on old and new rows"),
        (totals, SVGP(8), "'f' has rows to absorb, .* does not factorise.* Train on old and new rows together"),
        (deep, SVGP(8), "'g' has rows to absorb, .* enter another GP site"),
    ],
)
def test_what_is_no_sum_over_rows_is_refused(model, family, words):
    x, y = data()
    guide = prepared(model, family, x, y)
    refused(words, guide.absorb, x, y)


def test_expectation_propagation_and_a_joint_q_are_refused():
    x, y = data()
    refused("SparseEP", lambda: AutoSparseGP(gaussian(KERNEL), SparseEP(8)).absorb(x, y))
    guide = prepared(heteroscedastic, {("f", "g"): SVGP(8)}, x, y)
    refused(r"'f' and 'g' have one posterior", guide.absorb, x, y)

    def level(x, y):
        c = pyro.sample("c", dist.Normal(0.0, 1.0))
        f = pyro.sample("f", GaussianProcess(KERNEL, x))
        observed(dist.Normal(c + f, 0.1), y)

    def classes(x, y):
        f = pyro.sample("f", GaussianProcess(KERNEL, x).expand([2]).to_event(1))
        observed(dist.Categorical(logits=f.mT), y)

    refused("'c' has .* one posterior with f", prepared(level, SVGP(8), x, y).absorb, x, y)
    refused("'f' have one .*independent=True", prepared(classes, SVGP(8), x, y := 1.0 * (y > 0)).absorb, x, y)
    prepared(classes, SVGP(8), x, y, independent=True).absorb(x, y)


def test_bad_arguments_leave_the_guide_as_it_is():
    x, y = data()
    guide = AutoSparseGP(gaussian(KERNEL), SVGP(8))
    guide.absorb(x, y)
    before = guide.posterior(x)["f"].mean
    refused(r"share of what was learned, in \[0, 1\], got 2", guide.absorb, x, y, forget=2)
    refused(r"observes 60 of the 100 rows of plate 'data': .* size=len", guide.absorb, x, y, size=100)
    refused("no observations", guide.absorb, x)
    for bad in (y[:, None], y[:1]):
        refused("site 'y' observes data of shape", guide.absorb, x, bad)
    with pytest.raises(ValueError):
        guide.absorb(x, torch.full_like(y, torch.inf))
    assert torch.equal(guide.posterior(x)["f"].mean, before)
