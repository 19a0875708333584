"""Whose errors are whose: the program's lead to a more general way, the package's reach whoever looks for bugs."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, families, kernels
from pyro_sparsegp.guide.nested import Nested
from pyro_sparsegp.guide.predictors import Predictors
from pyro_sparsegp.inference.terms import Grid
from pyro_sparsegp.program.asking import Unsupported, answers, asks_program, attempt
from pyro_sparsegp.program.explore import Program


def data():
    x = torch.linspace(0, 1, 20)[:, None]
    return x, torch.poisson(torch.exp(1 + torch.sin(8 * x[:, 0])))


def plain(x, y=None):
    v = pyro.sample("v", dist.LogNormal(0.0, 1.0))
    b = pyro.sample("b", dist.Normal(0.0, 1.0))
    f = pyro.sample("f", GaussianProcess(v * kernels.Matern32(0.3), x))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Poisson((f + b).exp()), obs=y)


def alone(x, y=None):
    f = pyro.sample("f", GaussianProcess(kernels.Matern32(0.3), x))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Poisson(f.exp()), obs=y)


@pytest.mark.parametrize("kind", [RuntimeError, TypeError, ValueError, AttributeError])
@pytest.mark.parametrize(
    ("owner", "name", "program"),
    [
        (Nested, "at", plain),
        (Predictors, "back", plain),
        (Predictors, "distribution", plain),
        (Grid, "expectations", alone),
        (Program, "touching", alone),
    ],
    ids=lambda value: getattr(value, "__name__", value),
)
def test_a_bug_of_the_packages_own_is_raised(monkeypatch, owner, name, program, kind):
    def broken(*args, **kwargs):
        raise kind("a bug")

    monkeypatch.setattr(owner, name, broken)
    svi = SVI(program, AutoSparseGP(program, families.SVGP(4)), pyro.optim.Adam({"lr": 0.01}), TraceQuadrature_ELBO())

    def train():
        for _ in range(2):
            svi.step(*data())

    with pytest.raises(kind, match="a bug"):
        train()


def asked_of(function, *args):
    with attempt() as asked:
        function(*args)
    return asked.error


def test_what_the_program_raises_ends_an_attempt():
    error = asked_of(asks_program()([].pop))
    assert (type(error), type(error.__cause__)) == (Unsupported, IndexError)
    with pytest.raises(IndexError), asks_program():  # where no other way is left
        [].pop()


def test_answers_within_the_program_are_the_packages():
    answer = answers(lambda function: function())
    with pytest.raises(IndexError):
        asked_of(asks_program()(answer), [].pop)
    assert isinstance(asked_of(asks_program()(answer), asks_program()([].pop)), Unsupported)  # which asks it again
    assert "definite" in str(asked_of(asks_program()(answer), lambda: torch.linalg.cholesky(-torch.eye(2))))
