"""One training step of SVGP or SGPR against GPyTorch, pyro.contrib.gp and a hand-written floor, interleaved in one run.

python tests/benchmarks/step_time.py [--device cuda] [--rounds 15] [--dtypes float32] [--out table.md]
python tests/benchmarks/step_time.py --sgpr [--rounds 9] [--sizes 10000,256 10000,512] [--dtypes float64]

The step is forward, backward and an update, Adam's of all parameters or, "natural", our default, natural for q(u) and
Adam's for the rest, on 8-dimensional uniform inputs, with a Matern-3/2 kernel (a length scale a column, an output
scale), a Gaussian likelihood and a mini-batch of a larger data set; all hyperparameters, inducing inputs and
variational parameters are trained. "GPyTorch NGD" is its natural step for q(u), with Adam for the rest. Adam is torch's
fused one wherever it can be had, which is all but pyro.contrib.gp, whose step is Pyro's. Times, of this process's CPU
(on a GPU by the clock), are medians over rounds, ratios medians of each round's ratio, so that a machine that slows
down does so for all of them. With --sgpr it is a step on Titsias' bound of all data, with the same kernel.
"""

import argparse
import math
import platform
import statistics
import time
import warnings
from collections.abc import Callable
from functools import partial
from pathlib import Path

import gpytorch
import pyro
import pyro.distributions as dist
import torch
from pyro.contrib import gp
from torch import Tensor
from torch.distributions import constraints

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import SGPR, SVGP

NUM, DIM = 100_000, 8
COLLAPSED_SIZES = [(1000, 64), (10_000, 256), (10_000, 512)]  # N, M
SIZES = [(12, 200), (128, 256), (512, 1024), (1024, 1024)]
Step = Callable[[Tensor, Tensor], float]


def ours(z: Tensor, family: Callable = SVGP) -> Step:
    """pyro_sparsegp, with the hyperparameters as parameters."""

    def model(x: Tensor, y: Tensor) -> None:
        scale = pyro.param("scale", z.new_ones(()), constraint=constraints.positive)
        length = pyro.param("length", z.new_full((DIM,), 0.7), constraint=constraints.positive)
        noise = pyro.param("noise", z.new_full((), 0.3), constraint=constraints.positive)
        f = pyro.sample("f", GaussianProcess(scale * kernels.Matern32(length), x))
        with pyro.plate("data", len(x) if family is SGPR else NUM, subsample=x):
            pyro.sample("y", dist.Normal(f, noise), obs=y)

    guide = AutoSparseGP(model, family(z))
    return pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), TraceQuadrature_ELBO(2)).step


def gpytorchs(z: Tensor, natural: bool = False) -> Step:
    """GPyTorch's approximate GP, as its documentation writes it, and its natural gradients."""

    class Model(gpytorch.models.ApproximateGP):
        def __init__(self) -> None:
            kind = "NaturalVariationalDistribution" if natural else "CholeskyVariationalDistribution"
            distribution = getattr(gpytorch.variational, kind)(len(z))
            strategy = gpytorch.variational.VariationalStrategy(self, z, distribution, learn_inducing_locations=True)
            super().__init__(strategy)
            self.mean_module = gpytorch.means.ZeroMean()
            self.covar_module = gpytorch.kernels.ScaleKernel(gpytorch.kernels.MaternKernel(1.5, ard_num_dims=DIM))

        def forward(self, x: Tensor) -> gpytorch.distributions.MultivariateNormal:
            return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))

    model, likelihood = Model().to(z), gpytorch.likelihoods.GaussianLikelihood().to(z)
    objective = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=NUM)
    others = model.hyperparameters() if natural else model.parameters()
    optimisers = [torch.optim.Adam([*others, *likelihood.parameters()], lr=0.01, fused=True)]
    if natural:
        optimisers.append(gpytorch.optim.NGD(model.variational_parameters(), num_data=NUM, lr=0.1))

    def step(x: Tensor, y: Tensor) -> float:
        for optimiser in optimisers:
            optimiser.zero_grad()
        loss = -objective(model(x), y)
        loss.backward()
        for optimiser in optimisers:
            optimiser.step()
        return loss.item()

    return step


def contrib(z: Tensor) -> Step:
    """pyro.contrib.gp, with a mini-batch by set_data."""
    kernel = gp.kernels.Matern32(DIM, lengthscale=torch.full((DIM,), 0.7)).to(z)
    likelihood = gp.likelihoods.Gaussian(torch.tensor(0.09))
    x, y = z.new_zeros(1, DIM), z.new_zeros(1)
    jitter = 1e-4 if z.dtype == torch.float32 else 1e-6
    model = gp.models.VariationalSparseGP(x, y, kernel, z, likelihood, num_data=NUM, whiten=True, jitter=jitter).to(z)
    loss = pyro.infer.TraceMeanField_ELBO()
    svi = pyro.infer.SVI(model.model, model.guide, pyro.optim.Adam({"lr": 0.01}), loss)

    def step(x: Tensor, y: Tensor) -> float:
        model.set_data(x, y)
        return svi.step()

    return step


def by_hand(z: Tensor) -> tuple[list[Tensor], Callable[[Tensor, Tensor], Tensor]]:
    """The logarithms of scale, noise and length scales, as leaves, and the kernel of them."""
    log_scale, log_noise = z.new_zeros(()).requires_grad_(), z.new_full((), math.log(0.3)).requires_grad_()
    log_length = z.new_full((DIM,), math.log(0.7)).requires_grad_()

    def kernel(a: Tensor, b: Tensor) -> Tensor:
        a, b = a / log_length.exp(), b / log_length.exp()
        s = a.square().sum(-1)[:, None] + b.square().sum(-1) - 2 * a @ b.mT
        r = math.sqrt(3) * s.clamp(min=1e-12).sqrt()
        return log_scale.exp() * (1 + r) * torch.exp(-r)

    return [log_scale, log_noise, log_length], kernel


def floor(z: Tensor) -> Step:
    """What an expert would write by hand in plain torch."""
    m = len(z)
    (log_scale, log_noise, log_length), kernel = by_hand(z)
    inputs, loc = z.clone().requires_grad_(), z.new_zeros(m).requires_grad_()
    raw = torch.eye(m, dtype=z.dtype, device=z.device).requires_grad_()
    eye = torch.eye(m, dtype=z.dtype, device=z.device)
    jitter = 1e-5 if z.dtype == torch.float32 else 1e-6
    optimiser = torch.optim.Adam([log_scale, log_noise, log_length, inputs, loc, raw], lr=0.01, fused=True)

    def step(x: Tensor, y: Tensor) -> float:
        optimiser.zero_grad()
        chol = torch.linalg.cholesky(kernel(inputs, inputs) + jitter * eye)
        phi = torch.linalg.solve_triangular(chol, kernel(inputs, x), upper=False)
        tril = raw.tril()
        mean = loc @ phi
        variance = log_scale.exp() - phi.square().sum(0) + (tril.mT @ phi).square().sum(0)
        noise = (2 * log_noise).exp()
        fit = -0.5 * (((y - mean).square() + variance) / noise + noise.log() + math.log(2 * math.pi)).sum()
        kl = 0.5 * (tril.square().sum() + loc @ loc - m) - tril.diagonal().abs().log().sum()
        loss = kl - fit * NUM / len(x)
        loss.backward()
        optimiser.step()
        return loss.item()

    return step


def collapsed_gpytorchs(x: Tensor, y: Tensor, z: Tensor) -> Step:
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

    def step(x: Tensor, y: Tensor) -> float:
        optimiser.zero_grad()
        loss = -objective(model(x), y)
        loss.backward()
        optimiser.step()
        return loss.item()

    return step


def collapsed_contrib(x: Tensor, y: Tensor, z: Tensor) -> Step:
    """pyro.contrib.gp's collapsed bound."""
    kernel = gp.kernels.Matern32(DIM, lengthscale=torch.full((DIM,), 0.7)).to(z)
    model = gp.models.SparseGPRegression(x, y, kernel, z.clone(), noise=torch.tensor(0.09), jitter=1e-6).to(z)
    optimiser = torch.optim.Adam(model.parameters(), lr=0.01)
    objective = pyro.infer.Trace_ELBO().differentiable_loss

    def step(x: Tensor, y: Tensor) -> float:
        optimiser.zero_grad()
        loss = objective(model.model, model.guide)
        loss.backward()
        optimiser.step()
        return loss.item()

    return step


def collapsed_floor(x: Tensor, y: Tensor, z: Tensor) -> Step:
    """Titsias' bound by hand."""
    (log_scale, log_noise, log_length), kernel = by_hand(z)
    inputs = z.clone().requires_grad_()
    eye = torch.eye(len(z), dtype=z.dtype)
    optimiser = torch.optim.Adam([log_scale, log_noise, log_length, inputs], lr=0.01)

    def step(x: Tensor, y: Tensor) -> float:
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


MAKERS = {
    "natural": ours,
    "Adam": partial(ours, family=partial(SVGP, natural=False)),
    "GPyTorch": gpytorchs,
    "GPyTorch NGD": partial(gpytorchs, natural=True),
    "pyro.contrib.gp": contrib,
    "floor": floor,
}

COLLAPSED = {
    "ours": lambda x, y, z: ours(z, SGPR),
    "GPyTorch": collapsed_gpytorchs,
    "pyro.contrib.gp": collapsed_contrib,
    "floor": collapsed_floor,
}
RATIOS = [
    ("natural", "GPyTorch NGD"),
    *((own, other) for own in ("natural", "Adam") for other in ("GPyTorch", "floor")),
]


def pairs(sgpr: bool) -> list[tuple[str, str]]:
    """Whose times are divided by whose."""
    return [("ours", other) for other in list(COLLAPSED)[1:]] if sgpr else RATIOS


def measure(size: tuple[int, int], sgpr: bool, dtype: torch.dtype, device: str, rounds: int) -> list[str]:
    """One row of the table: of M and a batch's rows, or with ``sgpr`` of all rows and M."""
    (m, num), batch = (size[::-1], size[0]) if sgpr else ((size[0], NUM), size[1])
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    data = torch.rand(num, DIM, dtype=dtype, device=device)
    target = torch.sin(4 * data.sum(-1)) + 0.1 * torch.randn(num, dtype=dtype, device=device)
    if sgpr:
        steps: dict[str, Step] = {name: make(data, target, data[:m].clone()) for name, make in COLLAPSED.items()}
    else:
        steps = {name: make(data[:m].clone()) for name, make in MAKERS.items()}
    times: dict[str, list[float]] = {name: [] for name in steps}
    clock = time.process_time if device == "cpu" else time.perf_counter
    for turn in range(rounds + 2):  # two to warm up
        for name, step in steps.items():
            rows = slice(None) if sgpr else torch.randint(0, NUM, (batch,), device=device)
            x, y = data[rows], target[rows]
            if device != "cpu":
                torch.cuda.synchronize()
            start = clock()
            for _ in range(2):
                step(x, y)
            if device != "cpu":
                torch.cuda.synchronize()
            if turn >= 2:
                times[name].append((clock() - start) / 2 * 1e3)
    medians = [f"{statistics.median(times[name]):.1f}" for name in steps]
    ratios = [f"{statistics.median(a / b for a, b in zip(times[own], times[other])):.2f}" for own, other in pairs(sgpr)]
    return [f"{size[0]}, {size[1]}", str(dtype).removeprefix("torch."), *medians, *ratios]


def main() -> None:
    """Measure and print the table."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--sizes", nargs="*", help="pairs M,batch, or N,M of SGPR")
    parser.add_argument("--sgpr", action="store_true")
    parser.add_argument("--dtypes", nargs="*", default=["float32", "float64"])
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    warnings.filterwarnings("ignore", category=gpytorch.utils.warnings.NumericalWarning)
    name = torch.cuda.get_device_name() if options.device != "cpu" else platform.processor() or platform.machine()
    makers = COLLAPSED if options.sgpr else MAKERS
    columns = ["N, M" if options.sgpr else "M, batch", "dtype", *(f"{name} (ms)" for name in makers)]
    columns += [f"{own} / {other}" for own, other in pairs(options.sgpr)]
    lines = [
        f"{name}, {torch.get_num_threads()} threads, torch {torch.__version__}, GPyTorch {gpytorch.__version__}, "
        f"pyro-ppl {pyro.__version__}, {options.rounds} rounds",
        "",
        "| " + " | ".join(columns) + " |",
        "|" + "---|" * len(columns),
    ]
    print("\n".join(lines), flush=True)
    sizes = [tuple(map(int, size.split(","))) for size in options.sizes or ()]
    for size in sizes or (COLLAPSED_SIZES if options.sgpr else SIZES):
        for dtype in options.dtypes:
            cells = measure(size, options.sgpr, getattr(torch, dtype), options.device, options.rounds)
            row = "| " + " | ".join(cells) + " |"
            lines.append(row)
            print(row, flush=True)
    if options.out:
        options.out.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()
