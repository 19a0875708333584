"""Models and helpers that several tests share."""

import numpy as np
import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, families, kernels

# The registry the contract test runs over.
FAMILIES = {
    "SVGP": families.SVGP(12),
    "SVGPGradients": families.SVGP(12, natural=False),
    "OrthogonalInducing": families.OrthogonalInducing(6, 6),
    "OrthogonalInducing3": families.OrthogonalInducing(5, [4, 3]),
    "OrthogonallyDecoupled": families.OrthogonallyDecoupled(6, 6),
    "DecoupledColumns": families.OrthogonallyDecoupled(6, 6, num_columns=4),
    "MeanFieldAdditive": families.MeanFieldAdditive(6),
    "CoupledCovariance": families.CoupledCovariance(6),
    "CoupledPrecision": families.CoupledPrecision(6),
    "CoupledPrecisionGradients": families.CoupledPrecision(6, natural=False),
    "CoupledPrecisionIdentity": families.CoupledPrecision(6, rank=8, base="identity"),
    "AdditiveSGPR": families.AdditiveSGPR(6),
    "SGPR": families.SGPR(12),
    "CollapsedOrthogonal": families.CollapsedOrthogonal(6, 6),
    "SemiCollapsedOrthogonal": families.SemiCollapsedOrthogonal(6, 6),
    "ConditionalSGPR": families.ConditionalSGPR(12),
    "ComputationAwareSparse": families.ComputationAware(12),
    "Exact": families.Exact(),
    "ComputationAwareCG": families.ComputationAware(12, "cg"),
}


def additive(scale, length):
    """A kernel with two smooth terms on columns of their own, a linear and a constant term."""
    return (
        scale * kernels.Matern32(length[..., :1])[0]
        + scale * kernels.RBF(length[..., 1:])[1]
        + kernels.Linear(1.0)
        + kernels.Constant(1.0)
    )


def product(scale, length):
    """A kernel of one term, with a length scale a column."""
    return scale * kernels.Matern52(length)


def interaction(scale, length):
    """Two terms, one of them a product over columns, the other periodic in a column."""
    smooth = kernels.RBF(length[..., :1])[0] * kernels.Matern12(length[..., 1:])[1]
    return scale * smooth + kernels.Periodic(1.0, 0.7)[0]


def hyperparameters(x):
    scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
    length = pyro.sample("length", dist.LogNormal(x.new_zeros(2), 1.0).to_event(1))
    return additive(scale, length)


def observed(fn, y, x=None, size=None):
    """The site y in a plate of its rows, of which x may be a mini-batch."""
    with pyro.plate("data", size or fn.batch_shape[-1], subsample=x):
        return pyro.sample("y", fn, obs=y)


def regression(x, y=None, size=None):
    noise = pyro.sample("noise", dist.HalfNormal(1.0))
    f = pyro.sample("f", GaussianProcess(hyperparameters(x), x))
    return observed(dist.Normal(f, noise), y, x, size)


def bernoulli(x, y=None, size=None):
    f = pyro.sample("f", GaussianProcess(hyperparameters(x), x))
    return observed(dist.Bernoulli(logits=f), y, x, size)


def poisson(x, y=None, size=None):
    f = pyro.sample("f", GaussianProcess(hyperparameters(x), x, mean=lambda x: x.new_ones(len(x))))
    return observed(dist.Poisson(f.exp()), y, x, size)


def heteroscedastic(x, y=None, size=None):
    kernel = hyperparameters(x)
    f = pyro.sample("f", GaussianProcess(kernel, x))
    g = pyro.sample("g", GaussianProcess(0.2 * kernel, x, mean=x.new_full((), -1.5)))
    return observed(dist.Normal(f, g.exp()), y, x, size)


def data(model=regression, num=60, dtype=torch.float64, device="cpu", seed=1):
    """Inputs (N, 2) and observations fit for the model."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(num, 2, generator=generator, dtype=torch.float64)
    f = torch.sin(6 * x[:, 0]) + x[:, 1]
    y = f + 0.2 * torch.randn(num, generator=generator, dtype=torch.float64)
    if model is bernoulli:
        y = (y > 0.5).double()
    if model is poisson:
        y = torch.poisson((1 + f).exp(), generator=generator)
    return x.to(device, dtype), y.to(device, dtype)


def one_function(kernel, likelihood, mean=None, jitter=None):
    """A model with fixed hyperparameters: a function f, and observations of distribution ``likelihood(f)``."""

    def model(x, y=None):
        return observed(likelihood(pyro.sample("f", GaussianProcess(kernel, x, mean, jitter))), y)

    return model


def gaussian(kernel, noise=0.2, mean=None, jitter=None):
    """A regression model with fixed hyperparameters."""

    def model(x, y=None, size=None):
        f = pyro.sample("f", GaussianProcess(kernel, x, mean, jitter))
        return observed(dist.Normal(f, noise), y, x, size)

    return model


def prepared(model, family, *args, **options):
    """A guide that has seen the data."""
    guide = AutoSparseGP(model, family, **options)
    guide(*args)
    return guide


def train(model, guide, *args, steps=200, lr=0.02, loss=None, **kwargs):
    """Steps of SVI; the losses."""
    svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": lr}), loss or TraceQuadrature_ELBO(10))
    return [svi.step(*args, **kwargs) for _ in range(steps)]


def trained(model, family, *args, independent=(), **how):
    """A guide after some steps."""
    guide = AutoSparseGP(model, family, independent=independent)
    train(model, guide, *args, **how)
    return guide


def restored(guide, model, family, **options):
    """Another guide with the state of one."""
    other = AutoSparseGP(model, family, **options)
    other.load_state_dict(guide.state_dict())
    return other


def assert_alike(one, other, **how):
    """Two posteriors have the same means and variances."""
    torch.testing.assert_close(one.mean, other.mean, **how)
    torch.testing.assert_close(one.variance, other.variance, **how)


def cross_covariance(f, g):
    """Cov(f(x), g(x')) of two sites with one posterior, ΦS_abΨᵀ, ``(..., N, N')``."""
    one, other = f.coefficients, g.coefficients
    both = [torch.cat(pair, -2) for pair in zip(one.padded(f.features), other.padded(g.features))]
    return one.whole.q.covariance_change(both)[..., : len(f.mean), len(f.mean) :]


def refused(message, call, *args, **kwargs):
    """The call raises a ValueError of this message."""
    with pytest.raises(ValueError, match=message):
        call(*args, **kwargs)


def by_gradients(family):
    """The family, with q's mean and scale for parameters, which a line search can move to and fro."""
    if isinstance(family, dict):
        return {name: by_gradients(part) for name, part in family.items()}
    return family.learning(natural=False) if isinstance(family, families.FreeFormFamily) else family


def lbfgs(loss, parameters, **options):
    """The least that a loss comes to by L-BFGS."""
    optimiser = torch.optim.LBFGS(list(parameters), line_search_fn="strong_wolfe", **options)

    def closure():
        optimiser.zero_grad()
        value = loss()
        value.backward()
        return value

    optimiser.step(closure)
    return loss()


def hermite(num):
    """Nodes and weights of the standard normal."""
    nodes, weights = (torch.from_numpy(part) for part in np.polynomial.hermite_e.hermegauss(num))
    return nodes, weights / weights.sum()


def conditional(kernel, x, y, noise, new, mean=0.0):
    """Mean and covariance of f at new inputs given data with noise of these standard deviations, dense."""
    covariance = kernel(x) + torch.diag(torch.as_tensor(noise, dtype=x.dtype).square().expand(len(x)))
    gain = torch.linalg.solve(covariance, kernel(x, new)).mT
    return mean + gain @ (y - mean), kernel(new) - gain @ kernel(x, new)


def maximise(model, family, *args, num_nodes=2, iterations=400, seed=0):
    """A guide whose bound is at its maximum by L-BFGS, and the bound."""
    pyro.set_rng_seed(seed)
    guide = family if isinstance(family, AutoSparseGP) else AutoSparseGP(model, by_gradients(family))
    guide(*args)
    bound = TraceQuadrature_ELBO(num_nodes)(model, guide)
    bound(*args)
    parameters = [*guide.parameters(), *dict(pyro.get_param_store().named_parameters()).values()]
    least = lbfgs(
        lambda: bound(*args),
        {id(p): p for p in parameters}.values(),
        max_iter=iterations,
        max_eval=2 * iterations,
        history_size=50,
        tolerance_grad=1e-8,
        tolerance_change=1e-8,
    )
    return guide, -least.item()


def fitc(kernel, x, z, noise, mean=0.0, share=1.0):
    """N(μ, Q + αD + σ²I) of the rows, dense: Q by inducing inputs z, D what is left of the prior's variances."""
    cross = kernel(x, z)
    q = cross @ torch.linalg.solve(kernel(z) + 1e-8 * kernel.diag(z).mean() * torch.eye(len(z)), cross.mT)
    rest = share * (kernel.diag(x) - q.diagonal())
    return dist.MultivariateNormal(x.new_zeros(len(x)) + mean, q + torch.diag(rest + noise**2))


def draws_of(guide, name, *data, num=400):
    """Draws of a latent, or of single values of a GP site, made at once."""
    return guide._marginal_draws("draws_of", data, {}, num)[name]


def estimate(loss, model, guide, *args, num=60, **kwargs):
    """Mean and standard error of an ELBO's loss at fixed parameters."""
    values = torch.tensor([loss.loss(model, guide, *args, **kwargs) for _ in range(num)])
    return values.mean().item(), values.std().item() / num**0.5
