"""Graphs that were simplified against the computations that they stand for."""

import pytest
import torch

from pyro_sparsegp.inference.tracing import traced

N = 3


def equal_operations(x, y):
    return [(x * y).exp() + (x * y).exp(), (x - y).pow(2).sum() * (x - y).pow(2).sum()]


def nothing(x, y):
    return [((x * 1 + 0.0) / 1).pow(1.0) - 0, y.neg().neg().expand(N, N).mT.mT.reshape(N, N) * torch.ones_like(y)]


def constants(x, y):
    half = torch.ones_like(x).sum() * 0.5
    return [x * half, half - y, torch.full_like(x, 3.0).cumsum(0) + x, x.new_zeros(()) + x.sum(), torch.ones_like(x)]


def broadcasts(x, y):
    one = x[0, 0] * torch.ones_like(x)
    row = (x + y)[0].expand(N, N) * 1
    return [one, one.view(-1), row.view(-1), x[:1] + torch.zeros_like(x), torch.ones(N, 1, dtype=x.dtype) * x]


def read_before_written(x, y):
    z = x * 2
    first = z.exp()
    z.add_(y)
    second = z.exp()
    whole = z * 1
    z.zero_()
    return [first, second, z, whole]


def written_to_copies(x, y):
    a, b = x.clone(), x.clone()
    a.add_(1)
    c = x * 1
    c.diagonal().zero_()
    d = x + 0.0
    return [a, b, c, d, x.sum(0)]


def written_through_views(x, y):
    z = x + y
    row = z[0]
    before = row.sum()
    z.mul_(3)
    return [before, row.sum(), z[0] * 1]


def factors(x, y):
    gram = x @ x.mT + N * torch.eye(N, dtype=x.dtype)
    first, second = torch.linalg.cholesky_ex(gram).L, torch.linalg.cholesky_ex(gram).L
    return [first + second.tril(), torch.linalg.solve_triangular(first, y, upper=False)]


def integers(x, y):
    count = torch.arange(N)
    return [
        count * 1.0,
        count * 1,
        count + 1,
        count + 1.0,
        (x > 0) * 1,
        (x > 0) * torch.ones_like(x),
        count + torch.zeros(N),
    ]


def gradients(x, y):
    a = x.detach().requires_grad_()
    return [*torch.autograd.grad(((a - y) ** 2).mean() + 0.5 * (a @ a).trace(), a)]


CASES = [
    equal_operations,
    nothing,
    constants,
    broadcasts,
    read_before_written,
    written_to_copies,
    written_through_views,
    factors,
    integers,
    gradients,
]


def calls(graph):
    return sum(node.op == "call_function" for node in graph.run.graph.nodes)


@pytest.mark.parametrize("function", CASES, ids=lambda case: case.__name__)
def test_a_graph_gives_the_same_numbers_again_and_again(function):
    x, y = torch.randn(2, N, N, dtype=torch.float64)
    graph = traced(lambda: function(x, y))
    for _ in range(2):
        x.normal_(), y.normal_()
        wanted = function(x.clone(), y.clone())
        kept = x.clone(), y.clone()
        found = graph.run(*graph.inputs)
        for one, other in zip(found, wanted):
            assert one.dtype == other.dtype
            assert one.shape == other.shape
            torch.testing.assert_close(one, other, rtol=0, atol=0)
        assert torch.equal(x, kept[0])
        assert torch.equal(y, kept[1])


@pytest.mark.parametrize(
    ("function", "most"),
    [(equal_operations, 7), (nothing, 2), (constants, 4), (factors, 8)],
    ids=lambda case: getattr(case, "__name__", case),
)
def test_a_graph_has_few_operations(function, most):
    x, y = torch.randn(2, N, N, dtype=torch.float64)
    assert calls(traced(lambda: function(x, y))) <= most


def test_results_are_memory_of_their_own():
    # What is given away may be kept while parameters, which are inputs, are stepped in place.
    x = torch.randn(N, dtype=torch.float64)
    graph = traced(lambda: [x * 1, (x + 0.0)[1:], (x / 1)[1:] * 1])
    whole, part, again = graph.run(*graph.inputs)
    before = x.clone()
    x.zero_()
    assert torch.equal(whole, before)
    assert torch.equal(part, before[1:])
    assert torch.equal(again, before[1:])


def test_draws_are_drawn_each():
    x = torch.zeros(N, dtype=torch.float64)
    graph = traced(lambda: [x + torch.randn(N, dtype=torch.float64), x + torch.randn(N, dtype=torch.float64)])
    one, other = graph.run(*graph.inputs)
    assert graph.draws
    assert not torch.equal(one, other)
