"""States that earlier releases saved load, and are the posteriors that they were."""

from pathlib import Path

import pytest
import torch

from pyro_sparsegp import AutoSparseGP
from tests.states.programs import FAMILIES, at, data, model_of

from .models import train

FILES = sorted((Path(__file__).parent / "states").glob("*.pt"))


@pytest.fixture(params=FILES, ids=lambda path: path.stem, scope="module")
def saved(request):
    return torch.load(request.param, weights_only=True)


@pytest.mark.parametrize("name", FAMILIES)
def test_a_state_loads_and_gives_the_posterior_it_had(name, saved):
    state, mean, variance = saved[name]
    guide = AutoSparseGP(model_of(name), FAMILIES[name]())
    guide.load_state_dict(state)
    if guide.on_sites:  # of a release whose states held no data
        guide(*data())
    posterior = guide.posterior(at())["f"]
    torch.testing.assert_close(posterior.mean, mean, rtol=1e-6, atol=1e-8)
    torch.testing.assert_close(posterior.variance, variance, rtol=1e-6, atol=1e-8)


def test_what_has_left_is_named(saved):
    for name, told in (("SVGP not whitened", "whiten=False"), ("FreeSites", r"FreeSites\(")):
        with pytest.raises(ValueError, match=f"{told}.*of an earlier release if it has left"):
            AutoSparseGP(model_of(name), FAMILIES["SVGP"]()).load_state_dict(saved[name][0])


@pytest.mark.parametrize("name", FAMILIES)
def test_a_state_that_was_loaded_trains_on(name, saved):
    guide = AutoSparseGP(model_of(name), FAMILIES[name]())
    guide.load_state_dict(saved[name][0])
    if guide.by_expectation:
        return
    from pyro_sparsegp import TraceQuadrature_ELBO

    losses = train(guide.model, guide, *data(), steps=3, lr=0.01, loss=TraceQuadrature_ELBO())
    assert all(loss < 1e4 for loss in losses)
