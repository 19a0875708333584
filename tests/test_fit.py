"""fit: what it trains on, when it stops, and that a fit that was cut off goes on as if it had not been."""

import os
import resource
import signal
from functools import partial

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.utils.data import BatchSampler, DataLoader, SubsetRandomSampler, TensorDataset

from pyro_sparsegp import (
    AutoSparseGP,
    ExpectationPropagation,
    GaussianProcess,
    TraceQuadrature_ELBO,
    fit,
    follow_rates,
    kernels,
)
from pyro_sparsegp.families import SGPR, SVGP, SparseEP, WeightSpace
from pyro_sparsegp.guide.check import Glance, check
from pyro_sparsegp.inference.batches import as_batches
from pyro_sparsegp.inference.fit import read, write
from pyro_sparsegp.inference.losses import fall_of, fell
from pyro_sparsegp.inference.optimisers import FallingAdam, falling

from . import fit_worker
from .fit_worker import regression
from .models import gaussian, observed, prepared, refused

pytestmark = pytest.mark.filterwarnings("ignore:Detected call of `lr_scheduler.step")


def fitted(data, family=None, model=regression, **options):
    guide = AutoSparseGP(model, family or SVGP(4))
    return fit(model, guide, data, **{"progress": False, "steps": 3, **options}), guide


def cut_after(step, how):
    def rule(losses):
        if len(losses) == step:
            how()
        return False

    return rule


class CutError(Exception):
    pass


def raised():
    raise CutError


def require_equal(found, expected):
    assert found.keys() == expected.keys()
    for key, value in expected.items():
        assert torch.equal(found[key], value), key


@pytest.mark.parametrize("step", [pytest.param(2, marks=pytest.mark.slow), 5])
@pytest.mark.parametrize("case", ["tensors", "loader", "sites", "EP", "EP, batches"])
def test_resumed_as_if_never_cut_off(case, step, tmp_path):
    torch.manual_seed(0)
    result, expected = fit_worker.run(case)  # no checkpoints at all: to write them changes nothing
    assert result.steps == fit_worker.STEPS
    pyro.clear_param_store()
    file = tmp_path / "fit.pt"
    with pytest.raises(CutError):
        fit_worker.run(case, checkpoint=file, checkpoint_every=0.0, stopping=cut_after(step, raised))
    pyro.clear_param_store()  # a new process
    again, found = fit_worker.run(case, checkpoint=file, resume=True)
    require_equal(found, expected)
    np.testing.assert_array_equal(again.losses, result.losses)
    assert [p.name for p in tmp_path.iterdir()] == ["fit.pt"]
    if case == "loader":  # another network would not take its place in the store
        pyro.clear_param_store()
    again, found = fit_worker.run(case, checkpoint=file, resume=True)  # nothing is left to do
    assert again.reason == result.reason == "all 9 steps were taken"
    require_equal(found, expected)


def test_an_interrupt_lets_the_step_end(tmp_path):
    file, before = tmp_path / "fit.pt", signal.getsignal(signal.SIGINT)
    _, expected = fit_worker.run("tensors")
    pyro.clear_param_store()
    rule = cut_after(5, lambda: os.kill(os.getpid(), signal.SIGINT))
    result, _ = fit_worker.run("tensors", checkpoint=file, stopping=rule)
    assert (result.steps, result.reason) == (5, "interrupted")
    assert signal.getsignal(signal.SIGINT) is before
    pyro.clear_param_store()
    _, found = fit_worker.run("tensors", checkpoint=file, resume=True)
    require_equal(found, expected)

    def twice():
        os.kill(os.getpid(), signal.SIGINT)
        os.kill(os.getpid(), signal.SIGINT)

    with pytest.raises(KeyboardInterrupt):
        fit_worker.run("tensors", stopping=cut_after(1, twice))


def test_a_checkpoint_that_fails_leaves_the_old_one(tmp_path):
    file = tmp_path / "fit.pt"
    write({"mark": 1, "step": 3}, file)
    with pytest.raises(Exception, match="local object"):
        write({"mark": 1, "step": lambda: 4}, file)
    assert read(file, 1)["step"] == 3
    assert [p.name for p in tmp_path.iterdir()] == ["fit.pt"]
    file.write_text("hello")
    refused("no file that fit wrote", read, file, 1)


@pytest.mark.parametrize(
    ("other", "match"),
    [
        ({"optim": pyro.optim.ClippedAdam({"lr": 0.01})}, "'Adam'.*'ClippedAdam'"),
        ({"data": fit_worker.rows(30)}, "'rows': 40.*'rows': 30"),
        ({"batch_size": 20}, "'batch_size': 10.*'batch_size': 20"),
    ],
)
def test_a_checkpoint_of_another_fit_is_told_of(other, match, tmp_path):
    given = {"data": fit_worker.rows(40), "batch_size": 10, "checkpoint": tmp_path / "fit.pt"}
    fitted(**given)
    refused(f"fit.pt' was written by a fit with .*{match}", fitted, **given | other, resume=True)
    assert fitted(**given, resume=True, steps=6, optim=pyro.optim.Adam({"lr": 0.01}))[0].steps == 6


def test_every_row_once_an_epoch_in_an_order_of_its_own():
    x = torch.arange(11.0)
    batches = as_batches((x[:, None], x, 3), 5, None, None, seed=1)
    assert len(batches) == 2
    (first, second), (third, fourth) = batches.epoch(0), batches.epoch(1)
    for one, other in ((first, second), (third, fourth)):  # a row is left out
        assert len({*one.args[1].tolist(), *other.args[1].tolist()}) == 10
    assert torch.equal(first.args[0][:, 0], first.args[1])
    assert torch.equal(first.indices.double(), first.args[1])
    assert (first.args[2], first.weight) == (3, 11)
    assert not torch.equal(torch.cat([first.indices, second.indices]), torch.cat([third.indices, fourth.indices]))
    (again,) = as_batches((x[:, None], x, 3), 5, None, None, seed=1).epoch(1, 1)
    assert torch.equal(again.indices, fourth.indices)


@pytest.mark.parametrize(("fall", "rows", "told"), [(1, 100, 1), (1, 40_000, 0), (60, 40_000, 1), (0.4, 100, 0)])
def test_a_loss_that_falls_is_told_by_what_a_row_gains(fall, rows, told):
    assert len(fell(np.array([[fall], [0.0]]) + np.random.default_rng(0).normal(size=(2, 50)), rows)) == told


class Drawing:
    """Batches that are drawn, from the global random numbers, as they are asked for."""

    def __iter__(self):
        for _ in range(4):
            yield torch.rand(3, 1), torch.from_numpy(np.random.rand(3))  # noqa: NPY002


@pytest.mark.parametrize("generator", [None, torch.Generator()])
def test_an_iterable_that_draws_as_it_goes_is_replayed(generator):
    loader = DataLoader(TensorDataset(torch.rand(12, 1), torch.rand(12)), 3, shuffle=True, generator=generator)
    for source in (Drawing(), loader):
        batches = as_batches(source, None, 12, None, seed=5)
        first, stream = [batch.args[1] for batch in batches.epoch(0)], batches.epoch(1)
        second, state = [next(stream).args[1] for _ in range(2)], pyro.util.get_rng_state()
        rest = [batch.args[1] for batch in stream]
        assert not torch.equal(torch.cat(first), torch.cat(second + rest))
        assert batches.first(5).weight == 6
        again = as_batches(source, None, 12, None, seed=5).epoch(1, 2)
        pyro.util.set_rng_state(state)  # as a checkpoint has it
        for expected, batch in zip(rest, again, strict=True):
            assert torch.equal(batch.args[1], expected)


@pytest.mark.parametrize(
    ("size", "draws"),
    [
        (40, {"shuffle": True, "batch_size": 10}),
        (None, {"sampler": range(2), "batch_size": None}),
        ("20 of 40", {"sampler": SubsetRandomSampler(range(20)), "batch_size": 10}),
        ("20 of 40", {"batch_sampler": BatchSampler(range(20), 10, drop_last=False)}),
    ],
)
def test_the_size_of_a_loader_is_that_of_its_data_set(size, draws):
    loader = DataLoader(TensorDataset(*fit_worker.rows(40)), **draws)
    if isinstance(size, str):
        refused(f"size: data draws {size} rows", as_batches, loader, None, None, None, seed=0)
        assert as_batches(loader, None, 20, None, seed=0).size == 20
    else:
        assert as_batches(loader, None, None, None, seed=0).size == size


class Endless:
    """Batches that are drawn anew, without end."""

    def __init__(self, x, y, each):
        self.x, self.y, self.each = x, y, each

    def __iter__(self):
        while True:
            rows = torch.randperm(len(self.x))[: self.each]
            yield self.x[rows], self.y[rows]


def test_batches_without_end():
    data = fit_worker.rows(40)
    batches = as_batches(Endless(*data, 15), None, 40, None, seed=0)
    assert batches.first(1000).weight == 30  # no more rows than there are
    assert fitted(Endless(*data, 10), size=40)[0].steps == 3
    assert fitted(DataLoader(TensorDataset(*data), 10), epochs=2, steps=None)[0].steps == 8


def test_a_size_among_positional_arguments_is_the_model_s():
    x, y = fit_worker.rows(40)
    losses = []
    for data in ((x, y), (x, y, 40)):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        losses.append(fitted(data, batch_size=10)[0].losses)
    np.testing.assert_array_equal(*losses)


def test_a_family_on_sites_meets_all_rows_at_its_first_call():
    """Not the random ones that others choose their inducing inputs among."""
    x = torch.rand(8292, 2)
    y = torch.sin(6 * x[:, 0]) + 0.1 * torch.randn(len(x))
    assert fitted((x, y), SGPR(5), steps=2)[0].steps == 2


def test_a_deep_basis_has_seen_all_rows():
    x, y = torch.rand(9000, 1), torch.randn(9000)
    network = torch.nn.Sequential(torch.nn.Linear(1, 3), torch.nn.Tanh())

    def model(x, y=None, size=None):
        f = pyro.sample("f", GaussianProcess(kernels.DeepBasis(pyro.module("net", network)), x))
        return observed(dist.Normal(f, 0.5), y, x, size)

    _, guide = fitted((x, y), WeightSpace(), model, batch_size=50, steps=2)
    assert guide.gps.f.num_seen == 9000


def test_an_epoch_over_rows_on_disk_keeps_little_of_them(tmp_path):
    def peak():
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20

    torch.set_default_dtype(torch.float32)
    rows, before = 40_000, peak()  # their squares are 6 GiB
    x, y = (
        np.memmap(tmp_path / name, np.float32, "w+", shape=shape) for name, shape in (("x", (rows, 2)), ("y", rows))
    )
    x[:] = np.random.default_rng(0).random((rows, 2))
    y[:] = np.sin(6 * x[:, 0]) + x[:, 1]
    assert fitted((x, y), SVGP(32), batch_size=4096, steps=None, epochs=1)[0].steps == 9
    assert peak() - before < 0.5


@pytest.mark.parametrize("given", ["optim", "method"])
def test_it_is_the_loop_that_one_would_write(given):
    x, y = fit_worker.rows(40)
    ways = []
    for own in (False, True):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        guide, optim = AutoSparseGP(regression, SVGP(x[:6])), pyro.optim.Adam({"lr": 0.02})
        svi = pyro.infer.SVI(regression, guide, optim, TraceQuadrature_ELBO())
        guide(x, y)
        pyro.set_rng_seed(1)
        if own:
            torch.randint(2**62, ())
            ways.append([svi.step(x, y) for _ in range(8)])
        else:
            how = {"optim": optim} if given == "optim" else {"method": svi}
            ways.append(fit(regression, guide, (x, y), steps=8, progress=False, **how).losses.tolist())
    assert ways[0] == ways[1]


def test_mini_batches_leave_the_mean_where_all_rows_have_it():
    """At a rate of 0.1 it would be 1.4 of its standard deviations beside that, which intervals do not tell."""
    x = 4 * torch.rand(1000, 1)
    y = torch.sin(2 * x[:, 0]) + 0.3 * torch.randn(1000)
    z, model = torch.linspace(0, 4, 9)[:, None], gaussian(kernels.RBF(0.7), 0.3)
    _, guide = fitted((x, y), SVGP(z, trainable=False), model, batch_size=25, steps=200)
    assert guide.gps.f.coefficients.share == 1  # for what follows
    best = prepared(model, SGPR(z, trainable=False), x, y)
    found, there = guide.posterior(z)["f"], best.posterior(z)["f"]
    assert ((found.mean - there.mean) / there.stddev).square().mean().sqrt() < 0.7
    with pytest.raises(CutError):
        fit(model, guide, (x, y), batch_size=25, steps=10, stopping=cut_after(9, raised), progress=False)
    assert guide.gps.f.coefficients.share == 1


@pytest.mark.slow  # quick: test_a_fit_that_is_resumed_where_the_bound_stood_ends_where_it_would_have
def test_without_a_number_of_steps_it_ends_once_the_bound_stands():
    """At the optimum of 2,000 steps, in a share of them; a bound that still falls goes on."""
    x = torch.rand(30, 2)
    y = torch.sin(6 * x[:, 0]) + 0.3 * torch.randn(30)
    result, _ = fitted((x, y), steps=None)
    assert result.reason == "the bound stands"
    assert 700 < result.steps < 1600
    whole, _ = fitted((x, y), steps=2000)
    assert whole.steps == 2000
    assert abs(result.losses[-50:].mean() - whole.losses[-50:].mean()) < 0.3
    noise = np.random.default_rng(0).normal(size=(2, 200))
    assert fall_of(noise) == 0
    assert abs(fall_of(noise - [[0.0], [1.0]]) - 1) < 0.3


def test_a_fit_that_is_resumed_where_the_bound_stood_ends_where_it_would_have(tmp_path, monkeypatch):
    monkeypatch.setitem(fit.__globals__, "_LOOK", 4)
    monkeypatch.setitem(fit.__globals__, "_STANDS", torch.inf)  # it stands at the first look, after 12 steps
    results, file = [], tmp_path / "fit.pt"
    for options in ({}, {"checkpoint": file, "stopping": lambda losses: len(losses) == 12}, {"checkpoint": file}):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        resume = "stopping" not in options and bool(options)
        results.append(fitted(fit_worker.rows(20), steps=None, jit=False, resume=resume, **options)[0])
    whole, cut, again = results
    assert (whole.steps, cut.steps) == (30, 12)
    np.testing.assert_array_equal(again.losses, whole.losses)


def test_rates_fall_to_the_end_and_those_of_many_points_are_smaller():
    assert [round(falling(step, 1000), 3) for step in (0, 400, 700, 999)] == [1.0, 1.0, 0.505, 0.01]
    x, y = fit_worker.rows(40)
    optim, rates = FallingAdam(0.1), []

    def rule(losses):  # after the next step's rates are set
        rates.append({group["lr"] for one in optim.optim_objs.values() for group in one.param_groups})
        return False

    fitted((x, y), SVGP(torch.rand(324, 2)), optim=optim, steps=12, stopping=rule)
    assert len(rates) == 12
    for step, found in enumerate(rates, 1):
        factor = 0.1 * min(1, (step + 1) / 3) * falling(step, 12)
        np.testing.assert_allclose(sorted(found), [16 / 18 * factor, factor])  # √(256/324) of the inducing inputs
    assert max(rates[-2]) < 0.006


def test_schedules_are_stepped():
    x, y = fit_worker.rows(20)
    plateau = pyro.optim.ReduceLROnPlateau(ADAM | {"patience": 0})
    fitted((x, y), optim=plateau)
    assert all(np.isfinite(one.best) for one in plateau.optim_objs.values())
    guide, optim = AutoSparseGP(fit_worker.classes, SparseEP(4)), exponential(0.5)
    method = ExpectationPropagation(fit_worker.classes, guide, optim)
    fit(fit_worker.classes, guide, (x, y), steps=3, method=method, progress=False)
    found = [one.get_last_lr() for one in optim.optim_objs.values()]
    assert found
    assert found == [[pytest.approx(0.02 / 4)]] * len(found)  # the first step is of sites alone


ADAM = {"optimizer": torch.optim.Adam, "optim_args": {"lr": 0.02}}


def exponential(gamma=0.9):
    return pyro.optim.ExponentialLR(ADAM | {"gamma": gamma})


CYCLE = {"max_lr": 0.1, "total_steps": 30}


def of_the_largest(step):
    """A rate of torch's OneCycleLR by the largest that it has had."""
    optim = torch.optim.Adam([torch.zeros(1)], lr=0.02)
    schedule, rates = torch.optim.lr_scheduler.OneCycleLR(optim, **CYCLE), []
    for _ in range(step + 1):
        rates.append(schedule.get_last_lr()[0])
        schedule.step()
    return rates[-1] / max(rates)


FALLING = {
    "OneCycleLR": (lambda: pyro.optim.OneCycleLR(ADAM | CYCLE), of_the_largest),
    "ExponentialLR": (exponential, lambda t: 0.9**t),
    "ClippedAdam": (lambda: pyro.optim.ClippedAdam({"lr": 0.02, "lrd": 0.9}), lambda t: 0.9**t),
    "warm-up": (
        lambda: pyro.optim.LinearLR(ADAM | {"start_factor": 0.1, "total_iters": 20}),
        lambda t: min(1.0, 0.1 + 0.045 * t) if t else 1.0,  # a schedule is made in the first step
    ),
    "constant": (lambda: pyro.optim.Adam({"lr": 0.02}), lambda t: 1.0),
}


@pytest.mark.quick("ExponentialLR | constant-fit | OneCycleLR-fit")
@pytest.mark.parametrize("how", ["fit", "loop"])
@pytest.mark.parametrize("kind", FALLING)
def test_natural_steps_follow_a_schedule(kind, how):
    """They have no other way to average the noise of batches out: the optimiser does not move them."""
    x, y = fit_worker.rows(40)
    make, wanted = FALLING[kind]
    optim, guide, rates = make(), AutoSparseGP(regression, SVGP(4)), []

    def note(losses):
        rates.append(float(guide.gps.f.coefficients.last_rate))
        return False

    if how == "fit":
        fit(regression, guide, (x, y), batch_size=20, steps=30, optim=optim, stopping=note, progress=False)
    else:
        svi = pyro.infer.SVI(regression, guide, optim, TraceQuadrature_ELBO())
        guide(x, y)
        for _ in range(30):
            svi.step(x[:20], y[:20], size=40)
            if isinstance(optim, pyro.optim.PyroLRScheduler):
                optim.step()
            follow_rates(guide, optim)
            note(None)
    refused("optim is Parameter", follow_rates, guide, guide.gps.f.coefficients.loc)
    torchs = torch.optim.Adam(guide.parameters(), lr=0.02)
    schedule = torch.optim.lr_scheduler.LambdaLR(torchs, lambda t: 0.5**t)
    schedule.step()
    follow_rates(guide, schedule)
    assert guide.gps.f.coefficients.share == 0.5
    # 0.1 of themselves: the first call has met all rows
    np.testing.assert_allclose(rates, [0.1 * wanted(t) for t in range(30)], rtol=1e-6)


def test_all_rows_leave_a_models_own_indices():
    met = []

    def model(x, y=None, indices=slice(None)):
        met.append(indices)
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5), x))
        with pyro.plate("data", 40, subsample=x):
            pyro.sample("y", dist.Normal(f, 0.3), obs=None if y is None else y[:, 0])

    guide = AutoSparseGP(model, SVGP(4))
    x, y = fit_worker.rows(40)
    fit(model, guide, (x, y.reshape(40, -1)), steps=2, progress=False)
    assert all(indices == slice(None) for indices in met)


def test_a_hyperparameter_that_is_given_is_no_data():
    """Its one number is no mini-batch that no plate scales."""
    model = pyro.condition(regression, {"noise": torch.tensor(0.2)})
    assert fitted(fit_worker.rows(40), model=model, batch_size=20)[0].steps == 3


@pytest.mark.parametrize("progress", [True, False])
def test_bars_that_show_or_hide_and_a_rule_that_stops(progress, monkeypatch, capsys):
    monkeypatch.setattr("pyro_sparsegp.program.draws._PATIENCE", 0.0)
    monkeypatch.setattr("pyro_sparsegp.guide.auto.check", partial(check, kind=Glance))
    rows, shown = fit_worker.rows(20), ["fit: ", "loss ", "3/100", "finding the posterior mode: ", "checking latents: "]
    result, guide = fitted(rows, steps=100, progress=progress, stopping=lambda losses: len(losses) == 3)
    assert (result.steps, len(result.losses), result.reason) == (3, 3, "the stopping rule says so")
    text = capsys.readouterr().err
    guide.check(progress=progress)
    assert [*(part in text for part in shown), shown[-1] in capsys.readouterr().err] == [progress] * 6


def test_a_fit_of_many_hyperparameters_looks_at_gp_sites_alone(monkeypatch):
    """15 of them took it longer than training."""
    monkeypatch.setattr(Glance, "most", 0)
    monkeypatch.setattr(Glance, "of_newton", None)
    result, _ = fitted(fit_worker.rows(20), steps=100)
    assert result.notes == ("fit compared GP sites alone: 1 hyperparameters are many. Call guide.check for the rest.",)


BATCH = (torch.zeros(4, 1), torch.zeros(4))


@pytest.mark.parametrize(
    ("named", "keywords"),
    [
        ("steps or epochs", {"steps": 3, "epochs": 1}),
        ("batch_size=41", {"batch_size": 41}),
        ("batch_size must be", {"batch_size": 2.5}),
        ("steps must be", {"steps": -1}),
        ("batch_size=2", {"data": (torch.zeros(4, 1), torch.zeros(3)), "batch_size": 2}),
        ("batch_size=2 is for", {"data": [BATCH], "batch_size": 2}),
        ("method has an optimiser", {"method": "svi", "loss": TraceQuadrature_ELBO()}),
        ("resume", {"resume": True}),
        ("group", {"group": "world"}),
        ("data must be a tuple", {"data": 3}),
        ("data must be a tuple", {"data": [*BATCH]}),
        ("data must be a tuple", {"data": TensorDataset(torch.zeros(3))}),
        ("data must be a tuple", {"data": iter([BATCH])}),
        ("data has no tensor", {"data": (1, 2)}),
        ("data gives no batches", {"data": [], "size": 3}),
        ("must hold tensors with rows, got NoneType", {"data": [BATCH, None], "size": 8}),
        ("size: the model takes", {"data": [BATCH]}),
        ("fit runs the guide's own model; it was given another", {"model": fit_worker.classes}),
        ("fit needs an AutoSparseGP guide, got function", {"guide": regression}),
        ("fit takes the guide itself", {"guide": pyro.poutine.block(AutoSparseGP(regression, SVGP(4)))}),
    ],
)
def test_bad_arguments_are_named(named, keywords):
    given = {"model": regression, "guide": AutoSparseGP(regression, SVGP(4)), "data": fit_worker.rows(40)}
    refused(named, fit, **{**given, "progress": False, **keywords})


def test_what_batches_cannot_do():
    data = fit_worker.rows(40)
    refused(r"batch_size.* needs all rows", lambda: fitted(data, SGPR(4), batch_size=10))

    def unscaled(x, y=None):
        f = pyro.sample("f", GaussianProcess(kernels.RBF(1.0), x))
        return observed(dist.Normal(f, 1.0), y)

    with pytest.warns(UserWarning, match="no plate scales them up"):
        fitted(data, model=unscaled, batch_size=10)
