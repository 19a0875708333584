"""A guide as BoTorch's model: batches, gradients, noise, and regrets beside SingleTaskGP's."""

from functools import partial

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import SGPR, SVGP, ComputationAware, OrthogonalInducing

from .models import data, gaussian, heteroscedastic, observed, one_function, prepared, refused, trained

pytest.importorskip("botorch")

from botorch.acquisition import LogExpectedImprovement, qKnowledgeGradient
from botorch.acquisition.objective import ScalarizedPosteriorTransform
from botorch.models import SingleTaskGP
from botorch.sampling import SobolQMCNormalSampler
from gpytorch.kernels import MaternKernel, ScaleKernel

from pyro_sparsegp.interop.botorch import Model

KERNEL = kernels.Matern52(0.5)
FAMILIES = {
    "SVGP": SVGP(12),
    "orthogonal": OrthogonalInducing(6, 6),
    "SGPR": SGPR(12),
    "computation-aware": ComputationAware(12),
}


trained = partial(trained, steps=3, lr=0.01, loss=TraceQuadrature_ELBO(2))


@pytest.mark.quick("shape1-SGPR | shape3-SVGP | shape3-orthogonal | shape0-computation")
@pytest.mark.parametrize("name", FAMILIES)
@pytest.mark.parametrize("shape", [(3,), (5, 1), (2, 4, 3), (90, 4)])
def test_batches_are_blocks_of_the_joint_posterior(name, shape):
    x, y = data()
    model = gaussian(KERNEL, mean=0.3)
    guide = trained(model, FAMILIES[name], x, y)
    inputs = torch.rand(*shape, 2)
    found = Model(model, guide).posterior(inputs)
    assert found.mean.shape == found.variance.shape == (*shape, 1)
    flat, normal, q = inputs.reshape(-1, *inputs.shape[-2:]), found.distribution, shape[-1]
    mean, covariance = normal.mean.reshape(-1, q), normal.covariance_matrix.reshape(-1, q, q)
    for each, m, c in list(zip(flat, mean, covariance))[:: max(1, len(flat) // 5)]:
        q = guide.posterior(each)["f"]
        torch.testing.assert_close(m, q.mean)
        torch.testing.assert_close(c, q.covariance_matrix)


@pytest.mark.parametrize("name", FAMILIES)
def test_gradients_by_the_inputs(name):
    x, y = data()
    model = gaussian(KERNEL)
    found = Model(model, trained(model, FAMILIES[name], x, y))
    at = torch.rand(2, 2, requires_grad=True)

    def value(at):
        return found.posterior(at).rsample_from_base_samples(torch.Size([1]), torch.ones(1, 2)).sum()

    assert torch.autograd.gradcheck(value, at, atol=1e-4)


def outputs(x, y=None):
    f = pyro.sample("f", GaussianProcess(KERNEL, x).expand([2]).to_event(1))
    g = pyro.sample("g", GaussianProcess(kernels.RBF(1.0), x))
    noise = pyro.sample("noise", dist.LogNormal(-1.0, 0.1))
    with pyro.plate("outputs", 2, dim=-2), pyro.plate("data", len(x), dim=-1):
        return pyro.sample("y", dist.Normal(f, noise * g.exp()), obs=y)


def test_outputs_of_several_sites_are_picked():
    x, y = data()
    with pytest.raises(ValueError, match=r"outputs of \['f', 'g'\] have one posterior.*independent=True"):
        Model(outputs, trained(outputs, SVGP(8), x, torch.stack([y, -y]), steps=1), site=["f", "g"])
    guide = trained(outputs, SVGP(8), x, torch.stack([y, -y]), independent=True)
    model = Model(outputs, guide, site=["f", "g"])
    assert model.num_outputs == 3
    at = torch.rand(4, 3, 2)
    q = guide.posterior(at.reshape(-1, 2))
    rows = torch.cat([q["f"].mean, q["g"].mean[None]])
    torch.testing.assert_close(model.posterior(at).mean, rows.reshape(3, 4, 3).movedim(0, -1))
    torch.testing.assert_close(model.posterior(at, output_indices=[2]).mean[..., 0], rows[2].reshape(4, 3))
    part = model.subset_output([2, 0])
    assert part.num_outputs == 2
    torch.testing.assert_close(part.posterior(at).mean[..., 1], rows[0].reshape(4, 3))
    torch.testing.assert_close(part.subset_output([0]).posterior(at).mean[..., 0], rows[2].reshape(4, 3))
    refused(r"Model has 3 outputs, numbers 0 to 2; got \[3\]", model.posterior, at, output_indices=[1, 3])
    refused(r"Model has 2 outputs, numbers 0 to 1; got \[2\]", part.subset_output, [2])
    transform = ScalarizedPosteriorTransform(torch.tensor([1.0, 2.0, 0.0]))
    found = model.posterior(at, posterior_transform=transform)
    torch.testing.assert_close(found.mean[..., 0], (rows[0] + 2 * rows[1]).reshape(4, 3))
    noisy = Model(outputs, guide).posterior(at, observation_noise=True)
    noise = guide.median(x, torch.stack([y, -y]))["noise"] * rows[2].reshape(4, 3).exp()
    torch.testing.assert_close(
        noisy.variance - Model(outputs, guide).posterior(at).variance, noise[..., None] ** 2 * torch.ones(2)
    )


def test_noise_and_its_absence():
    x, y = data()
    model = gaussian(KERNEL, noise=0.2)
    found = Model(model, trained(model, SGPR(12), x, y))
    plain = found.posterior(x[:4])
    torch.testing.assert_close(found.posterior(x[:4], observation_noise=True).variance, plain.variance + 0.04)
    noisy = found.posterior(x[:4], observation_noise=True).distribution.covariance_matrix
    torch.testing.assert_close(noisy - plain.distribution.covariance_matrix, 0.04 * torch.eye(4))
    given = found.posterior(x[:4], observation_noise=torch.tensor([[0.3]]))
    torch.testing.assert_close(given.variance, plain.variance + 0.3)
    counts = one_function(KERNEL, lambda f: dist.Poisson(f.exp()))
    y = torch.poisson((1 + y).exp())
    found = Model(counts, trained(counts, SVGP(12), x, y))
    refused("no observed site has a distribution of mean 'f'", found.posterior, x[:4], observation_noise=True)
    assert found.posterior(x[:4]).mean.shape == (4, 1)


def test_noise_is_that_of_the_site_around_f():
    """Far from data all means are 0, and a sum with another site is not around either."""

    def model(x, y=None):
        f, g, h = (pyro.sample(name, GaussianProcess(KERNEL, x)) for name in "fgh")
        normals = {"sum": dist.Normal(f + g, 0.3), "of f": dist.Normal(f, 0.1), "of h": dist.Normal(h, 1.0)}
        with pyro.plate("data", len(x)):
            for name, fn in normals.items():
                pyro.sample(name, fn, obs=y)

    x, y = data(num=12)
    guide, far = prepared(model, SVGP(4), x, y), torch.full((1, 2), 30.0)
    for site, noise in {"f": 0.1, "h": 1.0}.items():
        found = Model(model, guide, site)
        more = found.posterior(far, observation_noise=True).variance - found.posterior(far).variance
        torch.testing.assert_close(more, torch.tensor([[noise**2]]))
    refused("distribution of mean 'g'", Model(model, guide, "g").posterior, far, observation_noise=True)


def test_bad_arguments():
    x, y = data()
    guide = prepared(heteroscedastic, {("f", "g"): SVGP(4)}, x, y)
    with pytest.raises(ValueError, match="have one posterior, and Model takes outputs to be independent"):
        Model(heteroscedastic, guide, site=["f", "g"])
    model = gaussian(KERNEL)
    refused("has not been called", lambda: Model(model, AutoSparseGP(model, SVGP(4))))
    guide = trained(model, SVGP(4), x, y, steps=1)
    refused(r"Model\(model, guide\) needs an AutoSparseGP guide, got function", Model, guide, model)
    refused(r"runs the guide's own model; it was given another", Model, heteroscedastic, guide)
    refused(r"'g' is none of the guide's GP sites, \['f'\]", Model, model, guide, site="g")
    refused(r"X is \(..., q, D\), got a tensor of shape \(2,\)", lambda: Model(model, guide).posterior(x[0]))


def test_arguments_that_the_model_takes():
    x, y = data()

    def model(batch, power, y=None):
        return gaussian(KERNEL)(batch["x"] ** power, y)

    guide = prepared(model, SGPR(12), {"x": x}, 2, y)
    found = Model(model, guide, arguments=lambda x: ({"x": x}, 2))
    torch.testing.assert_close(found.posterior(x[:3]).mean[:, 0], guide.posterior({"x": x[:3]}, 2)["f"].mean)


def single_task(length, x, y, mean, noise):
    """BoTorch's exact model with hyperparameters of ours, of an isotropic Matern52."""
    model = SingleTaskGP(x, y[:, None], outcome_transform=None)
    model.covar_module = ScaleKernel(MaternKernel(2.5))
    model.covar_module.outputscale, model.covar_module.base_kernel.lengthscale = 1.0, length
    model.mean_module.constant.data.fill_(mean)
    model.likelihood.noise = noise**2
    return model.eval()


@pytest.mark.filterwarnings("ignore")  # of data that are not standardised
def test_fantasies_are_those_of_an_exact_model():
    """Conditioned on measurements once and again, beside SingleTaskGP; and on what all rows give at once."""
    x, y = data()
    exact = gaussian(kernels.Matern52(0.5), noise=0.2, mean=0.3)
    found = Model(exact, trained(exact, SGPR(x, trainable=False), x, y))
    exactly = single_task(0.5, x, y, 0.3, 0.2)
    at = torch.rand(4, 3, 2)
    torch.testing.assert_close(found.posterior(at).mean, exactly.posterior(at).mean, atol=1e-5, rtol=0)
    places, sampler = torch.rand(4, 2, 2), SobolQMCNormalSampler(torch.Size([5]), seed=0)
    mine, wanted = (model.fantasize(places, sampler) for model in (found, exactly))
    assert mine.batch_shape == (5, 4)
    again = (places + 0.1).expand(5, 4, 2, 2)
    for one, other in ((mine, wanted), (mine.fantasize(again, sampler), wanted.fantasize(again, sampler))):
        a, b = one.posterior(at), other.posterior(at)
        torch.testing.assert_close(a.mean, b.mean, atol=1e-4, rtol=0)
        torch.testing.assert_close(
            a.distribution.covariance_matrix, b.distribution.covariance_matrix, atol=1e-5, rtol=0
        )
    more = torch.cat([x, places[0]]), torch.cat([y, torch.tensor([0.3, -0.4])])
    given = found.condition_on_observations(places[0], more[1][-2:, None])
    whole = Model(exact, trained(exact, SGPR(more[0], trainable=False), *more))
    torch.testing.assert_close(given.posterior(at).mean, whole.posterior(at).mean, atol=1e-5, rtol=0)
    torch.testing.assert_close(given.posterior(at).variance, whole.posterior(at).variance, atol=1e-6, rtol=0)
    assert (found.posterior(at).mean - given.posterior(at).mean).abs().max() > 0.01  # the guide is as it was
    noisy = given.posterior(at, observation_noise=True).variance - given.posterior(at).variance
    torch.testing.assert_close(noisy, torch.full_like(noisy, 0.04))


@pytest.mark.parametrize("name", ["SVGP", "computation-aware"])
def test_fantasies_are_the_conditioned_joint_posterior(name):
    x, y = data()
    model = gaussian(KERNEL, noise=0.2)
    guide = trained(model, FAMILIES[name], x, y)
    places, at, values = torch.rand(2, 2), torch.rand(5, 2), torch.tensor([[0.7], [-0.1]])
    q = guide.posterior(torch.cat([places, at]))["f"]
    C, missed = q.covariance_matrix, values[:, 0] - q.mean[:2]
    gain = torch.linalg.solve(C[:2, :2] + 0.04 * torch.eye(2), C[:2, 2:]).mT
    found = Model(model, guide).condition_on_observations(places, values).posterior(at)
    torch.testing.assert_close(found.mean[:, 0], q.mean[2:] + gain @ missed, atol=1e-6, rtol=0)
    covariance = C[2:, 2:] - gain @ C[:2, 2:]
    torch.testing.assert_close(found.distribution.covariance_matrix, covariance, atol=1e-6, rtol=0)


@pytest.mark.filterwarnings("ignore")  # of data that are not standardised
def test_acquisition_functions_are_an_exact_models():
    x, y = data(num=20)
    exact = gaussian(kernels.Matern52(0.5), noise=0.2, mean=0.3)
    found = Model(exact, trained(exact, SGPR(x, trainable=False), x, y))
    sampler = SobolQMCNormalSampler(torch.Size([4]), seed=0)
    values, slopes, expected = [], [], []
    at = torch.rand(3, 6, 2, requires_grad=True)  # q = 2 and four fantasies
    for model in (found, single_task(0.5, x, y, 0.3, 0.2)):
        value = qKnowledgeGradient(model, num_fantasies=4, sampler=sampler)(at)
        values.append(value)
        expected.append(LogExpectedImprovement(model, best_f=1.0)(at[:, :1]))
        slopes.append(torch.autograd.grad(value.sum(), at)[0])
    torch.testing.assert_close(values[0], values[1], atol=1e-4, rtol=0)
    torch.testing.assert_close(expected[0], expected[1], atol=1e-4, rtol=0)
    torch.testing.assert_close(slopes[0], slopes[1], atol=1e-3, rtol=0)


def test_fantasies_of_several_outputs_and_other_likelihoods():
    x, y = data()
    guide = trained(outputs, SVGP(8), x, torch.stack([y, -y]), independent=True)
    model = Model(outputs, guide)
    places, at = torch.rand(2, 2), torch.rand(3, 2)
    values = torch.tensor([[0.7, 0.1], [-0.1, 0.4]])
    both = model.condition_on_observations(places, values)
    assert both.num_outputs == 2
    second = model.subset_output([1]).condition_on_observations(places, values[:, 1:])
    torch.testing.assert_close(both.posterior(at).mean[:, 1:], second.posterior(at).mean)
    torch.testing.assert_close(both.subset_output([1]).posterior(at).mean, second.posterior(at).mean)
    torch.testing.assert_close(both.posterior(at, output_indices=[1]).mean, second.posterior(at).mean)
    counts = one_function(KERNEL, lambda f: dist.Poisson(f.exp()))
    guide = trained(counts, SVGP(12), x, torch.poisson((1 + y).exp()))
    sampler = SobolQMCNormalSampler(torch.Size([3]), seed=0)
    with pytest.raises(ValueError, match=r"no observed site has a distribution of mean 'f'.*guide, noise=variance"):
        Model(counts, guide).fantasize(places, sampler)
    found = Model(counts, guide, noise=0.3).fantasize(places, sampler).posterior(at)
    given = Model(counts, guide).fantasize(places, sampler, observation_noise=torch.tensor(0.3)).posterior(at)
    torch.testing.assert_close(found.mean, given.mean)
    assert found.mean.shape == (3, 3, 1)
    assert (found.variance < Model(counts, guide).posterior(at).variance).all()
    with pytest.raises(ValueError, match=r"Y \(..., n, 2\), got tensors of shapes \(2, 2\) and \(2, 1\)"):
        model.condition_on_observations(places, values[:, :1])


def test_noise_of_outputs_in_columns_and_of_mixtures():
    x = torch.rand(20, 1)

    def several(x, y=None):
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5), x).expand([2]))
        return observed(dist.Normal(f.mT, torch.tensor([0.1, 0.3])).to_event(1), y)

    guide = prepared(several, SVGP(5), x, torch.stack([torch.sin(6 * x[:, 0]), x[:, 0]], -1))
    model = Model(several, guide)
    here = x[:3]
    more = model.posterior(here, observation_noise=True).variance - model.posterior(here).variance
    torch.testing.assert_close(more, torch.tensor([0.01, 0.09]).expand(3, 2), atol=1e-6, rtol=0)
    for noise in (-1.0, float("nan"), "a"):
        refused("Model's noise is a variance", Model, several, guide, noise=noise)
    refused("Model's site is a name", Model, several, guide, [])

    def outliers(x, y=None):
        f = pyro.sample("f", GaussianProcess(kernels.RBF(0.5), x))
        with pyro.plate("data", len(x)):
            z = pyro.sample("z", dist.Bernoulli(0.1), infer={"enumerate": "parallel"})
            return pyro.sample("y", dist.Normal(f, 0.1 + 3.0 * z), obs=y)

    guide = prepared(outliers, SVGP(5), x, torch.sin(6 * x[:, 0]))
    refused("noise=variance", lambda: Model(outliers, guide).posterior(here, observation_noise=True))
