"""What users do with a trained guide, against GPyTorch or plain torch as they would write it, interleaved in one run.

python tests/benchmarks/after_training.py [--rounds 9] [--out tests/benchmarks/after_training.md]

The guide is SVGP(64), in float32 and 4 dimensions, whose hyperparameters are parameters or, "priors", latents. Plain
torch takes kernel, factor and features once, or for "priors" at each of 100 draws. Times are of this process's CPU,
medians over rounds, ratios medians of each round's ratio.
"""

import statistics
from functools import partial

import arviz_base
import bench
import gpytorch
import pyro
import pyro.distributions as dist
import torch
from others import Approximate, matern

from pyro_sparsegp import AutoSparseGP, GaussianProcess, kernels, predict
from pyro_sparsegp.diagnostics import to_datatree
from pyro_sparsegp.families import SVGP


def with_priors(x, y=None):
    scale, noise = pyro.sample("scale", dist.LogNormal(0.0, 0.5)), pyro.sample("noise", dist.LogNormal(-1.2, 0.5))
    length = pyro.sample("length", dist.LogNormal(-0.4, 0.5).expand([4]).to_event(1))
    f = pyro.sample("f", GaussianProcess(scale * kernels.Matern32(length), x))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(f, noise), obs=y)


def kernel(a, b, scale, length):
    """Matern-3/2."""
    a = 3**0.5 * torch.cdist(a / length, b / length)
    return scale * (1 + a) * torch.exp(-a)


def by_hand(w, num, x, y=None):
    """Joint draws of y, or a tree of draws and densities of single values, under ``num`` draws of hyperparameters."""

    drawn, densities, z = [], [], torch.rand(64, 4)
    for part in w.split(100 // num):
        scale, length = 0.8 + 0.4 * torch.rand(()), 0.6 + 0.2 * torch.rand(4)
        factor = torch.linalg.cholesky(kernel(z, z, scale, length) + 1e-5 * torch.eye(64))
        phi = torch.linalg.solve_triangular(factor, kernel(z, x, scale, length), upper=False)
        f, variance = part @ phi, 0.09 + scale - phi.square().sum(0)
        if y is None:
            residual = kernel(x, x, scale, length) - phi.mT @ phi + 1e-5 * torch.eye(len(x))
            f, variance = f + torch.randn(f.shape) @ torch.linalg.cholesky(residual).mT, torch.tensor(0.09)
        predictive = dist.Normal(f, variance.sqrt())
        drawn.append(predictive.sample())
        densities += [] if y is None else [predictive.log_prob(y)]
    if y is None:
        return torch.cat(drawn)
    groups = {"posterior": w, "posterior_predictive": torch.cat(drawn), "log_likelihood": torch.cat(densities)}
    return arviz_base.from_dict({group: {"y": part[None].numpy()} for group, part in groups.items()})


def exactly(model, x):
    """As many draws as inputs, by a Cholesky factor, where GPyTorch takes an approximate root above 800 inputs."""
    with gpytorch.settings.max_cholesky_size(5000), gpytorch.settings.fast_computations(False, False, False):
        return model(x).rsample(x.shape[:1])


@torch.no_grad()
def main():
    options = bench.parsed(__doc__, rounds=9, out=None)
    bench.seeded()
    x, w, likelihood = torch.rand(10_000, 4), 0.1 * torch.randn(100, 64), gpytorch.likelihoods.GaussianLikelihood()
    y, few, more = torch.sin(4 * x.sum(-1)), x[:500], x[:1000]
    model = Approximate(x[:64].clone(), matern(4, 0.7, 1.0), natural=False).eval()
    cases = {}
    for how, program, num in (("", bench.regression(0.7), 1), (", priors", with_priors, 100)):
        with torch.enable_grad():
            guide = bench.Training(program, AutoSparseGP(program, SVGP(64)), more, y[:1000]).until(50).guide
        draws = partial(predict, program, guide, few, num_samples=100)
        loop = partial(lambda guide: [guide.draw(few) for _ in range(100)], guide)
        if not how:
            sample = partial(lambda guide: guide.posterior(more)["f"].rsample((1000,)), guide)
            cases["`rsample((1000,))`, 1,000 inputs"] = sample, "GPyTorch", lambda: model(more).rsample(more.shape[:1])
            cases["`rsample((1000,))`, 1,000 inputs "] = sample, "GPyTorch, exact", partial(exactly, model, more)
            cases["`predict`, 500 inputs"] = draws, "GPyTorch", lambda: likelihood(model(few)).rsample(w.shape[:1])
        cases[f"`predict`{how}, 500 inputs "] = draws, "plain torch", partial(by_hand, w, num, few)
        cases[f"`predict`{how}, 500 inputs  "] = draws, "a loop of `guide.draw`", loop
        for data in ((more, y[:1000]), (x, y)):
            tree = partial(to_datatree, program, guide, *data, num_samples=100)
            cases[f"`to_datatree`{how}, {len(data[0])} rows"] = tree, "plain torch", partial(by_hand, w, num, *data)
    matrices = partial(kernel, few, few, 1.0, 0.6 + 0.2 * torch.rand(100, 1, 4))  # of as many draws' lengths
    cases |= {f"`predict`{how}, 500 inputs   ": (draws, "its 100 kernel matrices", matrices)}
    factors = partial(torch.linalg.cholesky, matrices() + 1e-4 * torch.eye(len(few)))
    cases |= {f"`predict`{how}, 500 inputs    ": (draws, "their Cholesky factors", factors)}
    page = bench.Page(options.out)
    page.say(f"{bench.machine()}, GPyTorch {gpytorch.__version__}, {options.rounds} rounds", "")
    page.head("100 draws", "here (ms)", "beside", "its (ms)", "ratio")
    for name, (here, whose, other) in cases.items():
        times = bench.interleaved({"here": here, "other": other}, options.rounds)
        here, other = (f"{statistics.median(part):.0f}" for part in times.values())
        page.row(name, here, whose, other, f"{bench.ratio(times, 'here', 'other'):.2f}")


if __name__ == "__main__":
    main()
