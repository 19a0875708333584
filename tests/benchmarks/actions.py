"""Paper 2's experiments on actions and on SVGP's inducing points, as tables.

python tests/benchmarks/actions.py [--what policies placement scaling] [--rows 10000 40000 100000]

policies: the actions' mutual information with f (lemma S5) and their Grassmann distance from the top eigenvectors
(eq. S26) for each policy, on n = 500 uniform inputs; "sparse" before and after training by the bound.
placement: section S5.1: n = 500, d = 1 to 25, data from a Matern-3/2 prior; where SVGP's 64 inducing points go
(eq. S24) and the share of posterior in predictive variance there (eq. S25), beside the exact GP that made the data.
scaling: seconds and peak memory of a training step of ComputationAware(256) with sparse actions. The step evaluates
all pairs of rows: "linear" in the paper is said of parallel hardware.
"""

import subprocess
import sys

import bench
import pyro
import pyro.distributions as dist
import torch

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import SVGP, ComputationAware

ALL = ["policies", "placement", "scaling"]


def simulate(columns, num=500, noise=0.1):
    """Uniform inputs, targets from a Matern-3/2 process whose length scale grows with √d."""
    x = torch.rand(num, columns)
    return x, GaussianProcess(kernels.Matern32(0.5 * columns**0.5), x).rsample() + noise * torch.randn(num)


def train(model, guide, x, y, epochs, rate):
    """Adam, its rate falling linearly to a tenth."""
    schedule = pyro.optim.PyroLRScheduler(
        torch.optim.lr_scheduler.LinearLR,
        {"optimizer": torch.optim.Adam, "optim_args": {"lr": rate}, "start_factor": 1.0, "end_factor": 0.1}
        | {"total_iters": epochs},
    )
    svi = pyro.infer.SVI(model, guide, schedule, TraceQuadrature_ELBO(2))
    for _ in range(epochs):
        svi.step(x, y)
        schedule.step()


def policies(page):
    """Lemma S5 and eq. S26."""
    page.head("actions", "policy", "mutual information (nats)", "Grassmann distance to the eigenvectors")
    torch.manual_seed(0)
    x, y = simulate(2)
    k, noise = kernels.Matern32(0.5 * 2**0.5), 0.1

    def fixed(x, y=None):
        f = pyro.sample("f", GaussianProcess(k, x))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(f, noise), obs=y)

    for num in (4, 16, 64):
        top = torch.linalg.eigh(k(x))[1][:, -num:]
        for policy in ("eigen", "cg", "sparse", "sparse, trained", "random"):
            pyro.clear_param_store()
            guide = AutoSparseGP(fixed, ComputationAware(num, policy.split(",")[0], tolerance=0.0))
            guide(x, y)
            bench.Training(fixed, guide, x, y, 0.1).until(steps=200 if "trained" in policy else 0)
            s = torch.linalg.qr(guide.posterior(x)["f"].basis.actions.matrix.detach())[0]
            information = 0.5 * torch.logdet(torch.eye(num) + s.mT @ k(x) @ s / noise**2)
            angles = torch.linalg.svdvals(s.mT @ top).clamp(max=1).acos()
            page.row(num, policy, f"{information:.2f}", f"{angles.norm():.3f}")


def placement(page):
    """Section S5.1: eq. S24 and S25."""
    page.head(
        *("d", "distance of Z to the data, in lengths (S24)", "of uniform points", "S25 at Z", "S25, exact GP"),
        "noise sd",
    )
    for columns in range(1, 26):
        bench.seeded()
        x, y = simulate(columns)
        model = bench.regression(0.5 * columns**0.5)
        guide = AutoSparseGP(model, SVGP(64, init=lambda kernel, x, num: torch.rand(num, x.shape[-1])))
        train(model, guide, x, y, 300, 0.1)
        z, length = guide.gps.f.basis.inputs[0].detach(), pyro.param("length").detach()
        noise = pyro.param("noise").detach()

        def distance(a, x=x, length=length):
            return float(torch.cdist(a / length, x / length).min(-1)[0].mean())

        variance = guide.posterior(z)["f"].variance.detach()
        k = kernels.Matern32(0.5 * columns**0.5)
        gain = torch.linalg.solve(k(x) + 0.01 * torch.eye(len(x)), k(x, z))
        exact = k.diag(z) - (k(x, z) * gain).sum(0)
        cells = distance(z), distance(torch.rand(64, columns)), (variance / (variance + noise**2)).mean()
        rest = (exact / (exact + 0.01)).mean(), noise
        page.row(columns, *(f"{float(cell):.3f}" for cell in (*cells, *rest)))


def step(page, rows):
    """One training step, its seconds and this process's peak memory."""
    torch.set_default_dtype(torch.float32)
    torch.manual_seed(0)
    x = torch.rand(rows, 3)
    y = torch.sin(8 * x.sum(-1)) + 0.1 * torch.randn(rows)
    model = bench.regression(0.5 * 3**0.5)
    guide = bench.prepared(model, ComputationAware(256), x, y)
    seconds = bench.Training(model, guide, x, y).until(steps=1).seconds
    page.row(f"{rows:,}", f"{seconds:.1f}", f"{bench.peak():.2f}", f"{1e9 * seconds / rows**2:.1f}")


def main():
    options, page = bench.parsed(__doc__, what=ALL, rows=[10_000, 40_000, 100_000], step=0), bench.Page()
    if options.step:
        step(page, options.step)
        return
    page.say(bench.machine(), "")
    torch.set_default_dtype(torch.float64)
    if "policies" in options.what:
        policies(page)
    if "placement" in options.what:
        placement(page)
    if "scaling" in options.what:
        page.head("N", "seconds a step", "peak GiB", "nanoseconds a pair")
        for rows in options.rows:  # a process each, for its peak memory
            subprocess.run([sys.executable, __file__, "--step", str(rows)], check=True)


if __name__ == "__main__":
    main()
