"""The guide: what it owns, remembers, restores, refuses and warns of."""

import copy
import functools
import gc
import io
import pickle
from functools import partial

import pyro
import pyro.contrib.gp as gp
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.infer import SVI, Predictive, Trace_ELBO
from pyro.infer.autoguide import init_to_value
from pyro.nn import PyroModule

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels, predict
from pyro_sparsegp.families import (
    SGPR,
    SVGP,
    ComputationAware,
    FreeSites,
    MeanFieldAdditive,
    OrthogonalInducing,
    WeightSpace,
)
from pyro_sparsegp.posterior.sparse_posterior import SparsePosterior

from .models import data, gaussian, heteroscedastic, regression, train

RBF = kernels.RBF(0.5)


def means(guide, x):
    return guide.posterior(x)["f"].mean.detach()


def _registers(network, x, y=None):
    pyro.module("network", network)
    f = pyro.sample("f", GaussianProcess(RBF, network(x)))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(f, 0.3), obs=y)


class _Settings:
    def __init__(self, network):
        self.network = network


class _Registers:
    """A model that holds a network, in an attribute or in an object of its own."""

    def __init__(self, network, kind):
        self.held = _Settings(network) if kind == "settings" else network

    def __call__(self, x, y=None):
        return _registers(getattr(self.held, "network", self.held), x, y)


class TestOwnership:
    def test_two_guides_never_meet(self):
        x, y = data()
        first = AutoSparseGP(regression, SVGP(7))
        train(regression, first, x, y, steps=6)
        before = means(first, x)
        second = AutoSparseGP(regression, SVGP(5, start="prior"))
        second(x, y)
        assert second.gps.f.basis.sizes == (5,)
        assert second.posterior(x)["f"].kl.abs() < 1e-10  # fresh, not the first one's
        train(regression, second, x, y, steps=6)
        assert torch.equal(means(first, x), before)

    def test_guides_inside_modules_never_meet(self):
        class Holder(PyroModule):
            def __init__(self):
                super().__init__()
                self.guide = AutoSparseGP(regression, SVGP(7))

        x, y = data()
        one, two = Holder(), Holder()
        train(regression, one.guide, x, y, steps=6)
        before = means(one.guide, x)
        train(regression, two.guide, x, -y, steps=6)
        assert torch.equal(means(one.guide, x), before)
        three = Holder()
        three.load_state_dict(one.state_dict())
        assert torch.equal(means(three.guide, x), before)
        train(regression, three.guide, x, y, steps=3)
        assert torch.equal(means(one.guide, x), before)

    def test_the_parameter_store_does_not_matter(self):
        x, y = data()
        guide = AutoSparseGP(regression, SVGP(7))
        train(regression, guide, x, y, steps=20)
        before, stale = means(guide, x), pyro.get_param_store().get_state()
        pyro.clear_param_store()
        assert torch.equal(means(guide, x), before)
        train(regression, guide, x, y, steps=5)
        after = means(guide, x)
        assert not torch.equal(after, before)
        other = AutoSparseGP(regression, SVGP(7))
        pyro.get_param_store().set_state(stale)
        other.load_state_dict(guide.state_dict())
        assert torch.equal(means(other, x), after)

    @pytest.mark.parametrize("duplicate", [copy.deepcopy, lambda guide: pickle.loads(pickle.dumps(guide))])
    def test_copies_are_guides_of_their_own(self, duplicate):
        x, y = data()
        guide = AutoSparseGP(regression, SVGP(7))
        train(regression, guide, x, y, steps=10)
        before = means(guide, x)
        other = duplicate(duplicate(guide))
        assert torch.equal(means(other, x), before)
        train(regression, other, x, y, steps=3)
        assert torch.equal(means(guide, x), before)
        assert not torch.equal(means(other, x), before)

    @pytest.mark.parametrize("kind", ["attribute", "settings", "partial"])
    @pytest.mark.parametrize("clear", [False, True])
    def test_a_model_that_registers_its_network_pickles(self, kind, clear):
        x, y = data()
        network = torch.nn.Linear(2, 2)
        model = functools.partial(_registers, network) if kind == "partial" else _Registers(network, kind)
        guide = AutoSparseGP(model, SVGP(7))
        train(model, guide, x, y, steps=3)
        if clear:
            pyro.clear_param_store()
        other = pickle.loads(pickle.dumps(guide))
        assert torch.equal(means(other, x), means(guide, x))
        train(model, guide, x, y, steps=1)
        train(other.model, other, x, y, steps=1)

    def test_module_local_parameters(self):
        x, y = data()
        with pyro.settings.context(module_local_params=True):
            guide = AutoSparseGP(regression, SVGP(7))
            losses = train(regression, guide, x, y, steps=30)
            assert losses[-1] < losses[0]
            assert guide(x[:3])["y"].shape == (3,)

    def test_learning_rates_by_name(self):
        x, y = data()
        guide = AutoSparseGP(regression, SVGP(7, natural=False))
        guide(x, y)
        before = {name: value.clone() for name, value in guide.named_parameters()}
        optim = pyro.optim.Adam(lambda name: {"lr": 0.1 if "loc_0" in name else 0.0})
        SVI(regression, guide, optim, TraceQuadrature_ELBO(2)).step(x, y)
        SVI(regression, guide, optim, TraceQuadrature_ELBO(2)).step(x, y)
        moved = {name for name, value in guide.named_parameters() if not torch.equal(value, before[name])}
        assert moved == {"gps.f.coefficients.loc_0_unconstrained"}


def test_a_forgotten_adapted_kernel_is_told_of():
    module = gp.kernels.RBF(2)

    def model(x, y):
        f = pyro.sample("f", GaussianProcess(kernels.from_pyro(module), x))
        pyro.sample("y", dist.Normal(f, 0.1).to_event(1), obs=y)

    x, y = data()
    with pytest.raises(ValueError, match="these parameters would not train"):
        AutoSparseGP(model, SVGP(7))(x, y)


@pytest.mark.parametrize("family", [SVGP(7), SGPR(7), ComputationAware(5), MeanFieldAdditive(5), WeightSpace()])
def test_other_columns_than_in_training_raise(family):
    """A scalar length scale would take any number."""
    x, y = torch.rand(20, 3), torch.rand(20)
    model = gaussian(kernels.Linear(1.0) if isinstance(family, WeightSpace) else RBF)
    guide = AutoSparseGP(model, family)
    train(model, guide, x, y, steps=1)
    restored = AutoSparseGP(model, family)
    restored.load_state_dict(guide.state_dict())
    for found in (guide, restored):
        for new in (x[:5, :1], torch.rand(5, 4)):
            message = rf"GP site 'f' has inputs of shape \(5, {new.shape[1]}\); .* they had 3 columns"
            for ask in (found.posterior, found, partial(predict, model, found, num_samples=1)):
                with pytest.raises(ValueError, match=message):
                    ask(new)
            q = found.posterior(x)["f"]
            for ask in (q.at, q.paths(2), q.components.at, partial(q.process.given, f=torch.zeros(5))):
                with pytest.raises(ValueError, match="for a process whose own have 3 columns"):
                    ask(new)
    with pytest.raises(ValueError, match="they had 3 columns, not 2"):
        train(model, guide, x[:, :2], y, steps=1)


def test_a_plate_smaller_than_its_rows_raises():
    x, y = torch.rand(60, 1), torch.rand(60)
    with pytest.raises(ValueError, match=r"'y' observes 60 rows in pyro.plate\('data', 20, subsample=...\).*by 20/60"):
        AutoSparseGP(gaussian(RBF), SVGP(7))(x, y, 20)
    model = gaussian(RBF)
    guide = AutoSparseGP(model, SVGP(7))
    guide(x, y)
    with pytest.raises(ValueError, match="weighed by 20/60"):
        train(model, guide, x, y, 20, steps=1)
    train(model, guide, x[:20], y[:20], 60, steps=1)


@pytest.mark.parametrize("family", [SVGP(7), SGPR(7)])
def test_parameters_out_of_support_at_the_first_call_are_named(family):
    def model(x, y=None, variance=1e7):
        f = pyro.sample("f", GaussianProcess(variance * RBF, x))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Beta(f.exp(), 1.0), obs=y)

    x, y = torch.rand(40, 1), torch.rand(40)
    message = r"(?s)parameter concentration .*function values did it, of GP site 'f' from -.*clamp"
    with pytest.raises(ValueError, match=message):
        AutoSparseGP(model, family)(x, y)
    AutoSparseGP(model, family)(x, y, 1.0)


def test_noise_in_the_kernel_is_told_of():
    def model(x, y, share):
        f = pyro.sample("f", GaussianProcess(RBF + kernels.White(share), x))
        pyro.sample("y", dist.Normal(f, 0.1).to_event(1), obs=y)

    x, y = data()
    with pytest.warns(UserWarning, match="50% of the variance of GP site 'f' is independent noise"):
        AutoSparseGP(model, SVGP(7))(x, y, 1.0)
    AutoSparseGP(model, SVGP(7))(x, y, 1e-4)  # no more than jitter: warnings are errors here


class TestState:
    def test_file_round_trip_and_resume(self):
        x, y = data()
        guide = AutoSparseGP(heteroscedastic, {"f": SVGP(7), "g": OrthogonalInducing(4, 3)})
        train(heteroscedastic, guide, x, y, steps=6)
        file = io.BytesIO()
        torch.save(guide.state_dict(), file)
        file.seek(0)
        other = AutoSparseGP(heteroscedastic, {"f": SVGP(7), "g": OrthogonalInducing(4, 3)})
        other.load_state_dict(torch.load(file, weights_only=True))
        assert other.structure == guide.structure
        assert list(other.state_dict()) == list(guide.state_dict())
        assert other(x[:5])["y"].shape == (5,)  # remembers that y was observed
        pyro.set_rng_seed(1)
        one = train(heteroscedastic, guide, x, y, steps=5)
        pyro.set_rng_seed(1)
        assert train(heteroscedastic, other, x, y, steps=5) == pytest.approx(one, rel=1e-10)

    @pytest.mark.parametrize("saved", ["state", "guide"])
    @pytest.mark.parametrize("store_first", [False, True])
    def test_resuming_an_optimiser(self, tmp_path, saved, store_first):
        x, y = data()
        elbo = TraceQuadrature_ELBO(8)
        pyro.clear_param_store()
        guide, optim = AutoSparseGP(regression, SVGP(7)), pyro.optim.Adam({"lr": 0.05})
        svi = SVI(regression, guide, optim, elbo)
        for _ in range(4):
            svi.step(x, y)
        store = pyro.get_param_store()
        store.save(tmp_path / "store")
        optim.save(tmp_path / "optim")
        if saved == "state":
            torch.save(guide.state_dict(), tmp_path / "guide")
        else:
            torch.save(guide, tmp_path / "guide")
        # More steps, and an older copy of the parameters in the file than the guide's must not matter.
        pyro.set_rng_seed(1)
        expected = [svi.step(x, y) for _ in range(3)]
        name = guide._pyro_name
        del guide, svi, optim
        gc.collect()
        pyro.clear_param_store()

        def load_store():
            store.load(tmp_path / "store")
            for key in store:
                if key.startswith(name):
                    store._params[key].data.zero_()

        if store_first:
            load_store()
        if saved == "state":
            other = AutoSparseGP(regression, SVGP(7))
            other.load_state_dict(torch.load(tmp_path / "guide", weights_only=True))
        else:
            other = torch.load(tmp_path / "guide", weights_only=False)
        if not store_first:
            load_store()
        optim = pyro.optim.Adam({"lr": 0.05})
        optim.load(tmp_path / "optim")
        svi = SVI(regression, other, optim, elbo)
        pyro.set_rng_seed(1)
        assert [svi.step(x, y) for _ in range(3)] == pytest.approx(expected, rel=1e-10)

    def test_two_guides_of_one_saved_state_stay_apart(self):
        x, y = data()
        guide = AutoSparseGP(regression, SVGP(7))
        train(regression, guide, x, y, steps=5)
        state = guide.state_dict()
        del guide
        gc.collect()
        one, two = AutoSparseGP(regression, SVGP(7)), AutoSparseGP(regression, SVGP(7))
        one.load_state_dict(state)
        two.load_state_dict(state)
        before = means(two, x)
        train(regression, one, x, y, steps=5)
        assert torch.equal(means(two, x), before)
        assert not torch.equal(means(one, x), before)

    def test_loading_into_a_used_guide_keeps_its_parameters(self):
        x, y = data()
        guide, other = AutoSparseGP(regression, SVGP(7)), AutoSparseGP(regression, SVGP(7))
        train(regression, guide, x, y, steps=5)
        other(x, y)
        parameters = list(other.parameters())
        other.load_state_dict(guide.state_dict())
        assert all(a is b for a, b in zip(parameters, other.parameters()))
        assert torch.equal(means(other, x), means(guide, x))

    @pytest.mark.parametrize("used", [False, True])
    def test_the_state_of_another_family_or_size_is_an_error(self, used):
        x, y = data()
        guide = AutoSparseGP(regression, SVGP(7))
        guide(x, y)
        for family, said in (
            (SVGP(5), "SVGP\\(inducing=5, whiten=True, natural=True\\)"),
            (OrthogonalInducing(4, 3), "OrthogonalInducing\\(inducing=4, orthogonal=3, whiten=True, natural=True\\)"),
            (MeanFieldAdditive(7), "MeanFieldAdditive\\(inducing=7, natural=True\\)"),
        ):
            other = AutoSparseGP(regression, family)
            if used:
                other(x, y)
            saved = r"GP site 'f' is SVGP\(inducing=7, whiten=True, natural=True\)"
            with pytest.raises(ValueError, match=rf"{saved}, this guide declares {said}"):
                other.load_state_dict(guide.state_dict())
        with pytest.raises(ValueError, match="no family is given for GP site 'f'"):
            AutoSparseGP(regression, {"h": SVGP(7)}).load_state_dict(guide.state_dict())

    def test_given_inputs_count_as_their_number(self):
        x, y = data()
        guide = AutoSparseGP(regression, SVGP(7))
        guide(x, y)
        other = AutoSparseGP(regression, SVGP(x[:7]))
        other.load_state_dict(guide.state_dict())
        assert torch.equal(means(other, x), means(guide, x))

    def test_the_state_of_another_model_is_an_error(self):
        x, y = data()
        guide = AutoSparseGP(regression, SVGP(7))
        guide(x, y)
        for used in (False, True):
            other = AutoSparseGP(gaussian(RBF), SVGP(7))
            if used:
                other(x, y)
                with pytest.raises(ValueError, match="state of a guide of another model"):
                    other.load_state_dict(guide.state_dict())
                continue
            other.load_state_dict(guide.state_dict())
            with pytest.raises(ValueError, match="or its state saved, with another model"):
                TraceQuadrature_ELBO().loss(other.model, other, x, y)

    def test_a_fresh_guide_has_an_empty_state(self):
        guide = AutoSparseGP(regression, SVGP(7))
        other = AutoSparseGP(regression, SVGP(7))
        other.load_state_dict(guide.state_dict())
        assert other.structure is None

    def test_dtype_moves(self):
        x, y = data()
        guide = AutoSparseGP(regression, SVGP(7))
        train(regression, guide, x, y, steps=5)
        guide.float()
        assert guide.posterior(x.float())["f"].mean.dtype == torch.float32


@pytest.mark.parametrize("saved", [True, False])
def test_states_of_other_point_estimates_are_refused(saved):
    x, y = data(num=20)
    guide = AutoSparseGP(regression, SVGP(4), point_estimates=saved)
    guide(x, y)
    kinds = ("a point", "a distribution")
    with pytest.raises(ValueError, match=f"is {kinds[not saved]}, this guide declares {kinds[saved]}; make"):
        AutoSparseGP(regression, SVGP(4), point_estimates=not saved).load_state_dict(guide.state_dict())


class TestSites:
    def test_other_latents_are_mean_field_and_start_where_told(self):
        x, y = data()
        start = {"scale": torch.tensor(2.0), "length": torch.tensor([0.3, 0.4]), "noise": torch.tensor(0.1)}
        guide = AutoSparseGP(regression, SVGP(7), init_loc_fn=init_to_value(values=start), init_scale=0.01)
        guide(x, y)
        for name, value in guide.median(x, y).items():
            if name in start:
                torch.testing.assert_close(value, start[name])
        torch.testing.assert_close(guide.scales.noise, torch.tensor(0.01))

    def test_point_estimates(self):
        x, y = data()
        for points in (True, ["length", "noise"]):
            guide = AutoSparseGP(regression, SVGP(7), point_estimates=points)
            train(regression, guide, x, y, steps=5)
            draws = [guide(x, y) for _ in range(2)]
            assert torch.equal(draws[0]["length"], draws[1]["length"])
            assert torch.equal(draws[0]["scale"], draws[1]["scale"]) == (points is True)
            names = [name for name, _ in guide.named_parameters()]
            assert ("scales.scale_unconstrained" in names) == (points is not True)
            assert "scales.noise_unconstrained" not in names
            for elbo in (TraceQuadrature_ELBO(), Trace_ELBO()):
                assert torch.tensor(elbo.loss(regression, guide, x, y)).isfinite()
        elbo = TraceQuadrature_ELBO(2)
        guide = AutoSparseGP(regression, SVGP(7), point_estimates=True)
        guide(x, y)
        assert elbo.loss(regression, guide, x, y) == elbo.loss(regression, guide, x, y)
        with pytest.raises(ValueError, match=r"point_estimates names \['lenght'\]"):
            AutoSparseGP(regression, SVGP(7), point_estimates=["lenght"])(x, y)

    def test_get_posterior_can_be_overridden(self):
        class Mine(AutoSparseGP):
            def get_posterior(self, name, prior):
                if name == "noise":
                    return dist.LogNormal(pyro.param("mine", torch.tensor(-1.0)), 0.1)
                return super().get_posterior(name, prior)

        x, y = data()
        guide = Mine(regression, SVGP(7))
        losses = train(regression, guide, x, y, steps=30)
        assert losses[-1] < losses[0]
        assert pyro.param("mine") != -1.0
        assert guide(x[:3])["y"].shape == (3,)

    def test_draws_are_independent_in_train_and_joint_in_eval(self):
        x, y = data()
        guide = AutoSparseGP(gaussian(kernels.RBF(5.0)), SVGP(5))
        guide(x, y)
        close = torch.zeros(2, 2) + torch.tensor([[0.0], [1e-4]])
        with torch.no_grad():
            train_draws = torch.stack([guide(close, y[:2])["f"] for _ in range(100)])
        predicted = torch.stack([guide(close)["f"] for _ in range(20)])
        assert predicted.T.corrcoef()[0, 1] > 0.99
        guide.eval()
        eval_draws = torch.stack([guide(close)["f"] for _ in range(20)])
        assert abs(train_draws.T.corrcoef()[0, 1]) < 0.3
        assert eval_draws.T.corrcoef()[0, 1] > 0.99

    def test_posterior_predictive(self):
        x, y = data(num=80)
        guide = AutoSparseGP(regression, SVGP(15))
        train(regression, guide, x, y, steps=25, lr=0.05)
        new, target = data(num=40, seed=3)
        for draws in (
            Predictive(regression, guide=guide, num_samples=40)(new)["y"],
            predict(regression, guide, new, num_samples=40)["y"],
            torch.stack([guide(new)["y"] for _ in range(40)]),
        ):
            assert draws.shape == (40, 40)
            assert (draws.mean(0) - target).square().mean().sqrt() < 0.35
            inside = (draws.quantile(0.025, 0) < target) & (target < draws.quantile(0.975, 0))
            assert inside.double().mean() > 0.8

    def test_posterior_is_differentiable_in_new_inputs(self):
        x, y = data()
        guide = AutoSparseGP(regression, SVGP(7))
        guide(x, y)
        new = x[:3].clone().requires_grad_()
        posterior = guide.posterior(new)["f"]
        assert isinstance(posterior, SparsePosterior)
        assert torch.autograd.grad(posterior.variance.sum(), new)[0].abs().sum() > 0

    @pytest.mark.filterwarnings("ignore:latent site .* has a value for each datum")
    def test_subsampling_is_off_in_prediction(self):
        x, y = data()

        def model(x, y=None):
            plate = pyro.plate("data", len(x), subsample_size=16)
            f = pyro.sample("f", GaussianProcess(RBF, x[plate.indices]))
            with plate:
                local = pyro.sample("local", dist.Normal(0.0, 0.1))
                return pyro.sample("y", dist.Normal(f + local, 0.2), obs=None if y is None else y[plate.indices])

        guide = AutoSparseGP(model, SVGP(7))
        assert torch.tensor(train(model, guide, x, y, steps=10)).isfinite().all()
        assert guide.locs.local_unconstrained.shape == (60,)
        new = torch.rand(33, 2)
        assert predict(model, guide, new, num_samples=3)["local"].shape == (3, 33)
        assert guide.posterior(new)["f"].mean.shape == (33,)
        assert guide(x, y)["f"].shape == (16,)

    @pytest.mark.filterwarnings("ignore:latent site .* has a value for each datum")
    def test_local_latents_at_new_inputs_come_from_the_model(self):
        x, y = data()

        def model(x, y=None):
            f = pyro.sample("f", GaussianProcess(RBF, x))
            with pyro.plate("data", len(x)):
                z = pyro.sample("z", dist.Normal(f, 0.5))
                return pyro.sample("y", dist.Normal(z, 0.1), obs=y)

        guide = AutoSparseGP(model, SVGP(7))
        train(model, guide, x, y, steps=5)
        assert guide(x[:4])["z"].shape == (4,)
        draws = predict(model, guide, x, num_samples=100)  # the same number of rows, and still new
        assert abs((draws["z"] - draws["f"]).std() - 0.5) < 0.05


class TestRefusals:
    def test_families(self):
        x, y = data()
        with pytest.raises(ValueError, match=r"no family is given for GP site 'g'.*\['f'\]"):
            AutoSparseGP(heteroscedastic, {"f": SVGP(7)})(x, y)
        with pytest.raises(ValueError, match="given for 'noise', which is a site that is no Gaussian process"):
            AutoSparseGP(regression, {"f": SVGP(7), "noise": SVGP(7)})(x, y)
        with pytest.raises(ValueError, match="given for 'h', which is no site"):
            AutoSparseGP(regression, {"f": SVGP(7), "h": SVGP(7)})(x, y)
        with pytest.raises(ValueError, match=r"make an instance, SVGP\(...\)"):
            AutoSparseGP(regression, SVGP)
        with pytest.raises(ValueError, match="families must be a family"):
            AutoSparseGP(regression, {"f": 64})
        with pytest.raises(ValueError, match="model must be callable"):
            AutoSparseGP(None, SVGP(7))

    def test_models(self):
        x, _ = data()
        with pytest.raises(ValueError, match="no GP site"):
            AutoSparseGP(lambda: pyro.sample("y", dist.Normal(0.0, 1.0), obs=torch.tensor(1.0)), SVGP(3))()
        with pytest.raises(ValueError, match="observes nothing"):
            AutoSparseGP(regression, SVGP(3))(x)

        def changing(x, y=None, more=False):
            pyro.sample("f", GaussianProcess(RBF, x))
            if more:
                pyro.sample("g", GaussianProcess(RBF, x))
            pyro.sample("y", dist.Normal(0.0, 1.0), obs=torch.tensor(0.0))

        guide = AutoSparseGP(changing, SVGP(3))
        guide(x)
        with pytest.raises(ValueError, match="GP site 'g' was not there"):
            guide(x, more=True)

    def test_inputs(self):
        x, y = data()
        bad = x.clone()
        bad[3, 1] = torch.nan
        with pytest.raises(ValueError, match=r"GP site 'f'.*x must have shape \(N, D\), got \(60,\)"):
            AutoSparseGP(gaussian(RBF), SVGP(5))(x[:, 0], y)
        with pytest.raises(ValueError, match=r"site 'f'.*floating point tensor \(N, D\), got a tensor of torch.int64"):
            AutoSparseGP(gaussian(RBF), SVGP(5))(x.long(), y)
        with pytest.raises(ValueError, match=r"floating point tensor \(N, D\), got ndarray"):
            AutoSparseGP(gaussian(RBF), SVGP(5))(x.numpy(), y)
        guide = AutoSparseGP(gaussian(RBF), SVGP(5))
        with pytest.raises(ValueError, match=r"GP site 'f'.*contains NaN"):
            guide(bad, y)
        guide(x, y)
        with pytest.raises(ValueError, match=r"GP site 'f'.*contains NaN"):
            guide(bad, y)
        with pytest.raises(ValueError, match="contains NaN"):
            Predictive(gaussian(RBF), num_samples=1)(bad)

    def test_inputs_of_another_dtype(self):
        x, y = data()
        guide = AutoSparseGP(gaussian(RBF), SVGP(5))
        guide(x.float(), y.float())
        with pytest.raises(ValueError, match=r"site 'f' has inputs of torch.float64.*guide.double\(\)"):
            guide(x, y)
        guide.double()
        guide(x, y)

    def test_first_call_in_inference_mode(self):
        x, y = data()
        guide = AutoSparseGP(gaussian(RBF), SVGP(5))
        with torch.inference_mode(), pytest.raises(ValueError, match="the guide's first call makes its parameters"):
            guide(x, y)
        guide(x, y)
        with torch.inference_mode():
            assert predict(guide.model, guide, x, num_samples=2)["y"].shape == (2, 60)

    def test_an_observed_gp_site(self):
        x, y = data()

        def model(x, y=None):
            pyro.sample("f", GaussianProcess(RBF, x), obs=y)

        with pytest.raises(ValueError, match=r"GP site 'f' is observed.*Add a likelihood"):
            AutoSparseGP(model, SVGP(5))(x, y)

    def test_nan_in_the_data(self):
        x, y = data()
        y[3] = torch.nan
        with pytest.raises(ValueError, match=r"site 'y' has no density.*1 of 60 are NaN.*poutine.mask"):
            AutoSparseGP(gaussian(RBF), SVGP(5))(x, y)

    def test_a_large_joint_draw_warns_once(self, monkeypatch):
        monkeypatch.setattr("pyro_sparsegp.guide.runs.LARGEST_JOINT", 50)
        x, y = data()
        guide = AutoSparseGP(gaussian(RBF), SVGP(5))
        guide(x, y)
        predict(guide.model, guide, x, num_samples=2, joint=False)
        with pytest.warns(UserWarning, match="60 values of GP site 'f' are drawn jointly.*joint=False") as caught:
            predict(guide.model, guide, x, num_samples=3)
        assert len(caught) == 1

    def test_a_failed_cholesky_names_the_site(self):
        x, y = data()

        class Broken(kernels.RBF):
            def __call__(self, x, z=None):
                k = super().__call__(x, z)
                return -k if z is None else k

        with pytest.raises(RuntimeError, match=r"K_ZZ of site 'f' \(5 x 5, float64\) failed"):
            AutoSparseGP(gaussian(Broken()), SVGP(5))(x, y)

    def test_a_site_inside_the_data_plate(self):
        x, y = data()

        def model(x, y=None, batch=None):
            with pyro.plate("data", 60, subsample=batch):
                f = pyro.sample("f", GaussianProcess(RBF, x))
                return pyro.sample("y", dist.Normal(f, 0.1), obs=y)

        message = r"inside pyro.plate\('data'\).*Sample the process before the plate"
        with pytest.raises(ValueError, match="site 'f' stands " + message):
            AutoSparseGP(model, SVGP(5))(x, y)
        with pytest.raises(ValueError, match="site 'f' stands " + message):
            AutoSparseGP(model, SVGP(5))(x[:20], y[:10], torch.arange(10))
        with pytest.raises(ValueError, match="GaussianProcess stands " + message):
            Predictive(model, num_samples=2)(x)

    def test_independent_processes_inside_another_plate(self):
        x, y = data()

        def model(x, y=None):
            with pyro.plate("tasks", 3):
                f = pyro.sample("f", GaussianProcess(RBF, x))
            with pyro.plate("rows", 3, dim=-2), pyro.plate("data", len(x), dim=-1):
                return pyro.sample("y", dist.Normal(f, 0.1), obs=y)

        guide = AutoSparseGP(model, SVGP(5))
        train(model, guide, x, torch.stack([y, -y, 2 * y]), steps=5)
        assert guide.posterior(x)["f"].mean.shape == (3, 60)

    def test_vectorised_samples(self):
        x, y = data()
        guide = AutoSparseGP(regression, SVGP(5))
        message = r"'f' stands inside a plate over samples \(vectorize_particles=True, or Predictive\(parallel=True\)\)"
        elbo = Trace_ELBO(num_particles=2, vectorize_particles=True, max_plate_nesting=1)
        with pytest.raises(ValueError, match=message):
            SVI(regression, guide, pyro.optim.Adam({}), elbo).step(x, y)
        guide(x, y)
        with pytest.raises(ValueError, match=message):
            SVI(regression, guide, pyro.optim.Adam({}), elbo).step(x, y)
        with pytest.raises(ValueError, match=message):
            Predictive(regression, guide=guide, num_samples=2, parallel=True)(x)
        with pytest.raises(ValueError, match="inside a plate over samples"):
            Predictive(regression, num_samples=2, parallel=True)(x)

    @pytest.mark.parametrize("where", ["kernel", "inputs", "mean", "gpytorch"])
    def test_an_unregistered_network(self, where):
        x, y = data()
        network = torch.nn.Sequential(torch.nn.Linear(2, 1))
        if where == "gpytorch":
            module = pytest.importorskip("gpytorch").kernels.RBFKernel()
            kernel = kernels.from_gpytorch(module)

        class Warped(kernels.RBF):
            def __init__(self, network):
                super().__init__()
                self.network = network

            def __call__(self, x, z=None):
                return super().__call__(self.network(x), None if z is None else self.network(z))

        def model(x, y=None, register=False):
            if register:
                pyro.module("network", module if where == "gpytorch" else network)
            if where == "kernel":
                process = GaussianProcess(Warped(network), x)
            elif where == "inputs":
                process = GaussianProcess(RBF, network(x))
            elif where == "mean":
                process = GaussianProcess(RBF, x, mean=lambda x: network(x)[:, 0])
            else:
                process = GaussianProcess(kernel, x)
            f = pyro.sample("f", process)
            with pyro.plate("data", len(x)):
                return pyro.sample("y", dist.Normal(f, 0.1), obs=y)

        name = "RBFKernel.raw_lengthscale" if where == "gpytorch" else r"Sequential.0.weight in the \w+"
        guide = AutoSparseGP(model, SVGP(5))
        with pytest.raises(ValueError, match=rf"would not train: {name}.*pyro.module"):
            SVI(model, guide, pyro.optim.Adam({}), TraceQuadrature_ELBO(2)).step(x, y)
        with pytest.raises(ValueError, match="would not train"):
            SVI(model, guide, pyro.optim.Adam({}), Trace_ELBO()).step(x, y)
        train(model, guide, x, y, steps=3, register=True)
        for parameter in network.parameters():
            parameter.requires_grad_(False)
        if where != "gpytorch":
            train(model, AutoSparseGP(model, SVGP(5)), x, y, steps=2)

    def test_a_pyro_module_model_registers_its_network(self):
        class Model(pyro.nn.PyroModule):
            def __init__(self):
                super().__init__()
                self.network = torch.nn.Linear(2, 1)

            def forward(self, x, y=None):
                f = pyro.sample("f", GaussianProcess(RBF, self.network(x)))
                with pyro.plate("data", len(x)):
                    return pyro.sample("y", dist.Normal(f, 0.1), obs=y)

        x, y = data()
        model = Model()
        before = model.network.weight.detach().clone()
        guide = AutoSparseGP(model, SVGP(5))
        train(model, guide, x, y, steps=3)
        assert not torch.equal(model.network.weight, before)
        assert not any("network" in name for name in guide.state_dict())

    def test_a_mini_batch_without_size_warns_once(self):
        x, y = data()
        guide = AutoSparseGP(regression, SVGP(5))
        svi = SVI(regression, guide, pyro.optim.Adam({"lr": 0.01}), TraceQuadrature_ELBO(2))
        svi.step(x, y)
        svi.step(x[:10], y[:10], size=60)
        svi.evaluate_loss(x[:10], y[:10])
        with pytest.warns(UserWarning, match="site 'y' observes 10 values in this step, 60 in the first.*size=N"):
            svi.step(x[:10], y[:10])
        svi.step(x[:10], y[:10])

    @pytest.mark.filterwarnings("ignore:latent site .* has a value for each datum")
    def test_local_latents_need_row_numbers(self):
        x, y = data()

        def model(x, y=None, size=None):
            f = pyro.sample("f", GaussianProcess(RBF, x))
            with pyro.plate("data", size or len(x), subsample=x):
                z = pyro.sample("z", dist.Normal(f, 0.5))
                return pyro.sample("y", dist.Normal(z, 0.1), obs=y)

        guide = AutoSparseGP(model, SVGP(5))
        guide(x, y)
        with pytest.raises(ValueError, match=r"'z' inside pyro.plate.*plate.indices"):
            guide(x[:10], y[:10], size=60)

    def test_an_interrupted_first_call_leaves_nothing(self):
        x, y = data()
        fail = [True]

        def model(x, y=None):
            f = pyro.sample("f", GaussianProcess(RBF, x))
            if fail[0]:
                raise KeyboardInterrupt
            pyro.sample("y", dist.Normal(f, 0.1).to_event(1), obs=y)

        guide = AutoSparseGP(model, SVGP(5))
        with pytest.raises(KeyboardInterrupt):
            guide(x, y)
        assert not list(guide.parameters())
        fail[0] = False
        train(model, guide, x, y, steps=2)


def test_one_data_point_and_one_inducing_point():
    x, y = data(num=1)
    guide = AutoSparseGP(regression, SVGP(1))
    assert torch.tensor(train(regression, guide, x, y, steps=5)).isfinite().all()
    assert guide(x)["y"].shape == (1,)


def test_one_run_of_the_model_a_step():
    x, y = data()
    count = [0]

    def model(x, y=None):
        count[0] += 1
        return regression(x, y)

    guide = AutoSparseGP(model, SVGP(5))
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), TraceQuadrature_ELBO())
    svi.step(x, y)
    count[0] = 0
    svi.step(x, y)
    assert count[0] == 1


def test_from_pyro_kernels_train_inside_a_model():
    from pyro.contrib.gp import kernels as pyro_kernels

    class Model(pyro.nn.PyroModule):
        def __init__(self):
            super().__init__()
            self.kernel = pyro_kernels.RBF(2)
            self.kernel.lengthscale = pyro.nn.PyroSample(dist.LogNormal(0.0, 1.0))

        def forward(self, x, y=None):
            f = pyro.sample("f", GaussianProcess(kernels.from_pyro(self.kernel), x))
            with pyro.plate("data", len(x)):
                return pyro.sample("y", dist.Normal(f, 0.2), obs=y)

    x, y = data()
    model = Model()
    guide = AutoSparseGP(model, SVGP(8))
    losses = train(model, guide, x, y, steps=20)
    assert losses[-1] < losses[0]
    assert set(guide.structure.latents) == {"kernel.lengthscale"}
    assert model.kernel.variance != 1.0


@pytest.mark.parametrize("family", [SVGP(5), SGPR(5)], ids=["SVGP", "SGPR"])
def test_draws_of_predictions_share_one_posterior(family, monkeypatch):
    x, y = data(num=20)
    guide = AutoSparseGP(regression, family, point_estimates=True)
    train(regression, guide, x, y, steps=3)
    new, made = torch.rand(7, x.shape[-1]), []
    whole = SparsePosterior.residual_tril.fget
    monkeypatch.setattr(
        SparsePosterior, "residual_tril", property(lambda q: made.append("residual" in q._cache) or whole(q))
    )
    values = predict(regression, guide, new, num_samples=100)["f"]
    assert len(made) == 100
    assert made.count(False) == 1
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
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5), x, mean=level))
        with rows:
            return pyro.sample("y", dist.Normal(f, 0.1), obs=y)

    x, y = data(num=20)
    guide = AutoSparseGP(levels, SVGP(5), point_estimates=True)
    train(levels, guide, x, y, steps=3)
    new = torch.rand(4, x.shape[-1])
    draws = predict(levels, guide, new, num_samples=60)
    assert draws["level"].std(0).min() > 5
    torch.testing.assert_close(draws["f"], draws["level"], rtol=0, atol=8.0)


FOLLOWING = [SGPR(5), ComputationAware(4), FreeSites(5)]


@pytest.mark.parametrize(
    ("family", "which"),
    [  # each family in two ways, each way in two families
        pytest.param(family, which, marks=[pytest.mark.slow] if i == j else [], id=f"{type(family).__name__}-{which}")
        for i, family in enumerate(FOLLOWING)
        for j, which in enumerate(["new rows", "rows of training", "scaled"])
    ],
)
def test_handlers_around_a_prediction_are_not_those_of_the_training_data(family, which):
    # Pyro's prediction runs the guide under a mask that leaves all densities out.
    x, y = data(num=30)
    guide = AutoSparseGP(regression, family, point_estimates=True)
    train(regression, guide, x, y, steps=4)
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
    torch.testing.assert_close(again.mean, q.mean)
    torch.testing.assert_close(again.variance, q.variance)
    draws = draws.reshape(40, -1)
    assert ((draws.mean(0) - q.mean).abs() < 5 * q.stddev / 40**0.5).all()
    assert ((draws.var(0) / q.variance).log().abs() < 1.5).all()


@pytest.mark.parametrize("family", [SVGP(5), SGPR(5)], ids=["SVGP", "SGPR"])
def test_numbers_that_are_none_are_named_with_their_row(family):
    x, y = data(num=20)
    guide = AutoSparseGP(regression, family)
    train(regression, guide, x, y, steps=2)
    svi = SVI(regression, guide, pyro.optim.Adam({"lr": 0.01}), TraceQuadrature_ELBO())
    bad = x.clone()
    bad[7, 0] = torch.nan
    with pytest.raises(ValueError, match=r"site 'f'.*\(1 of 20 rows, the first at 7\)"), pyro.validation_enabled(False):
        svi.step(bad, y)
    q = guide.posterior(x)["f"]
    for other in (x[None], x.float(), x.tolist()):
        with pytest.raises(ValueError, match="the posterior of site 'f' is asked at inputs"):
            q.at(other)
    for num in (0, 2.5, True):
        with pytest.raises(ValueError, match="whole number of at least 1"):
            predict(regression, guide, x, num_samples=num)
        with pytest.raises(ValueError, match="whole number of at least 1"):
            next(guide.draws(num, x))


def test_a_latent_that_a_later_step_meets_first_is_an_error():
    x, y = data(num=20)

    def model(x, y=None, more=False):
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5), x))
        level = pyro.sample("level", dist.Normal(0.0, 1.0)) if more else 0.0
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(f + level, 0.2), obs=y)

    guide = AutoSparseGP(model, SVGP(5))
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), TraceQuadrature_ELBO())
    svi.step(x, y)
    with pytest.raises(ValueError, match="'level' is a latent that the guide's first call did not meet"):
        svi.step(x, y, more=True)
