"""Programs in whatever form they are written: posteriors of latents beside f, against dense references."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import SVGP

N, NOISE, KERNEL = 20, 0.3, kernels.Matern32(0.3)


def _inputs():
    return torch.linspace(0, 1, N)[:, None]


def _trained(model, family, data, steps, lr=0.02):
    pyro.set_rng_seed(0)
    guide = AutoSparseGP(model, family)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": lr}), TraceQuadrature_ELBO())
    losses = [svi.step(*data) for _ in range(steps)]
    return guide, sum(losses[-20:]) / len(losses[-20:])


def _on_a_grid(grid, log_joint):
    """The mean, sd and log evidence of one latent, of its log joint density with the data."""
    log_joint = torch.stack([log_joint(value) for value in grid])
    weights = log_joint.softmax(0)
    mean = weights @ grid
    return mean, (weights @ (grid - mean).square()).sqrt(), (log_joint.logsumexp(0) + (grid[1] - grid[0]).log())


def _draws(guide, name, data, num=1000):
    with torch.no_grad():
        return torch.stack([guide.draw(*data)[name] for _ in range(num)])


def test_a_product_is_no_predictor():
    """y ~ N(f), t ~ N(b f): at x = 0 either factor hides the other."""
    generator = torch.Generator().manual_seed(0)
    x = _inputs()
    f = torch.linalg.cholesky(KERNEL(x) + 1e-9 * torch.eye(N)) @ torch.randn(N, generator=generator)
    y, t = f + NOISE * torch.randn(N, generator=generator), 1.5 * f + NOISE * torch.randn(N, generator=generator)

    def model(x, y=None, t=None):
        b = pyro.sample("b", dist.Normal(0.0, 2.0))
        f = pyro.sample("f", GaussianProcess(KERNEL, x))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(f, NOISE), obs=y)
            pyro.sample("t", dist.Normal(b * f, NOISE), obs=t)

    def log_joint(b):
        loadings = torch.stack([torch.ones(()), b])
        cover = torch.kron(torch.outer(loadings, loadings), KERNEL(x)) + NOISE**2 * torch.eye(2 * N)
        density = dist.MultivariateNormal(torch.zeros(2 * N), cover).log_prob(torch.cat([y, t]))
        return density + dist.Normal(0.0, 2.0).log_prob(b)

    mean, sd, evidence = _on_a_grid(torch.linspace(0.5, 3, 200), log_joint)
    guide, loss = _trained(model, SVGP(N, trainable=False), (x, y, t), 60)
    b = _draws(guide, "b", (x,))
    assert loss == pytest.approx(-evidence.item(), abs=0.1)
    assert b.mean().item() == pytest.approx(mean.item(), abs=0.2 * sd.item())
    assert b.std().item() == pytest.approx(sd.item(), rel=0.15)


def test_training_keeps_the_width_of_a_weight_of_f():
    """Of rho in rho f + d: f's posterior moves with rho, or q(rho) would be that given f, a quarter as wide."""
    generator = torch.Generator().manual_seed(1)
    x, high = torch.cat([_inputs(), torch.linspace(0, 1, 7)[:, None]]), torch.arange(N + 7) >= N
    scale, short, long = 0.07, 2.25 * kernels.RBF(0.2), 2.5 * kernels.RBF(0.8)
    bend = torch.where(high, 1.7, 1.0) * torch.sin(9 * x[:, 0]) + high * (1 + x[:, 0])
    y = bend + scale * torch.randn(N + 7, generator=generator)

    def model(x, y=None):
        rho = pyro.sample("rho", dist.Normal(1.0, 1.0))
        f, d = pyro.sample("f", GaussianProcess(short, x)), pyro.sample("d", GaussianProcess(long, x))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(torch.where(high, rho * f + d, f), scale), obs=y)

    def log_joint(rho):
        by_f = torch.where(high, rho, 1.0)
        cover = torch.outer(by_f, by_f) * short(x) + torch.outer(high, high) * long(x) + scale**2 * torch.eye(N + 7)
        return dist.MultivariateNormal(torch.zeros(N + 7), cover).log_prob(y) + dist.Normal(1.0, 1.0).log_prob(rho)

    mean, sd, _ = _on_a_grid(torch.linspace(1.0, 2.4, 200), log_joint)
    guide, _ = _trained(model, {"f": SVGP(12), "d": SVGP(6)}, (x, y), 300)
    rho = _draws(guide, "rho", (x,))
    assert guide.facts.intercepts == ["rho"]
    assert rho.mean().item() == pytest.approx(mean.item(), abs=0.3 * sd.item())
    assert rho.std().item() == pytest.approx(sd.item(), rel=0.25)
