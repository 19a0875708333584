"""One training step of README's model against GPyTorch, pyro.contrib.gp, Pyro's floor and plain torch, in one run.

python tests/benchmarks/step_time.py [--device cuda] [--rounds 11] [--sizes 16,500] [--launches] [--first] [--plain]
    [--out PAGE]

The step is that of README as a user writes it: priors on the kernel's variance and length, Pyro's Adam, the default
TraceQuadrature_ELBO; all rows, all of float32. "natural" is the default, "Adam" has ``natural=False``. "recorded" and
"compiled" are the default by JitTraceQuadrature_ELBO, which replays a graph, and by inductor, whose compilation takes
the first steps: after "overtakes" seconds of training it has caught up with the plain step. Pyro's Adam stays outside
of these graphs; "fit, recorded" and "fit, compiled" are steps of ``fit``, whose Adam is inside. GPyTorch's is
its documentation's loop with torch's Adam, and with its natural step of q(u), NGD; both, pyro.contrib.gp's and plain
torch's learn kernels' parameters as numbers. "Pyro's floor" is a step of AutoNormal and Trace_ELBO on the same program
with a plain normal for f: what Pyro's handlers, priors and optimisers take without any GP. Times, of this process's CPU
(on a GPU by the clock), are medians over rounds that take turns, ratios medians of each round's ratio. "floor + plain"
is the sum of two columns: handlers without a GP, and a GP without handlers. GPflow does not install here.
``--plain`` compiles nothing, for a quick trial: its compiled steps are recorded ones. ``--first`` tells README's first
step beside later ones, and what the import of this package adds to Pyro's, in fresh processes. ``--launches`` counts
the kernels that a GPU launches a step; on a CPU all operations but views, which are more where an optimiser has one
kernel for all.
"""

import importlib
import itertools
import math
import os
import statistics
import subprocess
import sys
import warnings
from functools import partial

import bench
import gpytorch
import numpy as np
import pyro
import pyro.distributions as dist
import torch
from others import Approximate, matern, optimisers, stepping
from pyro.contrib import gp
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoNormal
from torch.utils._python_dispatch import TorchDispatchMode

from pyro_sparsegp import AutoSparseGP, GaussianProcess, JitTraceQuadrature_ELBO, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import SVGP
from pyro_sparsegp.inference.optimisers import FallingAdam

SIZES = [(16, 500), (64, 1000), (128, 256), (512, 1024)]  # M, N
LIKELIHOODS = {
    "Poisson": lambda f: dist.Poisson(f.exp()),
    "Gaussian": lambda f: dist.Normal(f, 0.3),
    "Bernoulli": lambda f: dist.Bernoulli(logits=f),
}


class GPyTorchPoisson(gpytorch.likelihoods._OneDimensionalLikelihood):
    """Counts, as GPyTorch's documentation has users write a likelihood."""

    def forward(self, f, **kwargs):
        return torch.distributions.Poisson(f.exp())


OTHERS = {  # GPyTorch's likelihoods, and pyro.contrib's
    "Poisson": (GPyTorchPoisson, gp.likelihoods.Poisson),
    "Gaussian": (gpytorch.likelihoods.GaussianLikelihood, partial(gp.likelihoods.Gaussian, torch.tensor(0.09))),
    "Bernoulli": (gpytorch.likelihoods.BernoulliLikelihood, gp.likelihoods.Binary),
}


def program(name, process):
    """README's, with what f is."""

    def model(x, y=None, size=None):
        variance = pyro.sample("variance", dist.LogNormal(0.0, 1.0))
        length = pyro.sample("length", dist.LogNormal(-1.0, 1.0))
        f = pyro.sample("f", process(variance, length, x))
        with pyro.plate("data", size or len(x), subsample=x):
            return pyro.sample("y", LIKELIHOODS[name](f), obs=y)

    return model


def readme(name):
    return program(name, lambda v, length, x: GaussianProcess(v * kernels.Matern32(length), x, mean=1.0))


def ours(name, x, y, z, elbo=TraceQuadrature_ELBO, **options):
    """README's step."""
    model = readme(name)
    svi = SVI(model, AutoSparseGP(model, SVGP(len(z), **options)), pyro.optim.Adam({"lr": 0.02}), elbo())
    return lambda: svi.step(x, y)


def fits(name, x, y, z, compile=False):
    """The same step as ``fit`` takes it, with its Adam in the graph."""
    model, optim, elbo = readme(name), FallingAdam(0.02), JitTraceQuadrature_ELBO(compile=compile)
    elbo.optim = optim
    svi = SVI(model, AutoSparseGP(model, SVGP(len(z))), optim, elbo)
    return lambda: svi.step(x, y)


def pyros_floor(name, x, y, z):
    """The same without a GP."""
    model = program(name, lambda v, length, x: dist.Normal(x.new_ones(len(x)), (v * length).to(x)).to_event(1))
    svi = SVI(model, AutoNormal(model), pyro.optim.Adam({"lr": 0.02}), Trace_ELBO())
    return lambda: svi.step(x, y)


def gpytorchs(name, x, y, z, natural=False):
    """GPyTorch's approximate GP, and its natural gradients."""
    model, likelihood = Approximate(z, matern(None), natural).to(z), OTHERS[name][0]().to(z)
    model.mean_module = gpytorch.means.ConstantMean().to(z)
    objective = gpytorch.mlls.VariationalELBO(likelihood, model, num_data=len(x))
    return stepping(lambda: -objective(model(x), y), *optimisers(model, likelihood, natural, len(x), 0.02))


def contrib(name, x, y, z):
    """pyro.contrib.gp's."""
    kernel, jitter = gp.kernels.Matern32(1), 1e-4 if z.dtype == torch.float32 else 1e-6
    likelihood = OTHERS[name][1]()
    model = gp.models.VariationalSparseGP(x, y, kernel, z, likelihood, whiten=True, jitter=jitter).to(z)
    svi = SVI(model.model, model.guide, pyro.optim.Adam({"lr": 0.02}), TraceMeanField_ELBO())
    return svi.step


def plain(name, x, y, z):
    """What an expert would write by hand in plain torch."""
    log_scale, log_length, level = (z.new_full((), value).requires_grad_() for value in (0.0, math.log(0.7), 1.0))
    inputs, loc = z.clone().requires_grad_(), z.new_zeros(len(z)).requires_grad_()
    eye = torch.eye(len(z), dtype=z.dtype, device=z.device)
    raw, jitter = eye.clone().requires_grad_(), 1e-4 if z.dtype == torch.float32 else 1e-6
    nodes, weights = (torch.from_numpy(part).to(z) for part in np.polynomial.hermite_e.hermegauss(20))
    weights = weights / weights.sum()

    def kernel(a, b):
        a, b = a / log_length.exp(), b / log_length.exp()
        s = a.square().sum(-1)[:, None] + b.square().sum(-1) - 2 * a @ b.mT
        r = math.sqrt(3) * s.clamp(min=1e-12).sqrt()
        return log_scale.exp() * (1 + r) * torch.exp(-r)

    def loss():
        chol = torch.linalg.cholesky(kernel(inputs, inputs) + jitter * eye)
        phi = torch.linalg.solve_triangular(chol, kernel(inputs, x), upper=False)
        tril = raw.tril()
        mean = level + loc @ phi
        variance = log_scale.exp() - phi.square().sum(0) + (tril.mT @ phi).square().sum(0)
        if name == "Gaussian":
            fit = -0.5 * (((y - mean).square() + variance) / 0.09 + math.log(2 * math.pi * 0.09)).sum()
        else:
            f = mean + variance.sqrt() * nodes[:, None]
            each = y * f - f.exp() if name == "Poisson" else y * f - torch.nn.functional.softplus(f)
            fit = (weights @ each).sum()
        kl = 0.5 * (tril.square().sum() + loc @ loc - len(z)) - tril.diagonal().abs().log().sum()
        return kl - fit

    return stepping(loss, torch.optim.Adam([log_scale, log_length, level, inputs, loc, raw], lr=0.02))


def blas(name, x, y, z):
    """The step's factor, triangular solves and products of M x M by M x N, there and back, and nothing else."""
    gram, cross = (torch.exp(-((z - other.mT) ** 2)) for other in (z, x))
    gram = gram + 0.1 * torch.eye(len(z)).to(z)
    solve = torch.linalg.solve_triangular

    def step():
        chol = torch.linalg.cholesky(gram)
        phi = solve(chol, cross, upper=False)
        back = chol.mT @ (chol @ phi)  # (S − I)Φ, its gradient's product, and that by L
        return solve(chol.mT, back, upper=True) @ phi.mT

    return step


MAKERS = {
    "natural": ours,
    "recorded": partial(ours, elbo=JitTraceQuadrature_ELBO),
    "compiled": partial(ours, elbo=partial(JitTraceQuadrature_ELBO, compile=True)),
    "fit, recorded": fits,
    "fit, compiled": partial(fits, compile=True),
    "Adam": partial(ours, natural=False),
    "GPyTorch": gpytorchs,
    "GPyTorch NGD": partial(gpytorchs, natural=True),
    "pyro.contrib.gp": contrib,
    "Pyro's floor": pyros_floor,
    "plain torch": plain,
    "BLAS": blas,
}
_WARM = 24  # steps, among them those in which a recording is made and compared with the plain step
RATIOS = [  # whose times are divided by whose
    *(("natural", other) for other in ("GPyTorch", "GPyTorch NGD", "pyro.contrib.gp", "Pyro's floor", "floor + plain")),
    *(("Adam", other) for other in ("GPyTorch", "Pyro's floor")),
    *((own, other) for own in ("recorded", "compiled") for other in ("natural", "GPyTorch")),
    *((own, "GPyTorch") for own in ("fit, recorded", "fit, compiled")),
]


def apart(make):
    """A step with a parameter store of its own: names are alike in all."""
    store = pyro.get_param_store()
    with store.scope() as state:
        step = make()

    def taken():
        with store.scope(state):
            return step()

    return taken


class Launches(TorchDispatchMode):
    """Counts operations that a GPU would launch a kernel for: all but views and memory."""

    def __init__(self):
        super().__init__()
        self.num = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        self.num += not (func.is_view or "empty" in func.name() or "scalar_dense" in func.name())
        return func(*args, **(kwargs or {}))


def launched(device, step):
    """The launches of a step that is none of the first: on a GPU its kernels and copies, as the driver sees them."""
    for _ in range(4):
        step()
    if device != "cpu":
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as found:
            step()
        return sum(event.device_type == torch.autograd.DeviceType.CUDA for event in found.events())
    with Launches() as found:
        step()
    return found.num


def measure(size, name, dtype, options):
    """One row of the table, of M and N."""
    m, num = size
    bench.seeded()
    x = torch.rand(num, 1, dtype=getattr(torch, dtype), device=options.device)
    y, z = LIKELIHOODS[name](1 + torch.sin(8 * x[:, 0])).sample(), x[:m].clone()
    makers = MAKERS | ({"compiled": MAKERS["recorded"], "fit, compiled": fits} if options.plain else {})
    steps = {key: apart(partial(make, name, x, y, z.clone())) for key, make in makers.items()}
    if options.launches:
        return [f"{m}, {num}", name, dtype, *map(partial(launched, options.device), steps.values())]
    began = {key: timed(steps[key], options.device) for key in ("natural", "compiled")}
    times = bench.interleaved(steps, options.rounds, warm=_WARM, repeats=2, device=options.device)
    medians = [f"{statistics.median(each):.1f}" for each in times.values()]
    # c + n t' = n t after n steps: S = n t
    saved = 1 - bench.ratio(times, "compiled", "natural")
    overtakes = f"{(began['compiled'] - began['natural']) / saved:.0f}" if saved > 0 else "never"
    times["floor + plain"] = [a + b for a, b in zip(times["Pyro's floor"], times["plain torch"])]
    ratios = [f"{bench.ratio(times, *pair):.2f}" for pair in RATIOS]
    return [f"{m}, {num}", name, dtype, *medians, *ratios, overtakes]


def timed(step, device, num=6):
    """The seconds of the first steps, in which graphs are recorded and compiled."""
    # of a CPU's compiler, too, which is another process
    clock = partial(bench.clock, device) if device != "cpu" else lambda: sum(os.times()[:4])
    start = clock()
    for _ in range(num):
        step()
    return clock() - start


def first(options):
    """README's first step in later ones' time, and the shares of imports."""
    bench.seeded()
    x = torch.rand(500, 1, device=options.device)
    y = LIKELIHOODS["Poisson"](1 + torch.sin(8 * x[:, 0])).sample()
    importlib.import_module("torch._dynamo")  # by Pyro's optimisers, of whatever program
    step, times = ours("Poisson", x, y, x[:16]), []
    for _ in range(41):
        start = bench.clock(options.device)
        step()
        times.append(bench.clock(options.device) - start)
    print(f"the first step takes as long as {times[0] / statistics.median(times[1:]):.0f} later ones")
    code = (
        "from time import process_time as t; a = t(); import pyro; b = t(); import pyro_sparsegp; print(t() - b, b - a)"
    )
    runs = [subprocess.check_output([sys.executable, "-c", code], text=True).split() for _ in range(options.rounds)]
    shares = [float(own) / float(pyros) for own, pyros in runs]
    print(f"import pyro_sparsegp adds {statistics.median(shares):.0%} to import pyro")


def main():
    options = bench.parsed(
        __doc__,
        device="cpu",
        rounds=11,
        sizes=[""],
        dtypes=["float32"],
        first=False,
        launches=False,
        plain=False,
        likelihoods=list(LIKELIHOODS),
        out=None,
    )
    if options.first:
        first(options)
        return
    warnings.filterwarnings("ignore", category=gpytorch.utils.warnings.NumericalWarning)
    page = bench.Page(options.out)
    page.say(
        f"Made by `python tests/benchmarks/step_time.py`: {bench.machine(options.device)}, GPyTorch "
        f"{gpytorch.__version__}, pyro-ppl {pyro.__version__}, {options.rounds} rounds; "
        "milliseconds a step, and medians of each round's ratio.",
        "",
    )
    page.head(
        *("M, N", "likelihood", "dtype"),
        *(name if options.launches else f"{name} (ms)" for name in MAKERS),
        *(f"{own} / {other}" for own, other in RATIOS if not options.launches),
        *(["overtakes (s)"] if not options.launches else []),
    )
    sizes = [tuple(map(int, size.split(","))) for size in options.sizes if size]
    for size, name, dtype in itertools.product(sizes or SIZES, options.likelihoods, options.dtypes):
        page.row(*measure(size, name, dtype, options))


if __name__ == "__main__":
    main()
