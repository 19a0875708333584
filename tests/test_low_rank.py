"""Block plus low-rank precisions: the parts of their inverse, and the damped precision formed or not."""

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import CoupledPrecision
from pyro_sparsegp.gaussians import Product
from pyro_sparsegp.gaussians import low_rank as module_of
from pyro_sparsegp.gaussians.anchors import turned_sums
from pyro_sparsegp.gaussians.base import Stack
from pyro_sparsegp.gaussians.factors import CovarianceFactor, DenseFactor, DiagonalFactor, LowRankFactor
from pyro_sparsegp.gaussians.low_rank import Formed, NaturalLowRank, Products, above_one, sweep
from pyro_sparsegp.gaussians.steps import recording
from pyro_sparsegp.numerics.linalg import cholesky

from .models import gaussian

STACK, RANK = Stack([3, 2, 3]), 2


def pieces(seed=0):
    """D and B of a precision, and a column, flat: those of a block of two are 0 and 1 in its third place."""
    generator = torch.Generator().manual_seed(seed)
    low_rank, column = (torch.randn(9, k, generator=generator, dtype=torch.float64) for k in (RANK, 1))
    low_rank[5] = column[5] = 0.0
    halves = [torch.randn(n, n, generator=generator, dtype=torch.float64) for n in STACK.sizes]
    return STACK.squares([a @ a.mT + torch.eye(len(a)).double() for a in halves]), low_rank, column


def dense(blocks, low_rank):
    """blockdiag(D) + BBᵀ."""
    return torch.block_diag(*blocks) + low_rank @ low_rank.mT


def test_moments_of_several_functions():
    loc, phi = torch.randn(8), torch.randn(3, 5, 8)
    root = torch.randn(8, 8).tril()
    blocks, low_rank, _ = pieces()
    covariance = CovarianceFactor(loc, root @ root.mT, *torch.ones(2), lambda: root)
    coupled = LowRankFactor(STACK, loc, low_rank.to(loc).unflatten(0, (3, 3)), torch.linalg.cholesky(blocks).to(loc))
    halves = [DenseFactor(loc[:3], root[:3, :3]), DiagonalFactor(loc[3:], loc[3:].exp())]
    for factors, groups in (([covariance], [(0, 1, 2)]), ([coupled], [(0, 1, 2)]), (halves, [(0,), (1, 2)])):
        q = Product(STACK.sizes, factors, groups)
        means, changes = q.joint_moments(phi.split(q.sizes, -1))
        torch.testing.assert_close(means, phi @ loc)
        torch.testing.assert_close(changes, phi @ (q.covariance_matrix - torch.eye(8)) @ phi.mT)


def test_precision_formed_or_not():
    blocks, low_rank, column = pieces()
    generator = torch.Generator().manual_seed(1)
    rows = [(torch.randn(5, 9, generator=generator).double(), torch.rand(5, 1, generator=generator).double())] * 2
    eye, rate = torch.eye(9).double(), torch.tensor([[0.3]]).double()
    data = sum(phi.mT @ (phi * each) for phi, each in rows)
    exact = 0.7 * dense(blocks, low_rank) + 0.3 * eye + data
    for target in (Formed(STACK, exact), Products(STACK, blocks, low_rank, rate, rows)):
        torch.testing.assert_close(target.times(eye), exact)
        aims = target.blocks()
        for i, aim in enumerate(aims):
            torch.testing.assert_close(aim, exact[3 * i : 3 * i + 3, 3 * i : 3 * i + 3])
    for one in (Formed(STACK, exact), target):
        found, failed = one.solve(column[:, 0], blocks, low_rank, 40)
        torch.testing.assert_close(found, torch.linalg.solve(exact, column[:, 0]))
        assert failed == 0


def test_what_a_sweep_leaves_is_positive_definite_in_both_triangles():
    """In float32 P̂ is symmetric but for its rounding, which is more than D where B has nearly all of it."""
    generator = torch.Generator().manual_seed(0)
    low_rank = 1e4 * torch.randn(9, RANK, generator=generator)
    data = 1.9 * low_rank @ low_rank.mT + 3 * torch.randn(9, 9, generator=generator)
    goal = Formed(STACK, data + 0.1 * torch.eye(9))
    aims = goal.blocks()
    blocks, *_ = sweep(goal, aims, torch.eye(3).repeat(3, 1, 1), low_rank)
    assert (blocks - blocks.mT).abs().max() > 1  # else nothing is seen here
    for part in above_one(blocks, aims):
        torch.testing.assert_close(part, part.mT, rtol=0, atol=1e-5 * part.abs().max().item())
    for triangle in (above_one(blocks, aims)[0], above_one(blocks, aims)[0].mT):
        assert torch.linalg.cholesky_ex(triangle)[1].eq(0).all()


@pytest.mark.parametrize("batch", [(), (2,)])
def test_sums_under_another_factor(batch):
    generator = torch.Generator().manual_seed(0)

    def normal(*shape):
        return torch.randn(*shape, generator=generator, dtype=torch.float64)

    half, pull, before = normal(*batch, 4, 4), normal(*batch, 4), normal(4, 4).tril() + 3 * torch.eye(4).double()
    now = (normal(4, 4).tril() + 3 * torch.eye(4).double()).requires_grad_()
    gram = (half @ half.mT).requires_grad_()
    found = turned_sums(gram, pull, before, now)
    turn = torch.linalg.inv(before) @ now.tril()
    torch.testing.assert_close(found, (turn.mT @ gram @ turn, (turn.mT @ pull[..., None])[..., 0]))

    def turned(gram, now):
        return turned_sums(0.5 * (gram + gram.mT), pull, before, now)

    assert torch.autograd.gradcheck(turned, (gram, now), check_forward_ad=True)
    assert torch.autograd.gradgradcheck(turned, (gram, now))


def precision_of(module):
    with torch.no_grad():
        return torch.linalg.inv(module().covariance_matrix)


def test_curvature_that_draws_show():
    """E ∇²f = E ∇f(w)(w − m)ᵀP, of a quadratic f: the sum over draws."""
    centred, grad, half = torch.randn(5, 2, 6), torch.randn(5, 2, 6), torch.randn(2, 6, 6)
    with recording(grad) as record:
        taken = record.new(None, None)
    w = torch.zeros_like(grad)
    w.grad = grad
    taken.draws.append((centred, w))
    precision = half @ half.mT
    one = torch.einsum("ski,skj,kjl->kil", grad, centred, precision)
    found, cut = taken.curvature(precision, lambda: precision)
    torch.testing.assert_close(found, 0.25 * (one + one.mT))
    values, axes = torch.linalg.eigh(found)
    torch.testing.assert_close(found + cut, (axes * values.clamp(min=0)[..., None, :]) @ axes.mT)


@pytest.mark.parametrize("least", [-0.05, -100.0])
def test_negative_curvatures_are_cut_where_they_must_be(least):
    """P̂ = (1 − ρ)P + ρ(I + ΦᵀΛΦ) with negative λ, unless that leaves less than half of what there is without them."""
    module = NaturalLowRank((3, 2, 3), (), torch.zeros(()), rank=8, rate=0.3)
    module.sweeps = 300
    before = precision_of(module)
    phi, curvature = torch.randn(12, 8), torch.linspace(least, 1.0, 12)
    with recording(phi) as record:
        q = module()
        mean, change = q.moments(phi.split((3, 2, 3), -1))
        loss = mean @ (100 * torch.randn(12)) + change @ (0.5 * curvature) + q.kl()
    record.differentiate(loss)
    one = torch.ones(())
    with torch.no_grad():
        module.step(q.taken, 0.3 * one, one, False)
    kept = curvature if least > -1 else curvature.clamp(min=0)
    best = 0.7 * before + 0.3 * (torch.eye(8) + phi.mT @ (phi * kept[:, None]))
    torch.testing.assert_close(precision_of(module), best, atol=1e-3, rtol=0)
    moved = phi @ torch.cat(module().loc).detach() / phi.norm(dim=1)
    assert moved.abs().max().item() == pytest.approx(3.0)  # deviations of the prior


def test_sites_that_are_drawn_learn_their_precision():
    """A density that couples all values, and hides that it is normal, is drawn from.

    q goes to P = I + ΦᵀAᵀAΦ/σ², the terms against each other.
    """
    pyro.set_rng_seed(2)
    x = torch.linspace(0, 1, 12)[:, None].expand(12, 2)
    mixing = torch.eye(12) + 0.3 * torch.ones(12, 12) / 12
    kernel = kernels.RBF(0.4)[0] + kernels.RBF(0.5)[1]

    def model(y):
        f = pyro.sample("f", GaussianProcess(kernel, x))
        pyro.factor("y", dist.MultivariateNormal(mixing @ f, 0.09 * torch.eye(12)).log_prob(y))

    z = torch.linspace(0, 1, 3)[:, None].expand(3, 2)
    family = CoupledPrecision([z, z], rank=6, trainable=False, rate=lambda t: max(0.02, 0.1 / (1 + t / 40)))
    guide = AutoSparseGP(model, family)
    y = mixing @ (3 * x[:, 0]).sin()
    svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), TraceQuadrature_ELBO())
    for _ in range(80):
        svi.step(y)
    q = guide.posterior(y)["f"]
    phi = torch.cat(list(q.features), -1)
    best = torch.linalg.inv(torch.eye(6) + phi.mT @ mixing.mT @ mixing @ phi / 0.09)
    found = q.coefficients.covariance_matrix
    size = best.diagonal().sqrt()
    assert ((found - best) / torch.outer(size, size)).abs().max() < 0.35
    assert (best / torch.outer(size, size))[:3, 3:].abs().max() > 0.7  # which independent terms would not have


def test_a_step_without_a_factor_is_left_out(monkeypatch):
    """An objective that reads flags at its end evaluates again what failed; a step has been taken by then."""
    x, model = torch.rand(20, 2), gaussian(kernels.RBF(0.5)[0] + kernels.RBF(0.5)[1], 0.1)
    guide = AutoSparseGP(model, CoupledPrecision(4))
    svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.0}), TraceQuadrature_ELBO())
    for _ in range(2):
        svi.step(x, x.sum(-1))
    kept = {name: value.clone() for name, value in guide.gps.f.coefficients.state_dict().items() if name != "steps"}
    with monkeypatch.context() as patched:
        patched.setattr(module_of, "_root", lambda matrix, what: cholesky(-matrix, 0.0, what))
        svi.step(x, x.sum(-1))
    now = guide.gps.f.coefficients.state_dict()
    assert kept["loc"].abs().max() > 0.1
    for name, value in kept.items():
        torch.testing.assert_close(now[name], value, rtol=0, atol=1e-8)


def test_a_step_is_the_same_whether_its_precision_is_formed_or_not(monkeypatch):
    x = torch.rand(30, 2)
    model = gaussian(kernels.RBF(0.5)[0] + kernels.RBF(0.5)[1], 0.3)
    losses = []
    for limit in (512, 0):
        monkeypatch.setattr(module_of, "_FEW", limit)
        pyro.set_rng_seed(0)
        guide = AutoSparseGP(model, CoupledPrecision([x[:4], x[4:8]], rank=8, trainable=False))
        svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.0}), TraceQuadrature_ELBO(2))
        losses.append([svi.step(x, x.sum(-1)) for _ in range(4)])
    assert losses[1] == pytest.approx(losses[0], rel=1e-6)


@pytest.mark.parametrize("lowest", [-0.95, 0.2])
def test_a_block_that_rounding_leaves_indefinite_is_lifted(lowest):
    values = torch.tensor([lowest, 0.9, 1.0, 3.0, 2e4])
    axes = torch.linalg.qr(torch.randn(5, 5)).Q
    block = (axes * values) @ axes.mT
    lifted, above = above_one(block.float(), block.float())
    assert torch.linalg.cholesky_ex(lifted).info == 0
    expected = (axes * values.clamp(min=0)) @ axes.mT
    torch.testing.assert_close(lifted.double(), expected, atol=0.02, rtol=0)
    torch.testing.assert_close(above.double(), (axes * (values - 1).clamp(min=0)) @ axes.mT, atol=0.02, rtol=0)
