"""Derivatives of a process: covariances by autograd and finite differences, posteriors by the dense joint Gaussian."""

import pyro.distributions as dist
import pytest
import torch

from pyro_sparsegp import AutoSparseGP, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import SGPR, SVGP, WeightSpace
from pyro_sparsegp.kernels import Derivative

from .models import gaussian, prepared, refused, trained

KERNELS = {
    "RBF": lambda l: 1.5 * kernels.RBF(l),
    "Matern32": lambda l: 0.7 * kernels.Matern32(l),
    "Matern52": kernels.Matern52,
    "RationalQuadratic": lambda l: kernels.RationalQuadratic(l, 1.3),
    "sum": lambda l: kernels.RBF(l[:1])[0] + kernels.Matern52(l[1:])[1] * kernels.Linear(0.7)[0],
    "Periodic": lambda l: kernels.Periodic(l[:1], period=1.2)[0] + kernels.Constant(2.0),
    "Polynomial": lambda l: kernels.Polynomial(2, 1.0),
}
LENGTH = torch.tensor([0.6, 0.9], dtype=torch.float64)


def augmented(num, seed=0):
    """Rows of values and of both derivatives, in no order."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(num, 2, generator=generator, dtype=torch.float64)
    return Derivative.at(x, torch.arange(num) % 3)


def entry(kernel, a, b):
    """∂_{x_i} ∂_{z_j} k(x, z) by reverse mode."""

    def k(x, z):
        return kernel(x[None], z[None])[0, 0]

    x, z, i, j = a[:-1], b[:-1], int(a[-1]), int(b[-1])
    by_z = (lambda x: torch.func.grad(k, 1)(x, z)[j - 1]) if j else (lambda x: k(x, z))
    return torch.func.grad(by_z)(x)[i - 1] if i else by_z(x)


@pytest.mark.parametrize("name", KERNELS)
def test_covariances_are_those_of_reverse_mode(name):
    kernel = KERNELS[name](LENGTH)
    x, z = augmented(7), augmented(5, seed=1)
    expected = torch.stack([torch.stack([entry(kernel, a, b) for b in z]) for a in x])
    torch.testing.assert_close(Derivative(kernel)(x, z), expected)


@pytest.mark.parametrize("name", ["RationalQuadratic", "RBF", "Matern52"])
def test_coincident_points_whose_distance_rounds_below_zero(name):
    """The slope's variance is the same at all of them."""
    x = Derivative.at(10 * torch.rand(200, 2), 1)
    found = Derivative(KERNELS[name](LENGTH))(x, x.clone()).diagonal()
    torch.testing.assert_close(found, found.median().expand(200), atol=1e-6, rtol=1e-6)


def test_gradients_by_hyperparameters_and_inputs():
    x = augmented(4)

    def total(length, inner):
        inputs = torch.cat([inner, x[:, 2:]], -1)
        k = Derivative(kernels.Matern52(length))
        return (k(inputs, inputs[:3]).square()).sum() + k(inputs).sin().sum() + k.diag(inputs).sum()

    length, inner = LENGTH.clone().requires_grad_(), x[:, :2].clone().requires_grad_()
    assert torch.autograd.gradcheck(total, (length, inner), atol=1e-4, fast_mode=True)


def test_several_outputs_and_diagonal_terms():
    length = torch.tensor([[0.5, 0.6], [0.9, 0.8], [1.0, 1.5]], dtype=torch.float64)
    x = augmented(6)
    k = Derivative(kernels.RBF(length))
    assert k.batch_shape == (3,)
    for p in range(3):
        torch.testing.assert_close(k(x)[p], Derivative(kernels.RBF(length[p]))(x))
        torch.testing.assert_close(k.diag(x)[p], Derivative(kernels.RBF(length[p])).diag(x))
    apart = torch.stack([x, x.flip(0), x.roll(1, 0)])  # each output at inputs of its own
    torch.testing.assert_close(k.diag(apart), k(apart).diagonal(dim1=-2, dim2=-1))
    noisy = Derivative(kernels.RBF(0.5) + kernels.White(0.3))
    plain = Derivative(kernels.RBF(0.5))
    extra = torch.where(x[:, -1] == 0, 0.3, 0.0)
    torch.testing.assert_close(noisy(x) - plain(x), extra.diag())
    torch.testing.assert_close(noisy.diag(x) - plain.diag(x), extra)


NOISE = 0.05


def model_of(kernel, mean=None):
    return gaussian(Derivative(kernel), NOISE, mean)


def observed():
    """sin(5x₁) + x₂ and its derivatives, noisy."""
    x = augmented(21)
    u, j = x[:, :2], x[:, -1]
    f = torch.where(j == 0, torch.sin(5 * u[:, 0]) + u[:, 1], torch.where(j == 1, 5 * torch.cos(5 * u[:, 0]), 1.0))
    return x, f + NOISE * torch.randn(21)


def test_the_posterior_is_the_joint_gaussians():
    """With as many inducing variables as rows, of values and of slopes: mean, variance and evidence are exact."""
    x, y = observed()
    kernel = kernels.RBF(LENGTH)

    def line(x):
        return 0.5 + 2.0 * x[..., 0]

    model = model_of(kernel, Derivative.of(line))
    mean = torch.where(x[:, -1] == 0, line(x[:, :2]), torch.where(x[:, -1] == 1, 2.0, 0.0))
    guide = AutoSparseGP(model, SGPR(x, trainable=False))
    loss = TraceQuadrature_ELBO(2).loss(model, guide, x, y)
    k = torch.stack([torch.stack([entry(kernel, a, b) for b in x]) for a in x])
    noisy = k + NOISE**2 * torch.eye(21)
    assert abs(loss + dist.MultivariateNormal(mean, noisy).log_prob(y)) < 1e-4
    new = augmented(6, seed=3)
    cross = torch.stack([torch.stack([entry(kernel, a, b) for b in x]) for a in new])
    q = guide.posterior(new)["f"]
    expected = torch.where(new[:, -1] == 0, line(new[:, :2]), torch.where(new[:, -1] == 1, 2.0, 0.0))
    torch.testing.assert_close(q.mean, expected + cross @ torch.linalg.solve(noisy, y - mean), atol=1e-4, rtol=0)
    own = torch.stack([entry(kernel, a, a) for a in new])
    reduced = own - (cross @ torch.linalg.solve(noisy, cross.mT)).diagonal()
    torch.testing.assert_close(q.variance, reduced, atol=1e-4, rtol=1e-4)


def test_slopes_of_the_posterior_are_its_derivatives():
    x, y = observed()
    model = model_of(kernels.Matern52(LENGTH))
    guide = trained(model, SVGP(12), x, y, steps=5)
    at = torch.rand(5, 2, requires_grad=True)
    mean = guide.posterior(Derivative.at(at))["f"].mean
    slopes = torch.autograd.grad(mean.sum(), at)[0]
    for j in (1, 2):
        q = guide.posterior(Derivative.at(at.detach(), j))["f"]
        torch.testing.assert_close(q.mean, slopes[:, j - 1])
    codes = next(z[:, -1] for z in guide.gps.f.basis.parameters() if z.shape == (12, 3))
    assert torch.equal(codes, codes.round())  # of inducing variables: they are learned, what they are of stays


def test_paths_have_their_slopes():
    x, y = observed()
    guide = prepared(model_of(kernels.RBF(LENGTH)), SVGP(12), x, y)
    path = guide.posterior(x)["f"].paths(3)
    at = torch.rand(4, 2, requires_grad=True)
    slope = torch.autograd.grad(path(Derivative.at(at))[1].sum(), at)[0]
    torch.testing.assert_close(path(Derivative.at(at.detach(), 2))[1], slope[:, 1])


def test_finite_features():
    x, y = observed()
    kernel = Derivative(kernels.Polynomial(2, 1.0))
    phi = kernel.features(x)
    torch.testing.assert_close(phi @ phi.mT, kernel(x))
    prepared(model_of(kernels.Polynomial(2, 1.0)), WeightSpace(), x, y)


def test_bad_arguments():
    refused(r"Derivative's kernel must be a kernel .*, got int", Derivative, 3)
    refused(r"j must be 0 \(values\) or a column, 1 to 2, got 3", Derivative.at, torch.rand(4, 2), 3)
    refused(r"Derivative.at's x is \(..., N, D\), got shape \(4,\).*x\[:, None\]", Derivative.at, torch.rand(4))
    x = Derivative.at(torch.rand(8, 2), torch.full((8,), 2.5))
    with pytest.raises(ValueError, match=r"GP site 'f': j in the last column .* from 0 to 2, got \[2.5\]; 0 is"):
        AutoSparseGP(model_of(kernels.RBF(0.5)), SVGP(4))(x, torch.zeros(8))


def test_derivatives_and_outputs_that_do_not_exist_are_no_certainties():
    refused("Matern12's functions have no derivative", Derivative, 2.0 * kernels.RBF(0.3) + kernels.Matern12(0.5)[0])
    x = torch.tensor([[0.1, 0.0], [0.2, 1.0], [0.3, 2.0], [0.4, 0.5]])
    found = Derivative(kernels.RBF(0.4)).diag(x)
    assert found.isnan().tolist() == [False, False, True, True]
    outputs = kernels.Coregionalisation(torch.ones(2, 1))
    assert outputs.diag(torch.tensor([[0.0], [1.0], [2.0], [0.5]])).isnan().tolist() == [False, False, True, True]
