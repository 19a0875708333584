"""Discrete latents of groups of rows, summed out: against the same models with the sums written out."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import Trace_ELBO

from pyro_sparsegp import (
    AutoSparseGP,
    ExpectationPropagation,
    GaussianProcess,
    TraceQuadrature_ELBO,
    class_probabilities,
    kernels,
    predict,
)
from pyro_sparsegp.families import SGPR, SVGP, CoupledPrecision, SparseEP
from pyro_sparsegp.program.handlers import held_trace
from pyro_sparsegp.program.traces import log_densities

from .models import observed, prepared, refused, restored, train
from .test_enumeration import PARALLEL, assert_same, bound

KERNEL = kernels.RBF(0.5)
G, ROWS = 4, 5
SHARES = torch.tensor([0.5, 0.3, 0.2], dtype=torch.float64)
SLOPES = torch.tensor([1.0, -1.0, 0.3], dtype=torch.float64)
GROUP = torch.tensor([0, 3, 1, 1, 0, 2, 3, 3, 0, 1, 1, 3, 0, 0, 3, 1, 0, 3, 3, 1])  # group 2 has one row


def data():
    generator = torch.Generator().manual_seed(0)
    x = torch.rand(G * ROWS, 1, generator=generator)
    return x, torch.sin(5 * x[:, 0]) + 0.3 * torch.randn(G * ROWS, generator=generator)


def _z(name="groups", num=G):
    with pyro.plate(name, num):
        return pyro.sample("z" if name == "groups" else name, dist.Categorical(SHARES), infer=PARALLEL)


def _y(x, y, mean):
    observed(dist.Normal(mean, 0.3), y)


def nested(x, y=None, groups=G):
    """A class for each of as many groups of rows, in plates within each other."""
    share = pyro.sample("share", dist.Dirichlet(2 * SHARES))
    f = pyro.sample("f", GaussianProcess(KERNEL, x))
    with pyro.plate("groups", groups, subsample_size=len(x) // ROWS, dim=-2):
        z = pyro.sample("z", dist.Categorical(share), infer=PARALLEL)
        with pyro.plate("rows", ROWS, dim=-1):
            mean = SLOPES[z] * f.reshape(-1, ROWS)
            return pyro.sample("y", dist.Normal(mean, 0.3), obs=None if y is None else y.reshape(-1, ROWS))


def indexed(x, group, y=None):
    """The same for groups of any size, a number for each row."""
    share = pyro.sample("share", dist.Dirichlet(2 * SHARES))
    f = pyro.sample("f", GaussianProcess(KERNEL, x))
    with pyro.plate("groups", G):
        z = pyro.sample("z", dist.Categorical(share), infer=PARALLEL)
    return observed(dist.Normal(SLOPES[z[group]] * f, 0.3), y)


def by_hand(x, group, y=None):
    share = pyro.sample("share", dist.Dirichlet(2 * SHARES))
    f = pyro.sample("f", GaussianProcess(KERNEL, x))
    observed(dist.Normal(x.new_zeros(len(x)), 1.0), y)
    rows = dist.Normal(SLOPES[:, None] * f, 0.3).log_prob(y)
    sums = torch.zeros(3, G).index_add(1, group, rows) + share.log()[:, None]
    pyro.factor("sum", sums.logsumexp(0).sum() - dist.Normal(0.0, 1.0).log_prob(y).sum())


def everything(x, group, y=None, c=None):
    """A class of all, a class of each group and an indicator of each row; two data of a row and one of a group."""
    f = pyro.sample("f", GaussianProcess(KERNEL, x))
    whole = pyro.sample("whole", dist.Bernoulli(0.3), infer=PARALLEL)
    with pyro.plate("groups", G):
        a = pyro.sample("a", dist.Bernoulli(0.2 + 0.5 * whole), infer=PARALLEL)
        pyro.sample("size", dist.Normal(a + whole, 1.0), obs=torch.arange(float(G)))
    with pyro.plate("data", len(x)):
        b = pyro.sample("b", dist.Bernoulli(0.2), infer=PARALLEL)
        pyro.sample("y", dist.Normal((1 + a[group]) * f, 0.3 + b), obs=y)
        return pyro.sample("c", dist.Bernoulli(logits=f - b), obs=c)


def everything_by_hand(x, group, y=None, c=None):
    f = pyro.sample("f", GaussianProcess(KERNEL, x))
    observed(dist.Normal(x.new_zeros(len(x)), 1.0), y)
    log = torch.tensor([[0.8, 0.2], [0.3, 0.7]]).log()
    total = []
    for whole in range(2):
        classes = []
        for a in range(2):
            rows = []
            for b in range(2):
                row = dist.Normal((1 + a) * f, 0.3 + b).log_prob(y) + dist.Bernoulli(logits=f - b).log_prob(c)
                rows.append(row + torch.tensor(0.2 if b else 0.8).log())
            sums = torch.zeros(G).index_add(0, group, torch.stack(rows).logsumexp(0))
            classes.append(sums + log[whole, a] + dist.Normal(a + whole, 1.0).log_prob(torch.arange(float(G))))
        total.append(torch.stack(classes).logsumexp(0).sum() + torch.tensor(0.3 if whole else 0.7).log())
    pyro.factor("sum", torch.stack(total).logsumexp(0) - dist.Normal(0.0, 1.0).log_prob(y).sum())


NESTED = torch.arange(G).repeat_interleave(ROWS)


@pytest.mark.quick("drawn | three levels | plates within each other")
@pytest.mark.parametrize(
    ("model", "written_out", "family", "group", "objective"),
    [
        (indexed, by_hand, SVGP(8), GROUP, None),
        (indexed, by_hand, SVGP(8), GROUP, Trace_ELBO()),
        pytest.param(indexed, by_hand, SVGP(8, natural=False), GROUP, None, marks=pytest.mark.slow),
        pytest.param(indexed, by_hand, CoupledPrecision(8), GROUP, None, marks=pytest.mark.slow),
        (nested, by_hand, SVGP(8), NESTED, None),
        (everything, everything_by_hand, SVGP(8), GROUP, None),
    ],
    ids=["numbers", "drawn", "no natural steps", "coupled", "plates within each other", "three levels"],
)
def test_groups(model, written_out, family, group, objective):
    x, y = data()
    more = ((y > 0).to(y),) if model is everything else ()
    args = (x, y) if model is nested else (x, group, y, *more)
    assert_same(
        bound(model, family, *args, objective=objective),
        bound(written_out, family, x, group, y, *more, objective=objective),
    )


def test_rows_that_share_a_class():
    """They have equal parts of what is one number, and masked ones have none; of a function of the class alone, too."""
    x, y = data()
    seen = torch.rand(len(y), generator=torch.Generator().manual_seed(1)) < 0.7
    seen[GROUP == 2] = False  # a group without rows

    def model(x, y):
        f = pyro.sample("f", GaussianProcess(KERNEL, x))
        second = torch.where(_z() == 1, 0.1, 2.0)
        with poutine.mask(mask=seen):
            _y(x, y, second[..., GROUP] * f)

    f = torch.sin(3 * x[:, 0])
    rows = log_densities(held_trace(model, {"f": f}, (x, torch.where(seen, y, torch.nan)), {}), ["f"])["y"]
    assert (rows[~seen] == 0).all()
    sums = of_groups(torch.tensor([2.0, 0.1, 2.0])[:, None] * f, y, seen)
    counts = torch.zeros(G).index_add(0, GROUP, seen.double())
    torch.testing.assert_close(rows[seen], (sums.logsumexp(0) / counts)[GROUP[seen]])


def of_groups(means, y, seen=1.0, shares=SHARES):
    """log p(z, y) of each value and group, (3, G)."""
    rows = dist.Normal(means, 0.3).log_prob(y) * seen
    return torch.zeros(3, G).index_add(1, GROUP, rows) + shares.log()[:, None]


LEVELS = torch.tensor([0.0, 60.0, -60.0], dtype=torch.float64)


@pytest.mark.parametrize("fault", ["saturated", "masked"])
def test_what_the_first_call_hides(fault):
    """Rows that share a class meet, though the classes' weights be 0 and 1, or a mask leave one row of each group."""
    x, y = data()
    some = torch.zeros(len(y), dtype=torch.bool)
    some[torch.stack([(g == GROUP).nonzero()[0, 0] for g in range(G)])] = True
    means = LEVELS if fault == "saturated" else 0 * LEVELS

    def model(x, y, seen):
        f = pyro.sample("f", GaussianProcess(KERNEL, x))
        z = _z()
        with poutine.mask(mask=seen):
            _y(x, y, means[z[GROUP]] + SLOPES[z[GROUP]] * f)

    guide = prepared(model, SVGP(8), x, y, some if fault == "masked" else ~some | some)
    assert guide.structure.coupled == ("f",)
    with torch.no_grad():
        pyro.set_rng_seed(1)
        loss = TraceQuadrature_ELBO(8).loss(model, guide, x, y, torch.ones_like(some))
        pyro.set_rng_seed(1)
        f = guide(x, y, torch.ones_like(some))["f"]
    sums = of_groups(means[:, None] + SLOPES[:, None] * f, y)
    assert abs(loss - (guide.posterior(x, y, some)["f"].kl - sums.logsumexp(0).sum())) < 1e-8


def test_mini_batches_of_groups():
    x, y = data()
    program = pyro.condition(nested, {"share": SHARES})
    guide = prepared(program, SVGP(8), x, y)
    kl, x, y = guide.posterior(x)["f"].kl, x[: 2 * ROWS], y[: 2 * ROWS]
    with torch.no_grad():
        pyro.set_rng_seed(1)
        loss = TraceQuadrature_ELBO(2).loss(program, guide, x, y)
        pyro.set_rng_seed(1)
        f = guide(x, y)["f"]
    rows = dist.Normal(SLOPES[:, None] * f, 0.3).log_prob(y).reshape(3, 2, ROWS).sum(-1)
    given = dist.Dirichlet(2 * SHARES).log_prob(SHARES) + 2 * (rows + SHARES.log()[:, None]).logsumexp(0).sum()
    assert abs(loss - (kl - given)) < 1e-8


def test_what_is_known_of_classes():
    """Given a draw of all else exactly."""
    x, y = data()
    y = SLOPES[torch.tensor([1, 0, 2, 1])][GROUP] * torch.sin(5 * x[:, 0])
    share = {"share": SHARES}
    f = torch.sin(5 * x[:, 0])
    found = class_probabilities(indexed, {"f": f} | share, x, GROUP, y)
    torch.testing.assert_close(found["z"], of_groups(SLOPES[:, None] * f, y).softmax(0).mT)
    assert found["z"].argmax(-1).tolist()[:2] == [1, 0]
    refused("site 'f' has no value", class_probabilities, indexed, share, x, GROUP, y)

    args = x, GROUP, y, (y > 0).to(y)
    found = class_probabilities(everything, {"f": f}, *args)
    assert {name: p.shape for name, p in found.items()} == {"whole": (2,), "a": (G, 2), "b": (G * ROWS, 2)}
    for p in found.values():
        torch.testing.assert_close(p.sum(-1), torch.ones(p.shape[:-1]))
    given = [
        class_probabilities(pyro.condition(everything, {"whole": torch.tensor(value)}), {"f": f}, *args)
        for value in (0.0, 1.0)
    ]
    for name in ("a", "b"):  # averaged over the level above
        mixed = found["whole"][0] * given[0][name] + found["whole"][1] * given[1][name]
        torch.testing.assert_close(found[name], mixed)

    guide = AutoSparseGP(indexed, SVGP(8))
    train(indexed, guide, x, GROUP, y, steps=3, lr=0.05, loss=TraceQuadrature_ELBO(2))
    draws = predict(indexed, guide, x[:6], GROUP[:6], num_samples=100)
    assert draws["z"].shape == (100, G)
    assert draws["y"].shape == (100, 6)
    away = draws["y"] - SLOPES[draws["z"]][:, GROUP[:6]] * draws["f"]
    assert abs(away.std() - 0.3) < 0.04
    guide.eval()
    assert class_probabilities(indexed, guide(x, GROUP, y), x, GROUP, y)["z"].shape == (G, 3)


def levels(x, group, y=None):
    f = pyro.sample("f", GaussianProcess(KERNEL, x))
    whole = pyro.sample("whole", dist.Bernoulli(0.3), infer=PARALLEL)
    with pyro.plate("groups", G):
        z = pyro.sample("z", dist.Bernoulli(0.2 + 0.5 * whole), infer=PARALLEL)
    observed(dist.Normal((1 + z[group]) * f, 1.0), y)


def test_predictions_have_the_classes_of_known_groups():
    """Given the rows of training, of MCMC's samples and of a guide, which is refused where it does not have these."""
    x, y = data()
    rows, f, num = (x[:3], GROUP[:3]), torch.sin(5 * x[:, 0]), 400
    draws = predict(levels, {"f": f.expand(num, -1)}, *rows, data=(x, GROUP, y))
    exact = class_probabilities(levels, {"f": f}, x, GROUP, y)
    for whole in (0.0, 1.0):  # which goes with its groups' classes
        held = pyro.condition(levels, {"whole": torch.tensor(whole)})
        both = class_probabilities(held, {"f": f}, x, GROUP, y)["z"][:, 1] * exact["whole"][int(whole)]
        found = (draws["z"] * (draws["whole"] == whole)[:, None]).mean(0)
        assert ((found - both).abs() < 4 * (0.25 / num) ** 0.5).all()
    assert (exact["z"][:, 1] - 0.35).abs().max() > 8 * (0.25 / num) ** 0.5

    guide = AutoSparseGP(levels, SVGP(8))
    train(levels, guide, x, GROUP, y, steps=3, lr=0.05, loss=TraceQuadrature_ELBO(2))
    guide.eval()
    exact = [class_probabilities(levels, guide(x, GROUP, y), x, GROUP, y)["z"] for _ in range(100)]
    here = (*rows, torch.tensor([9.0, -9.0, 9.0])), (x, GROUP, y)  # new data, and those of training
    more = ((guide, given, 100) for given in here)
    for one, given, num in ((guide, rows, 400), (restored(guide, levels, SVGP(8)), rows, 400), *more):
        found = predict(levels, one, *given, num_samples=num)["z"].mean(0)
        assert ((found - sum(exact)[:, 1] / 100).abs() < 5 * (0.25 / num) ** 0.5).all()
    guide.forget_data()
    refused("holds no training data, .* the posterior of site 'whole' needs these", guide.draw, *rows)


def test_pointwise_densities_add_up_by_group():
    source = pytest.importorskip("pyro_sparsegp.diagnostics.sources").GuideSource
    x, y = data()
    _, _, guide = bound(indexed, SVGP(8), x, GROUP, y)
    source = source(guide, (x, GROUP, y), {})
    (draw,) = source.draws()
    rows = source.reader(draw.held, draw.moments).integrated["y"][0]
    sums = of_groups(SLOPES[:, None] * draw.functions["f"][0], y, shares=draw.posterior["share"][0])
    torch.testing.assert_close(torch.zeros(G).index_add(0, GROUP, rows), sums.logsumexp(0))


def other_rows(x, y, f):
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Categorical(SHARES), infer=PARALLEL)
        pyro.sample("y", dist.Normal(f + z[torch.arange(len(x)).roll(1)], 0.3), obs=y)


def batch(x, y, f):
    z = _z()
    with pyro.plate("data", 5 * len(x), subsample=x):
        pyro.sample("y", dist.Normal(f * z[GROUP], 0.3), obs=y)


LATE = r"'y' in plates \['data'\] depends on the enumerated discrete site 'z' .*before anything else, z\[group\]"


@pytest.mark.parametrize(
    ("match", "body"),
    [
        (
            r"'y' .* 'z' in plates \['groups'\]: each row has to depend on one",
            lambda x, y, f: _y(x, y, f * (z := _z())[GROUP] + z[GROUP.flip(0)]),
        ),
        (
            r"site 'y' .* the discrete sites \['z', 'others'\] meet in a density, and their plates are not nested",
            lambda x, y, f: _y(x, y, f * _z()[GROUP] + _z("others", 3)[GROUP % 3]),
        ),
        (LATE, lambda x, y, f: _y(x, y, f * SLOPES[_z(num=len(x))])),
        (LATE, lambda x, y, f: _y(x, y, f * SLOPES[_z()][..., GROUP])),
        (r"'z' is enumerated, and indexed by 1: give each row", lambda x, y, f: _y(x, y, f * _z()[1])),
        ("'y' .* 'z' in plates .* each row has to depend on one", other_rows),
        (r"'y' is not scaled as the discrete site 'z'.* takes some elements of its plate, with all of their", batch),
    ],
)
def test_which_groups_cannot_be_summed_out(match, body):
    x, y = data()

    def program(x, y):
        body(x, y, pyro.sample("f", GaussianProcess(KERNEL, x)))

    refused(match, lambda: AutoSparseGP(program, SVGP(4))(x, y))


def test_families_that_refuse_groups():
    x, y = data()
    fixed = pyro.condition(indexed, {"share": SHARES})
    refused(r"'f' has the family SGPR, .* does not factorise", lambda: AutoSparseGP(fixed, SGPR(4))(x, GROUP, y))
    ep = ExpectationPropagation(fixed, AutoSparseGP(fixed, SparseEP(4)), pyro.optim.Adam({"lr": 0.01}))
    refused(r"'f' .* one term of a density depends on several of its values. Take SVI", ep.step, x, GROUP, y)
