import numpy as np
import pyro
import pyro.contrib.gp.kernels as pyro_kernels
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.nn import PyroModule, PyroSample
from torch.testing import assert_close

from pyro_sparsegp import GaussianProcess, kernels
from pyro_sparsegp.families import SGPR
from pyro_sparsegp.kernels.stacked import stacked, structure

from .models import gaussian, prepared, refused

LENGTH = torch.tensor([0.7, 1.6], dtype=torch.float64)
VARIANCE = torch.tensor(1.7, dtype=torch.float64)
X = torch.rand(6, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(0)) * 2
Z = torch.rand(4, 2, dtype=torch.float64, generator=torch.Generator().manual_seed(1)) * 2
NAMED = [kernels.RBF, kernels.Matern12, kernels.Matern32, kernels.Matern52]
STATIONARY = {k.__name__: k for k in NAMED} | {
    "RationalQuadratic": lambda length: kernels.RationalQuadratic(length, alpha=0.8),
    "Periodic": lambda length: kernels.Periodic(length, period=1.3),
}
FEATURES = {
    "Constant": kernels.Constant(VARIANCE),
    "Linear": kernels.Linear(LENGTH),
    "Polynomial": kernels.Polynomial(3, bias=0.6),
    "RandomFourier": kernels.RandomFourier(torch.randn(5, 2, generator=torch.Generator().manual_seed(2)), LENGTH),
}
DENSE = {
    "RBF": lambda s: torch.exp(-s / 2),
    "Matern12": lambda s: torch.exp(-s.sqrt()),
    "Matern32": lambda s: (1 + (3 * s).sqrt()) * torch.exp(-(3 * s).sqrt()),
    "Matern52": lambda s: (1 + (5 * s).sqrt() + 5 * s / 3) * torch.exp(-(5 * s).sqrt()),
    "RationalQuadratic": lambda s: (1 + s / 1.6) ** -0.8,
}

stationary = pytest.mark.parametrize("name", STATIONARY)


def dense(name, x, z, length):
    difference = x[:, None] - z
    if name == "Periodic":
        return torch.exp(-2 * ((torch.pi * difference / 1.3).sin() / length).square().sum(-1))
    return DENSE[name]((difference / length).square().sum(-1))


def frequencies(kernel, num):
    return kernels.RandomFourier.draw(kernel, num, 2, like=X)


@stationary
@pytest.mark.parametrize("length", [LENGTH, LENGTH[:1], LENGTH[0], 0.7])
def test_stationary_value(name, length):
    kernel = STATIONARY[name](length)
    assert_close(kernel(X, Z), dense(name, X, Z, length))
    assert_close((VARIANCE * kernel)(X), VARIANCE * dense(name, X, X, length))


def test_feature_kernel_value():
    assert_close(FEATURES["Constant"](X, Z), VARIANCE.expand(6, 4))
    assert_close(FEATURES["Linear"](X, Z), torch.einsum("nd,d,md->nm", X, LENGTH, Z))
    assert_close(FEATURES["Polynomial"](X, Z), (torch.einsum("nd,md->nm", X, Z) + 0.6) ** 3)


AS_PYRO = {  # our kernel of unit variance and the arguments of Pyro's
    "RBF": (kernels.RBF(LENGTH), {"lengthscale": LENGTH}),
    "Exponential": (kernels.Matern12(LENGTH), {"lengthscale": LENGTH}),
    "Matern32": (kernels.Matern32(LENGTH), {"lengthscale": LENGTH}),
    "Matern52": (kernels.Matern52(LENGTH), {"lengthscale": LENGTH}),
    "RationalQuadratic": (
        kernels.RationalQuadratic(LENGTH, VARIANCE),
        {"lengthscale": LENGTH, "scale_mixture": VARIANCE},
    ),
    "Periodic": (kernels.Periodic(LENGTH, LENGTH.flip(0)), {"lengthscale": LENGTH, "period": LENGTH.flip(0)}),
    "Linear": (kernels.Linear(), {}),
    "Constant": (kernels.Constant(), {}),
    "Polynomial": (kernels.Polynomial(3, bias=VARIANCE), {"bias": VARIANCE, "degree": 3}),
}


@pytest.mark.parametrize("name", AS_PYRO)
def test_as_pyro(name):
    ours, arguments = AS_PYRO[name]
    module = getattr(pyro_kernels, name)(2, variance=VARIANCE, **arguments)
    with torch.no_grad():
        expected, diagonal = module(X, Z), module(X, diag=True)
    for kernel in (VARIANCE * ours, kernels.from_pyro(module)):
        assert_close(kernel(X, Z), expected)
        assert_close(kernel.diag(X), diagonal)


@pytest.mark.parametrize("nu", [0.5, 1.5, 2.5])
def test_from_gpytorch(nu):
    gpytorch = pytest.importorskip("gpytorch")
    module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(nu, ard_num_dims=2)).double()
    module.outputscale, module.base_kernel.lengthscale = VARIANCE, LENGTH
    ours, adapted = VARIANCE * STATIONARY[f"Matern{round(2 * nu)}2"](LENGTH), kernels.from_gpytorch(module)
    assert_close(adapted(X, Z), ours(X, Z))
    assert_close(adapted(X), ours(X), atol=1e-7, rtol=0)
    assert_close(adapted.diag(X), ours.diag(X))
    assert repr(adapted) == "ScaleKernel"
    adapted(X, Z).sum().backward()
    assert all(p.grad is not None and p.grad.abs().min() > 0 for p in module.parameters())
    refused(r"from_gpytorch needs a gpytorch.kernels.Kernel, got RBF", lambda: kernels.from_gpytorch(kernels.RBF()))
    rbf = gpytorch.kernels.RBFKernel()
    for several in (gpytorch.kernels.MultitaskKernel(rbf, num_tasks=2), gpytorch.kernels.RBFKernelGrad()):
        for kernel in (several, gpytorch.kernels.ScaleKernel(several), several + rbf):
            refused(f"one value at each input; {type(several).__name__} has several", kernels.from_gpytorch, kernel)


ALL = {
    **{name: new(LENGTH) for name, new in STATIONARY.items()},
    **FEATURES,
    "White": kernels.White(VARIANCE),
    "sum": 2.0 * kernels.RBF(0.7)[0] + kernels.White(0.3) + 0.5,
    "product": kernels.Matern32(0.7)[0] * (kernels.Linear()[1] + kernels.White(0.3)),
    "scaled": VARIANCE * (kernels.Periodic(0.7) * kernels.RBF(LENGTH)),
}


@pytest.mark.parametrize("name", ALL)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_covariance_of_the_values_at_x(name, dtype):
    kernel, x = ALL[name], X.to(dtype)
    cov = kernel(x)
    assert cov.dtype == kernel.diag(x).dtype == dtype
    assert_close(cov, cov.mT)
    assert_close(kernel.diag(x), cov.diagonal())
    assert torch.linalg.eigvalsh(cov).min() > -100 * torch.finfo(dtype).eps * cov.diagonal().max()
    if name in STATIONARY:
        assert (cov.diagonal() == 1).all()
    cross = kernel(x, x)
    white = {"White": 1.7, "sum": 0.3, "product": 0.3}.get(name, 0.0)
    assert_close(cov, cross + white * torch.eye(6, dtype=dtype), atol=2e-3 if dtype == torch.float32 else 1e-7, rtol=0)


def test_white():
    rbf, white = kernels.RBF(0.7), kernels.White(0.3)
    assert (white(X, Z) == 0).all()
    assert white(X, Z).shape == (6, 4)
    assert_close((white * rbf)(X), 0.3 * torch.eye(6))
    assert_close((2.0 * white + rbf)(X, X.clone()), rbf(X))
    assert_close((2.0 * white + rbf)(X), rbf(X) + 0.6 * torch.eye(6))
    products = [white * kernels.Linear(), kernels.Constant() * (white + 1.0)]
    for kernel in [white, 2.0 * white, white[0], rbf + 2.0 * white, *products]:
        assert kernel.prior_functions(3, 5, X) is None  # a draw would leave out the white part


def test_algebra():
    a, b, c = kernels.RBF(0.7), kernels.Matern32(LENGTH), kernels.Linear()
    assert_close((a + b + c)(X, Z), a(X, Z) + b(X, Z) + c(X, Z))
    assert sum([a, b]).terms == (a, b)
    assert_close((a * b * c)(X, Z), a(X, Z) * b(X, Z) * c(X, Z))
    assert ((a + b) + (c + kernels.White())).terms[:3] == (a, b, c)
    assert (a * (b * c)).parts == (a, b, c)
    for two in (2, 2.0, np.float32(2.0), torch.tensor(2.0)):
        assert_close((two * a)(X, Z), 2 * a(X, Z))
        assert_close((a * two)(X, Z), 2 * a(X, Z))
        assert_close((two + a)(X, Z), 2 + a(X, Z))
        assert_close((a + two)(X, Z), 2 + a(X, Z))
    assert [type(t) for t in (2.0 * (a + b)).terms] == [kernels.Scaled, kernels.Scaled]
    assert [type(t) for t in (a + b)[0].terms] == [kernels.Select, kernels.Select]
    assert_close((2.0 * (a + b))(X, Z), 2 * a(X, Z) + 2 * b(X, Z))
    assert_close((a * (c + 1.0))(X, Z), a(X, Z) * (c(X, Z) + 1))
    with pytest.raises(TypeError, match=r"kernel\.terms"):
        list(a)


def test_columns():
    x, z, a = torch.randn(5, 4), torch.randn(3, 4), kernels.RBF(0.7)
    cases = [(1, [1]), (np.int64(1), [1]), ([0, 2], [0, 2]), ([3, 0], [3, 0]), (slice(1, 3), [1, 2])]
    for dims, columns in [*cases, (slice(0, 4, 2), [0, 2])]:
        assert_close(a[dims](x, z), a(x[:, columns], z[:, columns]))
        assert_close((a + kernels.Linear())[dims](x), (a + kernels.Linear())(x[:, columns]))
        assert a[dims].columns == tuple(sorted(columns))
    assert_close(kernels.RBF(LENGTH)[3, 0](x, z), kernels.RBF(LENGTH)(x[:, [3, 0]], z[:, [3, 0]]))
    assert a.columns is None
    assert (a[3] + 2.0 * a[0, 1] * a[1]).columns == (0, 1, 3)
    assert (a[3] + a).columns is None
    assert a[1][0, 2].columns == (2,)  # column 1 of the columns (0, 2)
    assert_close(a[1][0, 2](x, z), a[2](x, z))


def test_columns_from_the_end():
    """k[2:] and k[-1] have numbers once inputs are there; a process knows them."""
    x, z, a = torch.randn(5, 4), torch.randn(3, 4), kernels.RBF(0.7)
    cases = [
        (-1, [3]),
        ([0, -1], [0, 3]),
        (slice(2, None), [2, 3]),
        (slice(None, -1), [0, 1, 2]),
        (slice(-2, 4), [2, 3]),
    ]
    for dims, columns in [*cases, (slice(None, None, 2), [0, 2]), (slice(None), [0, 1, 2, 3])]:
        part, there = a[dims], a[columns]
        assert_close(part(x, z), a(x[:, columns], z[:, columns]))
        assert_close(part.diag(x), there.diag(x))
        assert part.columns is None
        kernel = GaussianProcess(2.0 * part + kernels.Constant(1.0), x).kernel
        assert kernel.terms[0].columns == tuple(columns)
        assert repr(kernel) == repr(2.0 * there + kernels.Constant(1.0))
        assert kernel.on_columns(4) is kernel
    assert_close(a[-2:][-1](x, z), a[3](x, z))
    assert repr(2.0 * a[-2:] + a[0, -1] + a[::2]) == "2.0 * RBF(0.7)[-2:] + RBF(0.7)[0, -1] + RBF(0.7)[::2]"
    assert GaussianProcess(a[-1].named("last") + a[0], x).kernel.terms[0].name == "last"
    assert kernels.Anova(a[-1], 0, 1)[-1](x).shape == (5, 5)
    known = a[0] + a[1, 2] * kernels.Linear()
    assert GaussianProcess(known, x).kernel is known


def test_functions_as_kernels():
    def brownian(x, z):
        return torch.minimum(x, z.mT)

    x, z = torch.rand(5, 2), torch.rand(3, 2)
    kernel = kernels.from_function(brownian, lambda x: x[..., 0])
    assert_close((2.0 * kernel[1] + kernels.RBF())(x, z), 2 * brownian(x[:, 1:], z[:, 1:]) + kernels.RBF()(x, z))
    assert_close((kernel[0] * 3.0).diag(x), 3 * x[:, 0])
    assert repr(2.0 * kernel) == "2.0 * brownian"
    guide = prepared(gaussian(2.0 * kernel[-1] + 0.1), SGPR(3), x, x[:, 0])
    assert guide.posterior(z)["f"].variance.shape == (3,)


def test_repr():
    a, b = kernels.RBF(0.5), kernels.Matern32(torch.ones(3, 2))
    assert repr(2.0 * a[0] + b * a + 1.5) == "2.0 * RBF(0.5)[0] + Matern32(<3, 2>) * RBF(0.5) + Constant(1.5)"
    assert repr(a * (b + kernels.Linear())) == "RBF(0.5) * (Matern32(<3, 2>) + Linear(1.0))"
    assert repr((VARIANCE * kernels.Periodic())[0, 2]) == "(1.7 * Periodic(1.0, period=1.0))[0, 2]"
    assert all(repr(kernel) for kernel in ALL.values())


class OnlyTheProtocol:
    def __call__(self, x, z=None):
        return 2 * kernels.RBF(0.7)(x, z)

    def diag(self, x):
        return 2 * kernels.RBF(0.7).diag(x)


def test_any_callable_with_a_diagonal_is_a_kernel():
    ours, own = kernels.Matern32(LENGTH), OnlyTheProtocol()
    cases = [(own + ours, own(X) + ours(X)), (kernels.Scaled(ours * own, 3.0)[0, 1], 3 * own(X) * ours(X))]
    for kernel, expected in cases:
        assert_close(kernel(X), expected)
        assert_close(kernel.diag(X), expected.diagonal())
        assert kernel.features(X) is None
        assert kernel.prior_functions(2, 5, X) is None


BATCHED = {name: lambda v, ls, new=new: v * new(ls) for name, new in STATIONARY.items()} | {
    "Constant": lambda v, ls: kernels.Constant(v),
    "Linear": lambda v, ls: kernels.Linear(ls),
    "Polynomial": lambda v, ls: kernels.Polynomial(2, v),
    "RandomFourier": lambda v, ls: v * kernels.RandomFourier(X, ls),
    "White": lambda v, ls: kernels.White(v),
    "alpha": lambda v, ls: kernels.RationalQuadratic(ls, v),
    "period": lambda v, ls: kernels.Periodic(0.7, ls),
    "sum": lambda v, ls: kernels.RBF(0.7) + v * kernels.Linear()[0] + kernels.Matern32(ls) * kernels.Constant(v),
}


@pytest.mark.parametrize("name", BATCHED)
@pytest.mark.parametrize("columns", [1, 2])
def test_batches_of_hyperparameters_and_inputs(name, columns):
    new, v, ls = BATCHED[name], torch.rand(3) + 0.5, torch.rand(3, columns) + 0.5
    kernel = new(v, ls)
    singles = [new(v[s], ls[s]) for s in range(3)]
    assert kernel.batch_shape == (3,)
    assert singles[0].batch_shape == ()
    assert_close(kernel(X, Z), torch.stack([k(X, Z) for k in singles]))
    assert_close(kernel(X), torch.stack([k(X) for k in singles]))
    assert_close(kernel.diag(X), torch.stack([k.diag(X) for k in singles]))
    x = torch.rand(3, 6, 2)
    assert_close(kernel(x, Z), torch.stack([k(a, Z) for k, a in zip(singles, x)]))
    assert_close(kernel(x), torch.stack([k(a) for k, a in zip(singles, x)]))
    assert_close(kernel.diag(x), torch.stack([k.diag(a) for k, a in zip(singles, x)]))
    assert_close(singles[0](x[:, None], x), torch.stack([torch.stack([singles[0](a, b) for b in x]) for a in x]))


@stationary
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("same", [False, True])
def test_gradient_at_coincident_points(name, dtype, same):
    x, z = torch.cat([X, X[:2]]).to(dtype), torch.cat([X[:3], Z]).to(dtype)
    z = x if same else z
    weights = torch.randn(len(x), len(z))
    arguments = [x, z, LENGTH.to(dtype)]
    leaves = [a.clone().requires_grad_() for a in arguments]
    kernel = STATIONARY[name](leaves[2])
    cov = kernel(leaves[0]) if same else kernel(leaves[0], leaves[1])
    total, wanted = (cov * weights.to(dtype)).sum(), leaves[::2] if same else leaves
    grads = torch.autograd.grad(total, wanted, retain_graph=True)
    again = torch.autograd.grad(total, wanted, create_graph=True)  # by another expression for the slope

    def value(x, z, length):
        return (dense(name, x, x if same else z, length) * weights).sum()

    for i, grad, other in zip([0, 2] if same else [0, 1, 2], grads, again):
        expected = torch.zeros_like(grad, dtype=torch.float64)
        for j in range(grad.numel()):  # central differences; by symmetry Matern12's are 0 at its kink
            up, down = ([a.double().clone() for a in arguments] for _ in range(2))
            up[i].view(-1)[j] += 1e-6
            down[i].view(-1)[j] -= 1e-6
            expected.view(-1)[j] = (value(*up) - value(*down)) / 2e-6
        tolerance = 1e-6 if dtype == torch.float64 else 1e-2 if name == "Matern12" else 1e-4
        assert_close(grad.double(), expected, atol=tolerance, rtol=tolerance)
        assert_close(other.double(), expected, atol=tolerance, rtol=tolerance)


@stationary
def test_derivatives_at_distinct_points(name):
    x, z, length = (a.clone().requires_grad_() for a in (X[:3], Z[:2], LENGTH))
    for check in (torch.autograd.gradcheck, torch.autograd.gradgradcheck):
        assert check(lambda x, z, length: STATIONARY[name](length)(x, z), (x, z, length))
        assert check(lambda x, length: STATIONARY[name](length)(x), (x, length))


@pytest.mark.parametrize("name", BATCHED)
def test_derivatives_of_hyperparameters(name):
    variance, length = VARIANCE.clone().requires_grad_(), LENGTH.clone().requires_grad_()
    assert torch.autograd.gradcheck(lambda v, ls: BATCHED[name](v, ls)(X[:3]), (variance, length))
    assert torch.autograd.gradgradcheck(lambda v, ls: BATCHED[name](v, ls)(X[:3]), (variance, length))


@stationary
@pytest.mark.parametrize("variance_shape", [(), (1,), (3,), (2, 1)])
@pytest.mark.parametrize("length_shape", [(), (2,), (1, 2), (3, 1)])
def test_a_variance_broadcasts_against_the_length_scale(name, variance_shape, length_shape):
    # Stationary kernels take their variance as a factor in place.
    variance = (torch.rand(variance_shape) + 0.5).requires_grad_()
    length = (torch.rand(length_shape) + 0.5).requires_grad_()
    kernel = STATIONARY[name](length)
    cov, expected = (variance * kernel)(X, Z), variance[..., None, None] * kernel(X, Z)
    assert_close(cov, expected)
    wanted = torch.autograd.grad(expected.square().sum(), (variance, length))
    assert_close(torch.autograd.grad(cov.square().sum(), (variance, length), retain_graph=True), wanted)
    assert_close(torch.autograd.grad(cov.square().sum(), (variance, length), create_graph=True), wanted)


@stationary
@pytest.mark.parametrize("z", [None, Z])
def test_vmap(name, z):
    lengths = torch.rand(3, 2) + 0.5

    def total(length):
        return STATIONARY[name](length)(X, z).square().sum()

    covs = torch.func.vmap(lambda length: STATIONARY[name](length)(X, z))(lengths)
    assert_close(covs, STATIONARY[name](lengths)(X, z))
    scaled = torch.func.vmap(lambda v: (v * STATIONARY[name](LENGTH))(X, z))(lengths)
    assert_close(scaled, (lengths * STATIONARY[name](LENGTH))(X, z))
    grads = torch.func.vmap(torch.func.grad(total))(lengths)
    assert_close(grads, torch.stack([torch.func.grad(total)(length) for length in lengths]))


@stationary
def test_float32_far_from_the_origin(name):
    x, z, weights = (X + 1e3).float(), (Z + 1e3).float(), torch.randn(6, 4)
    results = []
    for dtype in (torch.float32, torch.float64):
        length = LENGTH.float().to(dtype).requires_grad_()
        cov = STATIONARY[name](length)(x.to(dtype), z.to(dtype))
        results.append((cov.double(), torch.autograd.grad((weights.to(dtype) * cov).sum(), length)[0].double()))
    assert_close(*results, atol=3e-6, rtol=1e-5)


WITH_FEATURES = FEATURES | {
    "sum": FEATURES["Linear"] + 0.5 + kernels.White(0.3),
    "product": FEATURES["Polynomial"] * FEATURES["Linear"] * FEATURES["RandomFourier"],
    "scaled": VARIANCE * FEATURES["RandomFourier"],
    "selected": (2.0 * kernels.Linear(LENGTH[:1]) * kernels.Polynomial(2))[1],
    "batched": torch.tensor([0.5, 2.0]).double() * kernels.Linear() + kernels.Constant(0.5) * FEATURES["Polynomial"],
}


@pytest.mark.parametrize("name", WITH_FEATURES)
def test_features(name):
    kernel = WITH_FEATURES[name]
    assert_close(kernel.features(X) @ kernel.features(Z).mT, kernel(X, Z))


def test_a_kernel_without_finite_features():
    rbf, linear = kernels.RBF(), kernels.Linear()
    for kernel in (rbf, 2.0 * rbf, rbf[0], rbf + linear, rbf * linear):
        assert kernel.features(X) is None


@pytest.mark.parametrize("kernel", [*NAMED, kernels.RationalQuadratic])
def test_random_fourier_converges(kernel):
    num = 200_000
    approximate = kernels.RandomFourier(frequencies(kernel, num), LENGTH)
    assert_close(approximate(X, Z), kernel(LENGTH)(X, Z), atol=5 / (2 * num) ** 0.5, rtol=0)
    assert_close(approximate.diag(X), torch.ones(6))


DRAWN = {
    "RBF": kernels.RBF(LENGTH),
    "Matern32": kernels.Matern32(LENGTH),
    "RationalQuadratic": kernels.RationalQuadratic(LENGTH, alpha=0.8),
    "Scaled": VARIANCE * kernels.Matern52(LENGTH),
    "Select": kernels.Matern12(0.7)[1],
    "Product": (2.0 * kernels.RBF(0.7))[0] * kernels.Matern32(1.6)[1],
    "Sum": kernels.RBF(0.7)[0] + 0.5 * kernels.Matern32(LENGTH) + 0.5,
    "Linear": kernels.Linear(LENGTH),
    "batch": torch.tensor([0.5, 2.0]).double() * kernels.RBF(0.7)
    + kernels.Matern32(LENGTH)
    + kernels.Linear(LENGTH.view(2, 1)),
    "alphas": kernels.RationalQuadratic(LENGTH, alpha=torch.tensor([0.5, 3.0]).double()),
}


@pytest.mark.parametrize("name", DRAWN)
@pytest.mark.parametrize("batch", [(), (2,)])
def test_prior_functions(name, batch):
    kernel, num, x = DRAWN[name], 10_000, X.expand(*batch, 6, 2)
    draw = kernel.prior_functions(num, 8, x)
    f, again = draw(x), draw(x[..., :3, :])
    assert_close(f[..., :3], again)  # a function: the same values at the same inputs
    expected = kernel(x)
    assert f.shape == (num, *expected.shape[:-1])
    assert_close(torch.einsum("s...n,s...m->...nm", f, f) / num, expected, atol=0.06 * expected.max().item(), rtol=0)
    if f.dim() == 3:  # independent along the batch
        assert (f[:, 0] * f[:, 1]).mean(0).abs().max() < 0.06 * expected.max()


COMPOSED = {
    "Sum": lambda a, b: pyro_kernels.Sum(a, b),
    "Product": lambda a, b: pyro_kernels.Product(a, pyro_kernels.Sum(b, 0.5)),
    "Exponent": lambda a, b: pyro_kernels.Exponent(a),
    "WhiteNoise": lambda a, b: pyro_kernels.Sum(a, pyro_kernels.WhiteNoise(2)),
}


@pytest.mark.parametrize("name", COMPOSED)
def test_from_pyro(name):
    matern, linear = pyro_kernels.Matern32(2, VARIANCE, LENGTH), pyro_kernels.Linear(1, active_dims=[1])
    module = COMPOSED[name](matern, linear)
    kernel = kernels.from_pyro(module)
    assert_close(kernel(X, Z), module(X, Z))
    assert_close(kernel(X), module(X), atol=1e-6, rtol=0)
    assert_close(kernel.diag(X), module(X, diag=True))
    kernel(X).sum().backward()
    assert all(p.grad is not None and p.grad.abs().min() > 0 for p in module.parameters())
    assert repr(kernel) == type(module).__name__


class Model(PyroModule):
    def __init__(self):
        super().__init__()
        matern = pyro_kernels.Matern32(2, lengthscale=LENGTH)
        matern.lengthscale = PyroSample(dist.LogNormal(torch.zeros(2), 1.0).to_event(1))
        self.kernel = pyro_kernels.Exponent(pyro_kernels.Sum(matern, pyro_kernels.Constant(2)))

    def forward(self):
        return kernels.from_pyro(self.kernel)


def test_from_pyro_reads_a_prior_once():
    model = Model()
    kernel = kernels.from_pyro(model.kernel)  # outside a model a PyroSample attribute is drawn anew at each reading
    assert torch.equal(kernel(X, Z), kernel(X, Z))
    assert not torch.equal(kernel(X, Z), kernels.from_pyro(model.kernel)(X, Z))
    trace = poutine.trace(model).get_trace()
    kernel = trace.nodes["_RETURN"]["value"]
    drawn = trace.nodes["kernel.kern.kern0.lengthscale"]["value"]
    assert_close(kernel(X, Z), (kernels.Matern32(drawn) + 1.0)(X, Z).exp())
    assert set(pyro.get_param_store()) == {"kernel.kern.kern0.variance", "kernel.kern.kern1.variance"}


class WithBuffer(pyro_kernels.Kernel):
    def __init__(self):
        super().__init__(2)
        self.register_buffer("weights", LENGTH)

    def forward(self, X, Z=None, diag=False):
        phi = (X @ self.weights)[:, None]
        return phi[:, 0] ** 2 if diag else phi @ (phi if Z is None else (Z @ self.weights)[:, None]).T


def test_from_pyro_keeps_buffers():
    assert_close(kernels.from_pyro(WithBuffer())(X), WithBuffer()(X))


a = kernels.RBF()
MISTAKES = {
    "RBF's lengthscale has 3 entries .* 2 columns": lambda: kernels.RBF(torch.ones(3))(X),
    "Periodic's period has 3 entries": lambda: kernels.Periodic(1.0, torch.ones(3))(X),
    "Linear's variance has 3 entries": lambda: kernels.Linear(torch.ones(3))(X, Z),
    "RandomFourier's lengthscale has 3 entries": lambda: kernels.RandomFourier(X, torch.ones(3))(X),
    r"\[0, 2\] needs distinct columns of the inputs' 2, it reads \(0, 2\)": lambda: a[0, 2](X),
    r"\[1, 1\] needs distinct columns": lambda: a[1, 1](X),
    r"\[0, -2\] .* it reads \(0, 0\)": lambda: a[0, -2](X),
    r"\[2:\] needs distinct columns of the inputs' 2, it reads \(\)": lambda: a[2:](X),
    r"\[-3\] needs distinct columns of the inputs' 2, it reads \(-1,\)": lambda: GaussianProcess(a[0] + a[-3], X),
    "Anova's base must be a kernel of one column": lambda: kernels.Anova(a[1], 0, 1),
    "got function; kernels.from_function makes one": lambda: a * (lambda x, z: x @ z.mT),
    "from_function's diag must be a function": lambda: kernels.from_function(lambda x, z: x @ z.mT, None),
    "Matern32's lengthscale must be positive, got -1": lambda: kernels.Matern32(-1.0),
    "alpha must be positive": lambda: kernels.RationalQuadratic(1.0, 0.0),
    "period must be positive": lambda: kernels.Periodic(1.0, 0.0),
    "variance that scales a kernel must be positive": lambda: -2 * a,
    "White's variance must be positive": lambda: kernels.White(float("nan")),
    "Constant's variance must be positive": lambda: a + 0,
    "Sum's term 1 must be a kernel .* got str": lambda: kernels.Sum(a, "linear"),
    "Sum needs at least one": kernels.Sum,
    "Product's factor 1 must be a kernel .* got Linear": lambda: a * torch.nn.Linear(2, 1),
    "Product needs at least one": kernels.Product,
    "Scaled's kernel must be": lambda: kernels.Scaled(2.0, 1.0),
    "Select's kernel must be": lambda: kernels.Select(X, 1),
    "from_pyro needs a pyro.contrib.gp.kernels.Kernel, got RBF": lambda: kernels.from_pyro(a),
    "degree must be a whole number of at least 1, got 0": lambda: kernels.Polynomial(0),
    "got 1.5": lambda: kernels.Polynomial(1.5),
    "bias must not be negative": lambda: kernels.Polynomial(2, -1.0),
    "frequencies must be a tensor": lambda: kernels.RandomFourier(torch.ones(3)),
    "frequencies are for 3 columns, the inputs have 2": lambda: kernels.RandomFourier(torch.ones(4, 3))(X),
    "got <class .*Linear": lambda: frequencies(kernels.Linear, 5),
    "got <class .*Periodic": lambda: frequencies(kernels.Periodic, 5),  # its spectrum is discrete
}


@pytest.mark.parametrize("message", MISTAKES)
def test_mistakes(message):
    refused(message, lambda: MISTAKES[message]())


def alike(num=3):
    lengths = torch.tensor([0.3, 0.5, 0.9])[:num]
    outputs = torch.tensor([[0.4], [0.7]])
    return {
        "scalars": [kernels.RBF(length) for length in lengths],
        "numbers": [kernels.Matern52(length) for length in (0.3, 0.5, 0.9)],
        "columns": [kernels.Matern32(length * torch.tensor([1.0, 2.0])) for length in lengths],
        "scaled": [(1 + i) * kernels.Matern12(length)[i % 2] for i, length in enumerate(lengths)],
        "selected": [(torch.tensor(1.0 + i) * kernels.RBF(length))[[1, 0]] for i, length in enumerate(lengths)],
        "outputs": [torch.tensor([1.0, 2.0]) * kernels.RBF(length * outputs)[0] for length in lengths],
        "periodic": [kernels.Periodic(length, 2 * length)[1] for length in lengths],
        "rational": [kernels.RationalQuadratic(length, 1 + length)[0] for length in lengths],
        "product": [kernels.RBF(length)[0] * kernels.Periodic(1.0, length)[1] for length in lengths],
    }


@pytest.mark.parametrize("name", list(alike()))
def test_stacked_kernels_are_each_of_them(name):
    each, x, z = alike()[name], torch.rand(7, 2), torch.rand(3, 5, 2)
    assert len({structure(kernel) for kernel in each}) == 1
    whole = stacked(each, x)
    for c, kernel in enumerate(each):
        torch.testing.assert_close(whole(x)[..., c, :, :], kernel(x))
        torch.testing.assert_close(whole(x, z)[..., c, :, :], kernel(x, z[c]))
        torch.testing.assert_close(whole(z)[..., c, :, :], kernel(z[c]))
        torch.testing.assert_close(whole.diag(x)[..., c, :].expand(kernel.diag(x).shape), kernel.diag(x))


def test_kernels_that_differ_by_more_than_numbers_are_not_stacked():
    class Mine(kernels.RBF):
        pass

    rbf, matern = kernels.RBF(0.3), kernels.Matern32(0.3)
    for one, other in (
        (rbf, matern),
        (rbf[0], rbf),
        (rbf[0], rbf[:2]),
        (2.0 * rbf[0], rbf[0]),
        (rbf, kernels.RBF(torch.ones(2))),
        (rbf * matern, rbf * matern * rbf),
    ):
        assert structure(one) != structure(other)
    assert structure(Mine(0.3)) is structure(rbf * kernels.Linear()) is None
    assert structure(rbf[0]) == structure(kernels.RBF(torch.tensor([[0.2], [0.4]]))[1])
