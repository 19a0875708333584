"""The guide: what it owns, remembers, restores, refuses and warns of."""

import copy
import functools
import gc
import io
import pickle
import warnings
from functools import partial

import pyro
import pyro.contrib.gp as gp
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import init_to_value

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, families, kernels, predict
from pyro_sparsegp.families import SGPR, SVGP, ComputationAware, MeanFieldAdditive, OrthogonalInducing, WeightSpace
from pyro_sparsegp.posterior.sparse_posterior import SparsePosterior

from .models import (
    assert_alike,
    data,
    gaussian,
    heteroscedastic,
    observed,
    prepared,
    refused,
    regression,
    train,
    trained,
)

RBF = kernels.RBF(0.5)
PLAIN = gaussian(RBF)


def means(guide, x):
    return guide.posterior(x)["f"].mean.detach()


def begun(model=regression, family=None, steps=0, num=60, **options):
    """The data, and a guide that has seen them, or trained on them."""
    x, y = data(num=num)
    guide = AutoSparseGP(model, family or SVGP(7), **options)
    if steps:
        train(model, guide, x, y, steps=steps)
    else:
        guide(x, y)
    return x, y, guide


def svi_of(guide, loss=None):
    return SVI(guide.model, guide, pyro.optim.Adam({"lr": 0.01}), loss or TraceQuadrature_ELBO(2))


def restored(guide, state=None, family=None):
    other = AutoSparseGP(guide.model, family or SVGP(7))
    other.load_state_dict(state or guide.state_dict())
    return other


def local(x, y=None, size=None):
    """A latent for each datum."""
    f = pyro.sample("f", GaussianProcess(RBF, x))
    with pyro.plate("data", size or len(x), subsample=x):
        z = pyro.sample("z", dist.Normal(f, 0.5))
        return pyro.sample("y", dist.Normal(z, 0.1), obs=y)


def _registers(network, x, y=None):
    pyro.module("network", network)
    return gaussian(RBF, 0.3)(network(x), y)


class _Registers:
    """A model that holds a network, in an attribute or in an object of its own."""

    def __init__(self, network, kind):
        self.held = _Settings(network) if kind == "settings" else network

    def __call__(self, x, y=None):
        return _registers(getattr(self.held, "network", self.held), x, y)


class _Settings:
    def __init__(self, network):
        self.network = network


class TestOwnership:
    def test_two_guides_never_meet(self):
        x, y, first = begun(steps=6)
        before = means(first, x)
        second = prepared(regression, SVGP(5, start="prior"), x, y, independent=True)
        assert second.gps.f.basis.sizes == (5,)
        assert second.posterior(x)["f"].kl.abs() < 1e-10  # fresh, not the first one's
        train(regression, second, x, y, steps=6)
        assert torch.equal(means(first, x), before)

    def test_the_parameter_store_does_not_matter(self):
        x, y, guide = begun(steps=6)
        before, stale = means(guide, x), pyro.get_param_store().get_state()
        pyro.clear_param_store()
        assert torch.equal(means(guide, x), before)
        train(regression, guide, x, y, steps=5)
        after = means(guide, x)
        assert not torch.equal(after, before)
        pyro.get_param_store().set_state(stale)
        assert torch.equal(means(restored(guide), x), after)

    @pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda guide: pickle.loads(pickle.dumps(guide))])
    def test_copies_are_guides_of_their_own(self, duplicate):
        x, y, guide = begun(steps=6)
        before, other = means(guide, x), duplicate(duplicate(guide))
        assert torch.equal(means(other, x), before)
        train(regression, other, x, y, steps=3)
        assert torch.equal(means(guide, x), before)
        assert not torch.equal(means(other, x), before)

    @pytest.mark.parametrize("kind", ["attribute", "settings", "partial"])
    @pytest.mark.parametrize("clear", [False, True])
    def test_a_model_that_registers_its_network_pickles(self, kind, clear):
        network = torch.nn.Linear(2, 2)
        model = functools.partial(_registers, network) if kind == "partial" else _Registers(network, kind)
        x, y, guide = begun(model, steps=3)
        if clear:
            pyro.clear_param_store()
        other = pickle.loads(pickle.dumps(guide))
        assert torch.equal(means(other, x), means(guide, x))
        train(model, guide, x, y, steps=1)
        train(other.model, other, x, y, steps=1)

    def test_module_local_parameters(self):
        with pyro.settings.context(module_local_params=True):
            x, y = data()
            guide = AutoSparseGP(regression, SVGP(7), independent=True)
            losses = train(regression, guide, x, y, steps=20)
            assert losses[-1] < losses[0]
            assert guide(x[:3])["y"].shape == (3,)

    def test_learning_rates_by_name(self):
        x, y, guide = begun(family=SVGP(7, natural=False), independent=True)
        before = {name: value.clone() for name, value in guide.named_parameters()}
        optim = pyro.optim.Adam(lambda name: {"lr": 0.1 if "loc_0" in name else 0.0})
        for _ in range(2):
            SVI(regression, guide, optim, TraceQuadrature_ELBO(2)).step(x, y)
        moved = {name for name, value in guide.named_parameters() if not torch.equal(value, before[name])}
        assert moved == {"gps.f.coefficients.loc_0_unconstrained"}


@pytest.mark.parametrize("family", [SVGP(7), SGPR(7), ComputationAware(5), MeanFieldAdditive(5), WeightSpace()])
def test_other_columns_than_in_training_raise(family):
    """A scalar length scale would take any number."""
    x, y = torch.rand(20, 3), torch.rand(20)
    model = gaussian(kernels.Linear(1.0) if isinstance(family, WeightSpace) else RBF)
    guide = trained(model, family, x, y, steps=1)
    for found in (guide, restored(guide, family=family)):
        for new in (x[:5, :1], torch.rand(5, 4)):
            message = rf"GP site 'f' has inputs of shape \(5, {new.shape[1]}\); .* they had 3 columns"
            for ask in (found.posterior, found, partial(predict, model, found, num_samples=1)):
                refused(message, ask, new)
            q = found.posterior(x)["f"]
            for ask in (q.at, q.paths(2), q.components.at, partial(q.process.given, f=torch.zeros(5))):
                refused("for a process whose own have 3 columns", ask, new)
            refused(r"inputs of shape \(5,\) for .* columns, \(N, 3\)", q.paths(2), torch.rand(5))
            refused("must be a float32 or float64 tensor", q.paths(2), torch.rand(5, 3).numpy())
    refused("they had 3 columns, not 2", train, model, guide, x[:, :2], y, steps=1)


def test_a_plate_smaller_than_its_rows_raises():
    x, y = torch.rand(60, 1), torch.rand(60)
    with pytest.raises(ValueError, match=r"'y' observes 60 rows in pyro.plate\('data', 20, subsample=...\).*by 20/60"):
        AutoSparseGP(PLAIN, SVGP(7))(x, y, 20)
    guide = prepared(PLAIN, SVGP(7), x, y)
    refused("weighed by 20/60", train, PLAIN, guide, x, y, 20, steps=1)
    train(PLAIN, guide, x[:20], y[:20], 60, steps=1)


def test_noise_in_the_kernel_is_told_of():
    with pytest.warns(UserWarning, match="50% of the variance of GP site 'f' is independent noise"):
        begun(gaussian(RBF + kernels.White(1.0)))
    begun(gaussian(RBF + kernels.White(1e-4)))  # no more than jitter: warnings are errors here


class TestState:
    @pytest.mark.filterwarnings("ignore:.* is one Gaussian with a full covariance")
    def test_file_round_trip_and_resume(self):
        families = {"f": SVGP(7), "g": OrthogonalInducing(4, 3)}
        x, y, guide = begun(heteroscedastic, families, steps=6)
        file = io.BytesIO()
        torch.save(guide.state_dict(), file)
        file.seek(0)
        other = restored(guide, torch.load(file, weights_only=True), families)
        assert other.structure == guide.structure
        assert sorted(other.state_dict()) == sorted(guide.state_dict())
        assert other(x[:5])["y"].shape == (5,)  # remembers that y was observed
        pyro.set_rng_seed(1)
        one = train(heteroscedastic, guide, x, y, steps=5)
        pyro.set_rng_seed(1)
        assert train(heteroscedastic, other, x, y, steps=5) == pytest.approx(one, rel=1e-10)

    @pytest.mark.quick("True")
    @pytest.mark.parametrize("saved", ["state", "guide"])
    @pytest.mark.parametrize("store_first", [False, True])
    def test_resuming_an_optimiser(self, tmp_path, saved, store_first):
        x, y = data(num=20)
        guide = AutoSparseGP(regression, SVGP(7))
        svi = svi_of(guide)
        for _ in range(4):
            svi.step(x, y)
        store = pyro.get_param_store()
        store.save(tmp_path / "store")
        svi.optim.save(tmp_path / "optim")
        torch.save(guide.state_dict() if saved == "state" else guide, tmp_path / "guide")
        # More steps, and an older copy of the parameters in the file than the guide's must not matter.
        pyro.set_rng_seed(1)
        expected = [svi.step(x, y) for _ in range(3)]
        name = guide._pyro_name
        del guide, svi
        gc.collect()
        pyro.clear_param_store()

        def load_store():
            store.load(tmp_path / "store")
            for key in store:
                if key.startswith(name):
                    store._params[key].data.zero_()

        if store_first:
            load_store()
        other = torch.load(tmp_path / "guide", weights_only=saved == "state")
        if saved == "state":
            state, other = other, AutoSparseGP(regression, SVGP(7))
            other.load_state_dict(state)
        if not store_first:
            load_store()
        svi = svi_of(other)
        svi.optim.load(tmp_path / "optim")
        pyro.set_rng_seed(1)
        assert [svi.step(x, y) for _ in range(3)] == pytest.approx(expected, rel=1e-10)

    def test_loading_into_a_used_guide_keeps_its_parameters(self):
        x, _, guide = begun(steps=5)
        *_, other = begun()
        parameters = list(other.parameters())
        other.load_state_dict(guide.state_dict())
        assert all(a is b for a, b in zip(parameters, other.parameters()))
        assert torch.equal(means(other, x), means(guide, x))

    @pytest.mark.parametrize("used", [False, True])
    def test_the_state_of_another_family_or_model_is_an_error(self, used):
        x, y, guide = begun(num=20)
        for family, said in (
            (SVGP(5), "SVGP\\(inducing=5, natural=True\\)"),
            (OrthogonalInducing(4, 3), "OrthogonalInducing\\(inducing=4, orthogonal=3, natural=True\\)"),
            (MeanFieldAdditive(7), "MeanFieldAdditive\\(inducing=7, natural=True\\)"),
        ):
            other = prepared(regression, family, x, y) if used else AutoSparseGP(regression, family)
            saved = r"GP site 'f' is SVGP\(inducing=7, natural=True\)"
            refused(rf"{saved}, this guide declares {said}", other.load_state_dict, guide.state_dict())
        refused("no family is given for GP site 'f'", restored, guide, family={"h": SVGP(7)})
        other = prepared(PLAIN, SVGP(7), x, y) if used else AutoSparseGP(PLAIN, SVGP(7))
        other.load_state_dict(guide.state_dict())
        refused("there is no latent site 'noise'", TraceQuadrature_ELBO().loss, PLAIN, other, x, y)

    def test_given_inputs_count_as_their_number(self):
        x, _, guide = begun()
        assert torch.equal(means(restored(guide, family=SVGP(x[:7])), x), means(guide, x))
        assert repr(SVGP(x[:7], rate=0.5)) == "SVGP(inducing=7, rate=0.5)"

    def test_a_fresh_guide_has_an_empty_state(self):
        assert restored(AutoSparseGP(regression, SVGP(7))).structure is None


@pytest.mark.parametrize("saved", [True, False])
def test_states_of_other_point_estimates_are_refused(saved):
    *_, guide = begun(num=20, point_estimates=saved)
    with pytest.raises(ValueError, match=r"of another kind .* this guide.s: make the guide with the point_estimates="):
        AutoSparseGP(regression, SVGP(7), point_estimates=not saved).load_state_dict(guide.state_dict())


class TestSites:
    def test_other_latents_are_mean_field_and_start_where_told(self):
        start = {"scale": torch.tensor(2.0), "length": torch.tensor([0.3, 0.4]), "noise": torch.tensor(0.1)}
        x, y, guide = begun(init_loc_fn=init_to_value(values=start), init_scale=0.01, independent=True)
        medians = guide.median(x, y)
        for name, value in start.items():
            torch.testing.assert_close(medians[name], value)
        torch.testing.assert_close(guide.scales.noise, torch.tensor(0.01))

    def test_point_estimates(self):
        for points in (True, ["length", "noise"]):
            x, y, guide = begun(steps=5, point_estimates=points, independent=True)
            draws = [guide(x, y) for _ in range(2)]
            assert torch.equal(draws[0]["length"], draws[1]["length"])
            assert torch.equal(draws[0]["scale"], draws[1]["scale"]) == (points is True)
            names = [name for name, _ in guide.named_parameters()]
            assert ("scales.scale_unconstrained" in names) == (points is not True)
            assert "scales.noise_unconstrained" not in names
            for elbo in (TraceQuadrature_ELBO(), Trace_ELBO()):
                assert torch.tensor(elbo.loss(regression, guide, x, y)).isfinite()
        elbo = TraceQuadrature_ELBO(2)
        x, y, guide = begun(point_estimates=True)
        assert elbo.loss(regression, guide, x, y) == elbo.loss(regression, guide, x, y)
        refused(r"point_estimates names \['lenght'\]", prepared, regression, SVGP(7), x, y, point_estimates=["lenght"])

    def test_get_posterior_can_be_overridden(self):
        class Mine(AutoSparseGP):
            def get_posterior(self, name, prior):
                if name == "noise":
                    return dist.LogNormal(pyro.param("mine", torch.tensor(-1.0)), 0.1)
                return super().get_posterior(name, prior)

        x, y = data()
        guide = Mine(regression, SVGP(7))
        losses = train(regression, guide, x, y, steps=20)
        assert losses[-1] < losses[0]
        assert pyro.param("mine") != -1.0
        assert guide(x[:3])["y"].shape == (3,)

    def test_draws_are_independent_in_train_and_joint_in_eval(self):
        _, y, guide = begun(gaussian(kernels.RBF(5.0)), SVGP(5))
        close = torch.zeros(2, 2) + torch.tensor([[0.0], [1e-4]])
        with torch.no_grad():
            train_draws = torch.stack([guide(close, y[:2])["f"] for _ in range(100)])
        predicted = torch.stack([guide(close)["f"] for _ in range(20)])
        assert predicted.T.corrcoef()[0, 1] > 0.99
        guide.eval()
        eval_draws = torch.stack([guide(close)["f"] for _ in range(20)])
        assert abs(train_draws.T.corrcoef()[0, 1]) < 0.3
        assert eval_draws.T.corrcoef()[0, 1] > 0.99

    @pytest.mark.filterwarnings("ignore:latent site .* has a value for each datum")
    def test_subsampling_is_off_in_prediction(self):
        def model(x, y=None):
            plate = pyro.plate("data", len(x), subsample_size=16)
            f = pyro.sample("f", GaussianProcess(RBF, x[plate.indices]))
            with plate:
                local = pyro.sample("local", dist.Normal(0.0, 0.1))
                return pyro.sample("y", dist.Normal(f + local, 0.2), obs=None if y is None else y[plate.indices])

        x, y, guide = begun(model, steps=5)
        assert guide.locs.local_unconstrained.shape == (60,)
        new = torch.rand(33, 2)
        assert predict(model, guide, new, num_samples=3)["local"].shape == (3, 33)
        assert guide.posterior(new)["f"].mean.shape == (33,)
        assert guide(x, y)["f"].shape == (16,)

    @pytest.mark.filterwarnings("ignore:latent site .* has a value for each datum")
    def test_local_latents(self):
        """At new inputs they come from the model; a mini-batch of them needs row numbers."""
        x, y, guide = begun(local, steps=5)
        assert guide(x[:4])["z"].shape == (4,)
        draws = predict(local, guide, x, num_samples=100)  # the same number of rows, and still new
        assert abs((draws["z"] - draws["f"]).std() - 0.5) < 0.05
        refused(r"'z' inside pyro.plate.*plate.indices", guide, x[:10], y[:10], size=60)


def changing(x, y=None, more=""):
    """A program that meets another site later."""
    f = pyro.sample("f", GaussianProcess(RBF, x))
    if more == "site":
        pyro.sample("g", GaussianProcess(RBF, x))
    level = pyro.sample("level", dist.Normal(0.0, 1.0)) if more == "latent" else 0.0
    return observed(dist.Normal(f + level, 0.2), y)


def doubled(x, y=None):
    c = pyro.sample("c", dist.Delta(2 * pyro.sample("b", dist.Normal(0.0, 1.0))))
    return observed(dist.Normal(pyro.sample("f", GaussianProcess(kernels.RBF(0.3), x)) + c, 0.1), y)


def in_the_plate(x, y=None, batch=None):
    with pyro.plate("data", 60, subsample=batch):
        f = pyro.sample("f", GaussianProcess(RBF, x))
        return pyro.sample("y", dist.Normal(f, 0.1), obs=y)


def forgets(x, y):
    f = pyro.sample("f", GaussianProcess(kernels.from_pyro(FORGOTTEN), x))
    pyro.sample("y", dist.Normal(f, 0.1).to_event(1), obs=y)


class Broken(kernels.RBF):
    def __call__(self, x, z=None):
        k = super().__call__(x, z)
        return -k if z is None else k


FORGOTTEN = gp.kernels.RBF(2)
SPARSE = SVGP(5)
NOTHING = lambda: pyro.sample("y", dist.Normal(0.0, 1.0), obs=torch.tensor(1.0))  # noqa: E731
LEVEL = lambda: pyro.sample("level", dist.Normal(0.0, 1.0))  # noqa: E731
PLATE = r"inside pyro.plate\('data'\).*Sample the process before the plate"


def guided(model=PLAIN, family=SPARSE):
    return AutoSparseGP(model, family)


def numbered(y, value):
    return torch.where(torch.arange(len(y)) == 3, value, y)


@pytest.mark.parametrize(
    ("call", "message"),
    [
        (lambda x, y: guided(heteroscedastic, {"f": SPARSE})(x, y), r"no family is given for GP site 'g'.*\['f'\]"),
        (
            lambda x, y: guided(regression, {"f": SPARSE, "noise": SPARSE})(x, y),
            r"families names \['noise'\]; the GP sites are \['f'\]",
        ),
        (lambda x, y: guided(regression, {"f": SPARSE, "h": SPARSE})(x, y), r"families names \['h'\]"),
        (lambda x, y: guided(family=SVGP), r"an instance, not the class"),
        (lambda x, y: guided(family={"f": 64}), "families must be a family"),
        (lambda x, y: guided(family={"f": SPARSE, "g": families.SparseEP(8)}), "must all be SparseEP or none"),
        (lambda x, y: guided(None), "model must be callable"),
        (lambda x, y: guided(NOTHING)(), "no GP site"),
        (lambda x, y: guided(regression)(x), "observes nothing"),
        (lambda x, y: guided()(x[:, 0], y), r"x must have shape \(N, D\), got \(60,\)"),
        (lambda x, y: guided()(x.long(), y), r"float32 or float64 tensor \(N, D\), got a tensor of torch.int64"),
        (lambda x, y: guided()(x.half(), y), r"float32 or float64 tensor \(N, D\), got a tensor of torch.float16"),
        (lambda x, y: guided()(x.numpy(), y), r"float32 or float64 tensor \(N, D\), got ndarray"),
        (lambda x, y: guided()(x * torch.nan, y), "contains NaN"),
        (lambda x, y: begun(PLAIN)[2](x * torch.nan, y), "contains NaN"),
        (lambda x, y: Predictive(PLAIN, num_samples=1)(x * torch.nan), "contains NaN"),
        (lambda x, y: begun(PLAIN)[2](x.float(), y.float()), r"'f' has inputs of torch.float32.*guide.float\(\)"),
        (lambda x, y: torch.inference_mode()(guided())(x, y), "the guide's first call makes its parameters"),
        (
            lambda x, y: guided(lambda x, y: pyro.sample("f", GaussianProcess(RBF, x), obs=y))(x, y),
            r"no GP site to approximate.*Data need a likelihood",
        ),
        (lambda x, y: guided()(x, numbered(y, torch.nan)), r"site 'y' has no density.*1 of 60 are NaN.*poutine.mask"),
        (lambda x, y: guided(in_the_plate)(x, y), "site 'f' stands " + PLATE),
        (lambda x, y: guided(in_the_plate)(x[:20], y[:10], torch.arange(10)), "site 'f' stands " + PLATE),
        (lambda x, y: Predictive(in_the_plate, num_samples=2)(x), "GaussianProcess stands " + PLATE),
        (
            lambda x, y: guided(lambda x, y: PLAIN(x, y + poutine.mask(LEVEL, mask=False)()))(x, y),
            r"'level' is a latent under a poutine.mask.*dist.Normal\(0.0, 1.0\).mask\(keep\)",
        ),
        (lambda x, y: guided(doubled)(x, y), "latent site 'c' has a Delta prior.*pyro.deterministic"),
        (lambda x, y: guided(forgets)(x, y), "these parameters would not train"),
        (lambda x, y: begun(changing)[2](x, more="site"), "GP site 'g' was not there"),
        (lambda x, y: svi_of(begun(changing)[2]).step(x, y, more="latent"), "there is a latent site 'level'"),
    ],
)
def test_refusals(call, message):
    refused(message, lambda: call(*data()))


def test_a_failed_cholesky_names_the_site():
    with pytest.raises(RuntimeError, match=r"K_ZZ of site 'f' \(5 x 5, float64\) failed"):
        guided(gaussian(Broken()))(*data())


def test_inference_mode_and_another_dtype_after_the_first_call():
    x, _, guide = begun(PLAIN)
    with torch.inference_mode():
        assert predict(guide.model, guide, x, num_samples=2)["y"].shape == (2, 60)
    guide.float()
    guide(x.float())


def test_independent_processes_inside_another_plate():
    x, y = data()

    def model(x, y=None):
        with pyro.plate("tasks", 3):
            f = pyro.sample("f", GaussianProcess(RBF, x))
        with pyro.plate("rows", 3, dim=-2), pyro.plate("data", len(x), dim=-1):
            return pyro.sample("y", dist.Normal(f, 0.1), obs=y)

    guide = guided(model)
    train(model, guide, x, torch.stack([y, -y, 2 * y]), steps=5)
    assert guide.posterior(x)["f"].mean.shape == (3, 60)


def test_vectorised_samples():
    x, y = data()
    guide = guided(regression)
    message = (
        r"'(f|noise)' stands inside a plate over samples \(vectorize_particles=True, or Predictive\(parallel=True\)\)"
    )
    elbo = Trace_ELBO(num_particles=2, vectorize_particles=True, max_plate_nesting=1)
    for ask in (
        lambda: svi_of(guide, elbo).step(x, y),
        lambda: guide(x, y) and svi_of(guide, elbo).step(x, y),
        lambda: Predictive(regression, guide=guide, num_samples=2, parallel=True)(x),
    ):
        refused(message, ask)
    refused("inside a plate over samples", lambda: Predictive(regression, num_samples=2, parallel=True)(x))


class Warped(kernels.RBF):
    def __init__(self, network):
        super().__init__()
        self.network = network

    def __call__(self, x, z=None):
        return super().__call__(self.network(x), None if z is None else self.network(z))


@pytest.mark.parametrize("where", ["kernel", "inputs", "mean", "gpytorch"])
def test_an_unregistered_network(where):
    x, y = data()
    network = torch.nn.Sequential(torch.nn.Linear(2, 1))
    if where == "gpytorch":
        network = pytest.importorskip("gpytorch").kernels.RBFKernel()
        kernel = kernels.from_gpytorch(network)

    def model(x, y=None, register=False):
        if register:
            pyro.module("network", network)
        process = {
            "kernel": lambda: GaussianProcess(Warped(network), x),
            "inputs": lambda: GaussianProcess(RBF, network(x)),
            "mean": lambda: GaussianProcess(RBF, x, mean=lambda x: network(x)[:, 0]),
            "gpytorch": lambda: GaussianProcess(kernel, x),
        }[where]()
        f = pyro.sample("f", process)
        return observed(dist.Normal(f, 0.1), y)

    name = "RBFKernel.raw_lengthscale" if where == "gpytorch" else "Sequential.0.weight"
    guide = guided(model)
    refused(rf"would not train: {name}.*pyro.module", lambda: svi_of(guide).step(x, y))
    refused("would not train", lambda: svi_of(guide, Trace_ELBO()).step(x, y))
    train(model, guide, x, y, steps=3, register=True)
    network.requires_grad_(False)
    if where != "gpytorch":
        train(model, guided(model), x, y, steps=2)


def test_a_pyro_module_model_registers_its_network():
    class Model(pyro.nn.PyroModule):
        def __init__(self):
            super().__init__()
            self.network = torch.nn.Linear(2, 1)

        def forward(self, x, y=None):
            return PLAIN(self.network(x), y)

    model = Model()
    before = model.network.weight.detach().clone()
    *_, guide = begun(model, steps=3)
    assert not torch.equal(model.network.weight, before)
    assert not any("network" in name for name in guide.state_dict())


def test_a_mini_batch_without_size_warns_once():
    x, y, guide = begun()
    svi = svi_of(guide)
    svi.step(x, y)
    svi.step(x[:10], y[:10], size=60)
    svi.evaluate_loss(x[:10], y[:10])
    with pytest.warns(UserWarning, match="site 'y' observes 10 values in this step, .* 60 before.*size=N"):
        svi.step(x[:10], y[:10])
    svi.step(x[:10], y[:10])


def test_an_interrupted_first_call_leaves_nothing():
    x, y = data()
    fail = [True]

    def model(x, y=None):
        f = pyro.sample("f", GaussianProcess(RBF, x))
        if fail[0]:
            raise KeyboardInterrupt
        pyro.sample("y", dist.Normal(f, 0.1).to_event(1), obs=y)

    guide = guided(model)
    with pytest.raises(KeyboardInterrupt):
        guide(x, y)
    assert not list(guide.parameters())
    fail[0] = False
    train(model, guide, x, y, steps=2)


def test_one_data_point_and_one_inducing_point():
    x, _, guide = begun(family=SVGP(1), steps=5, num=1)
    assert guide(x)["y"].shape == (1,)


@pytest.mark.parametrize("family", [SVGP(5), SGPR(5)], ids=["SVGP", "SGPR"])
def test_draws_of_predictions_share_one_posterior(family, monkeypatch):
    x, _, guide = begun(family=family, steps=3, num=20, point_estimates=True)
    new, made = torch.rand(7, x.shape[-1]), []
    whole = SparsePosterior.residual_tril.func
    monkeypatch.setattr(SparsePosterior, "residual_tril", property(lambda q: made.append(q) or whole(q)))
    values = predict(regression, guide, new, num_samples=100)["f"]
    assert len(made) == 2  # the first draw's, and that of all others in one block
    q = guide.posterior(new)["f"]
    assert ((values.mean(0) - q.mean).abs() < 5 * q.stddev / 10).all()
    spread = torch.cov(values.T) - q.covariance_matrix
    assert spread.abs().max() < 0.6 * q.variance.max()


@pytest.mark.filterwarnings("ignore:latent site .* has a value for each datum")
def test_posteriors_whose_prior_follows_what_is_drawn_are_not_shared():
    # The level of each new row is drawn from the model, though levels of the rows of training are points.
    def levels(x, y=None):
        rows = pyro.plate("data", len(x))
        with rows:
            level = pyro.sample("level", dist.Normal(0.0, 10.0))
        f = pyro.sample("f", GaussianProcess(RBF, x, mean=level))
        with rows:
            return pyro.sample("y", dist.Normal(f, 0.1), obs=y)

    *_, guide = begun(levels, SPARSE, steps=3, num=20, point_estimates=True)
    draws = predict(levels, guide, torch.rand(4, 2), num_samples=60)
    assert draws["level"].std(0).min() > 5
    torch.testing.assert_close(draws["f"], draws["level"], rtol=0, atol=8.0)


@pytest.mark.quick("SGPR-rows of training | scaled")
@pytest.mark.parametrize("which", ["new rows", "rows of training", "scaled"])
@pytest.mark.parametrize("family", [SGPR(5), ComputationAware(4)], ids=["SGPR", "ComputationAware"])
def test_handlers_around_a_prediction_are_not_those_of_the_training_data(family, which):
    # Pyro's prediction runs the guide under a mask that leaves all densities out.
    x, y, guide = begun(family=family, steps=4, num=30, point_estimates=True)
    arguments = (x, y) if which == "rows of training" else (torch.rand(6, x.shape[-1]),)
    q = guide.posterior(*arguments)["f"]
    with torch.no_grad():
        if which == "scaled":
            guide.eval()
            draws = torch.stack([poutine.scale(guide, 0.01)(*arguments)["f"] for _ in range(40)])
        else:
            draws = Predictive(regression, guide=guide, num_samples=40, return_sites=("f",))(*arguments)["f"]
        with poutine.mask(mask=False):
            again = guide.posterior(*arguments)["f"]
    assert_alike(again, q)
    draws = draws.reshape(40, -1)
    assert ((draws.mean(0) - q.mean).abs() < 5 * q.stddev / 40**0.5).all()
    assert ((draws.var(0) / q.variance).log().abs() < 1.5).all()


@pytest.mark.parametrize(
    ("family", "match"),
    [(SVGP(5), r"site 'f'.*\(1 of 20 values, the first at 7\)"), (SGPR(5), "'f' .* brings other rows at site 'y'")],
    ids=["SVGP", "SGPR"],
)
def test_numbers_that_are_none_are_named(family, match):
    x, y, guide = begun(family=family, steps=2, num=20)
    bad = torch.where((torch.arange(20) == 7)[:, None], torch.nan, x)
    with pytest.raises(ValueError, match=match), pyro.validation_enabled(False):
        svi_of(guide).step(bad, y)
    q = guide.posterior(x)["f"]
    for other in (x[None], x.float(), x.tolist()):
        refused("the posterior of site 'f' got inputs", q.at, other)
    for num in (0, 2.5, True):
        refused("whole number of at least 1", predict, regression, guide, x, num_samples=num)


def test_a_summary_is_of_draws_and_prints_as_a_table():
    x, _, guide = begun(steps=5)
    table = guide.summary(x[:2], num_draws=1000)
    assert {*table.names[:-2]} == {"length[0]", "length[1]", "noise", "scale"}
    assert table.names[-2:] == ("f[0]", "f[1]")
    draws = guide.quantiles([0.05, 0.5], x[:2], num_draws=1000)["f"]
    assert ((table.low[-2:] - draws[0]).abs() < 0.2 * table.sd[-2:]).all()
    assert ((table.mean[-2:] - draws[1]).abs() < 0.2 * table.sd[-2:]).all()
    lines = repr(guide.summary(num_draws=20)).splitlines()
    assert len(lines) == 5
    assert lines[0].split() == ["mean", "sd", "5%", "95%"]
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        assert guide.summary(num_draws=1).sd.isnan().all()
        assert prepared(PLAIN, SVGP(5), *data(num=20)).summary(num_draws=5).names == ()  # of no latents


@pytest.mark.parametrize("is_made_of_f", [False, True])
def test_a_summary_of_latents_reads_no_function_values_but_where_a_latent_is_made_of_them(is_made_of_f, monkeypatch):
    def model(x, y=None):
        noise, f = pyro.sample("noise", dist.LogNormal(-1.0, 0.5)), pyro.sample("f", GaussianProcess(RBF, x))
        loc = pyro.sample("a", dist.Normal(f[..., 0], 0.1))[..., None] + f if is_made_of_f else f
        observed(dist.Normal(loc, noise[..., None]), y)

    guide, asked = trained(model, SVGP(5), *data(num=20), steps=5), list[str]()
    variance = SparsePosterior.variance.func
    monkeypatch.setattr(SparsePosterior, "variance", property(lambda q: asked.append(q.name) or variance(q)))
    assert {*guide.summary(num_draws=3).names} == {"noise", *["a"] * is_made_of_f}
    assert bool(asked) == is_made_of_f


@pytest.mark.parametrize("independent", [True, ()])
def test_medians_and_quantiles_as_of_auto_normal(independent):
    """Of draws: hyperparameters' are those of the normal in unconstrained space, f's those of its posterior."""
    x, _, guide = begun(steps=5, independent=independent)
    found = guide.quantiles([0.1, 0.5, 0.9])
    assert "f" not in found
    found |= guide.quantiles([0.1, 0.5, 0.9], x)
    assert found["f"].shape == (3, 60)
    assert found["length"].shape == (3, 2)
    for name, median in guide.median().items():
        if name != "y":
            spread = found[name][2] - found[name][0]
            assert ((found[name][1] - median).abs() < 0.15 * spread).all(), name
    if independent:
        loc, scale = guide.locs.noise, guide.scales.noise
        exact = (loc + scale * torch.tensor([-1.2816, 0.0, 1.2816])).exp().detach()
        assert ((found["noise"] - exact).abs() < 0.15 * (exact[2] - exact[0])).all()
    new = guide.quantiles(torch.tensor([0.5]), x[:4], num_draws=20)
    assert new["f"].shape == (1, 4)
    refused("quantiles must be between 0 and 1", guide.quantiles, [50])
    guide.forget_data()
    refused(r"holds no training data: give the model's arguments, guide.median\(", guide.median)


NAMES = "forward", "train", "modules", "state_dict", "training", "_modules"


@pytest.mark.quick("0-False | 1-False | 1-True")  # by which each name is that of a site once
@pytest.mark.parametrize("independent", [False, True])
@pytest.mark.parametrize("place", range(6))
def test_sites_may_have_names_of_what_modules_have(place, independent):
    """Each name is that of a hyperparameter, of a latent of the field and of a GP site once."""
    x, y = data(num=12)
    named = NAMES[place], NAMES[place - 2], NAMES[place - 4]

    def model(x, y=None):
        length = pyro.sample(named[0], dist.LogNormal(0.0, 1.0))
        level = pyro.sample(named[1], dist.Normal(0.0, 1.0))
        f = pyro.sample(named[2], GaussianProcess(kernels.RBF(length), x))
        observed(dist.Normal(f + level, 0.3), y)

    guide = trained(model, SVGP(4), x, y, steps=2, independent=independent)
    fresh = AutoSparseGP(model, SVGP(4), independent=independent)
    fresh.load_state_dict(guide.state_dict())
    assert_alike(fresh.posterior(x)[named[2]], guide.posterior(x)[named[2]])
    assert {*named} <= {*guide.median(x)}
