"""``guide.check``: what it tells of posteriors that are wrong, and of right ones."""

import math
import re

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, families, fit, kernels
from pyro_sparsegp.gaussians import FullCholesky
from pyro_sparsegp.guide.adaptive import drawn, weighted
from pyro_sparsegp.guide.bounds import of_bound
from pyro_sparsegp.guide.check import Compared
from pyro_sparsegp.guide.field import run_standardised
from pyro_sparsegp.guide.latents import Hyperparameters
from pyro_sparsegp.guide.moments import beside, said
from pyro_sparsegp.guide.nested import by_values
from pyro_sparsegp.guide.runs import Priors
from pyro_sparsegp.guide.search import Search
from pyro_sparsegp.program.traces import all_sites, whole_plates

from .models import observed

N = 24


def _data():
    x = torch.linspace(0, 1, N)[:, None]
    return x, torch.sin(6 * x[:, 0]) + 0.3 * torch.randn(N, generator=torch.Generator().manual_seed(0))


def _trained(model, family, *data, steps=30, **options):
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    guide = AutoSparseGP(model, family, **options)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.02}), TraceQuadrature_ELBO())
    for _ in range(steps):
        svi.step(*data)
    return guide


def _plain(x, y=None):
    variance, length = (pyro.sample(name, dist.LogNormal(0.0, 1.0)) for name in ("variance", "length"))
    observed(dist.Normal(pyro.sample("f", GaussianProcess(variance * kernels.RBF(length), x)), 0.3), y)


def test_intervals_are_compared_as_they_are_read(few_draws):
    """Of one value of f that is known v ~ InverseGamma(2, 1.32): q has the width of log v, and v's tail is longer."""
    x, y = torch.zeros(1, 1), torch.tensor([0.8])

    def model(x, y=None):
        v = pyro.sample("v", dist.InverseGamma(1.5, 1.0))
        observed(dist.Normal(pyro.sample("f", GaussianProcess(v * kernels.RBF(1.0), x)), 0.01), y)

    guide = _trained(model, families.SVGP(1), x, y, steps=200)
    assert guide.together.tril.item() / torch.polygamma(1, torch.tensor(2.0)).sqrt().item() > 0.8
    right = (1.32 / dist.Gamma(2.0, 1.0).sample((100_000,))).quantile(0.95)
    assert guide.quantiles([0.95])["v"][0] / right < 0.75
    (line,) = guide.check(x, y)
    assert line.startswith("'v': ")
    assert "call guide.integrate" in line
    with pytest.warns(UserWarning, match="few"):
        guide.integrate(x, y, num_points=3)
    assert "weighted points miss a part of it. Give integrate more" in "".join(guide.check())
    guide.integrate(x, y)
    assert guide.quantiles([0.95])["v"][0] / right > 0.85
    assert guide.check(x, y) == []


@pytest.mark.slow
def test_a_lower_mode_far_away_is_told():
    """A change whose place has some per cent of its probability elsewhere is uncertain by that."""
    x = torch.linspace(0, 10, 60)[:, None]
    y = (x[:, 0] < 3) + 0.6 * torch.randn(60, generator=torch.Generator().manual_seed(1))

    def model(x, y=None):
        change = pyro.sample("change", dist.Uniform(0.0, 10.0))
        before, f = pyro.sample("before", dist.Normal(0, 1)), pyro.sample("f", GaussianProcess(kernels.RBF(3.0), x))
        share = torch.sigmoid((change - x[:, 0]) / 0.1)
        observed(dist.Normal(share * before + f, 0.6), y)

    guide = _trained(model, families.SVGP(12), x, y, steps=40)
    assert re.search(
        r"a second mode, [4-9].* nats lower, .* Intervals of 'change' leave it out", "".join(guide.check())
    )


def test_the_objective_is_compared_with_draws(monkeypatch, request):
    runs = []
    guide = _trained(lambda x, y=None: runs.append(x) or _plain(x, y), families.SVGP(12), *_data())
    runs.clear()
    assert of_bound(guide, _data(), {}) == []
    assert len(runs) < 20  # draws of both are made at once
    request.getfixturevalue("few_draws")
    loss = TraceQuadrature_ELBO.differentiable_loss
    monkeypatch.setattr(TraceQuadrature_ELBO, "differentiable_loss", lambda *args: loss(*args) - 40.0)
    line = guide.check()[0]
    assert "'f': the bound is -" in line
    assert "by the objective" in line


def _preferences(x, y=None):
    s = pyro.sample("s", dist.LogNormal(0.5, 0.7))
    f = pyro.sample("f", GaussianProcess(s * kernels.RBF(0.25), x))
    gaps = f[..., 1:] - f[..., :-1]
    observed(dist.Bernoulli(torch.special.ndtr(gaps).clamp(1e-9, 1 - 1e-9)), y)


def _outputs(x, y=None):
    s = pyro.sample("s", dist.LogNormal(0.0, 0.7))
    f = pyro.sample("f", GaussianProcess(s * kernels.RBF(0.3), x).expand([2]).to_event(1))
    observed(dist.Normal(f[..., 0, :] * x[:, 0] + f[..., 1, :], 0.3), y)


def _correlated(x, y=None):
    mu, f = pyro.sample("mu", dist.Normal(0.0, 3.0)), pyro.sample("f", GaussianProcess(kernels.RBF(0.3), x))
    pyro.sample("y", dist.MultivariateNormal(mu + f, 0.1 * torch.eye(N) + 0.1), obs=y)


@pytest.mark.parametrize(("model", "names"), [(_preferences, "s"), (_outputs, "f"), (_correlated, "f mu")])
def test_a_program_of_any_form_is_checked(model, names, few_draws):
    """No linear predictor, or several values of a site, in a density: q takes what it can't join to be independent."""
    x, y = _data()
    y = (y > 0).double()[1:] if model is _preferences else y
    lines = _trained(model, families.SVGP(12), x, y, steps=5, independent=True).check()
    for name in names.split():
        assert any(line.startswith(f"'{name}': ") and "times too narrow" in line for line in lines)
    assert not any("Train longer" in line for line in lines)


def test_values_of_a_product_start_near_where_it_stands_still():
    """From far b went to -12.9, where f has the sign that data do not have."""
    x = torch.linspace(0, 1, 20)[:, None]
    f = 1 + torch.sin(6 * x[:, 0])
    data = x, f + 0.3 * torch.randn(20), 1.5 * f + 0.3 * torch.randn(20)

    def model(x, y=None, t=None):
        b, f = pyro.sample("b", dist.Normal(0.0, 2.0)), pyro.sample("f", GaussianProcess(kernels.Matern32(0.3), x))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(f, 0.3), obs=y)
            pyro.sample("t", dist.Normal(b * f, 0.3), obs=t)

    guide = AutoSparseGP(model, families.SVGP(4), independent=True, start=None)
    guide.prepare(*data)
    sites = dict(all_sites(Priors(guide, at_medians=True).perform(data, {}).trace))
    nothing = Hyperparameters({}, {}, guide.like)
    nested = by_values(guide, sites, ["b"], nothing, lambda *held: run_standardised(guide, data, {}, *held))
    assert 2 * nested.at(nothing.of({})).x[0] == pytest.approx(1.5, abs=0.2)


def test_missing_inducing_points_are_told_of_all_latents(few_draws):
    def model(x, y=None):
        mu, noise = pyro.sample("mu", dist.Normal(0.0, 9.0)), pyro.sample("noise", dist.LogNormal(-1.0, 0.7))
        observed(dist.Normal(mu + pyro.sample("f", GaussianProcess(kernels.RBF(0.1), x)), noise), y)

    lines = _trained(model, families.SVGP(3, trainable=False), *_data(), steps=5).check()
    told = {line.split("'")[1] for line in lines if "the basis of 'f' is too small" in line}
    assert told >= {"f", "noise"}


@pytest.mark.parametrize("family", [families.SVGP(12), families.Exact()], ids=["SVGP", "Exact"])
@pytest.mark.filterwarnings("ignore:the noise variance of site")
def test_what_float32_rounds_is_told(family):
    """Alone: its bound is no posterior's, and what differs has that cause."""
    x, y = (part.float() for part in _data())

    def model(x, y=None):
        observed(dist.Normal(pyro.sample("f", GaussianProcess(kernels.RBF(0.2), x)), 1e-3), y)

    (line,) = _trained(model, family, x, y, steps=3).check()
    assert line.startswith("'f': ")
    assert "float64" in line


class Own(families.InducingFamily):
    def new_coefficients(self):
        return FullCholesky


def _separated(x, y=None):
    """A posterior of f that no Gaussian has."""
    x, kernel = 2 * x[::3] - 1, 100 * kernels.Linear() + 100 * kernels.Constant(1.0)
    observed(dist.Bernoulli(logits=pyro.sample("f", GaussianProcess(kernel, x))), (x[:, 0] > 0).double())


def _known(x, y=None):
    """A normal posterior."""
    observed(dist.Normal(pyro.sample("f", GaussianProcess(kernels.RBF(0.2), x)), 0.3), y)


FULL = families.SVGP(2), families.WeightSpace(), families.ExactWeightSpace(), Own(2, natural=False)
NARROW = families.CoupledPrecision(12, rank=1, base="identity")
CAUSES = [
    *(("the posterior is far from normal", _separated, family, 400) for family in FULL),
    ("the basis of 'f' is too small", _known, families.SVGP(3), 5),
    ("training has not brought 'f' to the optimum", _known, families.SVGP(12, natural=False), 5),
    ("the family of 'f' restricts its covariance", _plain, NARROW, 400),
    ("without natural steps 'f' does not follow 'variance', 'length'", _plain, families.SVGP(12, natural=False), 400),
]


@pytest.mark.parametrize(("cause", "model", "family", "steps"), CAUSES)
def test_a_cause_is_told_where_it_is_one(cause, model, family, steps, few_draws):
    """Training is none where some hundred steps have brought the bound to its best."""
    assert f", because {cause}" in _trained(model, family, *_data(), steps=steps).check()[0]


def test_a_process_whose_mean_is_a_latent_is_right(few_draws):
    """f = c + r given draws of c has no more of its variance than given c's posterior, which r balances."""

    def model(x, y=None):
        c, noise = pyro.sample("c", dist.Normal(0.0, 9.0)), pyro.sample("noise", dist.LogNormal(-1.0, 0.3))
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5), x, mean=c))
        observed(dist.Normal(f, noise), y)

    assert _trained(model, families.SVGP(12), *_data(), steps=10).check() == []


def test_a_family_without_a_basis_is_checked():
    """Latents beside it, too, given whose medians f is narrower than it is."""

    def model(x, y=None):
        level = pyro.sample("level", dist.Normal(0.0, 2.0))
        return observed(dist.Normal(pyro.sample("f", GaussianProcess(kernels.RBF(0.3), x)) + level, 0.2), y)

    x, y = _data()
    pyro.set_rng_seed(0)
    guide = AutoSparseGP(model, families.ComputationAware(N))
    assert fit(model, guide, (x, y), steps=150, progress=False).notes == ()
    assert guide.check(x, y) == []
    lines = _trained(model, families.ComputationAware(N), x, y + 5.0, steps=1).check()
    assert any(line.startswith("'level': ") for line in lines)


def test_what_has_no_reference_is_named():
    def deep(x, y=None):
        h = pyro.sample("h", GaussianProcess(kernels.RBF(0.3), x))
        observed(dist.Normal(pyro.sample("f", GaussianProcess(kernels.RBF(0.3), h[:, None])), 0.3), y)

    (line,) = _trained(deep, families.SVGP(6), *_data(), steps=1).check()
    assert "'h', 'f'" in line


def test_the_best_of_many_modes_is_the_start():
    """Data between two values of a change point are told from neither side: F has a mode for each."""
    x = torch.linspace(0, 10, 60)[:, None]
    y = torch.where(x[:, 0] < 2.75, 1.2, -0.4) + 0.8 * torch.randn(60, generator=torch.Generator().manual_seed(1))

    def model(x, y=None):
        tau, noise = pyro.sample("tau", dist.Uniform(0.0, 10.0)), pyro.sample("noise", dist.HalfNormal(1.0))
        s, length = pyro.sample("s", dist.HalfNormal(1.0)), pyro.sample("length", dist.InverseGamma(4.0, 8.0))
        kernel, w = s**2 * kernels.RBF(length), torch.sigmoid((x[:, 0] - tau) / 0.1)
        before, after = (pyro.sample(name, GaussianProcess(kernel, x)) for name in ("before", "after"))
        observed(dist.Normal((1 - w) * before + w * after, noise), y)

    guide = _trained(model, families.SVGP(8), x, y, steps=1)
    assert guide.median()["tau"].item() == pytest.approx(2.75, abs=0.6)


@pytest.mark.slow  # quick: test_float32.py::test_a_probability_that_saturates_hides_no_predictor
def test_a_saturated_probability_is_as_the_guide_knows_it():
    """Of survival times that are censored: far from the data 1 - cdf is 0, where a latent has no slope."""
    pyro.set_rng_seed(7)
    age, drug = 2 * torch.rand(40, 1) - 1, torch.randint(2, (40,)).to(torch.get_default_dtype())
    time = (1.0 + 0.6 * drug + 0.8 * torch.sin(2.5 * age[:, 0]) + 0.5 * torch.randn(40)).exp()
    end = 8 * torch.rand(40) + 1
    event, time = time <= end, torch.minimum(time, end)

    def model(time=None):
        a, b = pyro.sample("a", dist.Normal(0.0, 2.0)), pyro.sample("b", dist.Normal(0.0, 1.0))
        s, sd = pyro.sample("s", dist.HalfNormal(1.0)), pyro.sample("sd", dist.HalfNormal(1.0))
        loc = a + b * drug + pyro.sample("f", GaussianProcess(sd**2 * kernels.RBF(0.8), age))
        with pyro.plate("data", len(age)):
            with pyro.poutine.mask(mask=event):
                time = pyro.sample("time", dist.LogNormal(loc, s), obs=time)
            with pyro.poutine.mask(mask=~event):
                pyro.sample("alive", dist.Bernoulli(probs=1 - dist.Normal(loc, s).cdf(time.log())), obs=torch.ones(40))

    guide = AutoSparseGP(model, families.SVGP(8))
    fit(model, guide, (time,), steps=120, progress=False)
    assert guide.joint.links["alive"] == {"probs": "probit"}
    assert guide.check(time) == []


@pytest.mark.slow
def test_weighted_draws_are_the_posterior_s_wherever_q_is():
    """Draws about a q that is far off are worth nothing: others go to the mode, and to what these weigh."""
    guide = _trained(_plain, families.SVGP(12), *_data(), steps=5)
    with whole_plates(), torch.enable_grad():
        run = Priors(guide, at_medians=True).perform(_data(), {})
        nested = Compared(guide, Search(guide, run, (_data(), {}), [], lambda: None)).nested
        far = guide.together.mean.detach() + torch.tensor([4.0, -2.0]), 0.5 * torch.eye(2)
        found, ratio = weighted(nested, far, drawn(nested, far, 80)[0], 60, 120.0)
        mode, steps = nested.mode(found).theta, torch.linspace(-3, 3, 13)
        grid = [nested.tried(mode + torch.stack([a, b])) for a in steps for b in steps]
    assert len(found) > 160

    def moments(shares, each):
        theta = torch.stack([one.theta for one in each])
        return shares @ theta, (shares @ (theta - shares @ theta).square()).sqrt()

    values = torch.stack([one.value for one in grid])
    (mean, sd), (own, wide) = moments(values.softmax(0), grid), moments(ratio.softmax(0), found)
    volume = values.logsumexp(0) + 2 * math.log(0.5)
    assert abs(ratio.logsumexp(0) - volume) < 0.1
    assert ((own - mean) / sd).abs().max() < 0.3
    assert (wide / sd - 1).abs().max() < 0.2


def test_what_is_off_has_words_from_either_side():
    for ratio in (0.7, 0.751, 0.76, 1.31, 1.332, 1.34):
        is_off = beside(torch.zeros(1), torch.tensor([ratio]))[-1]
        assert is_off == bool(said(0.0, ratio)) == bool(said(0.0, 1 / ratio))
