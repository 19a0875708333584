"""Kernels of zero-mean functions against quadrature, and random effects."""

import numpy as np
import pytest
import torch
from torch.testing import assert_close

from pyro_sparsegp import AutoSparseGP, GaussianProcess, kernels
from pyro_sparsegp.families import SVGP, MeanFieldAdditive
from pyro_sparsegp.kernels import Anova

from .models import data, gaussian, refused

CLOSED = [kernels.RBF, kernels.Matern32, kernels.Matern52]
LOW, HIGH = -1.0, 2.5
X = torch.linspace(-1.5, 3.0, 25, dtype=torch.float64)[:, None]


def panels(breaks, num=40):
    """Gauss-Legendre nodes and weights of a mean over [LOW, HIGH], cut at ``breaks`` where a kernel has its kinks."""
    nodes, weights = (torch.as_tensor(part) for part in np.polynomial.legendre.leggauss(num))
    edges = torch.tensor(sorted({LOW, HIGH, *(b for b in breaks if LOW < b < HIGH)}))
    half = (edges[1:] - edges[:-1])[:, None] / 2
    where = edges[:-1, None] + half * (1 + nodes)
    return where.reshape(-1, 1), (half * weights).reshape(-1) / (HIGH - LOW)


def dense(kernel, x):
    """Eq. 8, each mean m(x) by quadrature cut at x, and v by the mean of m."""

    def m(x):
        rows = []
        for row in x:
            s, w = panels([float(row)])
            rows.append(kernel(row[None], s)[0] @ w)
        return torch.stack(rows)

    s, w = panels([])
    mean = m(x)
    return kernel(x) - mean[:, None] * mean / (m(s) @ w)


@pytest.mark.quick("RBF-0.3 | RBF-30.0 | Matern32-2.0 | Matern52-0.3 | Matern52-30.0")
@pytest.mark.parametrize("length", [0.3, 2.0, 30.0])
@pytest.mark.parametrize("base", CLOSED)
def test_closed_forms(base, length):
    kernel = Anova(1.7 * base(torch.tensor(length)), LOW, HIGH)
    expected = dense(1.7 * base(length), X)
    assert_close(kernel(X), expected, rtol=1e-9, atol=1e-13)
    assert_close(kernel(X, X[:7]), expected[:, :7], rtol=1e-9, atol=1e-13)
    assert_close(kernel.diag(X), expected.diagonal(), rtol=1e-9, atol=1e-13)
    assert_close(1.7 * Anova(base(length), LOW, HIGH)(X), kernel(X))


@pytest.mark.parametrize("base", CLOSED)
def test_the_integral_is_zero(base):
    kernel = Anova(base(0.4), LOW, HIGH)
    for x in X:
        s, w = panels([float(x)])
        assert abs(kernel(x[None], s)[0] @ w) < 1e-12
    assert (torch.linalg.eigvalsh(kernel(X)) > -1e-13).all()


@pytest.mark.parametrize("length", [0.1, 1.0, 30.0])
@pytest.mark.parametrize("base", CLOSED)
def test_float32_keeps_its_digits(base, length):
    """Of a long length scale little but differences of nearly equal numbers is left; naively all would be lost."""
    exact = Anova(base(length), LOW, HIGH)(X)
    single = Anova(base(torch.tensor(length, dtype=torch.float32)), LOW, HIGH)(X.float())
    assert single.dtype == torch.float32
    assert (single - exact).abs().max() < 1e-5 * exact.abs().max()


class Own:
    """A callable with a method ``diag``, which is all that a kernel has to be."""

    def __call__(self, x, z=None):
        return kernels.RBF(0.5)(x, z)

    def diag(self, x):
        return torch.ones_like(x[..., 0])


@pytest.mark.parametrize("base", CLOSED)
def test_very_long_length_scales(base):
    """What is left of k, of the size (width/ℓ)², is right in all digits."""
    one, other = (Anova(base(length), LOW, HIGH)(X) * length**2 for length in (1e4, 1e6))
    assert_close(one, other, rtol=2e-3, atol=2e-3)
    for length in (1e3, 1e5):
        k = Anova(base(length), LOW, HIGH)(X)
        assert torch.linalg.eigvalsh(k)[0] > -1e-10 * k.diagonal().mean()


BY_QUADRATURE = {
    "RationalQuadratic": (kernels.RationalQuadratic(0.8, 0.7), 1e-10),
    "Periodic": (kernels.Periodic(0.9, 1.3), 1e-10),
    "Sum": (1.3 * kernels.RBF(0.5) + 0.4 * kernels.RationalQuadratic(0.8), 1e-10),
    "Line": (kernels.Linear(0.7) + kernels.Constant(1.1), 1e-12),
    "Polynomial": (kernels.Polynomial(3), 1e-12),
    "callable": (Own(), 1e-10),
}


@pytest.mark.parametrize("name", BY_QUADRATURE)
def test_quadrature(name):
    base, tolerance = BY_QUADRATURE[name]
    kernel = Anova(base, LOW, HIGH)
    s, w = panels([0.3, 1.2])
    assert (kernel(X, s) @ w).abs().max() < tolerance
    mean = base(X, s) @ w
    expected = base(X) - mean[:, None] * mean / ((base(s, s) @ w) @ w)
    assert_close(kernel(X), expected, rtol=1e-8, atol=1e-9)
    assert_close(kernel.diag(X), expected.diagonal(), rtol=1e-8, atol=1e-9)


def test_white_noise_stays_on_the_diagonal():
    base = kernels.RationalQuadratic(0.8)
    assert_close(Anova(base + kernels.White(0.3), LOW, HIGH)(X), Anova(base, LOW, HIGH)(X) + 0.3 * torch.eye(25))


def test_nothing_to_take_off():
    """A line through the middle has mean zero, and v = 0."""
    kernel = Anova(kernels.Linear(0.7), -2.0, 2.0)
    assert_close(kernel(X), kernels.Linear(0.7)(X))


def test_interaction_has_zero_mean_along_each_column():
    kernel = 0.7 * Anova(kernels.RBF(0.4), LOW, HIGH)[0] * Anova(kernels.Matern52(0.9), LOW, HIGH)[2]
    x = torch.rand(5, 3)
    s, w = panels([float(v) for v in x[:, 2]])
    for column in (0, 2):
        line = torch.rand(1, 3).expand(len(s), 3).clone()
        line[:, column] = s[:, 0]
        assert (kernel(x, line) @ w).abs().max() < 1e-12
    assert kernel.centred == {0: (LOW, HIGH), 2: (LOW, HIGH)}
    assert kernel.columns == (0, 2)


def test_intervals_of_other_kernels():
    term = Anova(kernels.RBF(0.4), 0.0, 2.0)
    assert (2.0 * term[3]).centred == {3: (0.0, 2.0)}
    assert (term[0] * term[1])[[4, 2]].centred == {4: (0.0, 2.0), 2: (0.0, 2.0)}
    assert kernels.Constant(1.0).centred == {}
    assert kernels.RBF(1.0)[0].centred is None
    assert (term[0] * kernels.RBF(1.0)[1]).centred is None
    assert (term[0] * term[0]).centred is None


@pytest.mark.parametrize("base", [*CLOSED, kernels.RationalQuadratic])
def test_batches(base):
    lengths = torch.tensor([[0.3], [0.9], [2.0]])
    low, high = torch.tensor([-1.0, 0.0, 0.5]), torch.tensor([2.0, 1.0, 3.0])
    variance = torch.tensor([0.5, 1.0, 2.0])
    kernel = Anova(variance * base(lengths), low, high)
    assert kernel.batch_shape == (3,)
    assert kernel(X).shape == (3, 25, 25)
    for i in range(3):
        one = variance[i] * Anova(base(lengths[i]), low[i], high[i])
        assert_close(kernel(X)[i], one(X))
        assert_close(kernel(X, X[:4])[i], one(X, X[:4]))
        assert_close(kernel.diag(X)[i], one.diag(X))


@pytest.mark.parametrize("base", CLOSED)
def test_gradients_in_all_ways(base):
    """Forwards, twice, and mapped, of two sets of inputs, far from the origin."""

    def value(length, low, high, x, z):
        kernel = Anova(base(length), low, high)
        return torch.cat([kernel(x, z).flatten(), kernel(z).flatten()])

    x, z = 50 + torch.rand(4, 1), 50 + torch.rand(3, 1)
    numbers = [torch.tensor(v) for v in (0.6, 49.9, 51.2)]
    inputs = [part.double().requires_grad_() for part in (*numbers, x, z)]
    assert torch.autograd.gradcheck(value, inputs, check_forward_ad=True, fast_mode=True)
    assert torch.autograd.gradgradcheck(value, inputs, fast_mode=True)
    lengths = torch.tensor([0.4, 0.9]).double()
    rest = [part.detach() for part in inputs[1:]]
    mapped = torch.func.vmap(lambda length: value(length, *rest))(lengths)
    assert_close(mapped, torch.stack([value(length, *rest) for length in lengths]))


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Anova(kernels.RBF(1.0), 1.0, 1.0), "finite bounds, low < high, got 1.0 and 1.0"),
        (lambda: Anova(kernels.RBF(1.0), 0.0, float("inf")), "finite bounds, low < high, got 0.0 and inf"),
        (lambda: Anova(kernels.RBF(1.0)[2], 0.0, 1.0), "select outside"),
        (lambda: Anova(3.0), "Anova's base must be a kernel"),
        (lambda: Anova(kernels.DeepBasis(torch.nn.Linear(1, 3))), "has a variance correction"),
        (lambda: Anova(kernels.RBF(1.0))(torch.rand(3, 2)), "the inputs have 2: select one"),
        (lambda: kernels.Categorical(0), "num_levels must be"),
        (lambda: kernels.Categorical(2)(torch.rand(3, 2)), "select one"),
    ],
)
def test_errors(make, message):
    refused(message, make)


def test_categorical():
    codes = torch.tensor([[0.0], [2.0], [1.0], [2.0], [7.0], [7.0]])
    kernel = 1.5 * kernels.Categorical(3, torch.tensor([1.0, 2.0]))
    assert kernel.batch_shape == (2,)
    same = (codes == codes.mT).double()
    assert_close(kernel(codes), torch.tensor([1.5, 3.0])[:, None, None] * same)
    assert_close(kernel.diag(codes), torch.tensor([1.5, 3.0])[:, None].expand(2, 6))
    phi = kernel.features(codes)
    known = kernel(codes) * (codes[:, 0] < 3)  # new levels are all residual
    assert_close(phi @ phi.mT, known * (codes < 3))
    assert "Categorical(3, variance=<2>)" in repr(kernel)
    value = GaussianProcess(1.5 * kernels.Categorical(3), codes, jitter=1e-10).rsample()
    assert_close(value[[1, 4]], value[[3, 5]], atol=1e-3, rtol=0)


@pytest.mark.parametrize("base", [kernels.Linear(2.0), kernels.Constant(1.0)])
@pytest.mark.parametrize("family", [SVGP(4), MeanFieldAdditive(4)])
def test_a_base_without_functions_of_mean_zero_is_refused(base, family):
    x, y = data(num=20)
    model = gaussian(Anova(base)[0] + kernels.RBF(0.5)[1])
    refused(r"GP site 'f': Anova\(.*\) is identically 0.*Polynomial\(1\)", lambda: AutoSparseGP(model, family)(x, y))
    for kernel in (Anova(kernels.Linear(1.0), -1.0, 1.0), Anova(kernels.Polynomial(1))):
        AutoSparseGP(gaussian(kernel[0] + kernels.RBF(0.5)[1]), family)(x, y)
