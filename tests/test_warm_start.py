"""Where fit starts: the collapsed bound on a subset of rows, and where it does not apply."""

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, fit, kernels
from pyro_sparsegp.families import SGPR, SVGP, OrthogonalInducing, WeightSpace
from pyro_sparsegp.inference import fitting, warm_start
from pyro_sparsegp.inference.batches import Batch

from .models import bernoulli, data, gaussian, heteroscedastic


def wave(num, seed=0):
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(num, 1, generator=generator)
    return x, (12 * x[:, 0]).sin() + 0.1 * torch.randn(num, generator=generator)


def model(x, y=None, size=None):
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    length = pyro.sample("length", dist.LogNormal(0.0, 1.0))
    noise = pyro.sample("noise", dist.HalfNormal(1.0))
    f = pyro.sample("f", GaussianProcess(scale * kernels.RBF(length), x, mean=lambda x: 0.3 * x[:, 0]))
    with pyro.plate("data", size or len(x), subsample=x):
        return pyro.sample("y", dist.Normal(f, noise), obs=y)


@pytest.fixture
def hardly_trained(monkeypatch):
    monkeypatch.setattr(warm_start, "_STEPS", 10)


def warmed(model, family, x, y, size=None, **keywords):
    guide = AutoSparseGP(model, family, **keywords)
    with torch.no_grad():
        guide(x, y, size=size)
    takes = ["x", "y", "size"]
    return guide, warm_start.warm(model, guide, Batch((x, y), {}, None, len(x)), takes, size)


@pytest.mark.parametrize(
    "family", [SVGP(10), SVGP(10, whiten=False), OrthogonalInducing(6, 4)], ids=["whitened", "values", "nested"]
)
def test_q_starts_at_the_optimum_of_the_rows(family, monkeypatch):
    """With points for hyperparameters and all rows, the bound is that of SGPR on the union; nested blocks are near."""
    monkeypatch.setattr(warm_start, "_STEPS", 70)  # as many as this little data needs
    x, y = wave(300)
    guide, applied = warmed(model, family, x, y, point_estimates=True)
    assert applied
    elbo = TraceQuadrature_ELBO(2)
    found = -elbo.loss(model, guide, x, y)
    z = torch.cat(list(guide.gps.f.basis.inputs)).detach()
    best = AutoSparseGP(model, SGPR(z), point_estimates=True)
    best(x, y)
    for name, value in best.locs.named_parameters():
        value.data.copy_(getattr(guide.locs, name).detach())
    expected = -elbo.loss(model, best, x, y)
    if isinstance(family, OrthogonalInducing):
        assert expected - 30 < found < expected
    else:
        assert found == pytest.approx(expected, abs=1e-4)
    assert expected > 150  # it has learned
    length = float(guide.median(x, y)["length"].detach())
    assert 0.05 < length < 0.5


def test_rows_stand_for_all(hardly_trained):
    x, y = wave(100)
    one, _ = warmed(model, SVGP(8), x, y, size=100)
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    ten, _ = warmed(model, SVGP(8), x, y, size=1000)
    precision = [torch.linalg.inv(g.gps.f.coefficients().covariance_matrix) - torch.eye(8) for g in (one, ten)]
    assert float((precision[1].diagonal() / precision[0].diagonal()).median().detach()) > 5


def test_many_points_are_chosen_anew(monkeypatch, hardly_trained):
    monkeypatch.setattr(warm_start, "_POINTS", 6)
    x, y = wave(200)
    guide = AutoSparseGP(model, SVGP(12))
    guide(x, y)
    before = guide.gps.f.basis.inputs[0].detach().clone()
    assert warm_start.warm(model, guide, Batch((x, y), {}, None, 200), ["size"], None)
    after = guide.gps.f.basis.inputs[0].detach()
    assert after.shape == (12, 1)
    assert not torch.equal(before, after)
    assert len(torch.cat([after, x]).unique(dim=0)) == 200  # rows of x


def test_fixed_inputs_stay(hardly_trained):
    x, y = wave(200)
    z = torch.linspace(0, 1, 7)[:, None]
    guide, applied = warmed(model, SVGP(z, trainable=False), x, y)
    assert applied
    assert torch.equal(guide.gps.f.basis.inputs[0].sort(0).values, z)


def in_a_network(network):
    def model(x, y=None, size=None):
        f = pyro.sample("f", GaussianProcess(kernels.RBF(1.0), pyro.module("net", network)(x)))
        with pyro.plate("data", size or len(x), subsample=x):
            return pyro.sample("y", dist.Normal(f, 0.5), obs=y)

    return model


def self_subsampling(x, y=None, size=None):
    f = pyro.sample("f", GaussianProcess(kernels.RBF(0.3), x))
    with pyro.plate("data", 5000, subsample=x):
        return pyro.sample("y", dist.Normal(f, 0.5), obs=y)


def deep_basis(network):
    def model(x, y=None, size=None):
        f = pyro.sample("f", GaussianProcess(kernels.DeepBasis(pyro.module("net", network)), x))
        with pyro.plate("data", size or len(x), subsample=x):
            return pyro.sample("y", dist.Normal(f, 0.5), obs=y)

    return model


def tied(x, y=None, size=None):
    f = pyro.sample("f", GaussianProcess(kernels.RBF(0.3), x))
    return pyro.sample("y", dist.Normal(f + f.roll(1), 0.5).to_event(1), obs=y)


@pytest.mark.filterwarnings("ignore:The model couples values")
@pytest.mark.parametrize(
    ("model", "family"),
    [
        (bernoulli, SVGP(6)),
        (tied, SVGP(6)),
        (heteroscedastic, SVGP(6)),
        (gaussian(kernels.RBF(0.3)), SGPR(6)),
        (in_a_network(torch.nn.Linear(2, 2, dtype=torch.float64)), SVGP(6)),
        (deep_basis(torch.nn.Linear(2, 3, dtype=torch.float64)), WeightSpace()),
        (self_subsampling, SVGP(6)),
    ],
    ids=["Bernoulli", "rows that are tied", "two sites", "on sites", "network", "deep basis", "plate of its own size"],
)
def test_where_it_does_not_apply_nothing_changes(model, family):
    x, y = data(model, num=80)
    guide = AutoSparseGP(model, family)
    with torch.no_grad():
        guide(x, y)
    before = {key: value.clone() for key, value in guide.state_dict().items() if isinstance(value, torch.Tensor)}
    assert not warm_start.warm(model, guide, Batch((x, y), {}, None, 80), ["size"], None)
    for key, value in before.items():
        assert torch.equal(guide.state_dict()[key], value)


def test_more_numbers_than_the_rows_bear(hardly_trained):
    def wide(x, y=None):
        length = pyro.sample("length", dist.LogNormal(x.new_zeros(9), 1.0).to_event(1))
        f = pyro.sample("f", GaussianProcess(kernels.RBF(length), x))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(f, 0.3), obs=y)

    for num, applies in ((89, False), (90, True)):
        x = torch.rand(num, 9)
        guide = AutoSparseGP(wide, SVGP(5))
        guide(x, x[:, 0])
        assert warm_start.warm(wide, guide, Batch((x, x[:, 0]), {}, None, num), [], None) is applies


@pytest.mark.parametrize("rows", [100, 50], ids=["subset of all rows", "subset of half"])
def test_models_that_run_on_all_rows_alone(rows, monkeypatch, hardly_trained):
    monkeypatch.setattr(warm_start, "_ROWS", rows)
    x, y = wave(100)
    offset = torch.randn(100)

    def with_an_offset(x, y=None):
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.3), x))
        with pyro.plate("data", 100):
            return pyro.sample("y", dist.Normal(f + offset, 0.3), obs=y)

    guide = AutoSparseGP(with_an_offset, SVGP(6))
    guide(x, y)
    assert warm_start.warm(with_an_offset, guide, Batch((x, y + offset), {}, None, 100), [], None) is (rows == 100)


def test_fit_takes_it_where_asked(monkeypatch):
    monkeypatch.setattr(warm_start, "_STEPS", 40)
    x, y = wave(300)
    bounds = {}
    for on in (True, False):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        guide = AutoSparseGP(model, SVGP(10))
        fit(model, guide, (x, y), batch_size=100, steps=3, warm_start=on, progress=False)
        losses = torch.tensor([TraceQuadrature_ELBO(2).loss(model, guide, x, y) for _ in range(9)])
        bounds[on] = -losses.median()  # of draws of the hyperparameters
    assert bounds[True] > bounds[False] + 200  # nats


@pytest.mark.parametrize(
    ("num", "batch_size", "points", "taken"),
    [
        (100, None, 8, False),  # a step costs twice the subset's
        (400, None, 8, True),  # 400 · 8² and 50 · 8²
        (400, 100, 8, False),
        (400, 100, 12, True),  # 100 · 12² and 50 · 8²
    ],
)
def test_fit_takes_it_by_default_where_steps_are_dearer(num, batch_size, points, taken, monkeypatch):
    monkeypatch.setattr(warm_start, "_ROWS", 50)
    monkeypatch.setattr(warm_start, "_POINTS", 8)
    calls = []
    monkeypatch.setattr(fitting, "warm", lambda *arguments: calls.append(arguments))
    guide = AutoSparseGP(model, SVGP(points))
    fit(model, guide, wave(num), batch_size=batch_size, steps=1, progress=False)
    assert bool(calls) is taken
