"""Inducing variables of other domains: a basis asks them for K_uu and K_fu, and nothing else changes."""

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_sparsegp import AutoSparseGP, ExpectationPropagation, GaussianProcess, TraceQuadrature_ELBO, bases, kernels
from pyro_sparsegp.families import (
    SGPR,
    SVGP,
    CollapsedOrthogonal,
    CoupledPrecision,
    MeanFieldAdditive,
    OrthogonalInducing,
    SparseEP,
)

from .models import gaussian, observed, prepared, refused, restored, train

KERNEL = 1.3 * kernels.Matern52(0.4)


class Averages(bases.InducingVariables):
    """u_m = (f(a_m) + f(b_m))/2."""

    def __init__(self, a: torch.Tensor, b: torch.Tensor) -> None:
        super().__init__()
        self.a, self.b = torch.nn.Parameter(a.clone()), torch.nn.Parameter(b.clone())

    @property
    def size(self) -> int:
        return len(self.a)

    def covariance(self, kernel):
        return (self.cross(kernel, self.a) + self.cross(kernel, self.b)) / 2

    def cross(self, kernel, x):
        return (kernel(x, self.a) + kernel(x, self.b)) / 2


@pytest.fixture
def data():
    torch.manual_seed(0)
    x = torch.linspace(0, 2, 40).double()[:, None]
    return x, torch.sin(3 * x[:, 0]) + 0.1 * torch.randn(40).double()


def model(x, y=None, size=None):
    noise = pyro.param("noise", torch.tensor(0.1).double(), constraint=dist.constraints.positive)
    f = pyro.sample("f", GaussianProcess(KERNEL, x))
    return observed(dist.Normal(f, noise), y, x, size)


def points(num, start=0.0, stop=2.0):
    return torch.linspace(start, stop, num).double()[:, None]


def loss_of(family, x, y):
    pyro.clear_param_store()
    guide = prepared(model, family, x, y)
    return guide, float(TraceQuadrature_ELBO(2).loss(model, guide, x, y))


def dense(functionals, x, y, groups=None):
    """The collapsed bound of q(u) from first principles: u = Tf(Z) for a matrix T, at noise sd 0.1."""
    weights, z = functionals
    covariance = weights @ KERNEL(z) @ weights.T
    cross = KERNEL(x, z) @ weights.T
    explained = cross @ torch.linalg.solve(covariance, cross.T)
    noise = 0.01
    exact = dist.MultivariateNormal(torch.zeros(len(x)).double(), explained + noise * torch.eye(len(x)).double())
    return exact.log_prob(y) - (KERNEL.diag(x) - explained.diagonal()).sum() / (2 * noise)


def averaging(num):
    return torch.cat([torch.eye(num), torch.eye(num)], 1).double() / 2


def test_user_functionals_give_the_dense_collapsed_bound(data):
    x, y = data
    a, b = points(7), points(7, 0.1, 1.7)
    _, loss = loss_of(SGPR(Averages(a, b)), x, y)
    assert -loss == pytest.approx(float(dense((averaging(7), torch.cat([a, b])), x, y)), rel=1e-5)


@pytest.mark.parametrize("order", ["functionals first", "values first"])
def test_nested_sets_of_different_domains(data, order):
    x, y = data
    a, b, z = points(5), points(5, 0.2, 1.5), points(4, 0.3, 1.9)
    u = Averages(a, b)
    sets = (u, z) if order == "functionals first" else (z, u)
    everything = torch.block_diag(averaging(5), torch.eye(4).double()), torch.cat([a, b, z])
    guide = prepared(model, OrthogonalInducing(*sets), x, y)
    q = guide.posterior(x)["f"]
    weights, support = everything
    covariance, cross = weights @ KERNEL(support) @ weights.T, KERNEL(x, support) @ weights.T
    phi = torch.cat(q.features, -1)
    assert torch.allclose(phi @ phi.T, cross @ torch.linalg.solve(covariance, cross.T), atol=1e-6)
    assert [block.shape[-1] for block in q.features] == [s.size if isinstance(s, Averages) else len(s) for s in sets]
    _, blockwise = loss_of(CollapsedOrthogonal(*sets), x, y)
    assert -blockwise <= float(dense(everything, x, y)) + 1e-6


def test_sets_whose_covariance_is_unknown_are_refused(data):
    x, y = data
    u = Averages(points(5), points(5))
    guide = AutoSparseGP(model, OrthogonalInducing(u, Averages(points(4), points(4))))
    refused(r"Averages with Averages is not known: of several sets, all but one", guide, x, y)


def test_each_guide_trains_a_copy_and_its_state_comes_back(data):
    x, y = data
    given = Averages(points(5), points(5, 0.1))
    family = SVGP(given)
    guide = AutoSparseGP(model, family)
    losses = train(model, guide, x, y, steps=10, lr=0.02, loss=TraceQuadrature_ELBO())
    assert losses[-1] < losses[0]
    moved = guide.gps.f.basis.variables_0
    assert not torch.equal(moved.a, given.a)
    assert torch.equal(given.a, points(5))
    again = restored(guide, model, family)
    assert torch.equal(again.gps.f.basis.variables_0.a, moved.a)
    assert torch.allclose(again.posterior(x)["f"].mean, guide.posterior(x)["f"].mean)
    with pytest.raises(ValueError, match=r"Averages\(5\)"):
        AutoSparseGP(model, SVGP(Averages(points(6), points(6)))).load_state_dict(guide.state_dict())


def test_paths_and_expectation_propagation_take_functionals(data):
    x, y = data
    guide = prepared(model, SGPR(Averages(points(8), points(8, 0.05, 1.9))), x, y)
    TraceQuadrature_ELBO(2).loss_and_grads(model, guide, x, y)
    q = guide.posterior(x)["f"]
    torch.manual_seed(1)
    drawn = q.paths(200)(x)
    assert ((drawn.mean(0) - q.mean).abs() < 5 * q.stddev / 200**0.5).all()
    assert torch.allclose(drawn.std(0), q.stddev, rtol=5 / 400**0.5)
    pyro.clear_param_store()
    guide = AutoSparseGP(model, SparseEP(Averages(points(8), points(8, 0.05, 1.9))))
    ExpectationPropagation(model, guide, pyro.optim.Adam({"lr": 0.01})).step(x, y)
    assert guide.posterior(x)["f"].variance.isfinite().all()


MATERN = (kernels.Matern12, kernels.Matern32, kernels.Matern52)


@pytest.mark.parametrize("matern", MATERN, ids=lambda k: k.__name__)
def test_fourier_coefficients_are_inner_products_of_the_rkhs(matern):
    # On a fine grid G, ⟨φ, φ'⟩ → φ_GᵀK_GG⁻¹φ'_G and cov(f(x), u) → k(x, G)K_GG⁻¹φ_G, also beyond the interval.
    kernel, u = 1.7 * matern(0.4), bases.FourierCoefficients(-0.5, 1.5, 5)
    grid = torch.linspace(-0.5, 1.5, 801).double()[:, None]
    x = torch.tensor([-1.2, -0.6, -0.5, 0.1, 0.9, 1.5, 1.7, 2.4]).double()[:, None]
    u.to(torch.float64)
    phi = u.cross(kernel, grid)
    weights = torch.cholesky_solve(phi, torch.linalg.cholesky(kernel(grid) + 1e-11 * torch.eye(801).double()))
    assert torch.allclose(phi.T @ weights, u.covariance(kernel), atol=5e-3)
    assert torch.allclose(kernel(x, grid) @ weights, u.cross(kernel, x), atol=5e-3)
    assert torch.allclose(u.covariance(kernel).diagonal(), torch.ones(11).double())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_fourier_coefficients_under_any_family(data, dtype):
    x, y = (t.to(dtype) for t in data)

    def additive(x, y=None):
        length = pyro.sample("length", dist.LogNormal(x.new_zeros(1), 0.3).to_event(1))
        f = pyro.sample("f", GaussianProcess(1.3 * kernels.Matern32(length)[0] + kernels.RBF(0.5)[1], x))
        return observed(dist.Normal(f, 0.1), y)

    x = torch.cat([x, x.flip(0)], 1)
    u = bases.FourierCoefficients(-0.3, 2.3, 10)
    for family in (CoupledPrecision([u, 6]), MeanFieldAdditive([u, 6])):
        pyro.clear_param_store()
        guide = AutoSparseGP(additive, family, point_estimates=True)
        losses = train(additive, guide, x, y, steps=10, lr=0.02, loss=TraceQuadrature_ELBO(2))
        assert losses[-1] < losses[0]
        assert guide.posterior(x)["f"].components[0].mean.dtype == dtype


def test_what_fourier_coefficients_are_not_for_is_named(data):
    x, y = data
    u = bases.FourierCoefficients(-0.3, 2.3, 10)
    refused("Matern12, Matern32 or Matern52 of one input", AutoSparseGP(gaussian(kernels.RBF(0.3)), SVGP(u)), x, y)
    refused("select one, kernel", AutoSparseGP(gaussian(kernels.Matern32(0.3)), SVGP(u)), torch.cat([x, x], 1), y)
    refused("low must be below high", bases.FourierCoefficients, 1.0, 1.0, 3)
    refused("at least 1, got 0", bases.FourierCoefficients, 0.0, 1.0, 0)


class TestWhatUsersWrite:
    def test_another_interval_is_another_family(self, data):
        x, y = data
        guide = prepared(gaussian(kernels.Matern32(0.3)), SVGP(bases.FourierCoefficients(-1.0, 3.0, 5)), x, y)
        other = AutoSparseGP(gaussian(kernels.Matern32(0.3)), SVGP(bases.FourierCoefficients(0.0, 3.0, 5)))
        refused(r"FourierCoefficients\(-1.0, 3.0, 5\)", lambda: other.load_state_dict(guide.state_dict()))

    def test_matrices_of_wrong_shape_are_named(self, data):
        x, y = data

        class Transposed(Averages):
            def cross(self, kernel, x):
                return super().cross(kernel, x).mT

        class Wrong(Averages):
            def covariance(self, kernel):
                return super().covariance(kernel)[:3]

        with pytest.raises(ValueError, match=r"Transposed.cross returned the shape \(5, 40\), expected \(..., 40, 5\)"):
            AutoSparseGP(model, SVGP(Transposed(points(5), points(5))))(x, y)
        with pytest.raises(ValueError, match=r"Wrong.covariance returned the shape \(3, 5\), expected \(..., 5, 5\)"):
            AutoSparseGP(model, SVGP(Wrong(points(5), points(5))))(x, y)
