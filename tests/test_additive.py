"""Additive models with coupled posteriors: what they cost, what the coupling is worth, and Friedman's function."""

import itertools

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.bases import additive as additive_basis
from pyro_sparsegp.families import AdditiveSGPR, CoupledCovariance, CoupledPrecision, MeanFieldAdditive
from pyro_sparsegp.gaussians import low_rank

from .models import gaussian, observed, one_function, prepared, refused, restored


class Count(torch.utils._python_dispatch.TorchDispatchMode):
    """Multiplications of matrix products, triangular solves and Cholesky factorisations; the largest tensor made."""

    def __init__(self):
        super().__init__()
        self.products, self.largest = 0, 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        made = [t for t in (out if isinstance(out, (tuple, list)) else [out]) if isinstance(t, torch.Tensor)]
        self.largest = max([self.largest, *(t.numel() for t in made)])
        name = func.overloadpacket.__name__
        if name in ("mm", "bmm", "mv", "dot", "addmm", "addmv"):
            a = args[1] if name.startswith("add") else args[0]
            self.products += made[0].numel() * a.shape[-1]
        elif name in ("linalg_solve_triangular", "linalg_cholesky_ex"):
            self.products += made[0].numel() * args[0].shape[-1]
        return out


def module_of(family, terms):
    kernel = sum(kernels.RBF(0.3)[i] for i in range(terms))
    process = GaussianProcess(kernel, torch.rand(40, terms))
    return family.build(process, "f"), process


def straight(values):
    """Whether values at 4, 8, 12, 16 terms lie on a line."""
    steps = [b - a for a, b in itertools.pairwise(values)]
    return len(set(steps)) == 1


TERMS = (4, 8, 12, 16)
Z = torch.linspace(0, 1, 8, dtype=torch.float64)[:, None]
RANK = 5


@pytest.mark.parametrize("base", ["block", "identity"])
def test_storage_is_linear_in_the_number_of_terms(base):
    def stored(family):
        return [sum(p.numel() for p in module_of(family, terms)[0].coefficients.parameters()) for terms in TERMS]

    numbers = stored(CoupledPrecision(Z, rank=RANK, base=base, natural=False))
    assert straight(numbers)
    a_term = 8 + 8 * RANK + (64 if base == "block" else 0)
    assert numbers == [terms * a_term for terms in TERMS]
    assert not straight(stored(CoupledCovariance(Z, natural=False)))


@pytest.mark.parametrize("base", ["block", "identity"])
@pytest.mark.parametrize("outputs", [(), (2,)])
@pytest.mark.parametrize("rank", [3, 40])
def test_the_coupling_starts_at_the_leading_directions_of_the_data(base, outputs, rank):
    variance = torch.tensor([2.0, 5.0])[:, None][: 2 if outputs else 1, 0].reshape(outputs)
    kernel = variance * kernels.RBF(0.3)[0] + kernels.RBF(0.5)[1] + kernels.Constant(4.0)
    process = GaussianProcess(kernel, torch.rand(60, 2))
    module = CoupledPrecision([Z, Z, None], rank=rank, base=base).build(process, "f")
    module.inform(process, "f")
    q, numbers = module.coefficients(), min(rank, 17)
    phi = torch.cat([block.detach().expand(*outputs, 60, -1) for block in module(process, "f").features], -1)
    gram = phi.mT @ phi / process.variance.mean(-1)[..., None, None]  # precision if the noise were as large as f
    size, directions = torch.linalg.eigh(gram)
    leading = (directions * size[..., None, :])[..., -numbers:] @ directions[..., -numbers:].mT
    with torch.no_grad():
        precision = torch.linalg.inv(q.covariance_matrix)
    torch.testing.assert_close(precision - torch.eye(17), leading, rtol=0.03, atol=0.03 * float(leading.abs().max()))
    if base == "block":
        for own in (slice(0, 8), slice(8, 16), slice(16, 17)):
            wanted = torch.eye(17)[own, own] + gram[..., own, own]
            torch.testing.assert_close(precision[..., own, own], wanted, rtol=1e-6, atol=1e-9 if rank < 17 else 0.05)
    b = q.factors[0].b.flatten(-3, -2)
    assert b.shape == (*outputs, 24, rank)
    assert all((b.norm(dim=-2) > 0).flatten())  # a column of 0 would never move


def test_the_coupling_starts_near_what_the_data_tell():
    x, y = torch.rand(300, 4), torch.randn(300)
    model = gaussian(sum(kernels.RBF(0.3)[i] for i in range(4)) + kernels.Constant(1.0))
    guide = prepared(model, CoupledPrecision(Z, rank=8), x, y)
    with torch.no_grad():
        q = guide.posterior(x)["f"]
        assert q.variance.sum() < 0.1 * q.process.variance.sum()
        assert q.kl < 20  # nats, where the optimum has 55


def work(family, terms, what):
    module, process = module_of(family, terms)
    q = module(process, "f")
    phi = [block.detach() for block in q.features]
    with Count() as count:
        coefficients = module.coefficients()
        (coefficients.kl() if what == "kl" else torch.cat(coefficients.moments(phi)).sum()).backward()
    return count.products, count.largest


@pytest.mark.parametrize("what", ["kl", "moments"])
@pytest.mark.parametrize("base", ["block", "identity"])
def test_work_is_linear_in_the_number_of_terms(base, what, monkeypatch):
    """Of the KL, and of the marginals of the sum: the terms are added up before squaring, table 1's NC²M² is spared;
    but where coefficients are so few that a natural step forms P̂.
    """
    for limit in ("_FEW", "_SMALL"):
        monkeypatch.setattr(low_rank, limit, 0)
    found = [work(CoupledPrecision(Z, rank=RANK, base=base), terms, what) for terms in TERMS]
    assert straight([products for products, _ in found])
    assert all(largest <= 40 * 8 * terms for terms, (_, largest) in zip(TERMS, found))
    dense = [work(CoupledCovariance(Z), terms, what) for terms in TERMS]
    if what == "moments":
        assert not straight([products for products, _ in dense])
    assert dense[-1][1] >= (8 * 16) ** 2  # the counter sees a dense matrix where there is one


@pytest.mark.parametrize("base", ["block", "identity"])
def test_a_step_makes_no_dense_matrix_of_all_coefficients(base, monkeypatch):
    """But where they are few."""
    for limit in ("_FEW", "_SMALL"):
        monkeypatch.setattr(low_rank, limit, 0)
    terms = 24
    x = torch.rand(20, terms)
    y = torch.randn(20)
    model = gaussian(sum(kernels.RBF(0.3)[i] for i in range(terms)))
    guide = AutoSparseGP(model, CoupledPrecision(Z, rank=RANK, base=base))
    bound = TraceQuadrature_ELBO(2)(model, guide)
    bound(x, y)
    with Count() as count:
        bound(x, y).backward()
    assert count.largest < (8 * terms) ** 2 / 4


def collapsed(kernel, z, noise, x, y):
    """Titsias' bound with a set of inducing inputs a term: Q = Σ_c k_c(x, z_c)k_c(z_c, z_c)⁻¹k_c(z_c, x)."""
    q = kernel.terms[-1](x)  # a line is exact
    for i, term in enumerate(kernel.terms[:-1]):
        full = torch.zeros(len(z), x.shape[-1])
        full[:, i] = z[:, 0]
        q = q + term(x, full) @ torch.linalg.solve(term(full), term(full, x))
    fit = dist.MultivariateNormal(torch.zeros(len(x)), q + noise**2 * torch.eye(len(x))).log_prob(y)
    return (fit - (kernel.diag(x) - q.diagonal()).sum() / (2 * noise**2)).item()


def test_optimal_posteriors_of_additive_models():
    """Eq. 6: the collapsed bound of all terms together."""
    x, y = torch.rand(25, 2), torch.randn(25)
    kernel = kernels.Matern32(0.4)[0] + 0.5 * kernels.Matern12(0.3)[1] + kernels.Linear(1.0)
    z = torch.linspace(0, 1, 5)[:, None]
    model = gaussian(kernel, 0.5, jitter=1e-12)
    expected = collapsed(kernel, z, 0.5, x, y)
    guide = AutoSparseGP(model, AdditiveSGPR([z, z, None], trainable=False))
    assert abs(-TraceQuadrature_ELBO(2)(model, guide)(x, y).item() - expected) < 1e-6
    guide = AutoSparseGP(model, AdditiveSGPR([x[:, :1], x[:, 1:], None], trainable=False))
    evidence = dist.MultivariateNormal(torch.zeros(25), kernel(x) + 0.25 * torch.eye(25)).log_prob(y)
    assert abs(-TraceQuadrature_ELBO(2)(model, guide)(x, y).item() - evidence) < 1e-5


def test_terms_keep_their_order_and_codes_their_range():
    from pyro_sparsegp import AutoSparseGP, kernels
    from pyro_sparsegp.families import CoupledPrecision

    x = torch.rand(40, 2)
    y = torch.sin(5 * x[:, 0])

    def model_of(kernel):
        return one_function(kernel, lambda f: dist.Normal(f, 0.2))

    a, b = kernels.RBF(0.4)[0].named("a"), kernels.RBF(0.6)[1].named("b")
    guide = prepared(model_of(a + b), CoupledPrecision(5), x, y)
    other = restored(guide, model_of(b + a), CoupledPrecision(5))
    refused(r"are \['b', 'a'\] now, and were \['a', 'b'\]", other.posterior, x)
    coded = torch.cat([x[:, :1], torch.randint(1, 4, (40, 1)).to(x)], 1)
    with pytest.raises(ValueError, match=r"GP site 'f': .*codes in .* must be whole numbers from 0 to 2, got \[3.0\]"):
        AutoSparseGP(model_of(a + kernels.Categorical(3)[1]), CoupledPrecision(5))(coded, y)
    kernel = kernels.Anova(kernels.RBF(0.3), 0, 1)[0] + kernels.Anova(kernels.RBF(0.3), 0, 2)[0]
    guide = prepared(model_of(kernel), CoupledPrecision(5), x, y)
    components = guide.posterior(x)["f"].components
    refused("one interval for each column", components.sobol_indices)


def smooth_and_periodic(scales):
    smooth = [scales[i % 2] * kernels.RBF(0.2 + 0.1 * i)[i] for i in range(3)]
    return sum(smooth[:2]) + kernels.Periodic(1.0, 0.4)[3] + smooth[2] + kernels.Matern32(0.5)[3]


def effects(scales):
    """One stack of main effects, and one of interactions whose columns stand in another order."""
    main = [kernels.Anova(kernels.RBF(scales[i % 2]), 0, 1 + 0.5 * i)[i] for i in range(3)]
    first, second = (0.5 * kernels.Anova(scales[i] * kernels.Matern32(0.6), 0, 1)[i] for i in range(2))
    last = kernels.Anova(scales[1] * kernels.Matern32(0.8), 0, 1)[3]
    return kernels.Constant(0.3) + sum(main) + first * second + 0.7 * last * second


@pytest.mark.parametrize(
    ("family", "dtype", "sum_of", "stacks"),
    [  # pairs of family, dtype and sum
        (CoupledPrecision(5, rank=3), torch.float32, smooth_and_periodic, 1),
        (CoupledPrecision(5, rank=3), torch.float64, effects, 2),
        (CoupledCovariance(5, natural=False), torch.float64, smooth_and_periodic, 1),
        (CoupledCovariance(5, natural=False), torch.float32, effects, 2),
    ],
)
def test_terms_of_one_structure_are_evaluated_together(monkeypatch, family, dtype, sum_of, stacks):
    x, y = torch.rand(30, 4, dtype=dtype), torch.randn(30, dtype=dtype)

    def model(x, y=None):
        pair = pyro.param("pair", torch.tensor([0.3, 0.6], dtype=dtype))
        f = pyro.sample("f", GaussianProcess(sum_of(pair), x))
        observed(dist.Normal(f, 0.3), y)

    found = []
    for together in (True, False):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        if not together:
            monkeypatch.setattr(additive_basis, "_alike", lambda bases, terms: [([c], []) for c in range(len(terms))])
        guide = AutoSparseGP(model, family)
        losses = [TraceQuadrature_ELBO().loss_and_grads(model, guide, x, y) for _ in range(3)]
        q = guide.posterior(x[:6])["f"]
        assert sum(len(members) > 1 for members, _ in q.basis.groups) == (stacks if together else 0)
        parameters = [pyro.param("pair"), *(p for _, p in sorted(guide.named_parameters()))]
        found.append((losses, q.mean, q.variance, q.components[1].mean))
        found[-1] += tuple(p.grad for p in parameters if p.grad is not None)
    close = {"atol": 1e-8, "rtol": 1e-8} if dtype == torch.float64 else {"atol": 2e-3, "rtol": 2e-3}
    for one, other in zip(*found):
        torch.testing.assert_close(torch.as_tensor(one), torch.as_tensor(other), **close)


@pytest.mark.quick("MeanFieldAdditive-outputs0 | CoupledPrecision-outputs1-4 | CoupledCovariance-outputs0-4-True")
@pytest.mark.parametrize("dtype", [torch.float64, pytest.param(torch.float32, marks=pytest.mark.slow)])
@pytest.mark.parametrize("natural", [True, False])
@pytest.mark.parametrize("counts", [4, (60, 50)])  # beyond 96 coefficients natural steps keep blocks
@pytest.mark.parametrize("outputs", [(), (2,)])
@pytest.mark.parametrize("family", [MeanFieldAdditive, CoupledPrecision, CoupledCovariance])
def test_states_of_additive_families_load(family, outputs, counts, natural, dtype):
    x, y = torch.rand(70, 1, dtype=dtype), torch.randn(70, *outputs, dtype=dtype)

    def model(x, y=None):
        prior = GaussianProcess(kernels.RBF(0.1) + kernels.Matern12(0.3), x)
        f = pyro.sample("f", prior.expand(outputs).to_event(len(outputs)))
        with pyro.plate("data", 70):
            pyro.sample("y", dist.Normal(f.mT if outputs else f, 0.3).to_event(len(outputs)), obs=y)

    guide, fresh = (AutoSparseGP(model, family(counts, natural=natural)) for _ in range(2))
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), TraceQuadrature_ELBO())
    guide.prepare(x, y)
    for steps in (0, 2):
        for _ in range(steps):
            svi.step(x, y)
        fresh.load_state_dict(guide.state_dict())
        ours, theirs = guide.posterior(x)["f"], fresh.posterior(x)["f"]
        torch.testing.assert_close(theirs.mean, ours.mean)
        torch.testing.assert_close(theirs.covariance_matrix, ours.covariance_matrix)
