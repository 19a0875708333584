"""One contract over every family, model, kernel and dtype."""

import itertools

import pyro
import pytest
import torch
from torch.distributions.constraints import positive

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.bases.initial import pivots
from pyro_sparsegp.families import (
    SVGP,
    CoupledPrecision,
    FreeFormFamily,
    MeanFieldAdditive,
    OrthogonalInducing,
    SiteFamily,
)
from pyro_sparsegp.gaussians.steps import steppers

from . import models
from .models import (
    FAMILIES,
    additive,
    bernoulli,
    data,
    gaussian,
    heteroscedastic,
    interaction,
    observed,
    poisson,
    prepared,
    product,
    refused,
    regression,
    train,
    trained,
)

MODELS = {m.__name__: m for m in (regression, bernoulli, poisson, heteroscedastic)}
KERNELS = {"additive": additive, "product": product, "interaction": interaction}
DTYPES = (torch.float64, torch.float32)


def _quick():
    """In the place of a product each family once, and these pairs: each likelihood with each kernel and in each dtype,
    each kernel in each dtype. The default dtype is the other one.
    """
    for i, family in enumerate(FAMILIES):
        yield family, list(MODELS)[i % 3], list(KERNELS)[i // 3 % 3], DTYPES[i % 2]
    for i, family in enumerate(("SVGP", "SGPR", "ComputationAwareSparse")):  # of each way: two processes take long
        yield family, "heteroscedastic", list(KERNELS)[i % 3], DTYPES[i // 2]


def _case(family, model, kernel, dtype, steps, marks=()):
    name = f"{family}-{model}-{kernel}-{str(dtype)[6:]}-{steps}"
    return pytest.param(FAMILIES[family], MODELS[model], KERNELS[kernel], dtype, steps, id=name, marks=marks)


CASES = [
    *(_case(*case, 4) for case in _quick()),
    *(_case(f, m, "additive", d, 200, pytest.mark.slow) for f in FAMILIES for m in MODELS for d in DTYPES),
]


def test_quick_cases_have_the_pairs():
    quick = list(_quick())
    assert {f for f, *_ in quick} == set(FAMILIES)
    assert {(m, k) for _, m, k, _ in quick} == set(itertools.product(MODELS, KERNELS))
    assert {(m, d) for _, m, _, d in quick} == set(itertools.product(MODELS, DTYPES))
    assert {(k, d) for _, _, k, d in quick} == set(itertools.product(KERNELS, DTYPES))


@pytest.mark.parametrize(("family", "model", "kernel", "dtype", "steps"), CASES)
def test_contract(family, model, kernel, dtype, steps, device, monkeypatch):
    # Everything must follow the data, not the default.
    torch.set_default_dtype(torch.float32 if dtype == torch.float64 else torch.float64)
    monkeypatch.setattr(models, "additive", kernel)
    x, y = data(model, 60 if steps > 4 else 16 if model is heteroscedastic else 40, dtype=dtype, device=device)
    guide = AutoSparseGP(model, family, independent=True)
    sites = ["f", "g"] if model is heteroscedastic else ["f"]

    # The mean starts at the prior's; the variance at what the inputs could leave of the prior's, if it is free.
    guide(x, y)
    start = guide.posterior(x)
    assert sorted(start) == sites
    if not isinstance(family, SiteFamily):
        for q in start.values():
            share = q.variance / q.process.variance
            torch.testing.assert_close(q.mean, q.process.mean)
            if isinstance(family, FreeFormFamily):
                assert (share < 1 + 1e-4).all()
                assert 0 < share.min() < 0.9
                assert 0.1 < q.kl < 50
            else:
                torch.testing.assert_close(share, torch.ones_like(share), rtol=1e-4, atol=0)
                assert abs(q.kl) < 1e-5
        torch.testing.assert_close(q.mean, q.process.mean, rtol=1e-4, atol=1e-4)

    # It trains: every parameter gets a gradient, but those that step naturally; nothing becomes NaN, the bound rises.
    natural = {id(p) for module in steppers(guide) for p in module.parameters()}
    seen = {name: 0.0 for name, p in guide.named_parameters() if id(p) not in natural}

    def watch(name):
        def keep(gradient):
            seen[name] = seen[name] + gradient.abs().sum()

        return keep

    def loss():  # of the same draws of the hyperparameters, whenever it is asked
        with torch.random.fork_rng():
            torch.manual_seed(3)
            return TraceQuadrature_ELBO(10).loss(model, guide, x, y)

    before = loss()
    hooks = [p.register_hook(watch(name)) for name, p in guide.named_parameters() if name in seen]
    losses = train(model, guide, x, y, steps=steps, lr=0.05 if steps < 100 else 0.02)
    assert torch.tensor(losses).isfinite().all()
    assert loss() < before
    assert all(total > 0 for total in seen.values()), [name for name, total in seen.items() if not total > 0]
    assert all(p.isfinite().all() and p.dtype == dtype and p.device == x.device for p in guide.parameters())
    for hook in hooks:
        hook.remove()

    # Shapes, the divergence, and marginals, joint covariance and components that agree.
    new = data(model, 7, dtype, device, seed=2)[0]
    tight = {"rtol": 1e-6, "atol": 1e-7} if dtype == torch.float64 else {"rtol": 2e-3, "atol": 2e-3}
    for name, q in guide.posterior(new).items():
        assert q.mean.shape == q.variance.shape == (7,)
        assert q.covariance_matrix.shape == (7, 7)
        assert q.kl.shape == ()
        assert q.kl > 0
        assert (q.variance > 0).all()
        assert q.mean.dtype == dtype
        torch.testing.assert_close(q.covariance_matrix.diagonal(), q.variance, **tight)
        assert len(q.components) == len(q.process.kernel.terms)
        torch.testing.assert_close(sum(part.mean for part in q.components) + q.process.mean, q.mean, **tight)
        assert q.paths(3, 64)(new).shape == (3, 7)
        assert name in repr(q)
    draws = guide(new)
    assert draws["f"].shape == draws["y"].shape == (7,)
    guide.eval()
    assert guide(new)["f"].shape == (7,)
    guide.train()

    # Save and load into a freshly made guide, without a dummy call.
    other = AutoSparseGP(model, family, independent=True)
    state = guide.state_dict()
    assert [key for key, value in state.items() if isinstance(value, torch.Tensor) and not value.is_contiguous()] == []
    other.load_state_dict(state)  # in another order of memory products would round otherwise
    found = guide.posterior(new)
    for name, q in other.posterior(new).items():
        # A GPU adds up by atomics, in any order: there the last bits may differ.
        few = {"rtol": 0.0, "atol": 64 * torch.finfo(dtype).eps if device.type == "cuda" else 0.0}
        for one in ("mean", "covariance_matrix"):
            torch.testing.assert_close(getattr(q, one), getattr(found[name], one), **few)
    assert type(family).__name__ in repr(family)


@pytest.mark.quick("grid-family0 | pivots-family1 | kmeans-family0 | greedy-family1 | <lambda>-family2")
@pytest.mark.parametrize("family", [SVGP(12), OrthogonalInducing(6, 6), MeanFieldAdditive(6)])
@pytest.mark.parametrize("init", ["pivots", "greedy", "kmeans", "grid", lambda kernel, x, num: x[:num]])
def test_initial_inducing_inputs(family, init):
    family = type(family)(**{**vars(family), "init": init})
    x, y = data()
    guide = prepared(regression, family, x, y, independent=True)
    for name, value in guide.named_parameters():
        if "inputs" in name:
            assert value.isfinite().all()
            assert len(value.unique(dim=0)) == len(value)
            if init in ("pivots", "greedy"):  # rows of x, in the columns that the term reads
                rows = x if value.shape[-1] == 2 else x[:, [0]] if "term_0" in name else x[:, [1]]
                assert all((row == rows).all(-1).any() for row in value)


def test_greedy_variance_is_the_pivoted_cholesky():
    kernel = additive(torch.tensor(1.0), torch.tensor([0.3, 0.4]))
    x = torch.rand(40, 2)
    chosen = pivots(kernel, x, 10)
    for m in range(1, 10):  # each point is where the conditional variance given the earlier ones is largest
        cross = kernel(x, chosen[:m])
        variance = kernel.diag(x) - (cross @ kernel(chosen[:m]).inverse() * cross).sum(-1)
        assert torch.equal(x[variance.argmax()], chosen[m])


def test_random_pivots_are_drawn_in_proportion_to_the_variance_that_is_left():
    kernel = additive(torch.tensor(1.0), torch.tensor([0.3, 0.4]))
    x, num = torch.tensor([[0.0, 0.0], [0.1, 0.1], [0.2, 0.0], [0.9, 0.9]]), 400
    expected, found = torch.zeros(4, 4), torch.zeros(4, 4)
    for i in range(4):
        cross = kernel(x, x[[i]])
        left = (kernel.diag(x) - (cross.square() / kernel.diag(x[[i]]))[:, 0]).clamp(min=0)
        expected[i] = kernel.diag(x)[i] / kernel.diag(x).sum() * left / left.sum()
    for _ in range(num):
        i, j = ((x == row).all(-1).nonzero()[0, 0] for row in pivots(kernel, x, 2, at_random=True))
        found[i, j] += 1 / num
    assert expected.max() > 0.15  # they are not all alike
    torch.testing.assert_close(found, expected, rtol=0, atol=4 * (0.15 / num) ** 0.5)


def test_random_pivots_are_rows_of_which_none_comes_twice():
    x = torch.rand(150, 2)
    for length in (0.1, 10.0):  # the variance is used up after a few
        chosen = pivots(kernels.RBF(torch.tensor(length)), x, 120, at_random=True)
        assert len(chosen.unique(dim=0)) == 120
        assert (chosen[:, None] == x).all(-1).any(-1).all()


def test_pivots_are_the_default_among_many_rows(monkeypatch):
    from pyro_sparsegp.bases import initial

    asked = []
    for name in ("greedy", "pivots"):
        way = initial._NAMED[name]
        monkeypatch.setitem(initial._NAMED, name, lambda *args, way=way, name=name: asked.append(name) or way(*args))
    for num in (1024, 1025):
        AutoSparseGP(gaussian(kernels.RBF(0.3)), SVGP(4), independent=True)(torch.rand(num, 1), torch.rand(num))
    assert asked == ["greedy", "pivots"]


def in_order(z):
    """Rows in the order of their first column."""
    return z[z[:, 0].argsort()]


def test_fixed_and_given_inducing_inputs():
    x, y = data()
    z = torch.rand(5, 2)
    guide = trained(regression, OrthogonalInducing(z, [3, z + 0.1], trainable=False), x, y, steps=3, independent=True)
    inputs = guide.gps.f.basis.inputs
    assert [len(part) for part in inputs] == [5, 3, 5]
    assert torch.equal(in_order(inputs[0]), in_order(z))
    assert torch.equal(in_order(inputs[2]), in_order(z + 0.1))
    assert not any("inputs" in name for name, _ in guide.named_parameters())
    assert torch.equal(guide.state_dict()["gps.f.basis.inputs_0"], inputs[0])


@pytest.mark.parametrize("trainable", [True, False])
def test_grids_of_terms(trainable):
    """One for each term, in its own columns: regular, or the values of a column that has few."""
    x = torch.rand(200, 4)
    x[:, 2] = torch.randint(0, 3, (200,)).double()
    smooth = kernels.RBF(0.5)
    kernel = (
        smooth[1] + smooth[0] * smooth[3] + kernels.Constant(1.0) + kernels.Categorical(3)[2] * smooth[0] + smooth[2]
    )
    family = CoupledPrecision([7, 30, None, 32, 9], init="grid", trainable=trainable)
    basis = family.build(GaussianProcess(kernel, x), "f").basis
    assert basis.sizes == (7, 30, 1, 30, 3)
    assert len(list(basis.parameters())) == (4 if trainable else 0)
    low, high = x.amin(0), x.amax(0)
    torch.testing.assert_close(in_order(basis.term_0.inputs[0])[:, 0], torch.linspace(low[1], high[1], 7))
    pair = basis.term_1.inputs[0]
    assert [len(pair[:, i].unique()) for i in range(2)] == [5, 6]
    torch.testing.assert_close(pair.amin(0), low[[0, 3]])
    torch.testing.assert_close(pair.amax(0), high[[0, 3]])
    by_level = basis.term_3.inputs[0]  # its columns are 0 and 2, in order
    assert by_level[:, 1].unique().tolist() == [0, 1, 2]
    assert len(by_level[:, 0].unique()) == 10
    assert in_order(basis.term_4.inputs[0])[:, 0].tolist() == [0, 1, 2]
    assert SVGP(30, init="grid").build(GaussianProcess(smooth, x[:, :2]), "f").basis.sizes == (30,)
    assert SVGP(1, init="grid").build(GaussianProcess(smooth, x[:, :1]), "f").basis.sizes == (1,)
    refused(r"one or two columns, .* reads 3", SVGP(30, init="grid").build, GaussianProcess(smooth, x[:, :3]), "f")


def test_additive_inputs_a_term():
    x, y = data()
    x[:, 1] = (4 * x[:, 1]).round()  # five distinct values: no more points than that
    z = torch.linspace(0, 1, 4)[:, None]
    guide = prepared(regression, MeanFieldAdditive([z, 9, None, None]), x, y, independent=True)
    assert torch.equal(in_order(guide.gps.f.basis.term_0.inputs[0]), z)
    assert guide.gps.f.basis.term_1.inputs[0].shape == (5, 1)
    assert guide.gps.f.basis.sizes == (4, 5, 2, 1)


@pytest.mark.parametrize(
    ("family", "message"),
    [
        (SVGP(61), r"site 'f' asks for 61 inducing points.*60 distinct"),
        (OrthogonalInducing(40, 30), r"site 'f' asks for 70 inducing points"),
        (SVGP(0), "inducing of site 'f' is a tensor of inputs or their number, .* whole number of at least 1, got 0"),
        (SVGP(2.5), "inducing of site 'f' is a tensor .* whole number of at least 1, got 2.5"),
        (SVGP(torch.rand(4, 3)), r"inducing inputs of site 'f' must be a tensor \(M, 2\), got \(4, 3\)"),
        (SVGP(torch.full((4, 2), torch.nan)), "contain NaN"),
        (SVGP(4, init="best"), r"init must be one of \['greedy', 'grid', 'kmeans', 'pivots'\]"),
        (SVGP(4, init=lambda kernel, x, num: x), r"init returned inducing inputs of shape \(60, 2\)"),
        (MeanFieldAdditive([4, 4]), r"lists 2 entries, the kernel of site 'f' has 4 terms"),
        (MeanFieldAdditive([4, None, None, None]), "no entry for term 1 of site 'f'"),
    ],
)
def test_bad_families(family, message):
    x, y = data()
    guide = AutoSparseGP(regression, family, independent=True)
    refused(message, guide, x, y)
    assert guide.structure is None  # nothing half-made is left behind
    assert not list(guide.parameters())


def test_bad_precision_arguments():
    refused("base must be", CoupledPrecision, 4, base="full")
    refused("rank must be", CoupledPrecision, 4, rank=0)


@pytest.mark.slow  # quick: test_contract
def test_matern_1024_in_float32_trains():
    """A 1024-point Matern-3/2 basis in float32 on 8-dimensional uniform inputs."""
    torch.set_default_dtype(torch.float32)
    x = torch.rand(2048, 8)
    y = torch.sin(3 * x.sum(-1)) + 0.1 * torch.randn(len(x))

    def model(x, y=None, size=None):
        scale, noise = (pyro.param(name, torch.tensor(v), constraint=positive) for name, v in (("s", 1.0), ("n", 0.5)))
        length = pyro.param("length", 0.5 * torch.ones(8), constraint=positive)
        f = pyro.sample("f", GaussianProcess(scale * kernels.Matern32(length), x))
        observed(pyro.distributions.Normal(f, noise), y, x, size)

    guide = prepared(model, SVGP(x[:1024].clone()), x, y, independent=True)
    svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), TraceQuadrature_ELBO(2))
    start, losses = svi.evaluate_loss(x, y), []
    for _ in range(2):
        batch = torch.randint(0, len(x), (256,))
        losses.append(svi.step(x[batch], y[batch], size=len(x)))
    assert torch.tensor(losses).isfinite().all()
    assert svi.evaluate_loss(x, y) < start
