"""Forward-mode derivatives, torch.func.jvp, jacfwd and hessian, of kernels and posteriors: against reverse mode."""

import pytest
import torch
from torch.func import grad, hessian, jacfwd, jacrev, jvp

from pyro_sparsegp import TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import SGPR, SVGP, ComputationAware, OrthogonalInducing
from pyro_sparsegp.numerics.linalg import cholesky, row_squares

from .models import gaussian, trained

KERNELS = {
    "RBF": lambda length: 1.5 * kernels.RBF(length),
    "Matern12": kernels.Matern12,
    "Matern32": kernels.Matern32,
    "Matern52": lambda length: 0.5 * kernels.Matern52(length) + kernels.White(0.1),
    "RationalQuadratic": lambda length: kernels.RationalQuadratic(length, 1.3),
    "Periodic": lambda length: kernels.Periodic(length[:1], period=1.2) * kernels.Linear(0.7),
}


def draws(*shapes):
    generator = torch.Generator().manual_seed(0)
    return [torch.rand(shape, generator=generator) for shape in shapes]


@pytest.mark.parametrize("name", KERNELS)
def test_kernels(name):
    x, z, length, dx, dz = draws((4, 2), (3, 2), (2,), (4, 2), (3, 2))

    def cross(x, z, length):
        return KERNELS[name](length + 0.5)(x, z)

    value, change = jvp(cross, (x, z, length), (dx, dz, length))
    slopes = jacrev(cross, (0, 1, 2))(x, z, length)
    expected = sum((slope * d).flatten(2).sum(-1) for slope, d in zip(slopes, (dx, dz, length)))
    torch.testing.assert_close(value, cross(x, z, length))
    torch.testing.assert_close(change, expected)
    for argument in range(3):
        torch.testing.assert_close(jacfwd(cross, argument)(x, z, length), slopes[argument])

    def total(x, length):
        k = KERNELS[name](length + 0.5)
        return (k(x, z).square().sum() + k(x).sin().sum()) + k.diag(x).sum()

    torch.testing.assert_close(jacfwd(total, (0, 1))(x, length), jacrev(total, (0, 1))(x, length))
    if name != "Matern12":  # which has a kink where rows of x meet
        found, expected = hessian(total, 1)(x, length), jacrev(jacrev(total, 1), 1)(x, length)
        torch.testing.assert_close(found, expected)
        assert expected.abs().max() > 0.01
        torch.testing.assert_close(jacrev(jacfwd(total, 1), 1)(x, length), expected)
        torch.testing.assert_close(hessian(total, 0)(x, length), jacrev(jacrev(total, 0), 0)(x, length))


FUSED = {
    "row_squares": (row_squares, [(4, 3)]),
    "cholesky": (lambda a: cholesky(a @ a.mT + torch.eye(3), 0.0, dtype=torch.float64), [(3, 3)]),
}


@pytest.mark.parametrize("name", FUSED)
def test_fused_operations(name):
    function, shapes = FUSED[name]
    where, directions = draws(*shapes), draws(*shapes, *shapes)[len(shapes) :]
    _, change = jvp(function, tuple(where), tuple(directions))
    size = 1e-5
    up, down = (function(*[w + sign * size * d for w, d in zip(where, directions)]) for sign in (1, -1))
    torch.testing.assert_close(change, (up - down) / (2 * size), atol=1e-8, rtol=1e-7)
    if name != "cholesky":  # whose way back is made in place
        every = tuple(range(len(where)))
        torch.testing.assert_close(jacfwd(function, every)(*where), jacrev(function, every)(*where))
        total = lambda *p: function(*p).square().sum()  # noqa: E731
        torch.testing.assert_close(hessian(total)(*where), jacrev(grad(total))(*where))


@pytest.mark.parametrize(
    "family",
    [SVGP(8), SVGP(8, natural=True), SGPR(8), OrthogonalInducing(4, 4), ComputationAware(6)],
    ids=["SVGP", "natural", "SGPR", "OrthogonalInducing", "ComputationAware"],
)
def test_posteriors(family):
    """Slopes and curvature of the posterior's mean and variance by its inputs, as Bayesian optimisation wants them."""
    x = torch.linspace(-1, 1, 20)[:, None]
    model = gaussian(1.3 * kernels.Matern52(0.4))
    guide = trained(model, family, x, torch.sin(4 * x[:, 0]), steps=5, lr=0.05, loss=TraceQuadrature_ELBO(2))
    new = torch.tensor([[0.13], [-0.37]])

    def moments(x):
        q = guide.posterior(x)["f"]
        return torch.stack([q.mean, q.variance])

    slopes = jacrev(moments)(new)
    torch.testing.assert_close(jacfwd(moments)(new), slopes)
    torch.testing.assert_close(jvp(moments, (new,), (torch.ones_like(new),))[1], slopes.sum((-1, -2)))
    size = 1e-4
    torch.testing.assert_close(
        (moments(new + size) - moments(new - size)) / (2 * size), slopes.sum((-1, -2)), atol=1e-4, rtol=1e-4
    )

    def bound(x):
        return (moments(x) * torch.tensor([[1.0], [2.0]])).sum()

    torch.testing.assert_close(hessian(bound)(new), jacrev(jacrev(bound))(new))
