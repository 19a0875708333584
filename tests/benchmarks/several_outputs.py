"""Outputs that share functions: this package beside GPyTorch's linear model of coregionalisation.

    python tests/benchmarks/several_outputs.py

Four outputs are mixtures of two functions, observed at 100 inputs each, one of them not in the middle third. Of each
way: the mean log density and RMSE of new noisy values where the output was observed, and in the gap, and CPU time.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Callable

import gpytorch
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from torch import Tensor

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels, mix_outputs
from pyro_sparsegp.families import SGPR, SVGP

P, Q, M, NOISE = 4, 2, 20, 0.1
MIXING = torch.tensor([[1.0, 0.2], [0.3, 1.0], [0.8, -0.7], [-0.6, -0.5]], dtype=torch.float64)


def signals(x: Tensor) -> Tensor:
    """The outputs without noise, ``(N, P)``."""
    return torch.stack([torch.sin(9 * x), torch.cos(14 * x.clamp(min=0) ** 1.5)], -1) @ MIXING.mT


def draw(num: int, generator: torch.Generator, gap: bool) -> tuple[Tensor, Tensor]:
    """Rows (x, p) at inputs of each output's own, and values; the third without, or of, the middle third."""
    rows = []
    for p in range(P):
        x = torch.rand(4 * num, generator=generator)
        middle = (x > 1 / 3) & (x < 2 / 3)
        x = x[middle if gap and p == 2 else ~middle if p == 2 else torch.ones_like(middle)][:num]
        rows.append(torch.stack([x, torch.full_like(x, p)], -1))
    whole = torch.cat(rows[2:3] if gap else rows)
    values = signals(whole[:, 0])[torch.arange(len(whole)), whole[:, 1].long()]
    return whole, values + NOISE * torch.randn(len(whole), generator=generator)


def by_kernel(rows, y=None):
    """The intrinsic model: one kernel of the inputs."""
    mixing = pyro.param("kernel_mixing", lambda: torch.randn(P, Q))
    length = pyro.param("kernel_length", torch.tensor(0.3), constraint=dist.constraints.positive)
    noise = pyro.param("kernel_noise", torch.tensor(0.3), constraint=dist.constraints.positive)
    f = pyro.sample("f", GaussianProcess(kernels.Coregionalisation(mixing)[1] * kernels.RBF(length)[0], rows))
    with pyro.plate("data", len(rows)):
        return pyro.sample("y", dist.Normal(f, noise), obs=y)


def by_values(rows, y=None):
    """The linear model: a kernel for each function."""
    mixing = pyro.param("values_mixing", lambda: torch.randn(P, Q))
    noise = pyro.param("values_noise", torch.tensor(0.3), constraint=dist.constraints.positive)
    shared = []
    for q in range(Q):
        length = pyro.param(f"values_length_{q}", torch.tensor(0.3), constraint=dist.constraints.positive)
        shared.append(pyro.sample(f"g{q}", GaussianProcess(kernels.RBF(length), rows[:, :1])))
    f = mix_outputs(mixing, torch.stack(shared), output=rows[:, 1].long())
    with pyro.plate("data", len(rows)):
        return pyro.sample("y", dist.Normal(f, noise), obs=y)


def ours(model: Callable, families, steps: int, rows: Tensor, y: Tensor) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """Train; what it says of new rows, mean and variance of y."""
    guide = AutoSparseGP(model, families)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.03}), TraceQuadrature_ELBO(2))
    for _ in range(steps):
        svi.step(rows, y)

    @torch.no_grad()
    def predicted(new: Tensor) -> tuple[Tensor, Tensor]:
        q = guide.posterior(new)
        if "f" in q:
            return q["f"].mean, q["f"].variance + pyro.param("kernel_noise") ** 2
        a = pyro.param("values_mixing")[new[:, 1].long()]
        covariance = q["g0"].covariance_with(q["g1"]).diagonal()
        mean = a[:, 0] * q["g0"].mean + a[:, 1] * q["g1"].mean
        variance = a[:, 0] ** 2 * q["g0"].variance + a[:, 1] ** 2 * q["g1"].variance
        return mean, variance + 2 * a[:, 0] * a[:, 1] * covariance + pyro.param("values_noise") ** 2

    return predicted


class LMC(gpytorch.models.ApproximateGP):
    """GPyTorch's linear model of coregionalisation.

    :param natural: q in natural parameters, for natural steps; or by its Cholesky factor, for Adam.
    """

    def __init__(self, inducing: Tensor, natural: bool) -> None:
        kinds = gpytorch.variational
        kind = kinds.NaturalVariationalDistribution if natural else kinds.CholeskyVariationalDistribution
        variational = kind(len(inducing), torch.Size([Q]))
        base = gpytorch.variational.VariationalStrategy(self, inducing.expand(Q, -1, -1).clone(), variational)
        super().__init__(gpytorch.variational.LMCVariationalStrategy(base, num_tasks=P, num_latents=Q, latent_dim=-1))
        self.mean_module = gpytorch.means.ZeroMean(batch_shape=torch.Size([Q]))
        self.covar_module = gpytorch.kernels.RBFKernel(batch_shape=torch.Size([Q]))
        self.covar_module.lengthscale = 0.3

    def forward(self, x):
        return gpytorch.distributions.MultivariateNormal(self.mean_module(x), self.covar_module(x))


def theirs(
    steps: int, rows: Tensor, y: Tensor, natural: bool, rate: float = 0.03
) -> Callable[[Tensor], tuple[Tensor, Tensor]]:
    """GPyTorch's, with as many inducing points for each function: Adam, beside natural steps of q or not."""
    mixing = torch.randn(P, Q)  # first, as in ours
    model = LMC(torch.linspace(0, 1, M)[:, None], natural)
    model.variational_strategy.lmc_coefficients.data = mixing.mT.clone()
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    likelihood.noise = 0.3**2
    loss = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(y))
    others = [*(model.hyperparameters() if natural else model.parameters()), *likelihood.parameters()]
    optims: list = [torch.optim.Adam(others, lr=rate)]
    if natural:
        optims.append(gpytorch.optim.NGD(model.variational_parameters(), num_data=len(y), lr=0.1))
    for _ in range(steps):
        for optim in optims:
            optim.zero_grad()
        value = -loss(model(rows[:, :1], task_indices=rows[:, 1].long()), y)
        value.backward()
        for optim in optims:
            optim.step()
    model.eval()

    @torch.no_grad()
    def predicted(new: Tensor) -> tuple[Tensor, Tensor]:
        q = model(new[:, :1], task_indices=new[:, 1].long())
        return q.mean, q.variance + likelihood.noise

    predicted.told = {  # type: ignore[attr-defined]
        "lengths": [round(v, 3) for v in model.covar_module.lengthscale.flatten().tolist()],
        "noise": round(likelihood.noise.sqrt().item(), 3),
        "loss a row": round(value.item(), 3),
    }
    return predicted


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--steps", type=int, default=300)
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--only", default="", help="ways with this in their names")
    parser.add_argument("--verbose", action="store_true", help="each run as it ends")
    options = parser.parse_args()
    torch.set_default_dtype(torch.float64)
    ways: dict[str, Callable] = {
        "`Coregionalisation`, `SGPR(40)`": lambda *data: ours(by_kernel, SGPR(2 * M), *data),
        "`Coregionalisation`, `SVGP(40)`": lambda *data: ours(by_kernel, SVGP(2 * M), *data),
        '`mix_outputs`, `{("g0", "g1"): SVGP(20)}`': lambda *data: ours(by_values, {("g0", "g1"): SVGP(M)}, *data),
        "`mix_outputs`, `SVGP(20)` each": lambda *data: ours(by_values, SVGP(M), *data),
        "`mix_outputs`, `SVGP(20, natural=False)` each": lambda *data: ours(by_values, SVGP(M, natural=False), *data),
        "GPyTorch's LMC, 20 each, Adam": lambda *data: theirs(*data, natural=False),
        "GPyTorch's LMC, 20 each, Adam at 0.1": lambda *data: theirs(*data, natural=False, rate=0.1),
        "GPyTorch's LMC, 20 each, NGD and Adam": lambda *data: theirs(*data, natural=True),
    }
    ways = {name: way for name, way in ways.items() if options.only in name}
    found: dict[str, list[list[float]]] = {name: [] for name in ways}
    for seed in range(options.seeds):
        generator = torch.Generator().manual_seed(seed)
        rows, y = draw(100, generator, gap=False)
        tests = [draw(100, generator, gap) for gap in (False, True)]
        for name, way in ways.items():
            pyro.clear_param_store()
            pyro.set_rng_seed(seed)
            start = time.process_time()
            predicted = way(options.steps, rows, y)
            spent = time.process_time() - start
            numbers = []
            for new, value in tests:
                mean, variance = predicted(new)
                density = dist.Normal(mean, variance.sqrt()).log_prob(value).mean()
                numbers += [density.item(), (mean - value).square().mean().sqrt().item()]
            found[name].append([*numbers, spent])
            if options.verbose:
                print(seed, name, [round(n, 3) for n in found[name][-1]], getattr(predicted, "told", ""), flush=True)
    print("| way | log density, RMSE | in the gap | CPU seconds |\n|---|---|---|---|")
    for name, runs in found.items():
        a, b, c, d, e = torch.tensor(runs).mean(0).tolist()
        print(f"| {name} | {a:.3f}, {b:.3f} | {c:.3f}, {d:.3f} | {e:.1f} |")


if __name__ == "__main__":
    main()
