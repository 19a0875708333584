"""Compiled steps against the steps that they stand for."""

import contextlib
import copy
import warnings
from types import SimpleNamespace

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from torch import nn

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import (
    SGPR,
    SVGP,
    CoupledCovariance,
    CoupledPrecision,
    MeanFieldAdditive,
    OrthogonalInducing,
    OrthogonallyDecoupled,
    WeightSpace,
)
from pyro_sparsegp.inference.captured import Captured

from .models import bernoulli, data, heteroscedastic, poisson, regression

FREE = {
    "SVGP": SVGP(6, natural=False),
    "SVGP by natural steps": SVGP(6, natural=True),
    "OrthogonalInducing": OrthogonalInducing(4, 3, natural=True),
    "OrthogonallyDecoupled": OrthogonallyDecoupled(4, 3, natural=False),
    "not whitened": SVGP(6, whiten=False),
    "sampled columns": OrthogonallyDecoupled(4, 6, num_columns=3),
    "MeanFieldAdditive": MeanFieldAdditive(4, natural=False),
    "CoupledCovariance": CoupledCovariance(4, natural=True),
    "CoupledPrecision": CoupledPrecision(4, natural=False),
    "CoupledPrecision by natural steps": CoupledPrecision(4, natural=True),
}


def points(x, y=None, size=None):
    """The shared model with hyperparameters that are parameters, so that the bound is deterministic."""
    scale = pyro.param("scale", x.new_ones(()), constraint=dist.constraints.positive)
    length = pyro.param("length", x.new_full((2,), 0.7), constraint=dist.constraints.positive)
    noise = pyro.param("noise", x.new_full((), 0.3), constraint=dist.constraints.positive)
    kernel = scale * kernels.Matern32(length[:1])[0] + scale * kernels.RBF(length[1:])[1]
    f = pyro.sample("f", GaussianProcess(kernel, x))
    with pyro.plate("data", size or len(x), subsample=x):
        return pyro.sample("y", dist.Normal(f, noise), obs=y)


def trained(model, family, steps, compile, nodes=4, seed=3, before=None, **kwargs):
    """Losses of steps with these arguments, each a tuple; the parameters after them; the guide."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    guide = AutoSparseGP(model, family, **kwargs)
    loss = TraceQuadrature_ELBO(nodes, compile=compile)
    svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.02}), loss)
    losses = []
    for i, (args, options) in enumerate(steps):
        if before is not None:
            before(i)
        losses.append(svi.step(*args, **options))
    found = {name.partition(".")[2] or name: value.detach().clone() for name, value in pyro.get_param_store().items()}
    return losses, found, (loss, guide)


def require_same(model, family, steps, replayed=True, **kwargs):
    """Without and with compilation: the same losses and parameters."""
    eager, there, _ = trained(model, family, steps, False, **kwargs)
    losses, here, (loss, guide) = trained(model, family, steps, True, **kwargs)
    assert losses == pytest.approx(eager, rel=1e-12, abs=1e-12)
    assert there.keys() == here.keys()
    for name, value in there.items():
        # Adam's steps are made of signs where gradients are rounding error.
        torch.testing.assert_close(
            here[name], value, rtol=1e-9, atol=1e-9, msg=lambda text, name=name: f"{name}: {text}"
        )
    steps_of = loss._compiled[guide]
    assert bool(steps_of._replays) == replayed
    return losses


def batches(model, num, sizes=(20,), seed=5, scaled=True):
    x, y = data(model, num=30)
    generator = torch.Generator().manual_seed(seed)
    found = []
    for i in range(num):
        rows = torch.randperm(len(x), generator=generator)[: sizes[i % len(sizes)]]
        found.append(((x[rows], y[rows]), {"size": len(x)} if scaled else {}))
    return found


@pytest.fixture(autouse=True)
def no_fallback():
    """A step that falls back where it should not is an error."""
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message=".*compile=.*")
        yield


@pytest.mark.parametrize("name", FREE)
def test_a_family_trains_as_without(name):
    require_same(points, FREE[name], batches(points, 5))


@pytest.mark.parametrize("model", [bernoulli, poisson, heteroscedastic])
def test_likelihoods_and_latents_that_are_drawn(model):
    # The same random numbers are drawn, so that losses are the same; new ones each step, so that they are no others'.
    steps = batches(model, 2)
    losses = require_same(model, SVGP(5), [*steps, *[steps[1]] * 3])
    assert len(set(losses)) == len(losses)


def test_weight_space_and_an_optimiser_of_torch():
    def model(x, y=None, size=None):
        f = pyro.sample("f", GaussianProcess(kernels.Polynomial(2, 1.0) + kernels.Linear(1.0), x))
        with pyro.plate("data", size or len(x), subsample=x):
            return pyro.sample("y", dist.Normal(f, 0.3), obs=y)

    require_same(model, WeightSpace(), batches(regression, 5))


def test_particles_and_subsampling_plates_draw_anew():
    x, y = data()

    def model(x, y=None):
        plate = pyro.plate("data", len(x), subsample_size=15)
        rows = plate.indices
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        f = pyro.sample("f", GaussianProcess(scale * kernels.RBF(0.5), x[rows]))
        with plate:
            return pyro.sample("y", dist.Normal(f, 0.3), obs=None if y is None else y[rows])

    require_same(model, SVGP(5), [((x, y), {})] * 5)


def test_each_shape_has_a_trace():
    _, _, (loss, guide) = trained(points, SVGP(5), batches(points, 9, sizes=(20, 20, 13)), True)
    assert len(loss._compiled[guide]._replays) == 2
    require_same(points, SVGP(5), batches(points, 9, sizes=(20, 20, 13)))


def test_another_dtype_is_traced_anew():
    x, y = data(points)
    results = []
    for compile in (False, True):
        guide, _ = fresh(compile)
        loss = TraceQuadrature_ELBO(2, compile=compile)
        svi = pyro.infer.SVI(points, guide, pyro.optim.SGD({"lr": 1e-4}), loss)  # whose state has no dtype
        losses = [svi.step(x, y) for _ in range(4)]
        guide.float()
        losses += [svi.step(x.float(), y.float()) for _ in range(4)]
        results.append(losses)
    assert results[0] == pytest.approx(results[1], rel=1e-6)
    assert {replay.dtype for replay in loss._compiled[guide]._replays.values()} == {torch.float32, torch.float64}


@pytest.mark.parametrize("by", ["an argument", "an attribute"])
def test_another_program_is_traced_anew(by):
    x, y = data()
    chosen = SimpleNamespace(heavy=False)

    def model(x, y=None, heavy=False):
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5), x))
        with pyro.plate("data", len(x)):
            likelihood = dist.StudentT(4.0, f, 0.3) if heavy or chosen.heavy else dist.Normal(f, 0.3)
            return pyro.sample("y", likelihood, obs=y)

    def before(i):
        chosen.heavy = by == "an attribute" and i >= 4

    steps = [((x, y), {"heavy": by == "an argument" and i >= 4}) for i in range(8)]
    require_same(model, SVGP(5), steps, before=before)


def test_gradients_add_up():
    x, y = data(points)
    pyro.set_rng_seed(0)
    guide = AutoSparseGP(points, SVGP(5))
    found = []
    for compile in (False, True):
        loss = TraceQuadrature_ELBO(2, compile=compile)
        for _ in range(3):
            loss.loss_and_grads(points, guide, x, y)
        guide.zero_grad()
        for _ in range(2):
            loss.loss_and_grads(points, guide, x, y)
        found.append([p.grad.clone() for p in guide.parameters()])
    for one, other in zip(*found):
        torch.testing.assert_close(one, other, rtol=1e-12, atol=1e-12)


def test_a_failing_factorisation_raises_as_without_before_the_update():
    def model(x, y, bad):
        f = pyro.sample("f", GaussianProcess((1 - bad) * kernels.RBF(0.5), x))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(f, 0.3), obs=y)

    x, y = data()
    messages = []
    for compile in (False, True):
        pyro.clear_param_store()
        pyro.set_rng_seed(0)
        guide = AutoSparseGP(model, SVGP(5))
        loss = TraceQuadrature_ELBO(2, compile=compile)
        svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.02}), loss)
        for _ in range(4):
            svi.step(x, y, x.new_zeros(()))
        before = [p.detach().clone() for p in guide.parameters()]
        with pytest.raises(RuntimeError, match="not positive-definite") as error:
            svi.step(x, y, x.new_full((), 3.0))
        messages.append(str(error.value))
        assert all(torch.equal(a, b) for a, b in zip(before, guide.parameters()))
        with pytest.raises(ValueError, match="NaN"):
            svi.step(x, y * torch.nan, x.new_zeros(()))
        assert all(torch.equal(a, b) for a, b in zip(before, guide.parameters()))
        svi.step(x, y, x.new_zeros(()))
    assert messages[0] == messages[1]


def test_more_jitter_is_tried_as_without():
    def model(x, y, length):
        f = pyro.sample("f", GaussianProcess(kernels.RBF(length), x, jitter=1e-16))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(f, 0.3), obs=y)

    x, y = data()
    lengths = [0.2] * 3 + [1e4] + [0.2] * 2
    steps = [((x, y, x.new_full((), length)), {}) for length in lengths]
    with pytest.warns(UserWarning, match="needed a relative jitter"):
        require_same(model, SVGP(12), steps)


FACTOR = 1.0


class Held(pyro.nn.PyroModule):
    def __init__(self):
        super().__init__()
        self.register_buffer("shift", torch.zeros(()))
        self.register_buffer("level", torch.zeros(()))
        self.number = 1.0
        self.runs = 0

    def forward(self, x, y=None):
        self.runs += 1
        mean = self.number * self.shift + self.level
        f = pyro.sample("f", GaussianProcess(FACTOR * kernels.RBF(0.5), x, mean=lambda x: mean.expand(len(x))))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(f, 0.3), obs=y)


@pytest.mark.parametrize("what", ["in place", "replaced", "number", "global", "mode"])
def test_what_a_model_reads_besides_may_change(what, monkeypatch):
    x, y = data()
    model = Held()

    def before(i):
        if i == 0:
            model.shift, model.number = torch.zeros(()), 1.0
            model.level.zero_()
            monkeypatch.setitem(globals(), "FACTOR", 1.0)
            model.train()
        if what == "in place":
            model.level.fill_(0.1 * i)
        elif what == "replaced":
            model.shift = torch.tensor(0.1 * i)
        elif i == 5 and what == "number":
            model.number = 2.0
        elif i == 5 and what == "global":
            monkeypatch.setitem(globals(), "FACTOR", 2.0)
        elif i == 5 and what == "mode":
            model.eval()

    eager = require_same(model, SVGP(5), [((x, y), {})] * 8, before=before)
    assert len(set(eager)) == 8


class Hidden:
    """Looks like a library's: no one looks into it."""

    __slots__ = ("value",)


def test_what_changes_out_of_reach_is_told():
    x, y = data()
    hidden = Hidden()

    def model(x, y=None):
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5), x, mean=hidden.value))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(f, 0.3), obs=y)

    def before(i):
        hidden.value = 0.0 if i < 4 else 2.0

    with pytest.warns(UserWarning, match="changes from step to step"):
        trained(model, SVGP(5), [((x, y), {})] * 8, True, before=before)


def reads_back(x, y=None):
    f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5 if x.sum().item() > 0 else 0.4), x))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(f, 0.3), obs=y)


def by_numpy(x, y=None):
    f = pyro.sample("f", GaussianProcess(kernels.RBF(float(x.detach().numpy().std())), x))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(f, 0.3), obs=y)


def random_numpy(x, y=None):
    f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5 + 0.1 * np.random.rand()), x))  # noqa: NPY002
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(f, 0.3), obs=y)


normalised = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3)).double()


def batch_norm(x, y=None):
    pyro.module("normalised", normalised)
    f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5), normalised(x)))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(f, 0.3), obs=y)


@pytest.mark.parametrize(
    ("model", "family", "why"),
    [
        (reads_back, SVGP(5), "a number is read"),
        (by_numpy, SVGP(5), "Tensor.numpy"),
        (random_numpy, SVGP(5), "NumPy"),
        (batch_norm, SVGP(5), "in place"),
        (regression, SGPR(5), "family on sites"),
    ],
)
def test_what_cannot_be_compiled_says_so_once_and_runs(model, family, why):
    x, y = data()
    states = [part.clone() for part in normalised.state_dict().values()]

    def reset():
        np.random.seed(0)  # noqa: NPY002
        for part, state in zip(normalised.state_dict().values(), states):
            part.copy_(state)

    reset()
    eager, _, _ = trained(model, family, [((x, y), {})] * 5, False)
    reset()
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        losses, _, _ = trained(model, family, [((x, y), {})] * 5, True)
    told = [str(w.message) for w in told if "compile" in str(w.message)]
    assert len(told) == 1
    assert why in told[0]
    if model is random_numpy:  # the attempt draws, too
        assert losses[0] == eager[0]
    elif model is not batch_norm:
        assert losses == eager


def test_a_handler_around_the_step_is_no_part_of_a_trace():
    x, y = data()
    guide = AutoSparseGP(points, SVGP(5))
    loss = TraceQuadrature_ELBO(2, compile=True)
    for _ in range(3):
        plain = loss.loss_and_grads(points, guide, x, y)
    with pytest.warns(UserWarning, match="a handler, ScaleMessenger"), poutine.scale(scale=2.0):
        scaled = loss.loss_and_grads(points, guide, x, y)
    assert scaled == pytest.approx(2 * plain)


def fresh(compile):
    """A guide of :func:`points` and its steps, from the same start each time."""
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    guide = AutoSparseGP(points, SVGP(5))
    return guide, pyro.infer.SVI(points, guide, pyro.optim.Adam({"lr": 0.02}), TraceQuadrature_ELBO(2, compile=compile))


def test_parameters_that_are_frozen_cleared_or_loaded():
    x, y = data()
    pyro.set_rng_seed(0)
    results = []
    for compile in (False, True):
        guide, svi = fresh(compile)
        losses = [svi.step(x, y) for _ in range(4)]
        state = copy.deepcopy(guide.state_dict())
        losses += [svi.step(x, y) for _ in range(3)]
        guide.load_state_dict(state)
        losses += [svi.step(x, y) for _ in range(4)]
        guide.gps.f.basis.inputs_0_unconstrained.requires_grad_(False)
        losses += [svi.step(x, y) for _ in range(4)]
        pyro.clear_param_store()
        losses += [svi.step(x, y) for _ in range(4)]
        results.append(losses)
    assert results[0] == pytest.approx(results[1], rel=1e-12)


def test_a_choice_that_is_none():
    with pytest.raises(ValueError, match="compile must be"):
        TraceQuadrature_ELBO(compile="cuda")


@pytest.mark.slow
def test_inductor():
    """A quick test sees the same faults: the trace is the same."""
    steps = batches(points, 5)
    eager, _, _ = trained(points, OrthogonalInducing(4, 4), steps, False)
    losses, _, _ = trained(points, OrthogonalInducing(4, 4), steps, "inductor")
    assert losses == pytest.approx(eager, rel=1e-9)


class Replayed:
    """A stand-in for a CUDA graph: a replay runs the captured function again, where its inputs and results are."""

    def __init__(self):
        self.replays = 0

    def replay(self):
        self.replays += 1
        for there, new in zip(self.found, self.function(*self.inputs)):
            there.copy_(new)


def test_a_captured_function_runs_on_new_inputs(monkeypatch):
    calls = []

    def function(x, y):
        calls.append(1)
        return [x @ y, x.sum()]

    for name in ("stream", "graph"):
        monkeypatch.setattr(torch.cuda, name, lambda _: contextlib.nullcontext())
    stream = SimpleNamespace(wait_stream=lambda other: None)
    monkeypatch.setattr(torch.cuda, "Stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda: stream)
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Replayed)
    given = [torch.randn(3, 3), torch.randn(3)]
    before = [part.clone() for part in given]
    captured = Captured(function, given)
    assert len(calls) == 3  # two to warm up
    graph = captured._graph
    graph.function, graph.inputs, graph.found = function, captured._inputs, captured._found
    runs = [[torch.randn(3, 3), torch.randn(3)] for _ in range(3)]
    found = [captured(*run) for run in runs]
    for run, results in zip(runs, found):  # none is overwritten by a later one
        torch.testing.assert_close(results, [run[0] @ run[1], run[0].sum()])
    assert graph.replays == 3
    torch.testing.assert_close(given, before)  # what it was captured with is left alone


def test_steps_by_a_cuda_graph(device):
    """On a CPU, those of the trace."""
    steps = [(tuple(part.to(device) for part in args), options) for args, options in batches(points, 6)]
    eager, _, _ = trained(points, OrthogonalInducing(4, 4), steps, False)
    losses, _, _ = trained(points, OrthogonalInducing(4, 4), steps, "cudagraph")
    assert losses == pytest.approx(eager, rel=1e-9)


def test_covariances_that_are_made_a_few_rows_at_a_time():
    """They are written to memory that operations name by ``out=``."""
    x, y = data(num=4000)
    eager, _, _ = trained(points_of_one, SVGP(30), [((x, y), {})] * 4, False)
    losses, _, _ = trained(points_of_one, SVGP(30), [((x, y), {})] * 4, True)
    assert losses == pytest.approx(eager, rel=1e-9)


def points_of_one(x, y):
    scale = pyro.param("scale", x.new_ones(()), constraint=dist.constraints.positive)
    f = pyro.sample("f", GaussianProcess(scale * kernels.RBF(0.7), x))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(f, 0.3), obs=y)


def test_a_parameter_that_another_takes_the_place_of():
    x, y = data(num=30)
    results = []
    for compile in (False, True):
        _, svi = fresh(compile)
        losses = [svi.step(x, y) for _ in range(4)]
        pyro.get_param_store()["noise"] = torch.tensor(2.0)
        losses += [svi.step(x, y) for _ in range(4)]
        results.append(losses)
    assert results[0] == pytest.approx(results[1], rel=1e-12)


def test_a_forgotten_size_is_told_of():
    """The first step's rows are all that is known; the second's are others, and no plate scales them up."""
    x, y = data()
    half = len(x) // 2

    def model(x, y):
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5), x))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(f, 0.3), obs=y)

    guide = AutoSparseGP(model, SVGP(5))
    svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), TraceQuadrature_ELBO(2, compile=True))
    svi.step(x[:half], y[:half])
    with pytest.warns(UserWarning, match="if this is a mini-batch, give the plate the full size"):
        svi.step(x[1 : half + 1], y[1 : half + 1])
    svi.step(x[2 : half + 2], y[2 : half + 2])
    svi.step(x[3 : half + 3], y[3 : half + 3])
