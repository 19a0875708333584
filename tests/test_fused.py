"""What a step is made of, large enough that it goes by blocks, against plain operations in float64."""

import pytest
import torch
from torch.func import jacrev, jvp

from pyro_sparsegp.gaussians.anchors import FromPrecision
from pyro_sparsegp.gaussians.base import Stack
from pyro_sparsegp.gaussians.factors import CovarianceFactor, DenseFactor
from pyro_sparsegp.numerics import linalg

SIZES = pytest.mark.parametrize("size", [5, 300])


def lower(size):
    return (torch.randn(size, size) / size**0.5).tril(-1) + 0.3 * torch.rand(size).add(1).diag()


def close(found, expected):
    torch.testing.assert_close(found, expected, rtol=1e-12, atol=1e-12 * float(expected.detach().abs().max()))


def gradients(value, leaves):
    """By the leaves, of a sum with weights that are the same at each call."""
    generator = torch.Generator().manual_seed(1)
    parts = value if isinstance(value, tuple) else (value,)
    total = sum((part * torch.randn(part.shape, generator=generator)).sum() for part in parts)
    return torch.autograd.grad(total, leaves, create_graph=True)


@SIZES
def test_products_by_blocks(size):
    a, b = torch.randn(7, size), torch.rand(7)
    close(linalg.tril_of_product(a, 2 * a).tril(), (2 * a.mT @ a).tril())
    close(linalg.gram(a, a * b[:, None]), a.mT @ torch.diag(b) @ a)


@pytest.mark.parametrize("size", [300, 700])
def test_a_matrix_without_a_factor_has_a_flag(size):
    for place in (0, size - 1):
        assert linalg.factorised(torch.eye(size).index_fill(0, torch.tensor(place), 0.0))[1] != 0
        assert linalg.factorised(torch.eye(size).index_fill(0, torch.tensor(place), torch.nan))[1] != 0


@SIZES
def test_whitening_is_that_of_the_factor(size):
    root, cross = lower(size).requires_grad_(), torch.randn(4, size, requires_grad=True)

    def found(root, cross):
        whitened = linalg.whitening(root @ root.mT, 0.0)
        return whitened(cross), whitened.factor

    def expected(root, cross):
        factor = torch.linalg.cholesky(root @ root.mT)
        return torch.linalg.solve_triangular(factor, cross.mT, upper=False).mT, factor

    leaves = (root, cross)
    for one, other in zip(found(*leaves), expected(*leaves)):
        close(one, other)
    first, second = (gradients(function(*leaves), leaves) for function in (found, expected))
    for one, other in zip(first, second):
        close(one, other)
    for one, other in zip(gradients(first, leaves), gradients(second, leaves)):
        torch.testing.assert_close(one, other, rtol=1e-9, atol=1e-9 * float(other.detach().abs().max()))
    changes = torch.randn_like(root), torch.randn_like(cross)
    for one, other in zip(jvp(found, leaves, changes)[1], jvp(expected, leaves, changes)[1]):
        close(one, other)


@SIZES
def test_whitening_near_a_matrix(size):
    root, change = lower(size).requires_grad_(), 1e-3 * torch.randn(size, size)

    def found(root, change):
        matrix = root @ root.mT
        return (linalg.whitening(matrix, 0.0).near(matrix + change @ root, matrix),)

    def expected(root, change):
        matrix = root @ root.mT
        factor = torch.linalg.cholesky(matrix)
        return (factor + torch.linalg.solve_triangular(factor, (change @ root).mT, upper=False).mT,)

    leaves = (root, change.requires_grad_())
    close(found(*leaves)[0], expected(*leaves)[0])
    for one, other in zip(*(gradients(function(*leaves), leaves) for function in (found, expected))):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8 * float(other.detach().abs().max()))
    changes = torch.randn_like(root), torch.randn_like(change)
    for one, other in zip(jvp(found, leaves, changes)[1], jvp(expected, leaves, changes)[1]):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8 * float(other.detach().abs().max()))
    # where nothing moved it is L to the bit
    whitened = linalg.whitening(root.detach() @ root.detach().mT, 0.0)
    assert torch.equal(whitened.near(whitened.factor, whitened.factor), whitened.factor)


def test_whitening_of_mapped_and_batched_matrices():
    roots, cross = torch.stack([lower(4) for _ in range(3)]), torch.randn(2, 1, 5, 4)
    several = linalg.whitening(roots @ roots.mT, 0.0)(cross)
    one_by_one = torch.stack([linalg.whitening(root @ root.mT, 0.0)(cross[:, 0]) for root in roots], 1)
    torch.testing.assert_close(several, one_by_one)
    whitened = linalg.whitening(roots @ roots.mT, 0.0)
    mapped = torch.func.vmap(lambda part: whitened(part))(cross)
    torch.testing.assert_close(mapped, several)


@SIZES
@pytest.mark.parametrize("by", ["factor", "covariance"])
def test_moments(size, by):
    leaves = phi, loc, tril = (
        torch.randn(7, size, requires_grad=True),
        torch.randn(size, requires_grad=True),
        lower(size).requires_grad_(),
    )
    factor = DenseFactor(loc, tril.tril())
    covariance = tril.tril() @ tril.tril().mT
    if by == "covariance":
        trace, log_det = factor.trace_and_log_det()
        factor = CovarianceFactor(loc, covariance, trace, log_det, lambda: tril)
    each = torch.stack([phi, phi.sin(), phi.flip(0)], 1)  # three functions a row
    found = (*factor.moments(phi), *factor.trace_and_log_det(), *factor.joint_moments(each))
    changes = each @ covariance @ each.mT - each @ each.mT
    expected = phi @ loc, changes[:, 0, 0], covariance.trace(), torch.logdet(covariance), each @ loc, changes
    for one, other in zip(found, expected):
        close(one, other)
    for one, other in zip(gradients(found, leaves), gradients(expected, leaves)):
        close(one, other)


@SIZES
@pytest.mark.parametrize("part", ["of the prior's", "of its own"])
def test_what_natural_parameters_say(size, part):
    """Of sites that keep their meaning about u = Lw, through P = K + TᵀG₀T and T = L₀⁻¹L; the part K stays."""
    before, start, sums, near, other = lower(size), lower(size), torch.randn(size), torch.randn(size), lower(size)
    gram = start @ start.mT
    root = (before + 0.1 * lower(size)).tril().requires_grad_()
    stays = torch.eye(size) if part == "of the prior's" else torch.eye(size) + other @ other.mT

    def moved(root):
        turn = torch.linalg.solve_triangular(before, root.tril(), upper=False)
        return stays + turn.mT @ gram @ turn, turn.mT @ sums

    def found(root):
        precision, pull = (part.detach() for part in moved(root))
        held = None if part == "of the prior's" else stays[None]
        return FromPrecision.apply(
            precision, near, pull - precision @ near, held, linalg.Turn.apply(root), Stack([size])
        )

    def expected(root):
        precision, pull = moved(root)
        covariance = torch.linalg.inv(precision)
        return covariance @ pull, covariance, covariance.trace(), torch.logdet(covariance)

    for one, other in zip(found(root), expected(root)):
        close(one, other)

    def used(root, moments):
        loc, covariance, trace, log_det = (found if moments else expected)(root)
        phi = torch.linspace(-1, 1, 3 * size).reshape(3, size) * loc  # which may depend on L, too
        if moments:
            return (*CovarianceFactor(loc, covariance, trace, log_det, lambda: None).moments(phi), trace, log_det)
        return phi @ loc, ((phi @ covariance) * phi).sum(-1) - phi.square().sum(-1), trace, log_det

    first, second = (gradients(used(root, moments), root)[0].tril() for moments in (True, False))
    close(first, second)


def test_mapped_ways_back_of_large_matrices():
    tril, phi = lower(272), torch.randn(2, 272)

    def found(phi, tril):
        return linalg.whitening(tril @ tril.mT, 0.0)(phi).sin().sum(-1)

    def expected(phi, tril):
        factor = torch.linalg.cholesky(tril @ tril.mT)
        return torch.linalg.solve_triangular(factor, phi.mT, upper=False).mT.sin().sum(-1)

    for one, other in zip(*(jacrev(function, (0, 1))(phi, tril) for function in (found, expected))):
        torch.testing.assert_close(one.tril(), other.tril(), rtol=1e-9, atol=1e-9)
    for one, other in zip(
        *(jacrev(torch.func.grad(lambda p, f=f: f(p, tril).square().sum()))(phi)[0] for f in (found, expected))
    ):
        torch.testing.assert_close(one, other, rtol=1e-8, atol=1e-8 * float(other.abs().max()))
