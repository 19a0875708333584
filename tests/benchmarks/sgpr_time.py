"""One SGPR training step on all data against GPyTorch, pyro.contrib.gp and a hand-written collapsed bound.

python tests/benchmarks/sgpr_time.py [--rounds 9] [--sizes 10000,256 10000,512] [--dtypes float64]

The step is forward, backward and an Adam update of Titsias' bound on 8-dimensional uniform inputs, with a Matern-3/2
kernel (a length scale a column, an output scale); all hyperparameters and inducing inputs are trained. Interleaved in
one run, medians over rounds, as in step_time.py.
"""

import argparse
import math
import platform
import statistics
import time
import warnings
from collections.abc import Callable

import gpytorch
import pyro
import pyro.distributions as dist
import torch
from pyro.contrib import gp
from torch import Tensor
from torch.distributions import constraints

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import SGPR

DIM = 8
Step = Callable[[], float]


def ours(x: Tensor, y: Tensor, z: Tensor) -> Step:
    """pyro_sparsegp."""

    def model(x: Tensor, y: Tensor) -> None:
        scale = pyro.param("scale", z.new_ones(()), constraint=constraints.positive)
        length = pyro.param("length", z.new_full((DIM,), 0.7), constraint=constraints.positive)
        noise = pyro.param("noise", z.new_full((), 0.3), constraint=constraints.positive)
        f = pyro.sample("f", GaussianProcess(scale * kernels.Matern32(length), x))
        with pyro.plate("data", len(x)):
            pyro.sample("y", dist.Normal(f, noise), obs=y)

    svi = pyro.infer.SVI(model, AutoSparseGP(model, SGPR(z)), pyro.optim.Adam({"lr": 0.01}), TraceQuadrature_ELBO(2))
    return lambda: svi.step(x, y)


def gpytorchs(x: Tensor, y: Tensor, z: Tensor) -> Step:
    """GPyTorch's inducing-point kernel under its exact marginal likelihood."""

    class Model(gpytorch.models.ExactGP):
        def __init__(self, likelihood: gpytorch.likelihoods.GaussianLikelihood) -> None:
            super().__init__(x, y, likelihood)
            self.mean_module = gpytorch.means.ZeroMean()
            base = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(1.5, ard_num_dims=DIM))
            self.covar_module = gpytorch.kernels.InducingPointKernel(base, z, likelihood)

        def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    likelihood = gpytorch.likelihoods.GaussianLikelihood().to(z)
    model = Model(likelihood).to(z)
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    model.train()

    def step() -> float:
        optimiser.zero_grad()
        loss = -objective(model(x), y)
        loss.backward()
        optimiser.step()
        return loss.item()

    return step


def contrib(x: Tensor, y: Tensor, z: Tensor) -> Step:
    """pyro.contrib.gp's collapsed bound."""
    kernel = gp.kernels.Matern32(DIM, lengthscale=torch.full((DIM,), 0.7)).to(z)
    model = gp.models.SparseGPRegression(x, y, kernel, z.clone(), noise=torch.tensor(0.09), jitter=1e-6).to(z)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    objective = pyro.infer.Trace_ELBO().differentiable_loss

    def step() -> float:
        optimiser.zero_grad()
        loss = objective(model.model, model.guide)
        loss.backward()
        optimiser.step()
        return loss.item()

    return step


def floor(x: Tensor, y: Tensor, z: Tensor) -> Step:
    """Titsias' bound by hand."""
    log_scale, log_noise = z.new_zeros(()).requires_grad_(), z.new_full((), math.log(0.3)).requires_grad_()
    log_length, inputs = z.new_full((DIM,), math.log(0.7)).requires_grad_(), z.clone().requires_grad_()
    eye = torch.eye(len(z), dtype=z.dtype)
    optimiser = torch.optim.Adam([log_scale, log_noise, log_length, inputs], lr=0.01)

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        a, b = a / log_length.exp(), b / log_length.exp()
        s = a.square().sum(-1)[:, None] + b.square().sum(-1) - 2 * a @ b.mT
        r = math.sqrt(3) * s.clamp(min=1e-12).sqrt()
        return log_scale.exp() * (1 + r) * torch.exp(-r)

    def step() -> float:
        optimiser.zero_grad()
        variance = (2 * log_noise).exp()
        chol = torch.linalg.cholesky(kernel(inputs, inputs) + 1e-6 * eye)
        a = torch.linalg.solve_triangular(chol, kernel(inputs, x), upper=False)
        inner = torch.linalg.cholesky(eye + a @ a.mT / variance)
        c = torch.linalg.solve_triangular(inner, (a @ y)[:, None], upper=False)[:, 0] / variance
        fit = y.square().sum() / variance - c.square().sum() + len(x) * (math.log(2 * math.pi) + 2 * log_noise)
        loss = 0.5 * fit + inner.diagonal().log().sum()
        loss = loss + 0.5 * (len(x) * log_scale.exp() - a.square().sum()) / variance
        loss.backward()
        optimiser.step()
        return loss.item()

    return step


MAKERS = {"ours": ours, "GPyTorch": gpytorchs, "pyro.contrib.gp": contrib, "floor": floor}


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--sizes", nargs="*", default=["1000,64", "10000,256", "10000,512"], help="pairs N,M")
    parser.add_argument("--dtypes", nargs="*", default=["float64"])
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=gpytorch.utils.warnings.NumericalWarning)
    print(
        f"{platform.machine()}, {torch.get_num_threads()} threads, torch {torch.__version__}, GPyTorch "
        f"{gpytorch.__version__}, pyro-ppl {pyro.__version__}, {options.rounds} rounds\n"
    )
    print("| N, M | dtype | " + " | ".join(f"{name} (ms)" for name in MAKERS), end=" | ")
    print(" | ".join(f"ours / {name}" for name in list(MAKERS)[1:]) + " |\n" + "|---" * 9 + "|")
    for size in options.sizes:
        num, m = map(int, size.split(","))
        for name in options.dtypes:
            pyro.clear_param_store()
            pyro.set_rng_seed(0)
            x = torch.rand(num, DIM, dtype=getattr(torch, name))
            y = torch.sin(4 * x.sum(-1)) + 0.1 * torch.randn(num, dtype=x.dtype)
            steps = {key: make(x, y, x[:m].clone()) for key, make in MAKERS.items()}
            times: dict[str, list[float]] = {key: [] for key in steps}
            for turn in range(options.rounds + 2):  # two to warm up
                for key, step in steps.items():
                    start = time.perf_counter()
                    step()
                    if turn >= 2:
                        times[key].append((time.perf_counter() - start) * 1e3)
            medians = [f"{statistics.median(times[key]):.1f}" for key in MAKERS]
            ratios = [
                f"{statistics.median(a / b for a, b in zip(times['ours'], times[key])):.2f}" for key in list(MAKERS)[1:]
            ]
            print(f"| {num}, {m} | {name} | " + " | ".join([*medians, *ratios]) + " |", flush=True)


if __name__ == "__main__":
    main()
