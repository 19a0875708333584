"""Every Gaussian over coefficients against its own dense covariance."""

import pytest
import torch
from torch.distributions import MultivariateNormal, kl_divergence

from pyro_sparsegp.gaussians import (
    BlockCholesky,
    BlockPlusLowRank,
    CholeskyIdentity,
    Diagonal,
    FullCholesky,
    Identity,
    IdentityPlusLowRank,
)

SIZES = (3, 1, 4)
KINDS = [FullCholesky, BlockCholesky, Diagonal, Identity, CholeskyIdentity, BlockPlusLowRank, IdentityPlusLowRank]


def random_gaussian(kind, batch=()):
    module = kind(SIZES, batch, torch.zeros(()))
    for parameter in module.parameters():
        parameter.data.add_(0.4 * torch.randn(parameter.shape))
    return module()


def dense(q):
    return MultivariateNormal(torch.cat(q.loc, -1), q.covariance_matrix)


@pytest.mark.parametrize("batch", [(), (2,)])
@pytest.mark.parametrize("kind", KINDS)
class TestAgainstDense:
    def test_moments_of_functions(self, kind, batch):
        q = random_gaussian(kind, batch)
        features = [torch.randn(5, size) for size in SIZES]
        phi = torch.cat(features, -1)
        change = phi @ (q.covariance_matrix - torch.eye(sum(SIZES))) @ phi.mT
        torch.testing.assert_close(q.covariance_change(features).expand(change.shape), change)
        mean, variance = q.moments(features)
        torch.testing.assert_close(variance.expand(change.shape[:-1]), change.diagonal(dim1=-2, dim2=-1))
        torch.testing.assert_close(mean, (phi @ torch.cat(q.loc, -1)[..., None])[..., 0])

    def test_kl_and_log_ratio(self, kind, batch):
        q = random_gaussian(kind, batch)
        prior = MultivariateNormal(torch.zeros(sum(SIZES)), torch.eye(sum(SIZES)))
        torch.testing.assert_close(q.kl().expand(batch), kl_divergence(dense(q), prior))
        assert (q.kl() > 0).all()
        w = q.rsample(torch.Size((6, *batch)))
        joined = torch.cat(w, -1)
        torch.testing.assert_close(q.log_ratio(w), dense(q).log_prob(joined) - prior.log_prob(joined))

    @pytest.mark.quick("batch0")
    def test_draws_have_the_moments(self, kind, batch):
        q = random_gaussian(kind, batch)
        w = torch.cat(q.rsample(torch.Size((100_000, *batch))), -1)
        torch.testing.assert_close(w.mean(0), torch.cat(q.loc, -1), atol=0.03, rtol=0.02)
        centred = (w - w.mean(0)).movedim(0, -1)
        torch.testing.assert_close(centred @ centred.mT / len(w), q.covariance_matrix, atol=0.08, rtol=0.04)

    @pytest.mark.parametrize("blocks", [(0,), (2,), (0, 2), (0, 1, 2)])
    def test_marginal(self, kind, batch, blocks):
        q = random_gaussian(kind, batch)
        part = q.marginal(blocks)
        rows = torch.cat([torch.arange(8).split(SIZES)[b] for b in blocks])
        torch.testing.assert_close(torch.cat(part.loc, -1), torch.cat(q.loc, -1)[..., rows])
        torch.testing.assert_close(part.covariance_matrix, q.covariance_matrix[..., rows[:, None], rows])
        assert part.sizes == tuple(SIZES[b] for b in blocks)


@pytest.mark.parametrize("kind", KINDS)
def test_moments_together_and_their_derivatives(kind):
    q = random_gaussian(kind)
    features = [torch.randn(5, size, requires_grad=True) for size in SIZES]
    phi = torch.cat(features, -1)
    change = (phi @ (q.covariance_matrix - torch.eye(sum(SIZES))) * phi).sum(-1)
    one, other = q.moments(features), (phi @ torch.cat(q.loc), change)
    if kind is Identity:
        return
    weights = torch.randn(5), torch.randn(5)
    values = [value for factor in getattr(q, "factors", ()) for value in vars(factor).values()]
    leaves = [*features, *(value for value in values if isinstance(value, torch.Tensor) and value.requires_grad)]
    first = torch.autograd.grad(one, leaves, weights, create_graph=True)
    second = torch.autograd.grad(other, leaves, weights, create_graph=True)
    torch.testing.assert_close(first, second)
    torch.testing.assert_close(torch.autograd.grad(one, leaves, weights, retain_graph=True), second)
    again = [torch.autograd.grad(sum(g.square().sum() for g in grads), features) for grads in (first, second)]
    torch.testing.assert_close(*again)


@pytest.mark.parametrize("kind", KINDS)
def test_starts_at_the_prior(kind):
    q = kind(SIZES, (2,), torch.zeros(()))()
    assert all((block == 0).all() for block in q.loc)
    low_rank = kind in (BlockPlusLowRank, IdentityPlusLowRank)
    assert q.kl().max() < (0.05 if low_rank else 1e-12)
    atol = 0.1 if low_rank else 1e-12
    torch.testing.assert_close(q.covariance_matrix, torch.eye(8).expand(2, 8, 8), atol=atol, rtol=0)


def test_block_plus_low_rank_contains_its_special_cases():
    module = BlockPlusLowRank(SIZES, (), torch.zeros(()), rank=2)
    for parameter in module.parameters():
        parameter.data.add_(0.4 * torch.randn(parameter.shape))
    precision = module().covariance_matrix.inverse()
    # S⁻¹ = blockdiag((L_bL_bᵀ)⁻¹) + (L⁻ᵀB)(L⁻ᵀB)ᵀ
    trils = [getattr(module, f"scale_tril_{i}") for i in range(3)]
    blocks = torch.block_diag(*[(tril @ tril.mT).inverse() for tril in trils])
    low = torch.cat([tril.inverse().mT @ getattr(module, f"b_{i}") for i, tril in enumerate(trils)])
    torch.testing.assert_close(precision, blocks + low @ low.mT)
    for i in range(3):
        getattr(module, f"b_{i}_unconstrained").data.zero_()
    torch.testing.assert_close(module().covariance_matrix, torch.block_diag(*[tril @ tril.mT for tril in trils]))
