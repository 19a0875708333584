"""fit: what it trains on, when it stops, and that a fit that was cut off goes on as if it had not been."""

import multiprocessing
import os
import re
import signal
import subprocess
import sys
import warnings

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_sparsegp import (
    AutoSparseGP,
    ExpectationPropagation,
    FusedAdam,
    GaussianProcess,
    TraceQuadrature_ELBO,
    fit,
    kernels,
)
from pyro_sparsegp.families import SGPR, SVGP, FreeSites, SparseEP, WeightSpace
from pyro_sparsegp.inference import checkpoint, warm_start
from pyro_sparsegp.inference.batches import as_batches
from pyro_sparsegp.inference.feeding import FIRST
from pyro_sparsegp.inference.held_out import log_score
from pyro_sparsegp.inference.interrupts import Interrupts
from pyro_sparsegp.inference.recipe import FallingAdam

from . import fit_worker
from .benchmarks import fit_memory

FORK = multiprocessing.get_context("fork")  # a process that has imported what it needs
CASES = ["tensors", "loader", "sites", "EP", "EP, batches"]


class CutError(Exception):
    pass


def cut_after(step):
    def rule(iterates):
        if len(iterates) == step:
            raise CutError
        return False

    return rule


def require_equal(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
@pytest.mark.parametrize("case", CASES)
def test_resumed_as_if_never_cut_off(case, tmp_path, monkeypatch):
    monkeypatch.setattr(warm_start, "_STEPS", 10)
    torch.manual_seed(0)
    result, expected = fit_worker.run(case)  # no checkpoints at all: to write them changes nothing
    assert result.steps == fit_worker.STEPS
    pyro.clear_param_store()
    file = tmp_path / "fit.pt"
    with pytest.raises(CutError):
        fit_worker.run(case, checkpoint=file, checkpoint_every=0.0, stopping=cut_after(5))
    pyro.clear_param_store()  # a new process
    again, found = fit_worker.run(case, checkpoint=file, resume=True)
    require_equal(found, expected)
    np.testing.assert_array_equal(again.losses, result.losses)
    assert [p.name for p in tmp_path.iterdir()] == ["fit.pt"]


def test_resumed_without_held_out_data(tmp_path):
    """What was the best state while there were some is not put back in the place of what was trained since."""
    x, y = fit_worker.rows(40)
    options = {"checkpoint": tmp_path / "fit.pt", "resume": True, "warm_start": False, "progress": False}

    def go(**more):
        guide = AutoSparseGP(fit_worker.regression, SVGP(4))
        return fit(fit_worker.regression, guide, (x, y), **options, **more), guide.gps.f.coefficients.loc

    _, before = go(steps=2, held_out=(x[:5], y[:5]), score_every=1)
    result, after = go(steps=4)
    assert not torch.equal(after, before)
    assert result.steps == 4
    assert result.best_score is None


def test_resumed_with_another_optimiser(tmp_path):
    data, path = fit_worker.rows(40), tmp_path / "fit.pt"

    def go(**options):
        guide = AutoSparseGP(fit_worker.regression, SVGP(4))
        return fit(fit_worker.regression, guide, data, checkpoint=path, progress=False, **options)

    go(steps=3)
    with pytest.raises(ValueError, match="by the optimiser Adam, and this one is ClippedAdam"):
        go(steps=6, resume=True, optim=pyro.optim.ClippedAdam({"lr": 0.01}))
    assert go(steps=6, resume=True, optim=pyro.optim.Adam({"lr": 0.01})).steps == 6


@pytest.mark.parametrize("other", ["rows", "number", None])
def test_resumed_with_other_held_out_data_is_told_of(other, tmp_path):
    """Scores of two data sets are no one history."""
    x, y = fit_worker.rows(40)

    def go(rows, steps, **options):
        guide = AutoSparseGP(fit_worker.regression, SVGP(4))
        options |= {"checkpoint": tmp_path / "f.pt", "score_every": 1, "warm_start": False, "progress": False}
        held_out = {"x": x[rows], "y": y[rows]}
        return fit(fit_worker.regression, guide, (x[:20], y[:20]), held_out=held_out, steps=steps, **options)

    go(slice(20, 30), steps=2)
    if other == "number":
        with pytest.raises(ValueError, match="held_out has 20 rows, the checkpoint's had 10"):
            go(slice(20, 40), steps=3, resume=True)
        return
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        result = go(slice(30, 40) if other == "rows" else slice(20, 30), steps=3, resume=True)
    assert result.scored.tolist() == [1, 2, 3]
    pattern = r"checkpoint: held_out\['x'\] has other first or last rows.*scores"
    matched = [re.match(pattern, str(one.message)) for one in told]
    assert [bool(one) for one in matched] == ([True] if other else [])
    assert all(one.filename == __file__ for one in told)


@pytest.mark.parametrize("other", ["inputs", "a NaN", None])
def test_resumed_on_other_data_is_told_of(other, tmp_path):
    x, y = fit_worker.rows(40)
    y = y.clone().index_fill(0, torch.tensor([39]), torch.nan)

    def model(x, y, size=None):
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5), x))
        with pyro.plate("data", size or len(x), subsample=x), pyro.poutine.mask(mask=~y.isnan()):
            pyro.sample("y", dist.Normal(f, 0.3), obs=y.nan_to_num())

    def go(*data, steps, **options):
        guide = AutoSparseGP(model, SVGP(4))
        fit(model, guide, data, steps=steps, batch_size=10, checkpoint=tmp_path / "f.pt", progress=False, **options)

    go(x, y, steps=1)
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        go(x + 1 if other == "inputs" else x.clone(), y.nan_to_num() if other == "a NaN" else y, steps=2, resume=True)
    name = {"inputs": r"data\[0\]", "a NaN": r"data\[1\]"}.get(other)
    matched = [re.match(f"checkpoint: {name} has other first or last rows", str(one.message)) for one in told]
    assert [bool(one) for one in matched] == ([] if other is None else [True])
    assert all(one.filename == __file__ for one in told)


def test_resumed_while_rates_rise(tmp_path, monkeypatch):
    monkeypatch.setattr(fit_worker, "STEPS", 50)
    result, expected = fit_worker.run("cold")
    pyro.clear_param_store()
    with pytest.raises(CutError):
        fit_worker.run("cold", checkpoint=tmp_path / "fit.pt", checkpoint_every=0.0, stopping=cut_after(2))
    pyro.clear_param_store()
    again, found = fit_worker.run("cold", checkpoint=tmp_path / "fit.pt", resume=True)
    require_equal(found, expected)
    np.testing.assert_array_equal(again.losses, result.losses)


def test_killed_and_resumed(tmp_path):
    file = tmp_path / "fit.pt"
    process = FORK.Process(target=fit_worker.killed, args=("cold", file, 5))
    process.start()
    process.join(120)
    assert process.exitcode == -signal.SIGKILL
    _, expected = fit_worker.run("cold")
    pyro.clear_param_store()
    again, found = fit_worker.run("cold", checkpoint=file, resume=True)
    assert again.steps == fit_worker.STEPS
    require_equal(found, expected)


def test_an_interrupt_lets_the_step_end(tmp_path):
    file = tmp_path / "fit.pt"

    def rule(iterates):
        if len(iterates) == 5:
            os.kill(os.getpid(), signal.SIGINT)
        return False

    _, expected = fit_worker.run("cold")
    pyro.clear_param_store()
    before = signal.getsignal(signal.SIGINT)
    result, _ = fit_worker.run("cold", checkpoint=file, stopping=rule)
    assert (result.steps, result.reason) == (5, "interrupted by SIGINT")
    assert signal.getsignal(signal.SIGINT) is before
    pyro.clear_param_store()
    _, found = fit_worker.run("cold", checkpoint=file, resume=True)
    require_equal(found, expected)


def test_a_second_interrupt_stops_at_once():
    with Interrupts() as interrupts:
        os.kill(os.getpid(), signal.SIGINT)
        assert interrupts.signal == signal.SIGINT
        with pytest.raises(KeyboardInterrupt):
            os.kill(os.getpid(), signal.SIGINT)


def test_sigterm_ends_the_process_after_its_checkpoint(tmp_path):
    def rule(iterates):
        os.kill(os.getpid(), signal.SIGTERM)
        return False

    with pytest.raises(SystemExit) as ended:
        fit_worker.run("cold", checkpoint=tmp_path / "fit.pt", stopping=rule)
    assert ended.value.code == 128 + signal.SIGTERM
    assert checkpoint.read(tmp_path / "fit.pt")["progress"]["step"] == 1


def test_a_fit_that_ends_leaves_what_it_reached(tmp_path):
    file = tmp_path / "fit.pt"
    result, expected = fit_worker.run("cold", checkpoint=file)
    assert checkpoint.read(file)["progress"]["step"] == result.steps
    again, found = fit_worker.run("cold", checkpoint=file, resume=True)  # nothing is left to do
    assert again.steps == result.steps
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_checkpoint_that_fails_leaves_the_old_one(tmp_path):
    file = tmp_path / "fit.pt"
    checkpoint.write({"version": 1, "step": 3}, file)
    with pytest.raises(Exception, match="pickle"):
        checkpoint.write({"version": 1, "step": lambda: 4}, file)
    assert checkpoint.read(file)["step"] == 3
    assert [p.name for p in tmp_path.iterdir()] == ["fit.pt"]


def test_a_finished_fit_has_nothing_left_to_do(tmp_path):
    file = tmp_path / "fit.pt"
    first, expected = fit_worker.run("cold", checkpoint=file)
    pyro.clear_param_store()
    again, found = fit_worker.run("cold", checkpoint=file, resume=True)
    require_equal(found, expected)
    assert again.reason == first.reason == "all 9 steps were taken"


# What is trained on.


def taken(batches, num):
    return [batches.next() for _ in range(num)]


def test_every_row_once_an_epoch_in_an_order_of_its_own():
    x = torch.arange(10.0)
    batches = as_batches((x[:, None], x, 3), 5, None, None, seed=1)
    first, second, third, fourth = taken(batches, 4)
    for one, other in ((first, second), (third, fourth)):
        assert sorted([*one.args[1].tolist(), *other.args[1].tolist()]) == x.tolist()
    assert torch.equal(first.args[0][:, 0], first.args[1])
    assert torch.equal(first.indices.double(), first.args[1])
    assert first.args[2] == 3
    assert (first.num, first.weight) == (5, 10.0)
    assert not torch.equal(torch.cat([first.indices, second.indices]), torch.cat([third.indices, fourth.indices]))
    again = as_batches((x[:, None], x, 3), 5, None, None, seed=2)
    again.set_state({"seed": 1, "epoch": 1, "place": 5, "num": 10})
    assert torch.equal(again.next().indices, fourth.indices)


def test_a_remainder_is_left_out_of_an_epoch():
    batches = as_batches({"x": torch.arange(7)}, 3, None, None, seed=0)
    assert [len(batch.kwargs["x"]) for batch in taken(batches, 5)] == [3] * 5
    assert batches.num_batches(3) == 2


def test_rows_of_a_memory_map(tmp_path):
    values = np.memmap(tmp_path / "rows", dtype=np.float64, mode="w+", shape=(50, 2))
    values[:] = np.arange(100).reshape(50, 2)
    values.flush()
    batch = as_batches((np.memmap(tmp_path / "rows", np.float64, "r", shape=(50, 2)),), 4, None, None, seed=0).next()
    assert isinstance(batch.args[0], torch.Tensor)
    assert torch.equal(batch.args[0][:, 0], 2.0 * batch.indices)


def test_batches_of_an_iterable_come_again():
    source = [(torch.full((2, 1), float(i)), torch.full((2,), float(i))) for i in range(3)]
    batches = as_batches(source, None, 6, None, seed=0)
    assert batches.some(3).num == 4
    assert [float(batch.args[1][0]) for batch in taken(batches, 5)] == [0, 1, 2, 0, 1]
    again = as_batches(source, None, 6, None, seed=0)
    again.set_state(batches.get_state())
    assert float(again.next().args[1][0]) == 2


def test_mini_batches_leave_the_mean_where_all_rows_have_it():
    """At a rate of 0.1 it would be 1.4 of its standard deviations beside that, which intervals do not tell."""
    x = 4 * torch.rand(1000, 1)
    y = torch.sin(2 * x[:, 0]) + 0.3 * torch.randn(1000)

    def model(x, y=None, size=None):
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.7), x))
        with pyro.plate("data", size or len(x), subsample=x):
            pyro.sample("y", dist.Normal(f, 0.3), obs=y)

    z = torch.linspace(0, 4, 9)[:, None]
    guide = AutoSparseGP(model, SVGP(z, trainable=False))
    fit(model, guide, (x, y), batch_size=25, steps=200, progress=False)
    assert guide.gps.f.coefficients.share == 1  # for what follows
    best = AutoSparseGP(model, SGPR(z, trainable=False))
    best(x, y)
    found, there = guide.posterior(z)["f"], best.posterior(z)["f"]
    assert ((found.mean - there.mean) / there.stddev).square().mean().sqrt() < 0.7

    def cut(iterates):
        if len(iterates.losses) == 9:
            raise RuntimeError("cut off")

    with pytest.raises(RuntimeError, match="cut off"):
        fit(model, guide, (x, y), batch_size=25, steps=10, stopping=cut, progress=False)
    assert guide.gps.f.coefficients.share == 1


@pytest.mark.parametrize("each", [None, 10])
def test_natural_rates_fall_where_the_model_draws_rows(each):
    x, y = fit_worker.rows(40)

    def model(x, y=None):
        plate = pyro.plate("data", len(x), subsample_size=each)
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.7), x[plate.indices]))
        with plate:
            pyro.sample("y", dist.Normal(f, 0.3), obs=None if y is None else y[plate.indices])

    guide, shares = AutoSparseGP(model, SVGP(4)), []
    rule = {"stopping": lambda _: shares.append(guide.gps.f.coefficients.share)}
    fit(model, guide, (x, y), steps=5, warm_start=False, progress=False, **rule)
    assert (min(shares) < 0.5) == (each is not None)


def rates_of(optim):
    return {group["lr"] for one in optim.optim_objs.values() for group in one.param_groups}


def test_rates_fall_to_the_end():
    """Of all parameters; those of hyperparameters begin at twice the rate, in a guide that has met no data."""
    x, y = fit_worker.rows(40)
    guide = AutoSparseGP(fit_worker.regression, SVGP(4))
    optim, rates = FallingAdam(0.1), []

    def rule(iterates):  # after the next step's rates are set
        rates.append(rates_of(optim))
        return False

    settings = {"optim": optim, "warm_start": False, "progress": False}
    fit(fit_worker.regression, guide, (x, y), steps=40, stopping=rule, **settings)
    assert len(rates) == 40
    for step, found in enumerate(rates, 1):
        expected = {FallingAdam.factor(step, 40, far) for far in (False, True)}
        np.testing.assert_allclose(sorted(found), [0.1 * factor for factor in sorted(expected)])
    assert min(rates[-2]) < 0.002
    assert max(rates[0]) == pytest.approx(39 / 40 * 2 * min(rates[0]), rel=0.02)


def test_hyperparameters_that_data_have_led_take_the_rate_of_the_rest():
    """Not twice it: of a guide that was called before, and of one that has had a warm start."""
    x, y = fit_worker.rows(40)
    found = []

    def rule(iterates):
        found.append(rates_of(optim))
        return True

    for called, warmed in ((True, False), (False, True)):
        pyro.clear_param_store()
        guide, optim = AutoSparseGP(fit_worker.regression, SVGP(4)), FallingAdam(0.1)
        if called:
            guide(x, y)
        settings = {"optim": optim, "warm_start": warmed, "progress": False}
        fit(fit_worker.regression, guide, (x, y), steps=40, stopping=rule, **settings)
    assert [len(rates) for rates in found] == [1, 1]


def test_many_inducing_inputs_take_smaller_steps():
    """Adam's first step is as long as its rate, here a third of 0.05: of 400 points √(256/400) of that."""
    x, y = fit_worker.rows(40)
    guide = AutoSparseGP(fit_worker.regression, SVGP(torch.rand(400, 2)))
    guide(x, y)
    before = guide.gps.f.basis.inputs[0].detach().clone()
    fit(fit_worker.regression, guide, (x, y), steps=1, progress=False)
    assert (guide.gps.f.basis.inputs[0] - before).abs().max().item() == pytest.approx(0.8 * 0.05 / 3, rel=1e-3)
    moved = (pyro.param("length") / 0.7).log().abs()
    torch.testing.assert_close(moved, torch.full_like(moved, 0.05 / 3))


class Drawing:
    """Batches that are drawn, from the global random numbers, as they are asked for."""

    def __len__(self):
        return 4

    def __iter__(self):
        for _ in range(4):
            yield torch.rand(3, 1), torch.from_numpy(np.random.rand(3))  # noqa: NPY002


def test_an_iterable_that_draws_as_it_goes_is_replayed():
    def numbers(batches, num):
        found = []
        for batch in taken(batches, num):
            torch.rand(7)  # what training draws
            found.append(torch.cat([batch.args[0][:, 0], batch.args[1]]))
        return torch.stack(found)

    whole = numbers(as_batches(Drawing(), None, 12, None, seed=5), 10)
    assert len(whole.unique()) == 60
    first = as_batches(Drawing(), None, 12, None, seed=5)
    first.some(5)  # to look ahead changes nothing
    start = numbers(first, 6)
    second = as_batches(Drawing(), None, 12, None, seed=0)
    second.set_state(first.get_state())
    assert torch.equal(torch.cat([start, numbers(second, 4)]), whole)


def test_a_generator_ends_the_fit():
    x, y = fit_worker.rows(60)
    guide = AutoSparseGP(fit_worker.regression, SVGP(6))
    stream = ({"x": x[i : i + 10], "y": y[i : i + 10]} for i in range(0, 60, 10))
    result = fit(fit_worker.regression, guide, stream, size=60, warm_start=False, progress=False)
    assert (result.steps, result.reason) == (6, "the data came to their end after 6 steps")


def test_it_is_the_loop_that_one_would_write():
    x, y = fit_worker.rows(40)
    ways = []
    for own in (False, True):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        guide = AutoSparseGP(fit_worker.regression, SVGP(x[:6]))
        optim = pyro.optim.Adam({"lr": 0.02})
        guide(x, y)
        pyro.set_rng_seed(1)
        if own:
            svi = pyro.infer.SVI(fit_worker.regression, guide, optim, TraceQuadrature_ELBO())
            torch.randint(2**62, ())
            ways.append([svi.step(x, y) for _ in range(8)])
        else:
            ways.append(fit(fit_worker.regression, guide, (x, y), steps=8, optim=optim, progress=False).losses.tolist())
    assert ways[0] == ways[1]


def test_a_deep_basis_has_seen_all_rows():
    x, y = torch.rand(9000, 1), torch.randn(9000)
    network = torch.nn.Sequential(torch.nn.Linear(1, 3), torch.nn.Tanh())

    def model(x, y=None, size=None):
        f = pyro.sample("f", GaussianProcess(kernels.DeepBasis(pyro.module("net", network)), x))
        with pyro.plate("data", size or len(x), subsample=x):
            return pyro.sample("y", dist.Normal(f, 0.5), obs=y)

    guide = AutoSparseGP(model, WeightSpace())
    fit(model, guide, (x, y), batch_size=50, steps=2, progress=False)
    assert guide.gps.f.num_seen == 9000


def test_an_epoch_over_rows_on_disk_keeps_little_of_them(tmp_path):
    torch.set_default_dtype(torch.float32)
    rows, before = 40_000, fit_memory.peak()  # their squares are 6 GiB
    fit_memory.written(tmp_path, rows)
    assert fit_memory.epoch(tmp_path, rows, 4096, "maps") - before < 0.5


@pytest.mark.slow  # the test above reads rows as this one does
def test_an_epoch_over_many_rows_on_disk_stays_under_two_gibibytes():
    command = [sys.executable, fit_memory.__file__, "--rows", "10000000", "--limit", "2"]
    subprocess.run(command, env=os.environ | {"OMP_NUM_THREADS": "1"}, check=True, timeout=1800)


# When it stops, and what it gives.


def test_early_stopping_leaves_the_best_state():
    x, y = fit_worker.rows(40)
    guide = AutoSparseGP(fit_worker.regression, SVGP(6, natural=False))
    told = iter([1.0, 5.0, 4.0, 3.0, 2.0])
    seen = []

    def score(model, guide, x, y):
        seen.append((guide.gps.f.coefficients.loc_0.detach().clone(), pyro.param("length").detach().clone()))
        return next(told)

    result = fit(
        fit_worker.regression,
        guide,
        (x, y),
        steps=100,
        held_out=(x, y),
        score=score,
        score_every=3,
        patience=2,
        warm_start=False,
        progress=False,
    )
    assert result.steps == 12
    assert "held-out" in result.reason
    assert result.scored.tolist() == [3, 6, 9, 12]
    assert result.best_score == 5.0
    assert torch.equal(guide.gps.f.coefficients.loc_0, seen[1][0])
    torch.testing.assert_close(pyro.param("length"), seen[1][1])
    assert not torch.equal(seen[1][0], seen[-1][0])
    other = AutoSparseGP(fit_worker.regression, SVGP(6))  # q learns as the saved one did
    other.load_state_dict(result.best_state["guide"])
    assert torch.equal(other.gps.f.coefficients.loc_0, seen[1][0])


def test_held_out_rows_may_be_arrays():
    x, y = (part.numpy() for part in fit_worker.rows(20))
    guide = AutoSparseGP(fit_worker.regression, SVGP(4))
    options = {"steps": 2, "score_every": 1, "warm_start": False, "progress": False}
    result = fit(fit_worker.regression, guide, (x, y), held_out={"x": x[:5], "y": y[:5]}, **options)
    assert np.isfinite(result.scores).all()


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_rates_are_scheduled_in_expectation_propagation():
    x, y = fit_worker.rows(20)
    guide = AutoSparseGP(fit_worker.classes, SparseEP(4))
    optim = pyro.optim.ExponentialLR({"optimizer": torch.optim.Adam, "optim_args": {"lr": 0.02}, "gamma": 0.5})
    method = ExpectationPropagation(fit_worker.classes, guide, optim)
    fit(fit_worker.classes, guide, (x, y), steps=3, method=method, warm_start=False, progress=False)
    schedulers = list(optim.optim_objs.values())
    assert schedulers
    assert [one.get_last_lr() for one in schedulers] == [[pytest.approx(0.02 / 4)]] * len(
        schedulers
    )  # the first step is of sites alone


@pytest.mark.parametrize(
    ("change", "match"),
    [
        (lambda x, y: (x, y[:, None]), r"held_out: argument 1 is .* of shape \(5, 1\)"),
        (lambda x, y: (x.float(), y), "held_out: argument 0 is torch.float32"),
    ],
)
def test_held_out_rows_are_like_those_of_training(change, match):
    x, y = fit_worker.rows(20)
    guide = AutoSparseGP(fit_worker.regression, SVGP(4))
    with pytest.raises(ValueError, match=match):
        fit(fit_worker.regression, guide, (x, y), steps=2, held_out=change(x[:5], y[:5]), progress=False)


def test_a_score_that_is_none_is_told_of():
    x, y = fit_worker.rows(20)
    guide = AutoSparseGP(fit_worker.regression, SVGP(4))
    new = y[:5].clone()
    new[1] = torch.nan
    options = {"steps": 2, "score_every": 1, "patience": 9, "warm_start": False, "progress": False}
    with pytest.warns(UserWarning, match="held_out: its score is -inf.*NaN"):
        fit(fit_worker.regression, guide, (x, y), held_out=(x[:5], new), **options)


@pytest.mark.parametrize("column", [0, 1])
@pytest.mark.parametrize("known", [False, True])
def test_a_row_of_the_data_is_named_that_is_not_finite(column, known):
    """Batches have an order of their own, the first call's too."""
    data = fit_worker.rows(40)
    guide = AutoSparseGP(fit_worker.regression, SVGP(4))
    if known:
        guide(*data)
    data = [part.clone() for part in data]
    data[column][23] = torch.nan
    with pytest.raises(ValueError, match=rf"data\[{column}\] is NaN or infinite at row 23\."):
        fit(fit_worker.regression, guide, tuple(data), batch_size=20, epochs=2, progress=False)


def test_a_checkpoint_of_another_kind_of_data_is_named(tmp_path):
    x, y = fit_worker.rows(20)
    options = {"steps": 2, "checkpoint": tmp_path / "fit.pt", "warm_start": False, "progress": False}
    fit(fit_worker.regression, AutoSparseGP(fit_worker.regression, SVGP(4)), (x, y), batch_size=10, **options)
    guide = AutoSparseGP(fit_worker.regression, SVGP(4))
    loader = torch.utils.data.DataLoader(torch.utils.data.TensorDataset(x, y), batch_size=10)
    with pytest.raises(ValueError, match="checkpoint: it is of a fit with another kind of data"):
        fit(fit_worker.regression, guide, loader, resume=True, **(options | {"steps": 4}))


class _Endless:
    """Batches that are drawn anew, without end."""

    def __init__(self, x, y, each):
        self.x, self.y, self.each = x, y, each

    def __iter__(self):
        while True:
            rows = torch.randperm(len(self.x))[: self.each]
            yield self.x[rows], self.y[rows]


@pytest.mark.parametrize(
    ("size", "draws"),
    [
        (20, {"sampler": torch.utils.data.SubsetRandomSampler(range(20)), "batch_size": 10}),
        (20, {"batch_sampler": torch.utils.data.BatchSampler(range(20), 10, drop_last=False)}),
        (40, {"sampler": torch.utils.data.WeightedRandomSampler(torch.ones(40), 60), "batch_size": 10}),
        (None, {"sampler": range(2), "batch_size": None}),
    ],
)
def test_the_size_of_a_loader_is_of_the_rows_that_it_draws_from(size, draws):
    data = torch.utils.data.TensorDataset(*fit_worker.rows(40))
    batches = as_batches(torch.utils.data.DataLoader(data, **draws), None, None, None, seed=0)
    assert batches.size == size
    assert size is None or batches.some(1000).num == size


@pytest.mark.parametrize("options", [{"steps": 7}, {"epochs": 1}])
@pytest.mark.parametrize(
    ("kind", "size", "wrong"),
    [
        ("list", 23, False),  # drop_last leaves fewer rows than a batch's out
        ("list", 24, True),
        ("loader", 17, False),
        ("loader", 12, True),
        ("iterable", 400, True),
        ("one batch", 400, False),
        ("endless", 400, False),
    ],
)
def test_a_size_that_an_epoch_has_not_is_told_of(kind, size, wrong, options):
    x, y = fit_worker.rows(20)
    batches = [(x[i : i + 4], y[i : i + 4]) for i in range(0, 20, 4)]
    data = {
        "list": batches,
        "loader": torch.utils.data.DataLoader(batches, batch_size=None),
        "iterable": dict(enumerate(batches)).values(),
        "one batch": [(x, y)],
        "endless": _Endless(x, y, 4),
    }[kind]
    guide = AutoSparseGP(fit_worker.regression, SVGP(4))
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        fit(fit_worker.regression, guide, data, size=size, warm_start=False, progress=False, **options)
    matched = [re.match(f"size={size}, and an epoch of data had 20 rows.*size=20", str(one.message)) for one in told]
    assert [bool(one) for one in matched] == ([True] if wrong else [])
    assert all(one.filename == __file__ for one in told)


def test_a_size_among_positional_arguments_is_the_model_s():
    x, y = fit_worker.rows(40)
    options = {"batch_size": 10, "steps": 2, "warm_start": False, "progress": False}
    losses = []
    for data in ((x, y), (x, y, 40)):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        losses.append(fit(fit_worker.regression, AutoSparseGP(fit_worker.regression, SVGP(4)), data, **options).losses)
    np.testing.assert_array_equal(*losses)


def test_a_batch_that_is_none_is_no_end():
    x, y = fit_worker.rows(20)
    guide = AutoSparseGP(fit_worker.regression, SVGP(4))
    with pytest.raises(ValueError, match="a batch of data must hold tensors with rows, got NoneType"):
        fit(fit_worker.regression, guide, [(x, y), None], size=20, steps=3, progress=False)


def test_epochs_and_a_first_call_of_batches_without_end():
    data = fit_worker.rows(40)
    batches = as_batches(_Endless(*data, 15), None, 40, None, seed=0)
    assert batches.some(1000).num == 30  # whole batches, and no more rows than there are
    assert batches.num_batches(1) == 3
    guide = AutoSparseGP(fit_worker.regression, SVGP(4))
    result = fit(fit_worker.regression, guide, _Endless(*data, 10), size=40, epochs=2, progress=False)
    assert result.steps == 8


@pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")
def test_a_plateau_is_of_the_loss():
    x, y = fit_worker.rows(20)
    guide = AutoSparseGP(fit_worker.regression, SVGP(4))
    optim = pyro.optim.ReduceLROnPlateau({"optimizer": torch.optim.Adam, "optim_args": {"lr": 0.02}, "patience": 0})
    fit(fit_worker.regression, guide, (x, y), steps=3, optim=optim, warm_start=False, progress=False)
    best = [one.best for one in optim.optim_objs.values()]
    assert best
    assert all(np.isfinite(best))


def test_held_out_score_of_a_gaussian_likelihood():
    x, y = fit_worker.rows(60)
    guide = AutoSparseGP(fit_worker.regression, SVGP(8))
    fit(fit_worker.regression, guide, (x, y), steps=60, warm_start=False, progress=False)
    new_x, new_y = fit_worker.rows(80)[0][60:], fit_worker.rows(80)[1][60:]
    noise = guide.median(x, y)["noise"]
    q = guide.posterior(new_x)["f"]
    expected = dist.Normal(q.mean, (q.variance + noise**2).sqrt()).log_prob(new_y).mean().detach()
    found = log_score(fit_worker.regression, guide, new_x, new_y)
    assert found == pytest.approx(float(expected), abs=1e-6)
    with pytest.raises(ValueError, match="held_out"):
        log_score(fit_worker.regression, guide, new_x)


def test_a_hyperparameter_that_is_given_is_no_data():
    """Neither its density is in the held-out score, nor is its one number a mini-batch that no plate scales."""
    x, y = fit_worker.rows(40)
    model = pyro.condition(fit_worker.regression, {"noise": torch.tensor(0.2)})
    guide = AutoSparseGP(model, SVGP(4))
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        result = fit(model, guide, (x, y), steps=3, batch_size=20, held_out=(x[:9], y[:9]), progress=False)
    q = guide.posterior(x[:9])["f"]
    expected = dist.Normal(q.mean, (q.variance + 0.2**2).sqrt()).log_prob(y[:9]).mean().detach()
    assert result.best_score == pytest.approx(float(expected), abs=1e-3)
    with pytest.raises(ValueError, match="this step observes nothing"):
        pyro.infer.SVI(model, guide, pyro.optim.Adam({}), TraceQuadrature_ELBO()).step(x)


def test_a_stopping_rule_and_its_history():
    x, y = fit_worker.rows(40)
    guide = AutoSparseGP(fit_worker.regression, SVGP(6))
    rule = lambda iterates: len(iterates) == 20  # noqa: E731
    rule.reason = "enough"
    result = fit(fit_worker.regression, guide, (x, y), stopping=rule, warm_start=False, progress=False)
    assert result.steps == 20


@pytest.mark.parametrize(
    ("named", "keywords"),
    [
        ("steps", {"steps": 0}),
        ("steps", {"steps": 3, "epochs": 1}),
        ("epochs", {"epochs": 1.5}),
        ("size=400, and data has 40 rows", {"size": 400}),
        ("size must be a whole", {"data": [(torch.zeros(4, 1), torch.zeros(4))], "size": 0}),
        ("batch_size", {"batch_size": 41}),
        ("batch_size", {"batch_size": 0}),
        ("optim", {"optim": torch.optim.Adam}),
        ("loss", {"loss": "elbo"}),
        ("method", {"method": "svi"}),
        ("score_every", {"score_every": 0}),
        ("patience", {"patience": True}),
        ("checkpoint_every", {"checkpoint_every": -1}),
        ("checkpoint", {"checkpoint": "/no/such/folder/fit.pt"}),
        ("checkpoint '.' is a folder", {"checkpoint": "."}),
        ("resume", {"resume": True}),
        ("group", {"group": "world"}),
        ("data", {"data": 3}),
        ("data", {"data": [torch.zeros(3), torch.zeros(3)]}),
        ("data", {"data": (1, 2)}),
        ("data", {"data": (torch.zeros(4, 1), torch.zeros(3)), "batch_size": 2}),
        ("data", {"data": torch.utils.data.TensorDataset(torch.zeros(3))}),
        ("data", {"data": iter([])}),
        ("batch_size", {"data": [(torch.zeros(4, 1), torch.zeros(4))], "batch_size": 2}),
        ("size", {"data": iter([(torch.zeros(4, 1), torch.zeros(4))])}),
        ("model", {"model": fit_worker.classes}),
        ("guide", {"guide": fit_worker.regression}),
    ],
)
def test_bad_arguments_are_named(named, keywords):
    x, y = fit_worker.rows(40)
    given = {"model": fit_worker.regression, "guide": AutoSparseGP(fit_worker.regression, SVGP(4)), "data": (x, y)}
    with pytest.raises(ValueError, match=named):
        fit(**{**given, "progress": False, **keywords})


def test_what_batches_cannot_do():
    x, y = fit_worker.rows(40)
    with pytest.raises(ValueError, match=r"batch_size: .* needs all rows"):
        fit(fit_worker.regression, AutoSparseGP(fit_worker.regression, SGPR(4)), (x, y), batch_size=10)

    def unscaled(x, y=None):
        f = pyro.sample("f", GaussianProcess(kernels.RBF(1.0), x))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(f, 1.0), obs=y)

    with pytest.raises(ValueError, match="plate of 10"):
        fit(unscaled, AutoSparseGP(unscaled, SVGP(4)), (x, y), batch_size=10, progress=False)


def test_a_file_that_is_no_checkpoint(tmp_path):
    (tmp_path / "fit.pt").write_text("hello")
    with pytest.raises(ValueError, match="no file that fit wrote"):
        fit_worker.run("cold", checkpoint=tmp_path / "fit.pt", resume=True)


def test_a_bar_with_the_bound(capsys):
    x, y = fit_worker.rows(40)
    fit(fit_worker.regression, AutoSparseGP(fit_worker.regression, SVGP(4)), (x, y), steps=3)
    shown = capsys.readouterr().err
    assert "elbo -" in shown
    assert "3/3" in shown


@pytest.mark.parametrize(
    ("options", "clips"),
    [
        ({}, {}),
        ({"amsgrad": True, "weight_decay": 0.1}, {"clip_norm": 0.5}),
        ({"maximize": True, "eps": 0.1}, {"clip_norm": 0.1}),
    ],
)
def test_one_step_of_all_parameters_is_each_ones_own(options, clips):
    values = [torch.randn(3, 2), torch.randn(()), torch.randn(4, dtype=torch.float32)]
    both = []
    for kind in (FusedAdam, pyro.optim.Adam):
        optim, parameters = kind({"lr": 0.05, **options}, clips), [value.clone().requires_grad_() for value in values]
        for step in range(4):
            for i, parameter in enumerate(parameters):
                parameter.grad = None if step == 2 and i == 1 else (parameter.detach() + step).cos()
            optim(parameters)
        both.append([parameter.detach() for parameter in parameters])
    for value, one, other in zip(values, *both):
        assert (one - value).abs().min() > 0
        torch.testing.assert_close(one, other)


def test_one_step_of_all_parameters_goes_on_from_pyros_states_and_has_rates_by_name():
    def loss():
        return sum((pyro.param(name, torch.ones(2)) - i).square().sum() for i, name in enumerate("abc"))

    def run(kinds):
        pyro.clear_param_store()
        state = {}
        for kind in kinds:
            optim = kind(lambda name: {"lr": 0.1 if name == "a" else 0.01})
            optim.set_state(state)
            for _ in range(5):
                loss().backward()
                parameters = [pyro.param(name).unconstrained() for name in "abc"]
                optim(parameters)
                pyro.infer.util.zero_grads(parameters)
            state = optim.get_state()
        return torch.stack([pyro.param(name).detach() for name in "abc"])

    plain = run([pyro.optim.Adam, pyro.optim.Adam])
    assert (plain[0] - 1).abs().min() > 5 * (plain[2] - 1).abs().max()
    for kinds in ([FusedAdam, FusedAdam], [pyro.optim.Adam, FusedAdam], [FusedAdam, pyro.optim.Adam]):
        torch.testing.assert_close(run(kinds), plain)


@pytest.mark.parametrize("family", [SGPR(5), FreeSites(5)])
def test_a_family_on_sites_meets_all_rows_at_its_first_call(family):
    """Not the random ones that others choose their inducing inputs among."""
    x = torch.rand(FIRST + 100, 2)
    y = torch.sin(6 * x[:, 0]) + 0.1 * torch.randn(len(x))
    result = fit(fit_worker.regression, AutoSparseGP(fit_worker.regression, family), (x, y), steps=2, progress=False)
    assert result.steps == 2
