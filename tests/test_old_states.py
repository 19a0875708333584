"""States that earlier releases saved load, and are the posteriors that they were."""

import functools
from pathlib import Path

import pytest
import torch

from pyro_sparsegp import AutoSparseGP
from tests.states.programs import FAMILIES, JOINT, at, data, model_of

from .models import train

STATES = Path(__file__).parent / "states"
FIRST = ["f33cd76", "fb7d7eb"]  # releases whose states had no latents that are joint with f
ALL = FAMILIES | JOINT
CASES = [(file, name) for file in FIRST for name in FAMILIES] + [
    ("2fc3d675", name) for name in ["SVGP", "SGPR", *JOINT]
]


@functools.cache
def saved(file):
    return torch.load(STATES / f"{file}.pt", weights_only=True)


@pytest.mark.filterwarnings("ignore:the density of site 'y'")
@pytest.mark.parametrize(("file", "name"), CASES)
def test_a_state_loads_and_gives_the_posterior_it_had(file, name):
    state, mean, variance = saved(file)[name]
    guide = AutoSparseGP(model_of(name), ALL[name]())
    guide.load_state_dict(state)
    if guide.kind.is_of_rows:  # of a release whose states held no data
        guide(*data())
    posterior = guide.posterior(at())["f"]
    # Sites over points have a ridge now, by which they follow a length: test_a_product_of_processes_does_not_diverge.
    close = {"rtol": 1e-3, "atol": 1e-4} if guide.joint.drawn else {"rtol": 1e-6, "atol": 1e-8}
    torch.testing.assert_close(posterior.mean, mean, **close)
    torch.testing.assert_close(posterior.variance, variance, **close)


@pytest.mark.parametrize("file", FIRST)
def test_what_has_left_is_named(file):
    for name, told in (("SVGP not whitened", "whiten=False"), ("FreeSites", r"FreeSites\(")):
        with pytest.raises(ValueError, match=f"{told}.*in an earlier release if need be"):
            AutoSparseGP(model_of(name), FAMILIES["SVGP"]()).load_state_dict(saved(file)[name][0])


@pytest.mark.quick("2fc3d675 | CoupledPrecision | f33cd76-MeanFieldAdditive | fb7d7eb-WeightSpace")
@pytest.mark.parametrize(("file", "name"), CASES)
def test_a_state_that_was_loaded_trains_on(file, name):
    guide = AutoSparseGP(model_of(name), ALL[name]())
    guide.load_state_dict(saved(file)[name][0])
    if not guide.kind.has_bound:
        return
    from pyro_sparsegp import TraceQuadrature_ELBO

    losses = train(guide.model, guide, *data(), steps=3, lr=0.01, loss=TraceQuadrature_ELBO())
    assert all(loss < 1e4 for loss in losses)
