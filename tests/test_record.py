"""Steps that are recorded as graphs: replays are plain steps to the last bit, guards see what is none."""

import warnings
from contextlib import nullcontext
from functools import partial
from types import SimpleNamespace

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from torch.fx.experimental.proxy_tensor import make_fx
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map_only

from pyro_sparsegp import AutoSparseGP, GaussianProcess, JitTraceQuadrature_ELBO, TraceQuadrature_ELBO, fit, kernels
from pyro_sparsegp.families import SGPR, SVGP, CoupledPrecision
from pyro_sparsegp.numerics.graphs import quickened, simplified

from .models import FAMILIES, data, heteroscedastic, observed, poisson, refused, regression


def stepper(elbo, model, family, lr=0.02, **options):
    """SVI of a fresh guide, from one seed."""
    pyro.clear_param_store()
    pyro.set_rng_seed(1)
    return SVI(model, AutoSparseGP(model, family, **options), pyro.optim.Adam({"lr": lr}), elbo)


def both(model, family, calls, **options):
    """Losses of plain and of recorded steps, and the recordings. ``calls``: each step's arguments."""
    elbos, losses, guides = (TraceQuadrature_ELBO(10), JitTraceQuadrature_ELBO(10)), [], []
    for elbo in elbos:
        svi = stepper(elbo, model, family, **options)
        losses.append([svi.step(*args, **kwargs) for args, kwargs in calls])
        guides.append(svi.guide)
    assert_same_state(*guides)
    return *losses, elbos[1]._recordings[guides[1]]


def assert_same_state(one, other):
    mine, its = one.state_dict(), other.state_dict()
    for name, value in mine.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(value, its[name]), name


def replayed(recordings):
    """How many steps were replays, neither compared with plain steps nor left to them."""
    return sum(one.replays for one in recordings.found.values())


def assert_recorded(model, family, calls, least=3, **options):
    plain, jit, recordings = both(model, family, calls, **options)
    assert not recordings.why
    assert replayed(recordings) >= least
    assert jit == plain
    return recordings


def test_a_graph_computes_nothing_twice_but_what_is_written_to_or_drawn():
    def function(x):
        kept = x.clone()
        before = kept * 2
        kept.add_(1)
        return [before + x.exp() + x.exp(), kept * 2, torch.randn_like(x) - torch.randn_like(x)]

    x = torch.rand(3, 3, dtype=torch.float64)
    graph = quickened(simplified(make_fx(function)(x), [x]), [x])
    one, two, noise = graph(x)
    torch.testing.assert_close(one, 2 * x + 2 * x.exp())
    torch.testing.assert_close(two, 2 * (x + 1), rtol=0, atol=0)
    assert noise.abs().min() > 0
    names = [str(node.target) for node in graph.graph.nodes if node.op.startswith("call")]
    assert sum("exp" in name for name in names) == 1
    assert sum("mul" in name for name in names) == 2
    # Draws alone are called as PyTorch has them in graphs.
    assert [name for name in names if name.startswith("aten")] == 2 * ["aten.randn_like.default"]


def test_a_graph_has_no_copies_and_tensors_for_numbers():
    def function(x):
        kept, rows = x.mul(1.0), x.expand(3, 3)  # one is written to, the other is x
        kept.add_(1)
        double = x.to(torch.float64)
        return [3.5 * (rows.pow(1.0) / 1), kept - 0.25, double.div(1) * x.to(torch.float64)]

    x = torch.rand(3, 3, dtype=torch.float32)
    graph = quickened(simplified(make_fx(function)(x), [x]), [x])
    scaled, moved, square = graph(x)
    assert torch.equal(scaled, 3.5 * x)
    assert torch.equal(moved, x + 1 - 0.25)
    assert torch.equal(square, x.double().square())
    nodes = [node for node in graph.graph.nodes if node.op.startswith("call")]
    names = sorted(str(getattr(node.target, "__name__", node.target)) for node in nodes)
    assert names == ["add_", "mul", "mul", "mul", "sub", "to"]
    assert not [node for node in nodes if any(isinstance(given, (int, float)) for given in node.args)]


# The others have the operations of these.
@pytest.mark.quick("SVGP | SVGPGradients | MeanFieldAdditive | CoupledPrecision | SGPR")
@pytest.mark.parametrize("name", FAMILIES)
def test_losses_are_those_of_plain_steps(name):
    assert_recorded(poisson, FAMILIES[name], 16 * [(data(poisson, num=60), {})], least=2)


@pytest.mark.slow  # quick: the same with counts
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("model", [regression, heteroscedastic])
def test_losses_of_other_likelihoods_are_those_of_plain_steps(name, model):
    # Sites of two functions may take another number of updates at each step, as precisions' sweeps may.
    options = {"least": 0, "independent": True} if model is heteroscedastic else {"least": 1}
    assert_recorded(model, FAMILIES[name], 12 * [(data(model, num=40), {})], **options)


def counts(x, y=None, size=None, change=None):
    """Poisson counts with an offset that may change from step to step."""
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    f = pyro.sample("f", GaussianProcess(scale * kernels.RBF(0.4), x))
    offset = 0.0 if change is None else change(f)
    return observed(dist.Poisson((f + 1 + offset).exp()), y, x, size)


def changing(change):
    return lambda x, y=None, size=None: counts(x, y, size, change)


def rows(num, seed=1):
    return data(poisson, num=num, seed=seed)


def test_another_batch_size_is_another_recording():
    calls = [((*rows(20 + 4 * (i % 2)),), {"size": 80}) for i in range(20)]
    recordings = assert_recorded(counts, SVGP(6), calls, least=6)
    assert len(recordings.found) == 2


@pytest.mark.slow
def test_there_are_eight_recordings_at_most():
    calls = [((*rows(20 + i // 4),), {"size": 80}) for i in range(40)]
    plain, jit, recordings = both(counts, SVGP(6), calls)
    assert jit == plain
    assert len(recordings.found) == 8


def test_batches_of_other_rows_are_replayed():
    calls = [((*rows(24, seed),), {"size": 80}) for seed in range(16)]
    assert_recorded(counts, SVGP(6), calls, least=6)


def test_rows_that_a_plate_draws_are_drawn_anew():
    def model(x, y=None):
        plate = pyro.plate("data", len(x), subsample_size=20)
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.4), x[plate.indices]))
        with plate:
            return pyro.sample("y", dist.Poisson(f.exp()), obs=None if y is None else y[plate.indices])

    assert_recorded(model, SVGP(6), 16 * [(rows(60), {})])


def test_arguments_that_are_no_tensors_are_guarded():
    calls = [(rows(24), {"size": 80 if i < 8 else 160}) for i in range(16)]
    recordings = assert_recorded(counts, SVGP(6), calls)
    assert len(recordings.found) == 2


def test_data_are_read_where_they_lie():
    x, y = rows(24)
    losses = []
    for elbo in (TraceQuadrature_ELBO(10), JitTraceQuadrature_ELBO(10)):
        svi, here = stepper(elbo, counts, SVGP(6)), y.clone()
        losses.append([svi.step(x, here.copy_(y + i % 3)) for i in range(12)])
    assert losses[0] == losses[1]
    assert len({round(loss) for loss in losses[0]}) > 3


def test_a_mode_is_a_recording_of_its_own():
    class Model(pyro.nn.PyroModule):
        def __init__(self):
            super().__init__()
            self.drop = torch.nn.Dropout(0.5)

        def forward(self, x, y=None):
            return counts(x, y, change=lambda f: self.drop(torch.ones(len(f)).to(f)))

    losses = []
    for elbo in (TraceQuadrature_ELBO(10), JitTraceQuadrature_ELBO(10)):
        model = Model()
        svi = stepper(elbo, model, SVGP(6))
        losses.append([svi.step(*rows(24)) for _ in range(8)])
        model.drop.eval()
        losses[-1] += [svi.step(*rows(24)) for _ in range(8)]
    assert losses[0] == losses[1]
    assert len(elbo._recordings[svi.guide].found) == 2


def test_another_state_is_loaded_between_replays():
    losses = []
    for elbo in (TraceQuadrature_ELBO(10), JitTraceQuadrature_ELBO(10)):
        svi = stepper(elbo, counts, SVGP(6))
        losses.append([svi.step(*rows(24)) for _ in range(4)])
        state = svi.guide.state_dict()
        state = {name: v.clone() if isinstance(v, torch.Tensor) else v for name, v in state.items()}
        losses[-1] += [svi.step(*rows(24)) for _ in range(8)]
        svi.guide.load_state_dict(state)
        losses[-1] += [svi.step(*rows(24)) for _ in range(8)]
    assert losses[0] == losses[1]


def test_steps_under_a_handler_are_plain():
    losses = []
    for elbo in (TraceQuadrature_ELBO(10), JitTraceQuadrature_ELBO(10)):
        svi = stepper(elbo, counts, SVGP(6))
        losses.append([svi.step(*rows(24)) for _ in range(6)])
        with pyro.poutine.scale(scale=0.5):
            losses[-1] += [svi.step(*rows(24)) for _ in range(4)]
    assert losses[0] == losses[1]


@pytest.mark.filterwarnings("ignore:.*needed a relative jitter")
def test_a_factor_that_fails_takes_the_plain_step():
    x, y = rows(24)
    near = x[:1] + 1e-9 * torch.randn(24, 2, dtype=x.dtype)  # of 12 such rows the Gram matrix needs more jitter

    def model(x, y=None):
        return observed(dist.Normal(pyro.sample("f", GaussianProcess(kernels.RBF(0.4), x, jitter=1e-12)), 0.5), y)

    calls = [((x if i < 6 or i > 8 else near, y), {}) for i in range(14)]
    for family in (SVGP(6),):
        assert_recorded(model, family, calls)


def test_a_factor_without_an_inverse_takes_the_plain_step():
    """Which a graph meets before it has told that the factor fails."""
    losses = []
    for elbo in (TraceQuadrature_ELBO(10), JitTraceQuadrature_ELBO(10)):
        svi = stepper(elbo, counts, SVGP(6))
        losses.append([svi.step(*rows(24)) for _ in range(6)])
        if isinstance(elbo, JitTraceQuadrature_ELBO):
            (recording,) = elbo._recordings[svi.guide].found.values()
            graphs = recording.graph, recording.exact
            recording.graph = recording.exact = lambda *inputs: torch.cholesky_inverse(torch.zeros(2, 2))
        losses[-1].append(svi.step(*rows(24)))
        if isinstance(elbo, JitTraceQuadrature_ELBO):
            assert recording.failures == 1
            recording.graph, recording.exact = graphs
        losses[-1] += [svi.step(*rows(24)) for _ in range(6)]
    assert losses[0] == losses[1]


def test_a_loss_that_is_not_finite_is_the_plain_error():
    x, y = rows(24)
    bad = y.clone()
    bad[3] = torch.nan
    losses = []
    for elbo in (TraceQuadrature_ELBO(10), JitTraceQuadrature_ELBO(10)):
        svi = stepper(elbo, counts, SVGP(6))
        losses.append([svi.step(x, y) for _ in range(6)])
        with pytest.raises(ValueError, match=r"the bound is NaN.*'y'"):
            svi.step(x, bad)
        losses[-1] += [svi.step(x, y) for _ in range(6)]
    assert losses[0] == losses[1]
    assert replayed(elbo._recordings[svi.guide]) > 3


def told_of(elbo, change, num, between=lambda step: None):
    """The losses of steps of a changing program, and what is said of recordings."""
    svi, losses = stepper(elbo, changing(change), SVGP(6)), []
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        for step in range(num):
            between(step)
            losses.append(svi.step(*rows(24)))
    return losses, [str(one.message) for one in told if "JitTrace" in str(one.message)]


def test_what_a_program_names_is_guarded():
    def steps(elbo):
        by = [0.0]

        def between(step):
            by[0] = 0.3 * (step > 10)

        return told_of(elbo, lambda f: by[0], 22, between)

    plain, jit = steps(TraceQuadrature_ELBO(10)), steps(elbo := JitTraceQuadrature_ELBO(10))
    assert jit == plain
    assert len(next(iter(elbo._recordings.values())).found) == 2


def test_a_program_that_counts_its_calls_is_not_recorded():
    def steps(elbo):
        calls = {"count": 0}

        def change(f):
            calls["count"] += 1
            return 0.3 * (calls["count"] > 30)

        return told_of(elbo, change, 40)

    (plain, none), (jit, told) = steps(TraceQuadrature_ELBO(10)), steps(JitTraceQuadrature_ELBO(10))
    assert jit == plain
    assert not none
    assert len(told) == 1
    assert "when it is called, the model changes calls. Give what changes as an argument" in told[0]


def test_a_cache_that_is_filled_is_no_change_of_the_program():
    def steps(elbo):
        cache = {}

        def model(x, y=None, size=None):
            weight = cache.setdefault(len(x), torch.full((), 0.5, dtype=x.dtype))
            return counts(x, y, size, lambda f: weight)

        svi = stepper(elbo, model, SVGP(6))
        return svi, [svi.step(*rows(20 + 2 * (step % 3)), 80) for step in range(30)]

    (_, plain), (svi, jit) = steps(TraceQuadrature_ELBO(10)), steps(elbo := JitTraceQuadrature_ELBO(10))
    assert jit == plain
    assert not elbo._recordings[svi.guide].why
    assert replayed(elbo._recordings[svi.guide]) > 2


def test_a_program_that_asks_an_iterator_is_not_recorded():
    def steps(elbo):
        each = iter([0.0] * 30 + [0.3] * 300)
        return told_of(elbo, lambda f: next(each), 20)

    (plain, none), (jit, told) = steps(TraceQuadrature_ELBO(10)), steps(JitTraceQuadrature_ELBO(10))
    assert jit == plain
    assert not none
    assert len(told) == 1
    assert "each is an iterator, and a replay would see no change of it. Give what" in told[0]


@pytest.mark.filterwarnings("ignore:.* was not registered in the param store")
def test_changes_of_networks_and_parameters_are_seen():
    def steps(elbo):
        torch.manual_seed(1)
        net = torch.nn.Sequential(torch.nn.Linear(2, 3), torch.nn.Dropout(0.2), torch.nn.Linear(3, 1)).double()

        def model(x, y=None):
            pyro.module("net", net)
            level = pyro.param("level", torch.zeros((), dtype=x.dtype))
            return counts(x, y, change=lambda f: level + net(x)[:, 0])

        store = partial(pyro.get_param_store().__setitem__, "level", torch.tensor(0.5, dtype=torch.float64))
        svi = stepper(elbo, model, SVGP(6))
        losses = [svi.step(*rows(24)) for _ in range(8)]
        for change in (lambda: net[0].requires_grad_(False), net.eval, store):
            change()
            losses += [svi.step(*rows(24)) for _ in range(3)]
            net.train().requires_grad_(True)
            losses += [svi.step(*rows(24)) for _ in range(4)]
        assert not getattr(elbo, "_recordings", {svi.guide: SimpleNamespace(why="")})[svi.guide].why
        return losses

    assert steps(JitTraceQuadrature_ELBO(10)) == steps(TraceQuadrature_ELBO(10))


def test_a_program_that_changes_unseen_ends_the_recording():
    def steps(elbo):
        now = SimpleNamespace(step=0)  # asked for by a name that code does not show
        between = partial(setattr, now, "step")
        return told_of(elbo, lambda f: 0.3 * (getattr(now, "st" + "ep") > 10), 24, between)

    (plain, none), (jit, told) = steps(TraceQuadrature_ELBO(10)), steps(elbo := JitTraceQuadrature_ELBO(10))
    assert not none
    assert len(told) == 1
    assert "Python has changed" in told[0]
    assert jit[:11] == plain[:11]
    assert jit[11:] != plain[11:]  # up to the next comparison
    assert not next(iter(elbo._recordings.values())).found


def test_the_last_step_of_a_fit_is_compared():
    now = SimpleNamespace(step=0)
    model = changing(lambda f: 0.3 * (getattr(now, "st" + "ep") > 10))

    def stopping(losses):
        now.step = len(losses)
        return False

    pyro.clear_param_store()
    with pytest.warns(UserWarning, match="Python has changed"):
        fit(model, AutoSparseGP(model, SVGP(6)), rows(24), steps=14, stopping=stopping, jit=True, progress=False)


def test_a_program_that_reads_a_number_is_told_where():
    def change(f):
        return 0.1 if f.max() > 100 else 0.0  # here

    said = r"the model reads a tensor's number, in .*test_record.py:\d+: return 0.1 if f.max\(\) > 100"
    with pytest.warns(UserWarning, match=said):
        plain, jit, recordings = both(changing(change), SVGP(6), 8 * [(rows(24), {})])
    assert jit == plain
    assert recordings.why


def test_particles_are_recorded():
    losses = []
    for kind in (TraceQuadrature_ELBO, JitTraceQuadrature_ELBO):
        svi = stepper(elbo := kind(10, num_particles=2), counts, SVGP(6))
        losses.append([svi.step(*rows(24)) for _ in range(12)])
    assert losses[0] == losses[1]
    assert replayed(elbo._recordings[svi.guide]) > 3


def test_the_optimiser_sees_the_parameters_of_the_program():
    def change(f):
        return pyro.param("level", torch.tensor(0.2, dtype=f.dtype))

    assert_recorded(changing(change), SVGP(6), 14 * [(rows(24), {})])


def with_intercept(x, y=None):
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    level = pyro.sample("level", dist.Normal(0.0, 2.0))
    f = pyro.sample("f", GaussianProcess(scale * kernels.RBF(0.4), x))
    return observed(dist.Poisson((f + level).exp()), y)


@pytest.mark.parametrize("family", [SVGP(6), SGPR(6)])
def test_a_joint_posterior_is_recorded(family):
    assert_recorded(with_intercept, family, 18 * [(rows(24), {})], least=5)


def wins(x, y=None):
    scale = pyro.sample("scale", dist.HalfNormal(2.0))
    f = pyro.sample("f", GaussianProcess(scale**2 * kernels.RBF(0.4), x))
    p = torch.special.ndtr(f[: len(f) // 2] - f[len(f) // 2 :])
    return observed(dist.Bernoulli(p.clamp(1e-6, 1 - 1e-6)), y)


@pytest.mark.slow  # quick: test_a_joint_posterior_is_recorded
def test_a_joint_posterior_over_points_is_recorded():
    """Looks at whether the program is still what it was, steps 4 and 16, leave the gradient as it is."""
    x, y = rows(24)
    assert_recorded(wins, SVGP(6), 18 * [((x, (y[:12] > y[12:]).to(x)), {})], least=5)


def deep(x, y=None):
    inner = pyro.sample("h", GaussianProcess(kernels.RBF(0.5), x, mean=lambda x: x[:, 0]))
    f = pyro.sample("f", GaussianProcess(kernels.RBF(0.3), inner[:, None]))
    return observed(dist.Normal(f, 0.3), y)


def test_a_deep_gp_is_recorded():
    assert_recorded(deep, SVGP(6), 12 * [(data(num=30), {})])


@pytest.mark.parametrize("options", [{}, {"batch_size": 16}])
def test_a_fit_is_the_same(options):
    results, states = [], []
    for jit in (False, True):
        pyro.clear_param_store()
        pyro.set_rng_seed(1)
        guide = AutoSparseGP(counts, SVGP(6))
        results.append(fit(counts, guide, rows(40), steps=24, jit=jit, progress=False, **options))
        states.append(guide)
    assert (results[0].losses == results[1].losses).all()
    assert_same_state(*states)


def test_a_resumed_fit_is_the_same(tmp_path):
    def fitted(steps, **options):
        pyro.clear_param_store()
        pyro.set_rng_seed(1)
        guide = AutoSparseGP(counts, SVGP(6))
        return fit(counts, guide, rows(40), steps=steps, jit=True, progress=False, **options).losses

    file = tmp_path / "fit.pt"
    whole = fitted(30)
    fitted(30, checkpoint=file, checkpoint_every=0, stopping=lambda losses: len(losses) == 17)
    assert (fitted(30, checkpoint=file, resume=True) == whole).all()


def test_adam_of_a_fit_is_within_the_recording():
    guide, elbo = AutoSparseGP(counts, SVGP(6)), JitTraceQuadrature_ELBO()
    fit(counts, guide, rows(40), steps=16, loss=elbo, progress=False)
    (recording,) = elbo._recordings[guide].found.values()
    assert recording.update.params
    assert recording.replays > 3


def test_what_jit_may_be():
    guide = AutoSparseGP(counts, SVGP(6))
    refused("fit's jit must be \"auto\" or True or False, got 'always'", fit, counts, guide, rows(20), jit="always")


def mixture(x, y=None):
    f = pyro.sample("f", GaussianProcess(kernels.RBF(0.4), x))
    with pyro.plate("data", len(x)):
        outlier = pyro.sample("outlier", dist.Bernoulli(0.1), infer={"enumerate": "parallel"})
        return pyro.sample("y", dist.Normal(f, 0.3 + 2 * outlier), obs=y)


def in_groups(x, y=None):
    with pyro.plate("groups", 5):
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
    f = pyro.sample("f", GaussianProcess(kernels.RBF(0.4), x))
    return observed(dist.Poisson((f + a[(10 * x[:, 0]).long() % 5]).exp()), y)


# which makes no subclass of a tensor while it records: steps are plain there
OLD = pytest.mark.skipif(torch.__version__.startswith("2.4."), reason="PyTorch 2.4 records no enumeration")


@pytest.mark.parametrize("model", [pytest.param(mixture, marks=OLD), pytest.param(in_groups, marks=pytest.mark.slow)])
def test_other_latents_are_recorded(model):
    assert_recorded(model, SVGP(6), 14 * [(rows(30), {})])


def test_rows_that_data_choose_are_not_recorded():
    """Of how many there are a recording would keep the number, and numbers that Python makes of it."""

    def model(x, y=None, size=None):
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.4), x))
        seen = y.isfinite()
        with pyro.plate("data", size, subsample=y[seen]):
            return pyro.sample("y", dist.Normal(f[seen], 0.3), obs=y[seen])

    calls = []
    for seed in range(16):
        x, y = data(num=24, seed=seed)
        calls.append(((x, y.masked_fill(torch.arange(24) < seed, torch.nan)), {"size": 80}))
    with pytest.warns(UserWarning, match=r"data say how many values there are, as in y\[seen\]"):
        plain, jit, recordings = both(model, SVGP(6), calls)
    assert jit == plain
    assert not recordings.found
    one = torch.arange(24) > 3  # which stays

    def with_one(x, y=None):
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.4), x))
        return observed(dist.Poisson(f[one].exp()), y[one])

    assert_recorded(with_one, SVGP(6), 12 * [(rows(24), {})])


@pytest.mark.filterwarnings("ignore:the inputs of GP site 'f'.* which other rows")  # as a BatchNorm's are
def test_a_program_that_writes_in_place_is_told_of():
    net = torch.nn.Sequential(torch.nn.Linear(2, 4), torch.nn.BatchNorm1d(4)).double()

    def model(x, y=None):
        pyro.module("net", net)
        return observed(dist.Normal(pyro.sample("f", GaussianProcess(kernels.RBF(1.0), net(x))), 0.3), y)

    svi = stepper(elbo := JitTraceQuadrature_ELBO(10), model, SVGP(6))

    def step():
        svi.step(*rows(30))
        return int(net[1].num_batches_tracked)

    with pytest.warns(UserWarning, match=r"writes to a tensor in place, as BatchNorm does\."):  # no line of ours
        seen = [step() for _ in range(6)]
    assert not elbo._recordings[svi.guide].found
    assert [*np.diff(seen[1:])] == 4 * [1]  # the recording's own run is undone


def test_a_step_that_loses_a_nat_a_datum_is_plain():
    x = torch.rand(60, 1, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    y, losses = torch.sin(8 * x[:, 0]), []

    def model(x, y=None):
        moved = x + pyro.param("shift", torch.zeros((), dtype=x.dtype))
        return observed(dist.Normal(pyro.sample("f", GaussianProcess(kernels.Matern32(0.5), moved)), 0.1), y)

    for elbo in (TraceQuadrature_ELBO(10), JitTraceQuadrature_ELBO(10)):
        pyro.clear_param_store()
        svi = stepper(elbo, model, CoupledPrecision(12), lr=1e-3)  # which does not follow inputs
        losses.append([svi.step(x, y) for _ in range(9)])
        pyro.param("shift").data += 0.4  # under a q that is right for where the inputs were
        losses[-1] += [svi.step(x, y) for _ in range(3)]
    assert losses[0] == losses[1]
    assert sum(one.failures for one in elbo._recordings[svi.guide].found.values()) == 1


class PretendedGraph(TorchDispatchMode):
    """In the place of a CUDA graph: operations, which a replay carries out anew, in the same memory."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        # Aliases keep shapes, which squeeze_ changes.
        def kept(tree):
            return tree_map_only(torch.Tensor, torch.ops.aten.alias.default, tree)

        before, out = kept((args, kwargs or {})), func(*args, **(kwargs or {}))
        self.calls.append((func, *before, kept(out)))
        return out

    def replay(self):
        for func, args, kwargs, out in self.calls:
            if not func.is_view and torch.Tag.inplace_view not in func.tags:  # which have no kernel
                found = func(*args, **kwargs)  # None of Adam's kernel
                for old, new in zip(tree_leaves(out), tree_leaves(found)) if out is not None else ():
                    old.copy_(new)


@pytest.fixture
def cuda(monkeypatch):
    """torch.cuda's graphs, pretended."""
    made, stream = [], lambda *_: SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: made.append(PretendedGraph()) or made[-1])
    monkeypatch.setattr(torch.cuda, "graph", lambda graph: graph)
    monkeypatch.setattr(torch.cuda, "stream", lambda stream: nullcontext())
    monkeypatch.setattr(torch.cuda, "Stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    monkeypatch.setattr("pyro_sparsegp.inference.record.is_capturable", lambda graph, inputs: True)
    return made


@pytest.mark.quick("SVGP")
@pytest.mark.parametrize("name", ["SVGP", "CoupledPrecision", "SGPR"])
def test_one_graph_of_a_gpu_is_the_step(name, cuda):
    assert_recorded(poisson, FAMILIES[name], 18 * [(data(poisson, num=60), {})])
    assert len(cuda) == 1
    waits = "_local_scalar_dense", "_linalg_check_errors", "nonzero"  # for which a device waits
    assert not [func for func, *_ in cuda[0].calls if any(f"aten.{name}." in str(func) for name in waits)]


def test_one_graph_of_a_gpu_is_the_step_of_batches_and_adam(cuda):
    losses = []
    for jit in (False, True):
        pyro.clear_param_store()
        pyro.set_rng_seed(1)
        guide = AutoSparseGP(counts, SVGP(6))
        losses.append(fit(counts, guide, rows(40), steps=16, batch_size=16, jit=jit, progress=False).losses)
    assert (losses[0] == losses[1]).all()
    assert len(cuda) == 1


def test_arguments_of_a_captured_step_are_not_written_to(cuda):
    batches = [rows(24, seed) for seed in range(12)]
    kept = [[value.clone() for value in batch] for batch in batches]
    assert_recorded(counts, SVGP(6), [(batch, {"size": 80}) for batch in batches])
    assert all(torch.equal(a, b) for batch, before in zip(batches, kept) for a, b in zip(batch, before))


@pytest.mark.slow  # inductor takes half a minute each
@pytest.mark.filterwarnings("ignore:inductor's code gives other numbers")  # of additive families' second inputs
@pytest.mark.parametrize("name", FAMILIES)
def test_a_compiled_step_is_that_of_plain_steps_up_to_rounding(name):
    losses, args = [], data(poisson, num=60)
    for elbo in (TraceQuadrature_ELBO(10), JitTraceQuadrature_ELBO(10, compile=True)):
        svi = stepper(elbo, poisson, FAMILIES[name])
        losses.append(torch.tensor([svi.step(*args) for _ in range(16)]))
    assert replayed(elbo._recordings[svi.guide]) >= 2
    torch.testing.assert_close(*losses, rtol=1e-7, atol=0)
