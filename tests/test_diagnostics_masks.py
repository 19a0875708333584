"""Scores and log likelihoods of data of which masks leave some out."""

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine

from pyro_sparsegp import AutoSparseGP, GaussianProcess, diagnostics, kernels
from pyro_sparsegp.families import SVGP

from .models import observed, train, trained

arviz_stats = pytest.importorskip("arviz_stats")
pytestmark = pytest.mark.filterwarnings("ignore:Estimated shape parameter")
KERNEL = kernels.Matern32(0.3)


def fitted(model, *args):
    return trained(model, SVGP(6), *args, steps=5)


def data():
    x = torch.rand(20, 1)
    Y = torch.stack([torch.sin(6 * x[:, 0]), torch.cos(6 * x[:, 0])], -1) + 0.2 * torch.randn(20, 2)
    seen = torch.rand(20, 2) < 0.6
    seen[3] = False
    return x, Y, seen


def test_a_mask_of_a_distribution_leaves_rows_out():
    def model(x, y, seen):
        f = pyro.sample("f", GaussianProcess(KERNEL, x))
        observed(dist.Normal(f, 0.2).mask(seen), y)

    x, Y, seen = data()
    y, seen = Y[:, 0], seen[:, 0]
    guide = fitted(model, x, y, seen)
    with_masks = diagnostics.predictive_scores(model, guide, x, y, seen, num_samples=1)
    without = diagnostics.predictive_scores(model, guide, x[seen], y[seen], seen[seen], num_samples=1)
    np.testing.assert_allclose(with_masks.summary, without.summary, rtol=1e-6)
    tree = diagnostics.to_datatree(model, guide, x, y, seen, num_samples=4)
    np.testing.assert_array_equal(tree.log_likelihood["data"], seen.nonzero()[:, 0])
    assert tree.log_likelihood["y"].shape[-1] == seen.sum()


def test_outputs_that_are_left_out_are_not_scored():
    def model(x, Y, seen):
        f = pyro.sample("f", GaussianProcess(KERNEL, x).expand([2]).to_event(1))
        observed(dist.Normal(f.mT, 0.2).mask(seen).to_event(1), Y)

    x, Y, seen = data()
    guide = fitted(model, x, Y, seen)
    found = [
        diagnostics.predictive_scores(model, guide, x, values, seen, num_samples=10, seed=0)
        for values in (Y, torch.where(seen, Y, torch.nan))
    ]
    np.testing.assert_allclose(found[0].summary, found[1].summary, rtol=1e-6)
    there = seen[seen.any(-1)].numpy()
    np.testing.assert_array_equal(found[0].pointwise["crps"].notnull(), there)
    crps = found[0].pointwise["crps"].values[there]
    assert found[0].summary["mean"]["crps"] == pytest.approx(crps.mean())
    assert found[0].coverage(1.0) == 1
    tree = diagnostics.to_datatree(model, guide, x, Y, seen, num_samples=4)
    assert tree.log_likelihood["y"].shape[-1] == seen.any(-1).sum()


def test_sites_of_one_plate_keep_rows_of_their_own():
    """A survival model: times of events, and times up to which there was none."""

    def model(x, t, event):
        f = pyro.sample("f", GaussianProcess(KERNEL, x))
        with pyro.plate("data", len(x)):
            with poutine.mask(mask=event):
                pyro.sample("t", dist.Exponential(f.exp()), obs=t)
            with poutine.mask(mask=~event):
                pyro.sample("later", dist.Bernoulli(probs=(-t * f.exp()).exp()), obs=torch.ones(len(x)))

    x, t, event = torch.rand(12, 1), torch.rand(12), torch.arange(12) % 2 == 0  # as many of one as of the other
    guide = fitted(model, x, t, event)
    tree = diagnostics.to_datatree(model, guide, x, t, event, num_samples=30)
    for site, rows in (("t", event), ("later", ~event)):
        terms = tree.log_likelihood[site]
        np.testing.assert_array_equal(terms[terms.dims[-1]], rows.nonzero()[:, 0])
        assert arviz_stats.loo(tree, var_name=site).n_data_points == 6


def test_cells_of_two_plates_are_left_out():
    def model(x, Y, seen):
        f = pyro.sample("f", GaussianProcess(KERNEL, x))
        series, time = pyro.plate("series", 2, dim=-2), pyro.plate("time", len(x), dim=-1)
        with series, time, poutine.mask(mask=seen):
            pyro.sample("y", dist.Normal(f, 0.5), obs=Y)

    x, Y, seen = data()
    Y, seen = Y.mT, seen.mT
    guide = fitted(model, x, Y, seen)
    tree = diagnostics.to_datatree(model, guide, x, Y, seen, num_samples=4)
    np.testing.assert_array_equal(tree.log_likelihood["y_dim_0"], seen.flatten().nonzero()[:, 0])
    assert np.isfinite(tree.log_likelihood["y"]).all()
    scores = diagnostics.predictive_scores(model, guide, x, Y, seen, num_samples=1)
    np.testing.assert_array_equal(scores.pointwise["log_score"].notnull(), seen)
    assert scores.summary["mean"]["log_score"] == pytest.approx(np.nanmean(scores.pointwise["log_score"]))


@pytest.mark.parametrize("in_groups", [False, True])
def test_rows_of_discrete_latents_are_left_out(in_groups):
    """A mask of the distribution, whose discrete latent is summed out, and ``poutine.mask`` say the same."""

    def model(x, y, seen, own):
        f = pyro.sample("f", GaussianProcess(KERNEL, x))
        data, group = pyro.plate("data", len(x)), torch.arange(len(x)) % 3
        with pyro.plate("groups", 3) if in_groups else data:
            z = pyro.sample("z", dist.Bernoulli(0.3), infer={"enumerate": "parallel"})
        fn = dist.Normal(f + (z[group] if in_groups else z), 0.3)
        with data, poutine.mask(mask=True if own else seen):
            pyro.sample("y", fn.mask(seen) if own else fn, obs=y)

    x, Y, seen = data()
    y, seen = Y[:, 0], seen[:, 0]
    guide = AutoSparseGP(model, SVGP(6))
    train(model, guide, x, y, seen, True, steps=3)
    trees = [diagnostics.to_datatree(model, guide, x, y, seen, own, num_samples=2, seed=0) for own in (True, False)]
    np.testing.assert_allclose(*(tree.log_likelihood["y"].values for tree in trees), rtol=1e-5)
    assert trees[0].log_likelihood["y"].shape[-1] == seen.sum()


@pytest.mark.parametrize("several", [False, True])
def test_a_site_that_is_left_out_whole_is_named(several):
    def model(x, y, seen):
        f = pyro.sample("f", GaussianProcess(KERNEL, x))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(f, 0.2).mask(seen), obs=y)
            if several:
                pyro.sample("z", dist.Normal(f, 1.0), obs=y)

    x, Y, _ = data()
    y, none = Y[:, 0], torch.zeros(20, dtype=torch.bool)
    guide = fitted(model, x, y, ~none)
    score, options = diagnostics.predictive_scores, {"num_samples": 30}
    with pytest.raises(ValueError, match="site 'y' has no observations: its masks leave out all rows"):
        score(model, guide, x, y, none, **options, **({"var_name": "y"} if several else {}))
    if several:
        score(model, guide, x, y, none, **options, var_name="z")
