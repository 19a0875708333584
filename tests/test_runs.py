"""How often the model runs."""

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, families, kernels

LIKELIHOODS = {
    "normal": lambda f: dist.Normal(f, 0.3),
    "poisson": lambda f: dist.Poisson(f.exp()),
    "odd": lambda f: dist.Poisson((0.1 + f).square()),
}


class Counted:
    """A model that counts its runs."""

    def __init__(self, sites: int, likelihood: str = "normal") -> None:
        self.sites, self.likelihood, self.runs = sites, likelihood, 0

    def __call__(self, x, y=None):
        self.runs += 1
        for i in range(self.sites):
            scale = pyro.sample(f"scale_{i}", dist.LogNormal(torch.zeros((), dtype=x.dtype), 0.1))
            f = pyro.sample(f"f_{i}", GaussianProcess(scale * kernels.RBF(0.5), x))
            with pyro.plate(f"data_{i}", len(x)):
                pyro.sample(f"y_{i}", LIKELIHOODS[self.likelihood](f), obs=y)


def data():
    x = torch.linspace(0, 1, 20, dtype=torch.float64)[:, None]
    return x, (6 * x[:, 0]).sin().round().abs()


def svi_of(model, guide):
    return pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), TraceQuadrature_ELBO())


FAMILIES = {"SVGP": lambda: families.SVGP(4), "SGPR": lambda: families.SGPR(4)}


@pytest.mark.parametrize(
    ("family", "sites", "likelihood"),
    [("SVGP", 1, "normal"), ("SVGP", 3, "poisson"), ("SVGP", 9, "normal"), ("SGPR", 1, "normal")],
)
def test_a_first_call_runs_the_model_at_most_eight_times(family, sites, likelihood):
    model = Counted(sites, likelihood)
    guide = AutoSparseGP(model, FAMILIES[family](), independent=True)  # the search for a mode apart
    guide(*data())
    assert model.runs <= 8  # of which two tell whether rows depend on each other
    svi_of(model, guide).step(*data())  # in which q meets the data
    assert model.runs <= 8 + 5


def test_a_first_step_from_the_mode_has_met_the_data():
    model = Counted(1, "poisson")
    guide = AutoSparseGP(model, families.SVGP(4))
    guide(*data())
    assert model.runs <= 34  # 10 of them of starts beyond a plateau, 2 of such starts' integrals, and 1 of links
    model.runs = 0
    svi_of(model, guide).step(*data())
    assert model.runs <= 2  # that of the check, and the step's


@pytest.mark.parametrize("likelihood", ["normal", "poisson", "odd"])
def test_a_step_and_a_posterior_run_a_model_once(likelihood):
    model = Counted(1, likelihood)
    svi = svi_of(model, AutoSparseGP(model, families.SVGP(4)))
    svi.step(*data())
    model.runs = 0
    svi.step(*data())
    assert model.runs == 1
    svi.guide.posterior(data()[0])
    assert model.runs == 2


@pytest.mark.parametrize("later", [False, True])
def test_a_program_that_takes_rows_by_itself_runs_once_a_step(later):
    x, y = data()
    taken = []

    def model(x, y=None):
        rows = torch.randperm(len(x))[:5] if whole is None else whole
        taken.append(rows)
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5), x[rows]))
        with pyro.plate("data", len(x), subsample=rows):
            pyro.sample("y", dist.Poisson(f.exp()), obs=None if y is None else y[rows])

    svi = svi_of(model, AutoSparseGP(model, families.SVGP(4)))
    whole = torch.arange(len(x)) if later else None
    svi.step(x, y)
    whole = None
    for _ in range(2):  # at the second step after the first call the program is asked whether it has changed
        svi.step(x, y)
    before = len(taken)
    svi.step(x, y)
    assert len(taken) == before + 1
