"""Fields whose largest plate is eliminated, against dense ones."""

import copy

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, families, kernels, predict
from pyro_sparsegp.gaussians import AtRows, NaturalGaussian
from pyro_sparsegp.gaussians.arrow import ArrowFactor
from pyro_sparsegp.gaussians.natural_arrow import NaturalArrow
from pyro_sparsegp.gaussians.steps import recording
from pyro_sparsegp.guide import search, start
from pyro_sparsegp.guide.check import Glance, check
from pyro_sparsegp.numerics.arrow import Arrow, OneEach
from pyro_sparsegp.numerics.linalg import NumericalWarning

from .models import observed, restored

N, COMMON, OWN, GROUPS = 40, 4, 7, 12


def _spread(phi):
    return torch.cat([phi.common, phi.entry[:, None] * torch.nn.functional.one_hot(phi.owner, phi.num)], 1)


def _rows():
    owner = torch.randint(0, OWN, (N,))
    phi = OneEach(torch.randn(N, COMMON + 1), owner, OWN)
    return phi, phi.like(torch.randn(N, COMMON + 1))


def test_arrows_are_their_dense_matrices():
    (phi, psi), h, eye = _rows(), torch.rand(N), torch.eye(COMMON + OWN)
    first, second = _spread(phi), _spread(psi)
    arrow = phi.gram(phi.compact * h[:, None]).plus(1.0)
    precision = eye + first.mT @ (first * h[:, None])
    dense, inverse = Arrow.of(precision), torch.linalg.inv(precision)
    x, v, rows = torch.randn(COMMON + OWN), torch.randn(N), torch.randn(3, COMMON + OWN)
    turn, own_turn = torch.randn(COMMON, COMMON), torch.rand(OWN)
    whole = torch.block_diag(turn, own_turn.diag())
    along = first @ inverse
    common, cross, own = (other := arrow.plus(-2.5)).parts  # which is indefinite: sizes in LDLᵀ
    sized = own.abs().clamp(min=0.5)
    values, axes = torch.linalg.eigh(common - cross / sized @ cross.mT)
    lower = torch.cat([torch.cat([eye[:COMMON, :COMMON], cross / sized], 1), eye[COMMON:]])
    middle = torch.block_diag((axes * values.abs().clamp(min=0.5)) @ axes.mT, sized.diag())
    pairs = {
        "sizes": (other.lifted(0.5) @ eye, lower @ middle @ lower.mT),
        "P⁻¹ of sizes": (other.lifted(0.5).solve(lower @ middle @ lower.mT), eye),
        "RRᵀ, K = 0": (dense.upper @ dense.upper.mT, inverse),
        "ΦP⁻¹, K = 0": (dense.covariances(first), along),
        "P": (arrow @ eye, precision),
        "Φx": (phi @ x, first @ x),
        "a column": (phi @ x[:, None], first @ x[:, None]),
        "vᵀΦ": (v @ phi, v @ first),
        "sums": (phi.square().sum(0), first.square().sum(0)),
        "Px": (arrow @ x, precision @ x),
        "P⁻¹x": (arrow.solve(x), inverse @ x),
        "P⁻¹X": (arrow.solve(rows.mT), inverse @ rows.mT),
        "log|P|": (arrow.half_log_det, 0.5 * torch.logdet(precision)),
        "variances": (arrow.variances, inverse.diagonal()),
        "crossed": ((arrow.white(phi) * arrow.white(psi)).sum(0), (first @ inverse @ second.mT).diagonal()),
        "of rows": (arrow.white(rows).square().sum(0), (rows @ inverse @ rows.mT).diagonal()),
        "ΦP⁻¹": (arrow.covariances(phi), torch.cat([along[:, :COMMON], along[range(N), COMMON + phi.owner, None]], 1)),
        "TᵀPT": (arrow.turned(turn, own_turn) @ eye, whole.mT @ precision @ whole),
        "a pair": (
            sum(a.gram(b.compact * h[:, None]) @ eye for a, b in ((phi, psi), (psi, phi))),
            first.mT @ (h[:, None] * second) + second.mT @ (h[:, None] * first),
        ),
    }
    for one, other in (*pairs.values(), (dense.solve(x), inverse @ x), (dense.half_log_det, arrow.half_log_det)):
        torch.testing.assert_close(one, other, rtol=0.0, atol=1e-12)
    noise = arrow.noise((40_000,))
    torch.testing.assert_close(noise.mT @ noise / len(noise), inverse, rtol=0.0, atol=0.03 * float(inverse.max()))
    assert arrow.is_positive
    assert not arrow.plus(-3.0).is_positive
    assert not arrow.plus(-1.5).is_positive or torch.linalg.eigvalsh(precision)[0] > 1.5


def test_natural_steps_are_those_of_a_dense_one():
    """Where a mean and its log scale have both the field, and a hyperparameter moves what sites are about."""
    (phi, psi), sizes, y = _rows(), [1, COMMON - 1, OWN], torch.randn(N)
    scale, at = torch.nn.Parameter(torch.tensor(0.3)), torch.randn(12, COMMON - 1)
    made, dense = NaturalArrow(sizes, torch.zeros(1)), NaturalGaussian(sizes, (), torch.zeros(1))
    for step in range(5):
        found = []
        for q in (made, dense):
            s = scale * (1 + 0.2 * step)
            mean = torch.cat([phi.common[:, :1], phi.common[:, 1:] * s, phi.entry[:, None] * s.exp()], 1)
            rows = phi.like(mean), psi.like(0.2 * psi.compact)
            blocks = rows if q is made else [list(_spread(part).split(sizes, -1)) for part in rows]
            with recording(scale) as record:
                w = q(AtRows([torch.ones(1), at * s, s.exp() * torch.ones(OWN)]))
                pair = torch.stack([*map(_spread, rows)], 1).split(sizes, -1)
                means, changes = w.joint_moments(rows if q is made else pair)
                (m, log_scale), variance = means.mT, mean.square().sum(-1) + changes[:, 0, 0]
                its = rows[1].square().sum(-1) + changes[:, 1, 1]
                across = (rows[0] * rows[1]).sum(-1) + changes[:, 0, 1]
                square = (y - m + 2 * across).square() + variance
                loss = (log_scale + 0.5 * square * (2 * its - 2 * log_scale).exp()).sum() + w.kl()
                record.retain()
                scale.grad = None
                loss.backward()
                record.step(1.0)
            gram = q.gram @ torch.eye(COMMON + OWN) if q is made else q.gram
            found.append((loss.detach(), q.loc.detach().clone(), gram, scale.grad.clone()))
        for one, other in zip(*(each[:3] for each in found)):
            torch.testing.assert_close(one, other, rtol=1e-10, atol=1e-10)
        torch.testing.assert_close(found[0][3], found[1][3], rtol=1e-6, atol=1e-6)
    with torch.no_grad():
        anchor = AtRows([torch.ones(1), at * s, s.exp() * torch.ones(OWN)])
        one, other, blocks = made(anchor), dense(anchor), blocks[0]
        w = list(torch.randn(sum(sizes)).split(sizes))
        draws = torch.cat(one.rsample(torch.Size([40_000])), -1)
        pairs = [
            (one.kl(), other.kl()),
            (one.log_ratio(w), other.log_ratio(w)),
            (one.covariance_matrix, other.covariance_matrix),
            (one.covariance_change(blocks), other.covariance_change(blocks)),
            *zip(one.moments(blocks), other.moments(blocks)),
            *((one.marginal(b).covariance_matrix, other.marginal(b).covariance_matrix) for b in ([0, 1], [1, 2])),
        ]
        for a, b in pairs:
            torch.testing.assert_close(a, b, rtol=1e-9, atol=1e-9)
        torch.testing.assert_close(torch.cov(draws.mT), other.covariance_matrix, rtol=0.0, atol=0.03)


def _counts(x, group, y=None):
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    s = pyro.sample("s", dist.LogNormal(-1.0, 0.7))
    mu = pyro.sample("mu", dist.Normal(1.0, 2.0))
    with pyro.plate("groups", GROUPS):
        a = pyro.sample("a", dist.Normal(0.3 * mu, tau))
    f = pyro.sample("f", GaussianProcess(s * kernels.RBF(0.4), x, jitter=1e-8))
    observed(dist.Poisson((mu + a[group] + f).exp()), y)


def _scales(x, group, y=None):
    """A mean and a log scale with the same groups, in other plates beside."""
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with pyro.plate("groups", GROUPS):
        a = pyro.sample("a", dist.Normal(0.0, tau))
    with pyro.plate("others", 5):
        b = pyro.sample("b", dist.Normal(0.0, 0.5))
    f = pyro.sample("f", GaussianProcess(kernels.RBF(0.4), x, jitter=1e-8))
    observed(dist.Normal(f + a[group] + b[group % 5], (0.3 * a[group] - 1).exp()), y)


def _games(x, group, y=None):
    """Each datum has two values of the groups."""
    tau = pyro.sample("tau", dist.HalfNormal(1.0))
    with pyro.plate("groups", GROUPS):
        a = pyro.sample("a", dist.Normal(0.0, tau))
    f = pyro.sample("f", GaussianProcess(kernels.RBF(0.4), x, jitter=1e-8))
    observed(dist.Normal(f + a[group] - a[(group + 3) % GROUPS], 0.4), y)


def _data(counts):
    x = torch.linspace(0, 1, 48)[:, None]
    group = torch.arange(48) % GROUPS
    eta = torch.sin(5 * x[:, 0]) + torch.linspace(-1, 1, GROUPS)[group]
    return x, group, torch.poisson((eta + 1).exp()) if counts else eta + 0.4 * torch.randn(48)


def _trained(model, data, steps=4, **options):
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    guide = AutoSparseGP(model, families.SVGP(10), **options)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.02}), TraceQuadrature_ELBO())
    return guide, [svi.step(*data) for _ in range(steps)]


def _choices(x, group, y=None):
    """Of three logits the last one alone has groups."""
    f = pyro.sample("f", GaussianProcess(kernels.RBF(0.4), x, jitter=1e-8))
    with pyro.plate("groups", GROUPS):
        a = pyro.sample("a", dist.Normal(0.0, 1.0))
    logits = torch.stack([0 * f, f, a[group]], -1)
    observed(dist.Categorical(logits=logits), None if y is None else y.clamp(0, 2).round())


@pytest.mark.parametrize("model", [_counts, _choices, pytest.param(_scales, marks=pytest.mark.slow)])
def test_a_program_s_posterior_is_that_of_a_dense_field(model, monkeypatch, few_draws):
    data = _data(model is _counts)
    whole, losses = _trained(model, data)
    assert not whole.joint.eliminated
    monkeypatch.setattr(search, "_ELIMINATED", 10)
    guide, found = _trained(model, data)
    assert guide.joint.eliminated == "a"
    assert isinstance(guide.field.coefficients, NaturalArrow)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-5, atol=1e-5)
    one, other = guide.posterior(*data[:2])["f"], whole.posterior(*data[:2])["f"]
    torch.testing.assert_close(one.mean, other.mean, rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(one.variance, other.variance, rtol=1e-4, atol=1e-6)
    torch.testing.assert_close(guide.median(*data)["a"], whole.median(*data)["a"], rtol=1e-3, atol=1e-3)
    again = restored(guide, model, families.SVGP(10))
    torch.testing.assert_close(again.posterior(*data[:2])["f"].variance, one.variance)
    assert copy.deepcopy(guide).joint.eliminated == "a"
    if model is _counts:
        one, other = (check(each, data, {}, kind=Glance) for each in (guide, whole))
        assert one == other
    points, others = guide.integrate(num_points=40), whole.integrate(num_points=40)
    torch.testing.assert_close(points.weight, others.weight, rtol=1e-3, atol=1e-5)
    assert predict(model, guide, *data[:2], num_samples=3)["a"].shape == (3, GROUPS)


@pytest.mark.parametrize("points", [[], ["a"]])
def test_groups_of_which_a_datum_has_two_values_or_that_are_points_stay_dense(points, monkeypatch):
    model, data = _choices if points else _games, _data(False)
    monkeypatch.setattr(search, "_ELIMINATED", 10)
    guide, losses = _trained(model, data, 2, point_estimates=points)
    assert not guide.joint.eliminated
    assert set(guide.joint.field) == (set() if points else {"a", "f"})
    monkeypatch.setattr(search, "_ELIMINATED", 10_000)
    torch.testing.assert_close(torch.tensor(losses), torch.tensor(_trained(model, data, 2, point_estimates=points)[1]))


def test_a_start_on_some_rows_takes_whole_groups(monkeypatch):
    """Few rows of each say little of their variance."""
    taken, made = [], start._Mode.__init__
    monkeypatch.setattr(
        start._Mode, "__init__", lambda self, search, *args: taken.append(search) or made(self, search, *args)
    )
    for name, value in {"_ELIMINATED": 10, "_MOST_ROWS": 12, "ALL_ROWS": 24}.items():
        monkeypatch.setattr(search, name, value)
    x, group, y = _data(True)
    guide, losses = _trained(_counts, (x, group, y), 2)
    chosen = taken[0].chosen
    assert len(chosen) == 24
    assert len(group[chosen].unique()) == 6
    assert guide.joint.eliminated == "a"
    assert torch.tensor(losses).isfinite().all()


def _effects(apart):
    def model(x, group, y=None):
        tau = pyro.sample("tau", dist.HalfNormal(1.0))
        mu = pyro.sample("mu", dist.Normal(1.0, 2.0))
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.4), x, jitter=1e-8))
        if apart:
            with pyro.plate("each", len(x)):
                e = pyro.sample("e", dist.Normal(0.0, tau))
        with pyro.plate("data", len(x)):
            e = e if apart else pyro.sample("e", dist.Normal(0.0, tau))
            pyro.sample("y", dist.Poisson((mu + f + e).exp()), obs=y)

    return model


@pytest.mark.parametrize("least", [pytest.param(10, marks=pytest.mark.slow), 1000])
def test_effects_of_single_rows_join_the_field_as_those_of_a_plate_of_their_own(least, monkeypatch):
    monkeypatch.setattr(search, "_ELIMINATED", least)
    data = _data(True)
    whole, losses = _trained(_effects(True), data)
    guide, found = _trained(_effects(False), data)
    assert set(guide.joint.field) == {"e", "mu", "f"}
    assert guide.joint.row_effects == ("e",)
    assert bool(guide.joint.eliminated) == (least == 10)
    torch.testing.assert_close(torch.tensor(found), torch.tensor(losses), rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(guide.median(*data)["e"], whole.median(*data)["e"], rtol=1e-5, atol=1e-6)
    x = torch.linspace(-0.2, 1.2, 5)[:, None]  # new rows, whose effects are drawn from the model
    draws = predict(guide.model, guide, x, None, num_samples=400)
    assert draws["e"].shape == (400, 5)
    assert draws["e"].mean().abs() < 0.1
    again = restored(guide, guide.model, families.SVGP(10))
    torch.testing.assert_close(again.posterior(x, None)["f"].variance, guide.posterior(x, None)["f"].variance)
    guide.integrate(num_points=40)
    assert predict(guide.model, guide, x, None, num_samples=3)["f"].shape == (3, 5)


@pytest.mark.quick("dtype1")
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_steps_on_batches_are_those_of_a_dense_field(dtype, monkeypatch):
    def model(x, group, y=None, size=None):
        tau = pyro.sample("tau", dist.HalfNormal(x.new_tensor(1.0)))
        mu = pyro.sample("mu", dist.Normal(x.new_tensor(1.0), 2.0))
        with pyro.plate("groups", GROUPS):
            a = pyro.sample("a", dist.Normal(x.new_tensor(0.0), tau))
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.4), x))
        observed(dist.Poisson((mu + a[group] + f).exp()), y, x, size)

    x, group, y = _data(True)
    data, found = (x.to(dtype), group, y.to(dtype)), []
    for least in (1000, 10):
        monkeypatch.setattr(search, "_ELIMINATED", least)
        guide, losses = _trained(model, data, 1)
        svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.02}), TraceQuadrature_ELBO())
        for half in (slice(0, 48, 2), slice(1, 48, 2), slice(0, 24)):
            losses.append(svi.step(*(part[half] for part in data), size=48))
        found.append(torch.tensor(losses))
    assert guide.joint.eliminated == "a"
    torch.testing.assert_close(found[1], found[0], rtol=1e-6 if dtype == torch.float64 else 1e-3, atol=0.0)


def test_a_covariance_that_rounding_makes_singular_has_a_jitter():
    phi, _ = _rows()
    arrow = phi.gram(1e13 * phi.compact).plus(1.0)
    arrow.__dict__["common_covariance"] = torch.ones(COMMON, COMMON)
    with pytest.warns(NumericalWarning, match="covariance of some coefficients"):
        factor = ArrowFactor(torch.zeros(COMMON + OWN), arrow).select(torch.arange(COMMON))
    assert torch.allclose(factor.root @ factor.root.mT, torch.ones(COMMON, COMMON), atol=1e-6)
