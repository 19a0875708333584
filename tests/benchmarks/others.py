"""GPyTorch's models, as its documentation writes them, for the benchmarks that compare with it."""

import gpytorch
import torch


def matern(columns, length=None, scale=None):
    """A Matern-3/2 kernel with a length scale a column and an output scale."""
    kernel = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(1.5, ard_num_dims=columns))
    if length is not None:
        kernel.base_kernel.lengthscale, kernel.outputscale = length, scale
    return kernel


class Approximate(gpytorch.models.ApproximateGP):
    """An approximate GP with trainable inducing points.

    :param natural: q in natural parameters, for natural steps; or by its Cholesky factor, for Adam.
    """

    def __init__(self, z, kernel, natural):
        kinds = gpytorch.variational
        kind = kinds.NaturalVariationalDistribution if natural else kinds.CholeskyVariationalDistribution
        super().__init__(kinds.VariationalStrategy(self, z, kind(len(z))))
        self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), kernel

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


class Exact(gpytorch.models.ExactGP):
    """An exact GP, or by an inducing-point kernel Titsias' bound."""

    def __init__(self, x, y, kernel, likelihood):
        super().__init__(x, y, likelihood)
        self.mean_module, self.covar_module = gpytorch.means.ZeroMean(), kernel

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def optimisers(model, likelihood, natural, num, rate, **options):
    """Adam for all, or beside natural steps of q at 0.1, as in GPyTorch's example."""
    others = model.hyperparameters() if natural else model.parameters()
    found = [torch.optim.Adam([*others, *likelihood.parameters()], lr=rate, **options)]
    if natural:
        found.append(gpytorch.optim.NGD(model.variational_parameters(), num_data=num, lr=0.1))
    return found


def stepping(loss, *optims):
    """A step of optimisers on a loss."""

    def step(*data):
        for optim in optims:
            optim.zero_grad()
        value = loss(*data)
        value.backward()
        for optim in optims:
            optim.step()
        return value.item()

    return step
