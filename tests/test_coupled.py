"""Latents coupled with each other and with GP sites' coefficients, against dense joint Gaussians."""

import copy
import functools
import warnings

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Trace_ELBO

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, families, fit, kernels, predict
from pyro_sparsegp.gaussians import Drawn, DrawnGaussian, Following, LowRankGaussian, NaturalGaussian
from pyro_sparsegp.gaussians.following import _weighed
from pyro_sparsegp.gaussians.steps import recording

N, GROUPS, NOISE = 24, 3, 0.4


def _data():
    generator = torch.Generator().manual_seed(0)
    x = torch.linspace(0, 1, N)[:, None]
    group = torch.arange(N) % GROUPS
    effects = torch.tensor([-0.8, 0.3, 0.9])
    y = torch.sin(5 * x[:, 0]) + 1.2 + effects[group] + NOISE * torch.randn(N, generator=generator)
    return x, group, y


def _kernel():
    return kernels.RBF(lengthscale=0.4)


def _model(after=False, kernel=_kernel):
    def levels():
        c = pyro.sample("c", dist.Normal(0.0, 2.0))
        with pyro.plate("groups", GROUPS):
            return c, pyro.sample("g", dist.Normal(0.0, 1.0))

    def model(x, group, y=None):
        c, g = levels() if not after else (None, None)
        f = pyro.sample("f", GaussianProcess(kernel(), x, jitter=1e-8))
        if after:
            c, g = levels()
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(f + c + g[group], NOISE), obs=y)

    return model


def _levels(group):
    return torch.cat([torch.ones(N, 1), torch.nn.functional.one_hot(group, GROUPS).double()], 1)


def _exact(x, group, y, kernel=_kernel):
    """The joint posterior of c, the groups and f, and the evidence."""
    prior = torch.diag(torch.tensor([4.0] + [1.0] * GROUPS))
    gram = kernel()(x)
    joint = torch.block_diag(prior, gram)
    to_data = torch.cat([_levels(group), torch.eye(N)], 1)
    evidence = to_data @ joint @ to_data.T + NOISE**2 * torch.eye(N)
    gain = torch.linalg.solve(evidence, to_data @ joint).T
    log_evidence = dist.MultivariateNormal(torch.zeros(N), evidence).log_prob(y)
    return gain @ y, joint - gain @ to_data @ joint, log_evidence


def _train(model, family, data, steps=300, lr=0.02, loss=None, **kwargs):
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    guide = AutoSparseGP(model, family, coupled=True, **kwargs)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": lr}), loss or TraceQuadrature_ELBO())
    for _ in range(steps):
        svi.step(*data)
    return guide


def _at_optimum(after):
    """A guide whose state is the joint posterior of c, the groups and the coefficients, by dense algebra."""
    x, group, y = _data()
    guide = AutoSparseGP(_model(after), families.SVGP(14, natural=True, trainable=False), coupled=True)
    guide(x, group, y)
    num = 1 + GROUPS
    phi = guide.posterior(x, group)["f"].features[0].detach()
    rows = torch.cat([_levels(group), phi], 1)
    prior = torch.cat([torch.tensor([0.25]), torch.ones(rows.shape[1] - 1)]).diag()
    covariance = torch.linalg.inv(prior + rows.T @ rows / NOISE**2)
    mean = covariance @ rows.T @ y / NOISE**2
    together, following, q = guide.together, guide.gps.f.following, guide.gps.f.coefficients
    together.loc.data, together.root = mean[:num], torch.linalg.cholesky(covariance[:num, :num])
    following.slope.data = torch.linalg.solve(covariance[:num, :num], covariance[:num, num:]).T
    following.centre = together.mean.detach()
    q.gram = phi.T @ phi / NOISE**2
    q.loc.data = mean[num:]
    return guide


@pytest.fixture(scope="module")
def trained():
    torch.set_default_dtype(torch.float64)
    return functools.cache(lambda after=False: _at_optimum(after))


def _require_exact(guide, data, short, near):
    """The bound is the evidence, draw by draw: the gap has no noise left; and q is the joint posterior."""
    mean, covariance, log_evidence = _exact(*data)
    for _ in range(3):
        assert -TraceQuadrature_ELBO().loss(guide.model, guide, *data) == pytest.approx(log_evidence.item(), abs=short)
    num = 1 + GROUPS
    root = guide.together.root
    torch.testing.assert_close(root @ root.T, covariance[:num, :num], rtol=near, atol=near / 4)
    torch.testing.assert_close(guide.together.loc.data, mean[:num], rtol=0.0, atol=near)
    q = guide.posterior_at_medians(*data[:2])["f"]
    torch.testing.assert_close(q.mean.detach(), mean[num:], rtol=0.0, atol=1.5 * near)
    across = torch.linalg.solve(covariance[:num, :num], covariance[:num, num:]).T  # what f does when c does
    torch.testing.assert_close((q.features[0] @ guide.gps.f.following.slope).detach(), across, rtol=0.0, atol=near)


@pytest.mark.parametrize("after", [False, True])
def test_the_joint_posterior_of_a_linear_gaussian_model_is_where_steps_rest(after):
    data, guide = _data(), _at_optimum(after)
    _require_exact(guide, data, 1e-4, 1e-4)
    svi = SVI(guide.model, guide, pyro.optim.Adam({"lr": 0.02}), TraceQuadrature_ELBO(2))
    for _ in range(5):
        svi.step(*data)
    _require_exact(guide, data, 1e-3, 1e-3)


def test_from_beside_the_joint_posterior_steps_come_back():
    data, guide = _data(), _at_optimum(False)
    guide.together.root = 1.2 * guide.together.root
    guide.gps.f.following.slope.data *= 0.8
    svi = SVI(guide.model, guide, pyro.optim.Adam({"lr": 0.02}), TraceQuadrature_ELBO(2))
    short = torch.tensor([svi.step(*data) for _ in range(40)]) + _exact(*data)[-1]
    assert short[:15].mean() > 1.5
    assert short[-10:].mean() < 0.7


@pytest.mark.slow  # the tests above see where steps lead; from the start it takes hundreds
@pytest.mark.parametrize("after", [False, True])
def test_a_linear_gaussian_model_reaches_its_evidence(after):
    # Mean field is 4 nats short of it, and its sd of c an eighth.
    guide = _train(_model(after), families.SVGP(14, natural=True, trainable=False), _data())
    _require_exact(guide, _data(), 0.02, 0.02)


def test_predictions_are_joint(trained):
    x, group, y = _data()
    guide = trained()
    _, covariance, _ = _exact(x, group, y)
    pyro.set_rng_seed(1)
    draws = predict(guide.model, guide, x, group, num_samples=120, joint=False)
    level = draws["f"] + draws["c"][..., None] + draws["g"].reshape(120, GROUPS)[:, group]
    to_level = torch.cat([_levels(group), torch.eye(N)], 1)
    sd = (to_level @ covariance @ to_level.T).diagonal().sqrt()
    torch.testing.assert_close(level.std(0), sd, rtol=4 / 240**0.5, atol=0.0)
    torch.testing.assert_close(draws["c"].std(), covariance[0, 0].sqrt(), rtol=4 / 240**0.5, atol=0.0)


def test_a_width_at_the_medians_is_told_of(trained):
    x, group, y = _data()
    guide = copy.deepcopy(trained())
    covariance = _exact(x, group, y)[1]
    whole = covariance.diagonal()[1 + GROUPS :]
    with pytest.warns(UserWarning, match=r"GP site 'f' follows them.*is 0.\d+ of .*predict") as told:
        q = guide.posterior(x, group)["f"]
    share = float(str(told[0].message).split("deviation is ")[1].split()[0])
    assert share == pytest.approx((q.variance / whole).min().sqrt().item(), rel=0.06)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        guide.posterior(x, group)  # once
        of_noise = AutoSparseGP(_with_noise, families.SVGP(14), coupled=True)
        SVI(_with_noise, of_noise, pyro.optim.Adam({"lr": 0.02}), TraceQuadrature_ELBO(2)).step(x, y)
        of_noise.posterior(x)


def test_a_width_of_one_of_several_sites_is_told_of():
    x, _, y = _data()

    def model(x, y=None):
        c = pyro.sample("c", dist.Normal(0.0, 2.0))
        f, g = (pyro.sample(name, GaussianProcess(_kernel(), x)) for name in "fg")
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(c + f * g, NOISE), obs=y)

    guide = AutoSparseGP(model, {("f", "g"): families.SVGP(5)}, coupled=True)
    guide(x, y)
    whole = guide.joints.group_0
    whole.following.slope.data[5:10] = 100.0
    with pytest.warns(UserWarning, match="GP site 'g' follows them") as told:
        guide.posterior(x)
    assert len(told) == 1


def _with_noise(x, y=None):
    noise = pyro.sample("noise", dist.LogNormal(-1.0, 0.5))
    f = pyro.sample("f", GaussianProcess(_kernel(), x))
    with pyro.plate("data", len(x)):
        pyro.sample("y", dist.Normal(f, noise), obs=y)


def test_a_value_held_by_a_handler_is_conditioned_on(trained):
    data, guide, other = _data(), trained(), trained(after=True)
    mean, covariance, _ = _exact(*data)
    with poutine.condition(data={"c": torch.tensor(3.0)}), torch.no_grad():
        draws = [guide(*data) for _ in range(100)]
    given = mean + covariance[:, 0] / covariance[0, 0] * (3.0 - mean[0])
    torch.testing.assert_close(torch.stack([draw["f"] for draw in draws]).mean(0), given[4:], rtol=0.0, atol=0.17)
    torch.testing.assert_close(torch.stack([draw["g"] for draw in draws]).mean(0), given[1:4], rtol=0.0, atol=0.17)
    with poutine.condition(data={"c": torch.tensor(3.0)}), pytest.raises(ValueError, match=r"'c'.*after GP site 'f'"):
        other(*data)


@pytest.mark.slow  # test_one_step_is_the_natural_gradient sees what a batch weighs; the evidence, the steps
def test_mini_batches_arrive():
    data = _data()

    def model(x, group, y):
        c = pyro.sample("c", dist.Normal(0.0, 2.0))
        with pyro.plate("groups", GROUPS):
            g = pyro.sample("g", dist.Normal(0.0, 1.0))
        plate = pyro.plate("data", N, subsample_size=12)
        f = pyro.sample("f", GaussianProcess(_kernel(), x[plate.indices], jitter=1e-8))
        with plate as rows:
            pyro.sample("y", dist.Normal(f + c + g[group[rows]], NOISE), obs=y[rows])

    guide = _train(model, families.SVGP(12, natural=True, trainable=False), data, steps=700)
    sd = (guide.together.root @ guide.together.root.T).diagonal().sqrt()
    exact = _exact(*data)[1].diagonal()[: 1 + GROUPS].sqrt()
    assert (sd > 0.8 * exact).all()
    assert (sd < 1.2 * exact).all()


def _sum():
    return kernels.RBF(lengthscale=0.4).named("a") + 0.3 * kernels.Matern32(lengthscale=0.2).named("b")


@pytest.mark.parametrize(
    ("family", "kernel"),
    [
        # What a shift does to several blocks, and to a low rank, is held against dense algebra below.
        pytest.param(families.OrthogonalInducing(8, 6, natural=True), _kernel, marks=pytest.mark.slow),
        pytest.param(families.CoupledPrecision(10, rank=8, natural=True), _sum, marks=pytest.mark.slow),
        pytest.param(families.SVGP(14, natural=False), _kernel, marks=pytest.mark.slow),
        (families.SGPR(14), _kernel),
    ],
    ids=lambda value: getattr(value, "__name__", type(value).__name__),
)
def test_every_family_gains(family, kernel):
    data = _data()
    *_, log_evidence = _exact(*data, kernel)
    steps = {"OrthogonalInducing": 200, "SGPR": 110, "SVGP": 900}.get(type(family).__name__, 300)
    guide = _train(_model(kernel=kernel), family, data, steps=steps)
    loss = sum(TraceQuadrature_ELBO().loss(guide.model, guide, *data) for _ in range(10)) / 10
    assert -loss == pytest.approx(log_evidence.item(), abs=1.5)  # mean field's is 4
    assert -loss < log_evidence + 0.05


def test_drawn_objectives_move_it():
    data = _data()
    guide = _train(_model(), families.SVGP(10, natural=True), data, steps=30, loss=Trace_ELBO(), point_estimates=("g",))
    assert guide.together.steps == 0  # plain gradients moved it
    assert guide.together.loc.abs().min() > 0.01
    assert guide.structure.coupled == ["c"]
    assert guide.gps.f.following.slope.isfinite().all()


def test_a_copy_and_a_loaded_guide_are_the_guide(trained):
    x, group, _ = _data()
    guide = trained()
    loaded = AutoSparseGP(guide.model, families.SVGP(14, natural=True, trainable=False), coupled=True)
    loaded.load_state_dict(guide.state_dict())
    seen = []
    for each in (guide, loaded, copy.deepcopy(guide)):
        pyro.set_rng_seed(5)
        seen.append(each.draw(x, group)["f"].detach())
        means = [one.posterior_at_medians(x, group)["f"].mean for one in (each, guide)]
        torch.testing.assert_close(*means)
    torch.testing.assert_close(seen[1], seen[0])
    torch.testing.assert_close(seen[2], seen[0])
    plain = AutoSparseGP(guide.model, families.SVGP(14, natural=True, trainable=False))
    plain(*_data())
    with pytest.raises(ValueError, match="coupled latents"):
        plain.load_state_dict(guide.state_dict())


def test_a_state_loads_into_a_guide_in_use():
    x, group, _ = data = _data()
    guide = _train(_model(), families.SVGP(6), data, steps=5)
    state = copy.deepcopy(guide.state_dict())
    before = guide.posterior_at_medians(x, group)["f"].mean.detach()
    guide.load_state_dict(state)
    torch.testing.assert_close(guide.posterior_at_medians(x, group)["f"].mean, before)


def _natural():
    q = NaturalGaussian([3, 2], (), torch.zeros(()))
    rows = torch.randn(4, 5)
    q.gram, q.loc.data = rows.T @ rows, torch.randn(5)
    return q()


def _low_rank(trils):
    loc, b = [torch.randn(3), torch.randn(2)], [torch.randn(3, 2), torch.randn(2, 2)]
    return LowRankGaussian(loc, b, trils)


@pytest.mark.parametrize(
    "make",
    [
        _natural,
        lambda: _low_rank([torch.eye(n) + 0.3 * torch.randn(n, n).tril(-1) for n in (3, 2)]),
        lambda: _low_rank(None),
    ],
    ids=["dense", "low rank", "identity and low rank"],
)
def test_a_shifted_gaussian_is_dense(make):
    torch.manual_seed(0)
    q = make()
    following = Following([3, 2], (), torch.zeros(()), torch.zeros(2))
    following.slope.data = torch.randn(5, 2)
    drawn = Drawn(torch.zeros(2), torch.tensor([[2.0, 0.0], [0.5, 1.0]]), torch.randn(2), torch.randn(2))
    shifted = following(q, drawn)
    covariance = q.covariance_matrix
    dense = dist.MultivariateNormal(torch.cat(q.loc) + following.slope @ drawn.value, covariance)
    prior = dist.MultivariateNormal(torch.zeros(5), torch.eye(5))
    torch.testing.assert_close(shifted.kl(), torch.distributions.kl_divergence(dense, prior))
    w = torch.randn(5)
    torch.testing.assert_close(shifted.log_ratio(w.split([3, 2])), dense.log_prob(w) - prior.log_prob(w))
    phi = torch.randn(7, 5)
    mean, change = shifted.moments(phi.split([3, 2], -1))
    torch.testing.assert_close(mean, phi @ dense.mean)
    torch.testing.assert_close(change, (phi @ (covariance - torch.eye(5)) @ phi.T).diagonal())
    torch.testing.assert_close(torch.cat(q.covariance_times(w.split([3, 2]))), covariance @ w)
    torch.testing.assert_close(shifted.marginal([1]).loc[0], dense.mean[3:])


@pytest.mark.parametrize("stays", [0.0, 1e3])
def test_what_a_batch_says_of_means_moves_neither_root_nor_slope(stays):
    # Two mirrored draws by hand, under a gradient that both share, of any size.
    torch.manual_seed(0)
    q, following = _natural(), Following([3, 2], (), torch.zeros(()), torch.zeros(2), rate=0.1)
    together = DrawnGaussian(torch.randn(2), torch.rand(2) + 0.5, rate=0.1)
    together.root = root = torch.tensor([[2.0, 0.0], [0.5, 1.0]])
    loc = following.centre = together.loc.detach().clone()
    noise = torch.randn(2)
    curved, along, shared = torch.diag(torch.tensor([1.0, 3.0])), torch.randn(5, 2), torch.randn(7)
    total = 0.0
    with recording(loc) as record:
        for each, mirrors in ((noise, False), (-noise, True)):
            drawn = together(each, mirrors)
            shifted = following(q, drawn)
            by_shift = along @ (drawn.value - loc).detach() + stays * shared[:5]
            density = 0.5 * (drawn.value - loc) @ curved @ (drawn.value - loc) + stays * shared[5:] @ drawn.value
            weights = drawn.weighed(torch.zeros(2)).sum() + _weighed(shifted.taken, torch.zeros(()))
            total = total + 0.5 * (density + (by_shift * torch.cat(list(shifted.shift))).sum() + weights)
    record.differentiate(total)
    record.step(1.0)
    assert together.steps == following.steps == 1
    pull = root.T @ curved @ root @ noise
    pull = pull * 0.1 / (1 + pull.square().mean()).sqrt()
    outer = torch.outer(pull, noise)
    half = outer.tril(-1) + 0.5 * outer.diagonal().diag()
    torch.testing.assert_close(together.root, root - root @ half / (1 + noise.square().sum()))
    apart = along @ root @ noise
    natural = q.covariance_matrix @ apart
    away = torch.linalg.solve(root.T, noise) / (1 + noise.square().sum())
    torch.testing.assert_close(following.slope.data, -0.1 / (1 + apart @ natural).sqrt() * torch.outer(natural, away))
    mean = stays * root.T @ shared[5:]
    torch.testing.assert_close(together.loc.data, loc - root @ mean * 0.1 / (1 + mean.square().mean()).sqrt())


@pytest.mark.parametrize("held", [False, True])
def test_an_objective_runs_each_draw_and_its_mirror_image_at_the_same_rows(held):
    data, seen = _data(), []

    def model(x, group, y):
        c = pyro.sample("c", dist.Normal(0.0, 2.0))
        with pyro.plate("groups", GROUPS):
            g = pyro.sample("g", dist.Normal(0.0, 1.0))
        e = pyro.sample("e", dist.Normal(0.0, 1.0))
        plate = pyro.plate("data", N, subsample_size=6)
        f = pyro.sample("f", GaussianProcess(_kernel(), x[plate.indices]))
        with plate as rows:
            seen.append((c.detach(), g.detach(), e.detach(), rows))
            pyro.sample("y", dist.Normal(f + c + e + g[group[rows]], NOISE), obs=y[rows])

    guide = AutoSparseGP(model, families.SVGP(5), coupled=("c", "g"))
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.02}), TraceQuadrature_ELBO(2))
    for _ in range(3):
        svi.step(*data)
    before, root = guide.together.loc.detach().clone(), guide.together.root.clone()
    seen.clear()
    if held:
        with poutine.condition(data={"g": torch.ones(GROUPS)}):
            svi.step(*data)
    else:
        svi.step(*data)
    (c, g, e, rows), (image, other, same, again) = seen[0], seen[-1]
    assert len({float(one[0]) for one in seen}) == 2
    torch.testing.assert_close(rows, again)
    torch.testing.assert_close(e, same)
    torch.testing.assert_close(c + image, 2 * before[0])
    if held:
        torch.testing.assert_close(g, other)
        return
    torch.testing.assert_close(g + other, 2 * before[1:])
    assert not torch.equal(guide.together.loc, before)
    assert not torch.equal(guide.together.root, root)


@pytest.mark.slow  # that a step's length is bounded, in units of q, is seen in the test above
@pytest.mark.parametrize("unit", [1.0, 0.01])
def test_strong_data_and_any_unit(unit):
    # Far from the optimum the gradients are hundreds of q's deviations long.
    torch.manual_seed(0)
    x, group = torch.rand(12, 1), torch.arange(12) % 2
    y = unit * (torch.sin(6 * x[:, 0]) + torch.tensor([1.2, -2.0])[group] + 0.1 * torch.randn(12))

    def model(x, group, y):
        with pyro.plate("groups", 2):
            a = pyro.sample("a", dist.Normal(0.0, unit))
        f = pyro.sample("f", GaussianProcess(unit**2 * kernels.RBF(lengthscale=0.3), x, jitter=1e-8))
        with pyro.plate("data", 12):
            pyro.sample("y", dist.Normal(f + a[group], 0.1 * unit), obs=y)

    design = torch.nn.functional.one_hot(group, 2).double()
    gram = kernels.RBF(lengthscale=0.3)(x) + design @ design.T + 0.01 * torch.eye(12)
    exact = dist.MultivariateNormal(torch.zeros(12), unit**2 * gram).log_prob(y)
    guide = _train(model, families.SVGP(10, natural=True, trainable=False), (x, group, y), steps=400)
    loss = TraceQuadrature_ELBO().loss(model, guide, x, group, y)
    assert -loss == pytest.approx(exact.item(), abs=0.3)


@pytest.mark.parametrize(
    ("coupled", "kwargs", "match"),
    [
        (("f",), {}, "'f', which is a GP site"),
        (("z",), {}, "'z', which is no latent site"),
        (("c",), {"point_estimates": True}, "'c', which is fitted as a point"),
        (("e",), {}, "'e', which has a value for each row"),
    ],
)
def test_what_can_not_be_coupled_is_refused(coupled, kwargs, match):
    x, _, y = _data()

    def model(x, y):
        c = pyro.sample("c", dist.Normal(0.0, 2.0))
        f = pyro.sample("f", GaussianProcess(_kernel(), x))
        with pyro.plate("data", len(x)):
            e = pyro.sample("e", dist.Normal(0.0, 1.0))
            pyro.sample("y", dist.Normal(f + c + e, NOISE), obs=y)

    with pytest.raises(ValueError, match=match):
        AutoSparseGP(model, families.SVGP(5), coupled=coupled, **kwargs)(x, y)
    for wrong in ("c", 3):
        with pytest.raises(ValueError, match="coupled must be"):
            AutoSparseGP(model, families.SVGP(5), coupled=wrong)


def test_parts_of_plates_and_conditioned_models_are_refused_and_fit_takes_it():
    x, _, y = _data()

    def model(x, y=None, part=None):
        with pyro.plate("groups", GROUPS, subsample_size=part):
            g = pyro.sample("g", dist.HalfNormal(1.0))
        f = pyro.sample("f", GaussianProcess(_kernel(), x))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(f + g.sum(), NOISE), obs=y)

    guide = AutoSparseGP(model, families.SVGP(5), coupled=True)
    assert fit(model, guide, (x, y), steps=3, progress=False).steps == 3
    with pytest.raises(ValueError, match="'g' is coupled and has the shape"):
        guide(x, y, part=2)
    with pytest.raises(ValueError, match="holds site 'g' at a value"):
        predict(poutine.condition(model, data={"g": torch.ones(GROUPS)}), guide, x, num_samples=1)


def test_a_second_set_that_is_never_formed_follows_nothing():
    with pytest.raises(ValueError, match="num_columns"):
        AutoSparseGP(_model(), families.OrthogonallyDecoupled(5, 8, num_columns=4), coupled=True)(*_data())


def test_a_plate_of_one():
    def model(x, y):
        with pyro.plate("columns", 1):
            length = pyro.sample("length", dist.LogNormal(x.new_zeros(()), 0.5))
        f = pyro.sample("f", GaussianProcess(kernels.RBF(length), x))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(f, 0.2), obs=y)

    x = torch.rand(12, 1)
    guide = AutoSparseGP(model, families.SVGP(4), coupled=True)
    svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.02}), TraceQuadrature_ELBO(2))
    losses = [svi.step(x, (6 * x[:, 0]).sin()) for _ in range(5)]
    assert losses[-1] < losses[0]
