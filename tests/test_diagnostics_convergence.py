"""Optimisation history, the stopping rule, simulation-based calibration and ribbons."""

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_sparsegp import AutoSparseGP, ExpectationPropagation, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import SGPR, SVGP, SparseEP

from .models import data, one_function, regression, train

pytest.importorskip("xarray")
stats = pytest.importorskip("arviz_stats")
diagnostics = pytest.importorskip("pyro_sparsegp.diagnostics")
History, StoppingRule = diagnostics.History, diagnostics.StoppingRule


def run(seed, steps=16, **kwargs):
    x, y = data(num=40)
    pyro.set_rng_seed(seed)
    guide = AutoSparseGP(regression, SVGP(6))
    history = History(guide, **kwargs)
    svi = pyro.infer.SVI(regression, guide, pyro.optim.Adam({"lr": 0.03}), TraceQuadrature_ELBO(2))
    losses = [history.record(svi.step(x, y)) for _ in range(steps)]
    return guide, history, losses, (x, y)


def test_history_is_a_group():
    first, second = run(0), run(1, 20)
    tree = diagnostics.to_datatree(regression, [first[0], second[0]], *first[3], num_samples=5)
    tree = diagnostics.add_history(tree, [first[1], second[1]], window=12)
    group = tree["vi_history"]
    assert group["elbo"].shape == (2, 12)
    np.testing.assert_allclose(group["elbo"][0], -np.array(first[2][-12:]))
    assert group["locs.length"].shape == (2, 12, 2)
    last = first[0].locs.length_unconstrained.detach()
    np.testing.assert_allclose(group["locs.length"][0, -1], last)
    found = stats.rhat(tree, group="vi_history")
    assert np.isfinite(found["elbo"])
    assert np.isfinite(stats.mcse(tree, group="vi_history")["locs.noise"])
    assert not any(name.startswith("gps") for name in group.data_vars)
    everything = run(0, 3, parameters=("gps.",))[1].to_datatree()
    assert any(name.startswith("gps.f") for name in everything["vi_history"].data_vars)
    with pytest.raises(ValueError, match="shortest run has 16"):
        diagnostics.add_history(tree, first[1], window=17)
    with pytest.raises(ValueError, match="history is empty"):
        History().to_datatree()
    with pytest.raises(ValueError, match="collection of names"):
        History(parameters="locs")


def stops_at(losses, **kwargs):
    history, rule = History(), StoppingRule(**kwargs)
    for step, loss in enumerate(losses):
        history.record(loss)
        if rule(history):
            return step, rule.reason
    return None, None


def test_the_stopping_rule():
    rng = np.random.default_rng(0)
    steps = np.arange(4000)
    noise = rng.normal(size=4000)
    # at rest from the start: soon after the window is full
    assert 400 <= stops_at(noise)[0] < 1000
    # a slow trend, of a tenth of the noise over a window: later than without
    trend = 100 * np.exp(-steps / 300)
    assert 1200 < stops_at(trend + noise)[0] < 3000
    # a steady trend never rests
    assert stops_at(noise - 0.02 * steps)[0] is None
    # without noise, the change in nats decides
    step, reason = stops_at(trend)
    assert 100 * np.exp(-(step - 400) / 300) * (1 - np.exp(-200 / 300)) < 0.05
    assert "nats" in reason
    assert "R-hat" in stops_at(noise)[1]
    for window in (19, 21):
        with pytest.raises(ValueError, match="even number"):
            StoppingRule(window=window)


@pytest.mark.parametrize("noise", [70, 100])
def test_a_slow_fall_in_much_noise_is_no_rest(noise):
    """R-hat alone takes it for rest by step 480, with 454 of 500 nats left: the window's fall is half of the noise."""
    falling = 500 * np.exp(-np.arange(8000) / 5000)
    for seed in range(2):
        losses = falling + noise * np.random.default_rng(seed).normal(size=8000)
        history = History()
        for loss in losses[:480]:
            history.record(loss)
        assert StoppingRule.largest_rhat(history.window(400)) < 1.05
        step, _ = stops_at(losses)
        assert step is None or falling[step] < 250


@pytest.mark.parametrize(("memory", "looks"), [(0.0, 30), (0.5, 70)])
def test_noise_at_rest_stops_within_so_many_looks(memory, looks):
    for seed in range(5):
        losses = np.random.default_rng(seed).normal(size=400 + 40 * looks)
        for step in range(1, len(losses)):
            losses[step] += memory * losses[step - 1]
        step, reason = stops_at(losses)
        assert step is not None
        assert step >= 799
        assert "beside noise of" in reason


@pytest.mark.parametrize("rate", [100, 1000])
def test_a_loss_without_noise_stops_by_its_change_in_nats(rate):
    falling = 500 * np.exp(-np.arange(20 * rate) / rate)
    step, reason = stops_at(falling)
    assert falling[step - 399] - falling[step] < 0.1
    assert "nats over 400 steps" in reason
    assert stops_at(falling[: int(5 * rate)])[0] is None


def test_chance_does_not_make_a_change_small():
    """The window's halves agree to a thousandth of a nat, and are known to a nat."""
    losses = 10 * np.random.default_rng(0).normal(size=400) - 0.02 * np.arange(400)
    losses[200:] += losses[:200].mean() - losses[200:].mean()
    assert stops_at(losses)[0] is None


def test_the_stopping_rule_watches_parameters():
    _, history, _, _ = run(0, 50)
    assert StoppingRule.largest_rhat(history.window(50)) > 1.5
    rule = StoppingRule(window=50, watch=("elbo", "locs."), tolerance=0.0)
    assert not rule(history)


def test_the_history_of_expectation_propagation_is_of_log_z():
    x, y = data(num=30)
    guide = AutoSparseGP(regression, SparseEP(6))
    ep = ExpectationPropagation(regression, guide, pyro.optim.Adam({"lr": 0.0}), damping=0.5)
    history, converged = History(ep), StoppingRule(window=20, tolerance=1e-6)
    for _ in range(100):
        loss = history.record(ep.step(x, y))
        if converged(history):
            break
    assert len(history) < 100
    assert converged.reason.startswith("log_z changed by")
    group = history.to_datatree()["vi_history"]
    assert "elbo" not in group
    assert float(group["log_z"][0, -1]) == -loss
    assert group["locs.length"].shape == (1, len(history), 2)
    assert History(objective="iwae").objective == "iwae"
    tree = diagnostics.to_datatree(regression, guide, x, y, num_samples=3)
    with pytest.raises(ValueError, match=r"different objectives, \['log_z', 'elbo'\]"):
        diagnostics.add_history(tree, [history, run(0, 3)[1]])
    with pytest.raises(ValueError, match=r"watches \['elbo'\], of which the history has none: \['log_z'"):
        StoppingRule(window=20, tolerance=0.0, watch=("elbo",), patience=1)(shortened(history, 20))
    with pytest.raises(ValueError, match="got the string 'elbo'"):
        StoppingRule(watch="elbo")


def shortened(history, num):
    new = History(objective=history.objective)
    for loss in history.window(num)[history.objective]:
        new.record(-loss)
    return new


# Simulation-based calibration.

X = torch.linspace(0, 1, 25, dtype=torch.float64)[:, None]


model = one_function(kernels.RBF(0.2), lambda f: dist.Normal(f, 0.3))


def fit_sgpr(x, y):
    guide = AutoSparseGP(model, SGPR(10))
    guide(x, y)
    return guide


def fit_one_point(x, y):
    guide = AutoSparseGP(model, SVGP(1))
    train(model, guide, x, y, steps=60, lr=0.05, loss=TraceQuadrature_ELBO(2))
    return guide


def test_sbc_is_the_same_in_any_number_of_processes():
    options = {"num_simulations": 4, "num_samples": 9, "progress": False}
    theirs = pyro.param("theirs", torch.ones(()))
    one = diagnostics.sbc(model, fit_sgpr, X, **options)
    assert pyro.param("theirs") is theirs  # what other models have learned stays
    two = diagnostics.sbc(model, lambda x, y: fit_sgpr(x, y), X, processes=2, **options)
    assert one["prior_sbc"]["f"].dims == ("chain", "draw", "f_dim_0")
    assert one["prior_sbc"]["f"].shape == (1, 4, 4)
    assert one["prior_sbc"]["f"].equals(two["prior_sbc"]["f"])


def test_sbc_of_hyperparameters_and_refusals():
    x, _ = data(num=20)

    def fit(x, y):
        guide = AutoSparseGP(regression, SGPR(6))
        train(regression, guide, x, y, steps=2)
        return guide

    options = {"num_simulations": 2, "num_samples": 9, "progress": False}
    tree = diagnostics.sbc(regression, fit, x, rows=[0, 3, 4], **options)
    assert {name: array.shape for name, array in tree["prior_sbc"].data_vars.items()} == {
        "scale": (1, 2),
        "length": (1, 2, 2),
        "noise": (1, 2),
        "f": (1, 2, 3),
    }
    assert all(((array > 0) & (array < 1)).all() for array in tree["prior_sbc"].data_vars.values())
    with pytest.raises(ValueError, match="observed names 'z'"):
        diagnostics.sbc(regression, fit, x, observed={"z": "y"}, **options)
    with pytest.raises(ValueError, match="could not be called"):
        diagnostics.sbc(regression, fit, x, observed={"y": "target"}, **options)
    with pytest.raises(ValueError, match="must return a fitted"):
        diagnostics.sbc(regression, lambda x, y: 3, x, **options)
    with pytest.raises(ValueError, match="at least 1"):
        diagnostics.sbc(regression, fit, x, processes=0)


def test_ranks_tell_where_the_truth_lies():
    """Of data 5 above what the truth gave, all draws are above it; of data 5 below, none."""
    options = {"num_simulations": 2, "num_samples": 9, "rows": 5, "progress": False}
    above = diagnostics.sbc(model, lambda x, y: fit_sgpr(x, y + 5), X, **options)["prior_sbc"]["f"]
    below = diagnostics.sbc(model, lambda x, y: fit_sgpr(x, y - 5), X, **options)["prior_sbc"]["f"]
    assert above.max() < 0.1
    assert below.min() > 0.9


@pytest.mark.slow  # the test above sees whose ranks they are
def test_sbc_ranks_are_uniform_for_sgpr_and_not_for_one_inducing_point():
    from scipy.stats import kstest

    def pvalues(fit):
        tree = diagnostics.sbc(model, fit, X, num_simulations=200, num_samples=99, rows=5, seed=1)
        return np.array([kstest(tree["prior_sbc"]["f"].values[0, :, i], "uniform").pvalue for i in range(5)])

    assert pvalues(fit_sgpr).min() > 0.005
    assert pvalues(fit_one_point).min() < 1e-4


# Ribbons.


@pytest.fixture
def pictures():
    matplotlib = pytest.importorskip("matplotlib")
    matplotlib.use("Agg")
    pytest.importorskip("arviz_plots")
    yield
    matplotlib.pyplot.close("all")


@pytest.mark.filterwarnings("ignore")
def test_ribbons(pictures):
    x, y = data(num=30)
    guide = fit_sgpr(X, torch.sin(6 * X[:, 0]))
    tree = diagnostics.to_datatree(model, guide, X, torch.sin(6 * X[:, 0]), num_samples=5, predict=torch.rand(50, 1))
    shown = diagnostics.plot_ribbon(tree, "f")
    assert type(shown).__name__ == "PlotCollection"
    diagnostics.plot_ribbon(tree, "y", probs=(0.9,))
    guide = AutoSparseGP(regression, SVGP(6))
    guide(x, y)
    tree = diagnostics.to_datatree(regression, guide, x, y, num_samples=5, predict=torch.rand(50, 2))
    assert len(diagnostics.plot_ribbon(tree, "f").axes) == 4  # two maps with colour bars
    assert type(diagnostics.plot_ribbon(tree, "f", columns=[1])).__name__ == "PlotCollection"
    with pytest.raises(ValueError, match="y must be one of"):
        diagnostics.plot_ribbon(tree, "g")
    with pytest.raises(ValueError, match="predict=inputs"):
        diagnostics.plot_ribbon(diagnostics.to_datatree(regression, guide, x, y, num_samples=2))
    with pytest.raises(ValueError, match="one or two"):
        diagnostics.plot_ribbon(tree, "f", columns=[])


@pytest.mark.filterwarnings("ignore")
def test_stock_plots_take_the_trees(pictures):
    import arviz_plots

    x, y = data(num=30)
    guide = AutoSparseGP(regression, SVGP(6))
    train(regression, guide, x, y, steps=5)
    tree = diagnostics.to_datatree(regression, guide, x, y, num_samples=25)
    names = ["scale", "length", "noise"]
    arviz_plots.plot_dist(tree, var_names=names)
    arviz_plots.plot_forest({"a": tree, "b": tree}, var_names=names)
    arviz_plots.plot_ppc_dist(tree)
    arviz_plots.plot_khat(diagnostics.loo(tree, target="none"))
    assert {"scale", "noise"} <= set(stats.summary(tree, var_names=names).index)
    ranks = diagnostics.sbc(model, fit_sgpr, X, num_simulations=5, num_samples=9, progress=False)
    arviz_plots.plot_ecdf_pit(ranks)
    scores = diagnostics.predictive_scores(regression, guide, x, y, num_samples=5)
    arviz_plots.plot_ecdf_pit(scores.tree, group="predictive_scores", var_names="pit", sample_dims=["data"])


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
def test_losses_that_are_not_finite_are_no_rest(value):
    history, rule = History(), StoppingRule(window=20)
    for step in range(11):
        history.record(100.0 - step)
    with pytest.raises(ValueError, match="at step 11"):
        history.record(value)
    assert len(history) == 11
    history._values["locs.noise"] = [np.array([1.0, value if step == 15 else 1.0]) for step in range(20)]
    for step in range(11, 20):
        history.record(100.0 - step)
    with pytest.raises(ValueError, match=r"'locs.noise' is NaN or infinite at step 15"):
        rule(history)


def test_the_stopping_rule_says_at_once_what_it_needs(monkeypatch):
    from pyro_sparsegp.diagnostics.export import backend

    def absent(module):
        raise ImportError(f"No module named {module!r}")

    monkeypatch.setattr(backend.importlib, "import_module", absent)
    with pytest.raises(ImportError, match=r"StoppingRule, for R-hat, needs arviz_stats"):
        StoppingRule()


def test_rows_and_columns_that_are_not_there():
    x, y = data(num=20)
    for rows in (0, -2, ()):
        with pytest.raises(ValueError, match="sbc's rows must be how many"):
            diagnostics.sbc(model, fit_sgpr, x, rows=rows, num_simulations=1, progress=False)
    for rows in ([100], [0, 20], [-21]):
        with pytest.raises(ValueError, match=r"sbc's rows must be row numbers of site 'f', 0 to 19"):
            diagnostics.sbc(model, fit_sgpr, x, rows=rows, num_simulations=1, progress=False)
    tree = diagnostics.to_datatree(model, fit_sgpr(x, y), x, y, num_samples=5, predict=x[:3])
    for columns in ([5], [0, -3]):
        with pytest.raises(ValueError, match="columns must be among the 2 of 'x'"):
            diagnostics.plot_ribbon(tree, columns=columns)
