"""Which relative jitter of K_ZZ: what it takes from the bound, and how much it steadies training.

    python tests/benchmarks/jitter.py > tests/benchmarks/jitter.md

"Smooth" is a function of one input with 20 trainable points, in batches of 64 of 500 rows, noise 0.1: L changes much
where points move, and with it q(f), whose w lags behind. "Precise" is a function of two inputs with 100 points, 2000
rows and noise 0.01: data that tell of directions in which K_ZZ has next to no variance.
"""

import sys
import warnings

import pyro
import pyro.distributions as dist
import torch
from torch.distributions import constraints

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import SGPR, SVGP

JITTERS = (1e-8, 1e-7, 1e-6, 1e-4)
DTYPES = (torch.float64, torch.float32)


def learned(name, value, x):
    return pyro.param(name, x.new_tensor(value), constraint=constraints.positive)


def regression(kernel, length, noise, jitter):
    def model(x, y=None, size=None):
        scaled = learned("variance", 1.0, x) * kernel(learned("length", length, x))
        f = pyro.sample("f", GaussianProcess(scaled, x, jitter=jitter))
        with pyro.plate("data", size or len(x), subsample=x):
            pyro.sample("y", dist.Normal(f, learned("noise", noise, x)), obs=y)

    return model


def train(model, family, x, y, steps, batch, seed, lr=0.01):
    """The guide, and the loss on all rows every ten steps."""
    pyro.clear_param_store()
    pyro.set_rng_seed(seed)
    guide = AutoSparseGP(model, family)
    guide(x, y)
    svi = pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": lr}), TraceQuadrature_ELBO(2))
    losses = []
    for step in range(steps):
        rows = torch.randperm(len(x))[:batch]
        svi.step(x[rows], y[rows], len(x))
        if step % 10 == 9:
            losses.append(svi.evaluate_loss(x, y))
    return guide, torch.tensor(losses)


def smooth(kernel, jitter, dtype, whiten, natural, lr, steps=600, seeds=(0,)):
    """The largest rise, and the bound at the end."""
    rises, ends = [], []
    for seed in seeds:
        generator = torch.Generator().manual_seed(seed)
        x = torch.rand(500, 1, generator=generator, dtype=torch.float64)
        f = torch.sin(6 * x[:, 0]) + 0.5 * torch.cos(11 * x[:, 0])
        y = f + 0.1 * torch.randn(500, generator=generator, dtype=torch.float64)
        model = regression(kernel, 0.3, 0.1, jitter)
        family = SVGP(20, whiten=whiten, natural=natural)
        try:
            _, losses = train(model, family, x.to(dtype), y.to(dtype), steps, 64, seed, lr)
        except (RuntimeError, ValueError) as error:
            return str(error).split("(")[0][:40]
        rises.append((losses - losses.cummin(0).values)[30:].max().item())
        ends.append(-losses[-20:].median().item())
    return f"{max(rises):.0f}, {sum(ends) / len(ends):.0f}"


def precise(jitter, dtype, length, seed=0):
    """Titsias' bound at 100 of the inputs."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.rand(2000, 2, generator=generator, dtype=torch.float64)
    prior = GaussianProcess(kernels.RBF(length), x, jitter=1e-10).scale_tril
    y = prior @ torch.randn(2000, generator=generator, dtype=torch.float64)
    y = y + 0.01 * torch.randn(2000, generator=generator, dtype=torch.float64)
    z, x, y = x[:100].to(dtype), x.to(dtype), y.to(dtype)
    model = regression(kernels.RBF, length, 0.01, jitter)
    pyro.clear_param_store()
    guide = AutoSparseGP(model, SGPR(z, trainable=False))
    guide(x, y)
    return -TraceQuadrature_ELBO(2).loss(model, guide, x, y)


def main():
    warnings.simplefilter("ignore")
    print("# The relative jitter of K_ZZ\n\nMade by `tests/benchmarks/jitter.py`. In nats.\n")
    print("## Precise: the bound of SGPR at fixed points\n")
    print("| length scale | dtype |", " | ".join(f"{j:.0e}" for j in JITTERS), "|")
    print("|---" * (2 + len(JITTERS)) + "|")
    for length in (0.5, 0.3, 0.2):
        for dtype in DTYPES:
            row = " | ".join(f"{precise(jitter, dtype, length):.0f}" for jitter in JITTERS)
            print(f"| {length} | {str(dtype)[6:]} | {row} |", flush=True)
    print("\n## Smooth: the largest rise of the loss above its lowest so far, and the bound at the end\n")
    print("| kernel | q by | whiten | dtype | Adam's rate |", " | ".join(f"{j:.0e}" for j in JITTERS), "|")
    print("|---" * (5 + len(JITTERS)) + "|")
    double, single = DTYPES
    for kernel, whiten, dtype, lr in (
        (kernels.RBF, True, double, 0.01),
        (kernels.RBF, False, double, 0.1),
        (kernels.RBF, False, double, 0.01),
        (kernels.RBF, True, single, 0.01),
        (kernels.Matern52, True, double, 0.01),
    ):
        for natural in (True, False):
            row = " | ".join(smooth(kernel, jitter, dtype, whiten, natural, lr) for jitter in JITTERS)
            label = "natural steps" if natural else "Adam"
            print(f"| {kernel.__name__} | {label} | {whiten} | {str(dtype)[6:]} | {lr} | {row} |", flush=True)


if __name__ == "__main__":
    sys.exit(main())
