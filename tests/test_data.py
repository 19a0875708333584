"""What a guide takes for its training data: first calls, other data, other orders of the rows, forgotten sizes."""

import warnings
from dataclasses import dataclass
from types import SimpleNamespace
from typing import Any, NamedTuple

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Predictive, Trace_ELBO

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels, predict
from pyro_sparsegp.families import SGPR, SVGP, ComputationAware, Exact, ExactWeightSpace
from pyro_sparsegp.program.data import Relation, TrainingData

from .models import conditional, data, gaussian, prepared, refused, restored, train, trained

KERNEL = kernels.Matern32(torch.tensor([0.5, 0.7]))
NOISE = 0.2
MODEL = gaussian(KERNEL, NOISE)


def exact_mean(x, y, new):
    return conditional(KERNEL, x, y, NOISE, new)[0]


def looked_at(guide, x, y):
    with torch.no_grad():
        guide(x, y)


def evaluated(guide, x, y):
    SVI(MODEL, guide, pyro.optim.Adam({"lr": 0.01}), TraceQuadrature_ELBO(2)).evaluate_loss(x, y)


def asked(guide, x, y):
    guide.posterior(x, y)


@pytest.mark.parametrize("first", [looked_at, evaluated, asked], ids=lambda f: f.__name__)
@pytest.mark.parametrize("family", [SGPR, lambda x, **_: ComputationAware(len(x), "eigen")], ids=["SGPR", "projected"])
def test_the_first_call_with_data_is_enough(first, family):
    x, y = data(num=20)
    new = torch.rand(5, 2)
    guide = AutoSparseGP(MODEL, family(x, trainable=False))
    first(guide, x, y)
    torch.testing.assert_close(guide.posterior(new)["f"].mean, exact_mean(x, y, new), atol=1e-4, rtol=1e-4)
    other = restored(guide, MODEL, family(x, trainable=False))
    torch.testing.assert_close(other.posterior(new)["f"].mean, exact_mean(x, y, new), atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("family", [SGPR(8), ComputationAware(8), ComputationAware(8, "cg")])
def test_a_loss_at_other_data_leaves_the_posterior_alone(family):
    x, y = data(num=30)
    there, seen = data(num=30, seed=9)
    guide = trained(MODEL, family, x, y, steps=3)
    before = guide.posterior(x)["f"].mean
    loss = TraceQuadrature_ELBO(2).loss(MODEL, guide, there, seen)
    with torch.no_grad():
        rough = torch.tensor([Trace_ELBO().loss(MODEL, guide, there, seen) for _ in range(20)])
    assert abs(rough.mean() - loss) < 5 * rough.std() / 20**0.5
    torch.testing.assert_close(guide.posterior(x)["f"].mean, before)
    q = guide.posterior(there)["f"]
    by_hand = dist.Normal(q.mean, NOISE).log_prob(seen).sum() - (q.variance / (2 * NOISE**2)).sum() - q.kl
    assert loss == pytest.approx(-by_hand.item(), rel=1e-6)
    whole = TraceQuadrature_ELBO(2).loss(MODEL, guide, x, y)
    assert TraceQuadrature_ELBO(2).loss(MODEL, guide, x.flip(0), y.flip(0)) == pytest.approx(whole, rel=1e-6)
    others = (there, seen), (there[:12], seen[:12]), (x.flip(0), y.flip(0))  # or the same in another order
    for call, elbo in zip((*others, others[0]), 3 * [TraceQuadrature_ELBO(2)] + [Trace_ELBO()]):
        with pytest.raises(ValueError, match=r"GP site 'f' has .* other rows at site 'y'.*no_grad.*keep their order"):
            elbo.loss_and_grads(MODEL, guide, *call)
    torch.testing.assert_close(guide.posterior(x)["f"].mean, before)


def test_other_data_after_the_first_are_forgotten():
    x, y = data(num=30)
    there, seen = data(num=25, seed=9)
    guide = prepared(MODEL, SGPR(x[:10], trainable=False), x, y)
    guide.forget_data()
    guide(there, seen)
    fresh = prepared(MODEL, SGPR(x[:10], trainable=False), there, seen)
    torch.testing.assert_close(guide.posterior(x)["f"].mean, fresh.posterior(x)["f"].mean)


def test_data_that_are_written_to_after_training_are_told_of():
    x, y = data(num=30)
    guide = prepared(MODEL, SGPR(x[:10], trainable=False), x, y)
    mean = guide.posterior(x)["f"].mean
    y.mul_(2.0)
    with pytest.warns(UserWarning, match=r"changed in place.*site 'f'.*y\.clone\(\)"):
        doubled = guide.posterior(x)["f"].mean
    torch.testing.assert_close(doubled, 2 * mean)


def with_local(x, y=None):
    f = pyro.sample("f", GaussianProcess(KERNEL, x))
    with pyro.plate("data", len(x)):
        e = pyro.sample("e", dist.Normal(0.0, 2.0))
        return pyro.sample("y", dist.Normal(f + e, NOISE), obs=y)


@pytest.mark.quick("SVGP")
@pytest.mark.filterwarnings("ignore:latent site .* has a value for each datum")
@pytest.mark.parametrize("family", [SVGP(6), SGPR(6)], ids=["SVGP", "SGPR"])
def test_latents_of_single_rows_are_new_at_new_rows(family):
    x, y = data(num=15)
    guide = trained(with_local, family, x, y, steps=8, lr=0.4)
    new = torch.rand(15, 2)
    there = Predictive(with_local, guide=guide, num_samples=30)(new)["e"].std(0).mean()
    here = torch.stack([guide(x)["e"] for _ in range(15)]).std(0).mean()
    called = torch.stack([guide(new)["e"] for _ in range(30)]).std(0).mean()
    assert abs(there - 2) < 0.3
    assert abs(called - 2) < 0.3
    assert here < 1
    loaded = restored(guide, with_local, family)
    assert abs(torch.stack([loaded(new)["e"] for _ in range(30)]).std(0).mean() - 2) < 0.3
    refused(r"'e' has a value for each row|other rows", lambda: train(with_local, guide, x.flip(0), y.flip(0), steps=1))


def test_batches_without_a_size_are_told_of():
    x, y = data(num=60)
    for family in (SGPR(6), ComputationAware(6), ComputationAware(6, "cg"), ExactWeightSpace()):
        model = gaussian(kernels.Linear(1.0), NOISE) if isinstance(family, ExactWeightSpace) else MODEL
        guide = trained(model, family, x[:20], y[:20], steps=1)
        refused(r"brings other rows.*size=N", train, model, guide, x[20:40], y[20:40], steps=1)
    guide = trained(MODEL, SVGP(6), x[:20], y[:20], steps=2)
    with pytest.warns(UserWarning, match="20 values in this step, .*others than the 20 before, and no plate.*size=N"):
        train(MODEL, guide, x[20:40], y[20:40], steps=1)
    train(MODEL, guide, x[40:], y[40:], steps=1)  # once
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sized = AutoSparseGP(MODEL, SVGP(6))
        for i in range(3):
            train(MODEL, sized, x[20 * i : 20 * i + 20], y[20 * i : 20 * i + 20], size=60, steps=1)
        whole = AutoSparseGP(MODEL, SVGP(6))
        for _ in range(3):  # copies, keywords, converted
            train(MODEL, whole, x.clone(), y=y.clone(), steps=1)


def with_another_mean(x, y=None, other=None):
    """Of f and a mean, which another measurement, that no plate holds, is about too."""
    mean = pyro.sample("mean", dist.Normal(0.0, 1.0))
    f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5), x))
    if other is not None:
        pyro.sample("other", dist.Normal(mean, 1.0).expand(other.shape).to_event(other.dim()), obs=other)
    if y is not None:
        with pyro.plate("data", 60, subsample=x):
            pyro.sample("y", dist.Normal(f + mean, NOISE), obs=y)


def test_measurements_that_are_not_of_f_are_data():
    x, y = data(num=60)
    guide = trained(with_another_mean, SVGP(6), x, y, other=y, steps=1)
    train(with_another_mean, guide, x, other=y, steps=1)  # alone
    with pytest.warns(UserWarning, match="'other' observes 20 values in this step, .* the 60 before, and no plate"):
        train(with_another_mean, guide, x[:20], y[:20], other=y[:20], steps=1)


def weighed(weight):
    def model(x, y=None, size=None):
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5), x))
        scale = weight(x) if callable(weight) else weight
        with poutine.scale(scale=scale), pyro.plate("data", size or len(x), subsample=x):
            return pyro.sample("y", dist.Normal(f, NOISE), obs=y)

    return model


@pytest.mark.parametrize("weight", [3.0, 0.5, torch.full((20,), 3.0)], ids=["3", "0.5", "by rows"])
def test_a_weight_of_the_data_is_no_size(weight):
    """But a scale of all rows over the call's is one."""
    x, y = data(num=60)
    model, scaled = weighed(weight), weighed(lambda x: 60 / len(x))
    guide = trained(model, SVGP(6), x[:20], y[:20], steps=1)
    with pytest.warns(UserWarning, match="others than the 20 before, and no plate.*poutine.scale does not do it"):
        train(model, guide, x[20:40], y[20:40], steps=1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        sized, guide = AutoSparseGP(model, SVGP(6)), AutoSparseGP(scaled, SVGP(6))
        for i in range(2):
            train(model, sized, x[20 * i : 20 * i + 20], y[20 * i : 20 * i + 20], size=60, steps=1)
        guide(x, y)
        train(scaled, guide, x[:7], y[:7], steps=1)


class Taking(pyro.nn.PyroModule):
    def forward(self, x, y=None, scale=1.0, mask=None, more=()):
        pass


@pytest.mark.parametrize("model", [Taking(), Taking().forward], ids=["module", "function"])
def test_what_is_the_same(model):
    x, y = torch.rand(7, 2), torch.rand(7)
    known = TrainingData(model, (x, y), {"more": [x + 1]})

    def relation(*args, **kwargs):
        return Relation(known, (model, args, kwargs), trains=True)

    same = relation(x.clone(), y=y, scale=2.0, mask=torch.ones(7, dtype=torch.bool), more=[x + 1])
    assert (same.same, same.inputs, same.fewer) == (True, True, False)
    turned = relation(x.flip(0), y.flip(0), more=[x.flip(0) + 1])
    assert (turned.same, turned.others) == (False, False)
    assert relation(x.flip(0), y.roll(1), more=[x.flip(0) + 1]).others
    fewer = relation(x, more=[x + 1])
    assert (fewer.same, fewer.inputs, fewer.fewer) == (False, True, True)
    assert not relation(x[:5], y[:5], more=[x[:5] + 1]).inputs
    assert not relation(x, y, more=[x + 1, x]).same
    x.add_(1.0)
    assert not relation(x, y, more=[known.kwargs["more"][0]]).same


@dataclass(frozen=True)
class Record:
    x: Any
    y: Any = None


class Named(NamedTuple):
    x: Any
    y: Any = None


def arrays(x, y=None):
    return Record(x.numpy().copy(), y if y is None else y.numpy().copy())


def labels(x, y=None):
    return Record(x, y if y is None else y > 0)


def of_record(record):
    x, y = (part if part is None else torch.as_tensor(part).double() for part in (record.x, record.y))
    return MODEL(x, y)


@pytest.mark.parametrize("given", [Record, SimpleNamespace, Named, arrays, labels], ids=lambda given: given.__name__)
def test_what_is_no_tensor(given):
    """Whatever holds data, others than those of training are known for that, and leave the posterior alone."""
    (x, y), new = data(num=15), given(x=data(num=15, seed=9)[0], y=None)
    seen = (y > 0).double() if given is labels else y
    training, others = given(x=x, y=y), given(x=x, y=-y)
    guide = trained(of_record, SGPR(x, trainable=False), training, steps=2)
    q, before = guide.posterior(given(x=x, y=None))["f"], guide.posterior(new)["f"].mean
    torch.testing.assert_close(before, exact_mean(x, seen, torch.as_tensor(new.x)), atol=1e-3, rtol=1e-3)
    loss = TraceQuadrature_ELBO(2).loss(of_record, guide, others)
    seen = torch.as_tensor(others.y).double()
    by_hand = dist.Normal(q.mean, NOISE).log_prob(seen).sum() - (q.variance / (2 * NOISE**2)).sum() - q.kl
    assert loss == pytest.approx(-by_hand.item(), rel=1e-6)
    if given is arrays:
        training.x[:] = 0.0
    torch.testing.assert_close(guide.posterior(new)["f"].mean, before)
    if given is not labels:  # which may be masks, that change from step to step
        refused(r"other rows at site 'y', in arguments \['record'\]", train, of_record, guide, others, steps=1)


def test_a_model_that_holds_its_data():
    x, y = data(num=15)
    held = [x, y]
    guide = trained(lambda: MODEL(*held), SGPR(x), steps=2)
    held[:] = torch.rand(5, 2), None
    refused("now observes nothing: it holds its data itself", guide.posterior)


@pytest.mark.parametrize("family", [lambda x: SGPR(x, trainable=False), lambda x: Exact()], ids=["SGPR", "Exact"])
def test_data_that_a_model_holds_and_that_were_replaced(family):
    """Their posterior is no other's: an evaluation is refused, and training goes on with the new ones."""
    x, y = data(num=15)
    new, held = data(num=6, seed=9)[0], [x, y]

    def model(new=None):
        return MODEL(*held) if new is None else MODEL(new)

    guide, elbo = AutoSparseGP(model, family(x)), TraceQuadrature_ELBO(2)
    train(model, guide, steps=2)
    loss, before = elbo.loss(model, guide), guide.posterior(new)["f"].mean
    held[:] = x, -y
    refused("now observes other values of site 'y': it holds its data itself", guide.posterior, new)
    refused("now observes other values of site 'y'", elbo.loss, model, guide)
    held[:] = x.flip(0), y
    refused("now observes other inputs of site 'f'", predict, model, guide, new, num_samples=2)
    held[:] = x.clone(), y.clone()
    assert elbo.loss(model, guide) == pytest.approx(loss, abs=1e-9)
    torch.testing.assert_close(guide.posterior(new)["f"].mean, before)
    loaded = restored(guide, model, family(x))
    held[:] = x, -y
    refused("now observes other values of site 'y'", loaded.posterior, new)
    train(model, guide, steps=1)
    torch.testing.assert_close(guide.posterior(new)["f"].mean, exact_mean(x, -y, new), atol=1e-3, rtol=1e-3)


def test_a_bound_at_other_rows_than_those_of_effects_is_refused():
    """By name: their posterior is one of single rows."""
    x, y = data(num=20)

    def model(x, y=None):
        f = pyro.sample("f", GaussianProcess(KERNEL, x))
        with pyro.plate("data", len(x)):
            e = pyro.sample("e", dist.Normal(0.0, 0.3))
            return pyro.sample("y", dist.Poisson((f + e).exp()), obs=y)

    guide = trained(model, SVGP(8), x, y.round().abs(), steps=2)
    refused("'e' has a value for each row", TraceQuadrature_ELBO().loss, model, guide, x[:8], y[:8].round().abs())
