"""Outputs that share functions: this package beside GPyTorch's linear model of coregionalisation.

    python tests/benchmarks/several_outputs.py

Four outputs are mixtures of two functions, observed at 100 inputs each, one of them not in the middle third. Of each
way: the mean log density and RMSE of new noisy values where the output was observed, and in the gap, and CPU time.
"""

import bench
import gpytorch
import pyro
import pyro.distributions as dist
import torch
from others import optimisers, stepping

from pyro_sparsegp import AutoSparseGP, GaussianProcess, kernels, mix_outputs
from pyro_sparsegp.families import SGPR, SVGP

P, Q, M, NOISE = 4, 2, 20, 0.1
MIXING = torch.tensor([[1.0, 0.2], [0.3, 1.0], [0.8, -0.7], [-0.6, -0.5]], dtype=torch.float64)


def signals(x):
    """The outputs without noise, ``(N, P)``."""
    return torch.stack([torch.sin(9 * x), torch.cos(14 * x.clamp(min=0) ** 1.5)], -1) @ MIXING.mT


def draw(num, generator: torch.Generator, gap):
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
    length = bench.positive("kernel_length", torch.tensor(0.3))
    noise = bench.positive("kernel_noise", torch.tensor(0.3))
    f = pyro.sample("f", GaussianProcess(kernels.Coregionalisation(mixing)[1] * kernels.RBF(length)[0], rows))
    with pyro.plate("data", len(rows)):
        return pyro.sample("y", dist.Normal(f, noise), obs=y)


def by_values(rows, y=None):
    """The linear model: a kernel for each function."""
    mixing = pyro.param("values_mixing", lambda: torch.randn(P, Q))
    noise = bench.positive("values_noise", torch.tensor(0.3))
    shared = []
    for q in range(Q):
        length = bench.positive(f"values_length_{q}", torch.tensor(0.3))
        shared.append(pyro.sample(f"g{q}", GaussianProcess(kernels.RBF(length), rows[:, :1])))
    f = mix_outputs(mixing, torch.stack(shared), output=rows[:, 1].long())
    with pyro.plate("data", len(rows)):
        return pyro.sample("y", dist.Normal(f, noise), obs=y)


def ours(model, families, steps, rows, y):
    """Train; what it says of new rows, mean and variance of y."""
    guide = AutoSparseGP(model, families)
    bench.Training(model, guide, rows, y, 0.03).until(steps=steps)

    @torch.no_grad()
    def predicted(new):
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

    def __init__(self, inducing, natural):
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


def theirs(steps, rows, y, natural, rate=0.03):
    """GPyTorch's, with as many inducing points for each function: Adam, beside natural steps of q or not."""
    mixing = torch.randn(P, Q)  # first, as in ours
    model = LMC(torch.linspace(0, 1, M)[:, None], natural)
    model.variational_strategy.lmc_coefficients.data = mixing.mT.clone()
    likelihood = gpytorch.likelihoods.GaussianLikelihood()
    likelihood.noise = 0.3**2
    loss = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(y))
    step = stepping(
        lambda: -loss(model(rows[:, :1], task_indices=rows[:, 1].long()), y),
        *optimisers(model, likelihood, natural, len(y), rate),
    )
    for _ in range(steps):
        step()
    model.eval()

    @torch.no_grad()
    def predicted(new):
        q = model(new[:, :1], task_indices=new[:, 1].long())
        return q.mean, q.variance + likelihood.noise

    return predicted


WAYS = {
    "`Coregionalisation`, `SGPR(40)`": lambda *data: ours(by_kernel, SGPR(2 * M), *data),
    "`Coregionalisation`, `SVGP(40)`": lambda *data: ours(by_kernel, SVGP(2 * M), *data),
    '`mix_outputs`, `{("g0", "g1"): SVGP(20)}`': lambda *data: ours(by_values, {("g0", "g1"): SVGP(M)}, *data),
    "`mix_outputs`, `SVGP(20)` each": lambda *data: ours(by_values, SVGP(M), *data),
    "`mix_outputs`, `SVGP(20, natural=False)` each": lambda *data: ours(by_values, SVGP(M, natural=False), *data),
    "GPyTorch's LMC, 20 each, Adam": lambda *data: theirs(*data, natural=False),
    "GPyTorch's LMC, 20 each, Adam at 0.1": lambda *data: theirs(*data, natural=False, rate=0.1),
    "GPyTorch's LMC, 20 each, NGD and Adam": lambda *data: theirs(*data, natural=True),
}


def main():
    options = bench.parsed(__doc__, steps=300, seeds=3, only="")
    torch.set_default_dtype(torch.float64)
    found = {name: [] for name in WAYS if options.only in name}
    for seed in range(options.seeds):
        generator = torch.Generator().manual_seed(seed)
        rows, y = draw(100, generator, gap=False)
        tests = [draw(100, generator, gap) for gap in (False, True)]
        for name, runs in found.items():
            bench.seeded(seed)
            start = bench.clock()
            predicted = WAYS[name](options.steps, rows, y)
            spent = bench.clock() - start
            runs.append([*(n for new, value in tests for n in bench.scores(*predicted(new), value)[:2]), spent])
    rows = []
    for name, runs in found.items():
        a, b, c, d, e = torch.tensor(runs).mean(0).tolist()
        rows.append([name, f"{a:.3f}, {b:.3f}", f"{c:.3f}, {d:.3f}", f"{e:.1f}"])
    print(bench.table(["way", "log density, RMSE", "in the gap", "CPU seconds"], rows))


if __name__ == "__main__":
    main()
