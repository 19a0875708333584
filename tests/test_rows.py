"""Rows recognised in another order."""

import time

import pytest
import torch

from pyro_sparsegp.numerics.rows import find_permutation


@pytest.mark.parametrize("shape", [(50,), (50, 1), (50, 3), (50, 2, 3), (1, 2), (0, 2)])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.int64, torch.bool])
def test_found(shape, dtype):
    old = (3 * torch.randn(shape)).to(dtype)
    order = torch.randperm(shape[0])
    found = find_permutation(old, old[order])
    assert torch.equal(old[found], old[order])
    assert torch.equal(found.sort().values, torch.arange(shape[0]))


def test_none_for_other_rows():
    x = torch.randn(40, 2)
    other = x.flip(0)
    other[7, 1] = torch.nextafter(other[7, 1], torch.tensor(9.0))
    assert find_permutation(x, other) is None
    assert find_permutation(x, x[:39]) is None
    assert find_permutation(x, x.float()) is None
    assert find_permutation(x, torch.cat([x[:39], x[:1]])) is None  # one twice, one missing
    assert find_permutation(x.reshape(80), x) is None
    assert find_permutation(torch.arange(3), torch.arange(3.0)).tolist() == [0, 1, 2]


def test_columns_are_told_apart():
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]])
    assert find_permutation(x, torch.tensor([[2.0, 1.0], [4.0, 3.0]])) is None
    assert find_permutation(x, torch.tensor([[1.0, 4.0], [3.0, 2.0]])) is None


def test_repeated_rows_keep_their_order():
    x = torch.tensor([2.0, 1.0, 2.0, 1.0, 1.0])
    assert find_permutation(x, x).tolist() == [0, 1, 2, 3, 4]
    assert find_permutation(x, x.sort().values).tolist() == [1, 3, 4, 0, 2]


def test_several_tensors_side_by_side():
    """Repeated inputs with other outcomes belong to their outcomes."""
    x, y = torch.tensor([[1.0], [1.0], [1.0], [2.0]]), torch.tensor([5, 6, 7, 5])
    order = torch.tensor([3, 2, 0, 1])
    assert torch.equal(find_permutation([x, y], [x[order], y[order]]), order)
    assert find_permutation([x, y], [x[order], y[[1, 0, 2, 3]]]) is None


def test_nan_and_zero():
    x = torch.tensor([[0.0, torch.nan], [1.0, 2.0], [torch.inf, torch.nan]])
    order = torch.tensor([2, 0, 1])
    assert torch.equal(find_permutation(x, x[order]), order)
    assert torch.equal(find_permutation(x, -(-x[order] + 0.0)), order)
    assert find_permutation(x, x.nan_to_num(3.0)) is None


def test_numbers_of_few_bits():
    """Grids of halves: floats whose last 50 bits are zeros."""
    axis = torch.arange(200) / 2
    x = torch.cartesian_prod(axis, axis)
    order = torch.randperm(len(x))
    assert torch.equal(find_permutation(x, x[order]), order)


def test_a_hundred_thousand_rows():
    x = torch.randn(100_000, 8)
    order = torch.randperm(len(x))
    start = time.perf_counter()
    assert torch.equal(find_permutation(x, x[order]), order)
    assert time.perf_counter() - start < 2
