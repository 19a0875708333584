import pytest
import torch

from pyro_sparsegp import GaussianProcess, kernels
from pyro_sparsegp.families import SVGP
from pyro_sparsegp.numerics.linalg import (
    MAPPED,
    NumericalWarning,
    above_rounding,
    cholesky,
    default_jitter,
    factorised,
    flags_kept,
    over_lower,
    over_upper,
    variance_floor,
)


def test_cholesky_adds_a_jitter_relative_to_the_diagonal():
    matrix = 500 * torch.randn(5, 7).cov()
    factor = cholesky(matrix)
    scale = default_jitter(torch.float64) * matrix.diagonal().mean()
    torch.testing.assert_close(factor @ factor.mT, matrix + scale * torch.eye(5), rtol=1e-13, atol=1e-12)


def test_a_failed_factor_under_vmap_is_finite():
    def factor(matrix):
        with flags_kept() as flags:
            return cholesky(matrix), flags[0]

    token = MAPPED.set(True)
    short = torch.ones(3, 3) - 3e-8 * torch.eye(3)  # needs more than the default jitter
    factors, flags = torch.func.vmap(factor)(torch.stack([2 * torch.eye(3), torch.full((3, 3), torch.nan), short]))
    MAPPED.reset(token)
    assert factors.isfinite().all()
    assert (flags > 0).tolist() == [False, True, False]
    torch.testing.assert_close(factors[2], cholesky(short, 1e-7))


def test_cholesky_escalates_and_says_so():
    x = torch.linspace(0, 1, 300, dtype=torch.float32)
    matrix = torch.exp(-0.5 * (x[:, None] - x).square())
    with pytest.warns(NumericalWarning, match=r"K_ZZ of site 'f' \(300 x 300, float32\).*float64, a rougher kernel"):
        factor = cholesky(matrix - 3e-6 * torch.eye(300, dtype=torch.float32), what="K_ZZ of site 'f'")
    assert factor.isfinite().all()


@pytest.mark.parametrize("shape", [(127,), (128,), (3, 128), (256,), (384,), (650,)])
def test_factors_of_all_sizes(shape):
    """Those of 128 and its multiples are cut out of larger ones."""
    *batch, num = shape
    a = torch.randn(*batch, num, num + 3)
    matrix = a @ a.mT / num
    factor, info = factorised(matrix)
    assert not info.any()
    assert info.shape == torch.Size(batch)
    torch.testing.assert_close(factor, torch.linalg.cholesky(matrix), rtol=1e-8, atol=1e-8)
    matrix[..., -1, -1] = -1
    assert factorised(matrix)[1].all()
    mapped = torch.func.vmap(lambda m: factorised(m)[0])(a @ a.mT) if batch else factorised(a @ a.mT)[0]
    torch.testing.assert_close(mapped @ mapped.mT, a @ a.mT)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("batch", [(), (2,)])
def test_rows_over_a_factor(batch, dtype):
    factor = (torch.randn(*batch, 5, 5).tril() + 4 * torch.eye(5)).to(dtype)
    rows = torch.randn(*batch, 7, 5, dtype=dtype)
    torch.testing.assert_close(over_upper(rows, factor) @ factor.mT, rows)
    torch.testing.assert_close(over_lower(rows, factor) @ factor, rows)
    assert over_upper(rows, factor).is_contiguous()


@pytest.mark.parametrize("length", [torch.nan, 0.0, 1e-320])
def test_a_kernel_that_is_not_finite_is_told_of_with_its_hyperparameters(length):
    x = torch.rand(12, 2)
    kernel = 2.0 * kernels.RBF(torch.tensor([length, 0.5])) + kernels.Linear(torch.tensor(0.3))
    message = (
        rf"entries are NaN or infinite \(RBF's lengthscale is {length:.3g}( to 0.5)?, Scaled's variance is 2, "
        r"Linear's variance is 0.3\)"
    )
    with pytest.raises(RuntimeError, match=message):
        GaussianProcess(kernel, x).rsample()
    with pytest.raises(RuntimeError, match=r"K_ZZ of site 'f' .*" + message):
        SVGP(x[:5]).build(GaussianProcess(kernel, x), "f")(GaussianProcess(kernel, x), "f")


@pytest.mark.parametrize(
    ("matrix", "advice"),
    [
        (
            torch.eye(3).double().index_fill(0, torch.tensor(1), torch.nan),
            "3 of its 9 entries are NaN .*a kernel of mine",
        ),
        (torch.zeros(3, 3).double(), "the kernel is 0 at these inputs"),
        (1.5 - torch.eye(3).double(), "fewer or better spread ones.*jitters from 1e-08 to 1e-04"),
    ],
    ids=["nan", "zero", "indefinite"],
)
def test_a_failure_tells_its_cause_and_no_other(matrix, advice):
    with pytest.raises(RuntimeError, match=rf"K_ZZ of site 'f' \(3 x 3, float64\).*{advice}") as error:
        cholesky(matrix, what="K_ZZ of site 'f'", made_of=lambda: "a kernel of mine")
    assert "use float64" not in str(error.value)  # it is
    assert "input is not positive-definite" in str(error.value)  # what Pyro's HMC looks for
    assert ("better spread" in str(error.value)) == ("spread" in advice)
    assert ("jitters from" in str(error.value)) == ("NaN" not in advice)  # which do not help against NaN


def test_a_factor_in_a_narrower_dtype():
    a = torch.randn(2, 5, 7)
    matrix = (a @ a.mT).requires_grad_()
    wide, narrow = cholesky(matrix, 1e-3), cholesky(matrix, 1e-3, dtype=torch.float32)
    assert narrow.dtype == torch.float32
    torch.testing.assert_close(narrow.double(), wide, rtol=1e-6, atol=1e-6)
    weights = torch.randn(2, 5, 5)
    (expected,) = torch.autograd.grad((wide * weights).sum(), matrix)
    (found,) = torch.autograd.grad((narrow * weights).sum(), matrix)
    torch.testing.assert_close((found + found.mT) / 2, expected, rtol=1e-4, atol=1e-4)


def test_the_floor_of_variances_is_positive_and_relative():
    prior = torch.tensor([[4.0, 0.0, 1e-8], [0.0, 0.0, 0.0]])
    eps, floor = torch.finfo(torch.float64).eps, variance_floor(prior)
    torch.testing.assert_close(floor[0], 10 * eps * torch.tensor([4.0, 4.0 * eps, 1e-8]))
    assert floor.rsqrt().isfinite().all()
    assert torch.func.grad(lambda low: above_rounding(low, prior).sum())(0 * prior).eq(1).all()  # and at it no clamp's
