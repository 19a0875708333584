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

import math
import statistics
import warnings
from functools import partial

import bench
import gpytorch
import pyro
import torch
from others import Approximate, Exact, matern, optimisers, stepping
from pyro.contrib import gp

from pyro_sparsegp import AutoSparseGP, TraceQuadrature_ELBO
from pyro_sparsegp.families import SGPR, SVGP

NUM, DIM = 100_000, 8
COLLAPSED_SIZES = [(1000, 64), (10_000, 256), (10_000, 512)]  # N, M
SIZES = [(12, 200), (128, 256), (512, 1024), (1024, 1024)]


def ours(z, family=SVGP, size=NUM):
    """pyro_sparsegp, with the hyperparameters as parameters."""
    model = partial(bench.regression(0.7), size=size)
    guide = AutoSparseGP(model, family(z))
    return pyro.infer.SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), TraceQuadrature_ELBO(2)).step


def gpytorchs(z, natural=False):
    """GPyTorch's approximate GP, and its natural gradients."""
    model, likelihood = Approximate(z, matern(DIM), natural).to(z), gpytorch.likelihoods.GaussianLikelihood().to(z)
    objective = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=NUM)
    return stepping(
        lambda x, y: -objective(model(x), y), *optimisers(model, likelihood, natural, NUM, 0.01, fused=True)
    )


def contrib(z):
    """pyro.contrib.gp, with a mini-batch by set_data."""
    kernel = gp.kernels.Matern32(DIM, lengthscale=torch.full((DIM,), 0.7)).to(z)
    likelihood = gp.likelihoods.Gaussian(torch.tensor(0.09))
    x, y = z.new_zeros(1, DIM), z.new_zeros(1)
    jitter = 1e-4 if z.dtype == torch.float32 else 1e-6
    model = gp.models.VariationalSparseGP(x, y, kernel, z, likelihood, num_data=NUM, whiten=True, jitter=jitter).to(z)
    loss = pyro.infer.TraceMeanField_ELBO()
    svi = pyro.infer.SVI(model.model, model.guide, pyro.optim.Adam({"lr": 0.01}), loss)

    def step(x, y):
        model.set_data(x, y)
        return svi.step()

    return step


def by_hand(z):
    """The logarithms of scale, noise and length scales, as leaves, and the kernel of them."""
    log_scale, log_noise = z.new_zeros(()).requires_grad_(), z.new_full((), math.log(0.3)).requires_grad_()
    log_length = z.new_full((DIM,), math.log(0.7)).requires_grad_()

    def kernel(a, b):
        a, b = a / log_length.exp(), b / log_length.exp()
        s = a.square().sum(-1)[:, None] + b.square().sum(-1) - 2 * a @ b.mT
        r = math.sqrt(3) * s.clamp(min=1e-12).sqrt()
        return log_scale.exp() * (1 + r) * torch.exp(-r)

    return [log_scale, log_noise, log_length], kernel


def floor(z):
    """What an expert would write by hand in plain torch."""
    (log_scale, log_noise, log_length), kernel = by_hand(z)
    inputs, loc = z.clone().requires_grad_(), z.new_zeros(len(z)).requires_grad_()
    eye = torch.eye(len(z), dtype=z.dtype, device=z.device)
    raw, jitter = eye.clone().requires_grad_(), 1e-5 if z.dtype == torch.float32 else 1e-6

    def loss(x, y):
        chol = torch.linalg.cholesky(kernel(inputs, inputs) + jitter * eye)
        phi = torch.linalg.solve_triangular(chol, kernel(inputs, x), upper=False)
        tril = raw.tril()
        mean = loc @ phi
        variance = log_scale.exp() - phi.square().sum(0) + (tril.mT @ phi).square().sum(0)
        noise = (2 * log_noise).exp()
        fit = -0.5 * (((y - mean).square() + variance) / noise + noise.log() + math.log(2 * math.pi)).sum()
        kl = 0.5 * (tril.square().sum() + loc @ loc - len(z)) - tril.diagonal().abs().log().sum()
        return kl - fit * NUM / len(x)

    return stepping(loss, torch.optim.Adam([log_scale, log_noise, log_length, inputs, loc, raw], lr=0.01, fused=True))


def collapsed_gpytorchs(x, y, z):
    """GPyTorch's inducing-point kernel under its exact marginal likelihood."""
    likelihood = gpytorch.likelihoods.GaussianLikelihood().to(z)
    model = Exact(x, y, gpytorch.kernels.InducingPointKernel(matern(DIM), z, likelihood), likelihood).to(z)
    objective = gpytorch.mlls.ExactMarginalLogLikelihood(likelihood, model)
    model.train()
    return stepping(lambda x, y: -objective(model(x), y), torch.optim.Adam(model.parameters(), lr=0.01))


def collapsed_contrib(x, y, z):
    """pyro.contrib.gp's collapsed bound."""
    kernel = gp.kernels.Matern32(DIM, lengthscale=torch.full((DIM,), 0.7)).to(z)
    model = gp.models.SparseGPRegression(x, y, kernel, z.clone(), noise=torch.tensor(0.09), jitter=1e-6).to(z)
    objective = pyro.infer.Trace_ELBO().differentiable_loss
    return stepping(lambda x, y: objective(model.model, model.guide), torch.optim.Adam(model.parameters(), lr=0.01))


def collapsed_floor(x, y, z):
    """Titsias' bound by hand."""
    (log_scale, log_noise, log_length), kernel = by_hand(z)
    inputs, eye = z.clone().requires_grad_(), torch.eye(len(z), dtype=z.dtype)

    def loss(x, y):
        variance = (2 * log_noise).exp()
        chol = torch.linalg.cholesky(kernel(inputs, inputs) + 1e-6 * eye)
        a = torch.linalg.solve_triangular(chol, kernel(inputs, x), upper=False)
        inner = torch.linalg.cholesky(eye + a @ a.mT / variance)
        c = torch.linalg.solve_triangular(inner, (a @ y)[:, None], upper=False)[:, 0] / variance
        fit = y.square().sum() / variance - c.square().sum() + len(x) * (math.log(2 * math.pi) + 2 * log_noise)
        rest = 0.5 * (len(x) * log_scale.exp() - a.square().sum()) / variance
        return 0.5 * fit + inner.diagonal().log().sum() + rest

    return stepping(loss, torch.optim.Adam([log_scale, log_noise, log_length, inputs], lr=0.01))


MAKERS = {
    "natural": ours,
    "Adam": partial(ours, family=partial(SVGP, natural=False)),
    "GPyTorch": gpytorchs,
    "GPyTorch NGD": partial(gpytorchs, natural=True),
    "pyro.contrib.gp": contrib,
    "floor": floor,
}
COLLAPSED = {
    "ours": lambda x, y, z: ours(z, SGPR, len(x)),
    "GPyTorch": collapsed_gpytorchs,
    "pyro.contrib.gp": collapsed_contrib,
    "floor": collapsed_floor,
}
RATIOS = [  # whose times are divided by whose
    ("natural", "GPyTorch NGD"),
    *((own, other) for own in ("natural", "Adam") for other in ("GPyTorch", "floor")),
]


def measure(size, dtype, options, pairs):
    """One row of the table: of M and a batch's rows, or with ``--sgpr`` of all rows and M."""
    (m, num), batch = (size[::-1], 0) if options.sgpr else ((size[0], NUM), size[1])
    bench.seeded()
    data = torch.rand(num, DIM, dtype=getattr(torch, dtype), device=options.device)
    target = torch.sin(4 * data.sum(-1)) + 0.1 * torch.randn(num).to(data)
    z = data[:m].clone()
    made = {name: make(data, target, z) for name, make in COLLAPSED.items()} if options.sgpr else None
    made = made or {name: make(z.clone()) for name, make in MAKERS.items()}

    def step(of):
        rows = torch.randint(0, NUM, (batch,), device=data.device) if batch else slice(None)
        return of(data[rows], target[rows])

    steps = {name: partial(step, of) for name, of in made.items()}
    times = bench.interleaved(steps, options.rounds, repeats=2, device=options.device)
    medians = [f"{statistics.median(each):.1f}" for each in times.values()]
    return [f"{size[0]}, {size[1]}", dtype, *medians, *(f"{bench.ratio(times, *pair):.2f}" for pair in pairs)]


def main():
    options = bench.parsed(
        __doc__, device="cpu", rounds=15, sizes=[""], sgpr=False, dtypes=["float32", "float64"], out=None
    )
    warnings.filterwarnings("ignore", category=gpytorch.utils.warnings.NumericalWarning)
    makers = COLLAPSED if options.sgpr else MAKERS
    pairs = [("ours", other) for other in list(COLLAPSED)[1:]] if options.sgpr else RATIOS
    page = bench.Page(options.out)
    page.say(
        f"{bench.machine(options.device)}, GPyTorch {gpytorch.__version__}, pyro-ppl {pyro.__version__}, "
        f"{options.rounds} rounds",
        "",
    )
    page.head(
        *("N, M" if options.sgpr else "M, batch", "dtype"),
        *(f"{name} (ms)" for name in makers),
        *(f"{own} / {other}" for own, other in pairs),
    )
    sizes = [tuple(map(int, size.split(","))) for size in options.sizes if size]
    for size in sizes or (COLLAPSED_SIZES if options.sgpr else SIZES):
        for dtype in options.dtypes:
            page.row(*measure(size, dtype, options, pairs))


if __name__ == "__main__":
    main()
