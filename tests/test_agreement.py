"""The same numbers as other libraries at the same parameters."""

import pytest
import torch

from pyro_sparsegp import GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import SVGP

from .models import data, gaussian, prepared

gpytorch = pytest.importorskip("gpytorch")

LENGTH, SCALE, NOISE, M = torch.tensor([0.4, 0.7], dtype=torch.float64), 1.0, 0.3, 12


def test_gpytorchs_variational_strategy():
    """ELBO, mean and variance to 1e-6 relative, in float64, with GPyTorch's jitter."""
    x, y = data(num=50)
    generator = torch.Generator().manual_seed(0)
    z = torch.rand(M, 2, generator=generator)
    m = torch.randn(M, generator=generator)
    tril = (0.3 * torch.randn(M, M, generator=generator)).tril(-1) + 0.5 * torch.eye(M)

    class Model(gpytorch.models.ApproximateGP):
        def __init__(self):
            distribution = gpytorch.variational.CholeskyVariationalDistribution(M)
            super().__init__(gpytorch.variational.VariationalStrategy(self, z, distribution))
            self.mean_module = gpytorch.means.ZeroMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(1.5, ard_num_dims=2))

        def forward(self, x):
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    theirs, likelihood = Model().double(), gpytorch.likelihoods.GaussianLikelihood().double()
    theirs.covar_module.base_kernel.lengthscale = LENGTH
    theirs.covar_module.outputscale = SCALE
    likelihood.noise = NOISE**2
    distribution = theirs.variational_strategy._variational_distribution
    theirs(x)  # initialises the variational distribution
    distribution.variational_mean.data.copy_(m)
    distribution.chol_variational_covar.data.copy_(tril)
    theirs.variational_strategy.variational_params_initialized.fill_(1)
    objective = gpytorch.mlls.VariationalELBO(likelihood, theirs, num_data=50)
    theirs.train(), likelihood.train()
    their_elbo = 50 * objective(theirs(x), y).item()
    theirs.eval()
    with torch.no_grad():
        their_f = theirs(x)

    jitter = gpytorch.settings.variational_cholesky_jitter.value(torch.float64)
    model = gaussian(SCALE * kernels.Matern32(LENGTH), NOISE, jitter=jitter)
    guide = prepared(model, SVGP(z, natural=False), x, y)
    guide.gps.f.coefficients.loc_0 = m
    guide.gps.f.coefficients.scale_tril_0 = tril
    ours = guide.posterior(x)["f"]
    torch.testing.assert_close(ours.mean, their_f.mean, rtol=1e-6, atol=1e-8)
    # GPyTorch adds its jitter to the prior variance at the data as well.
    torch.testing.assert_close(ours.variance, their_f.variance - jitter, rtol=1e-6, atol=0)
    elbo = -TraceQuadrature_ELBO(2).loss(model, guide, x, y) - 50 * jitter / (2 * NOISE**2)
    assert elbo == pytest.approx(their_elbo, rel=1e-6)


def test_exact_regression_as_gpytorch_and_scikit_learn():
    gaussian_process = pytest.importorskip("sklearn.gaussian_process")
    x, y = data(num=30)
    new = torch.rand(7, 2)
    kernel = SCALE * kernels.Matern32(LENGTH)
    noisy = GaussianProcess(kernel + kernels.White(NOISE**2), new, jitter=0.0).given(x, y)
    sk = gaussian_process.GaussianProcessRegressor(
        SCALE * gaussian_process.kernels.Matern(LENGTH.numpy(), nu=1.5), alpha=NOISE**2, optimizer=None
    ).fit(x.numpy(), y.numpy())
    mean, sd = sk.predict(new.numpy(), return_std=True)
    torch.testing.assert_close(noisy.mean, torch.from_numpy(mean), rtol=1e-8, atol=1e-8)
    torch.testing.assert_close(noisy.variance - NOISE**2, torch.from_numpy(sd**2), rtol=1e-6, atol=1e-8)
    evidence = GaussianProcess(kernel + kernels.White(NOISE**2), x, jitter=0.0).log_prob(y)
    assert evidence.item() == pytest.approx(sk.log_marginal_likelihood_value_, rel=1e-10)
