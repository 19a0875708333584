# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Deep Gaussian processes
#
# A deep GP (Damianou and Lawrence, 2013) is a program in which the values of one GP site stand in the inputs of
# another. Nothing else is needed: no layer class, no special inference. The guide sees that the values of `f1` enter
# `f2`, draws them (Salimbeni and Deisenroth, 2017), and integrates those of `f2` by quadrature, given each draw.
#
# On the command line: `python tutorials/deep_gp.py [--device cuda] [--steps 800] [--out DIR]`.

# %%
import argparse
import sys
from pathlib import Path

import matplotlib

IN_NOTEBOOK = "ipykernel" in sys.modules
if not IN_NOTEBOOK:
    matplotlib.use("Agg")

import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from sklearn.datasets import load_wine
from torch.distributions import constraints
from tqdm import tqdm

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels, predict
from pyro_sparsegp.distributions import RobustMax
from pyro_sparsegp.families import SVGP, OrthogonalInducing

parser = argparse.ArgumentParser(description="Deep GPs as plain programs.")
parser.add_argument("--device", default="cpu", help="cpu or cuda")
parser.add_argument("--steps", type=int, default=800, help="training steps of each guide")
parser.add_argument(
    "--out", type=Path, default=Path("output" if IN_NOTEBOOK else "tutorials/output"), help="where the picture goes"
)
options = parser.parse_args([] if IN_NOTEBOOK else None)
options.out.mkdir(parents=True, exist_ok=True)
torch.set_default_dtype(torch.float64)
pyro.set_rng_seed(0)

# %% [markdown]
# ## A step
#
# A stationary kernel has one length scale for everywhere: a step makes it short, and the flat parts pay for that.

# %%
x = torch.rand(100, 1, device=options.device)
y = torch.sign(x[:, 0] - 0.5) + 0.06 * torch.randn(100, device=options.device)
grid = torch.linspace(-0.1, 1.1, 241, device=options.device)[:, None]


def parameter(name, value):
    return pyro.param(name, torch.as_tensor(value, device=options.device), constraint=constraints.positive)


def single(x, y=None):
    f = pyro.sample("f", GaussianProcess(parameter("scale", 1.0) * kernels.RBF(parameter("length", 0.3)), x))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(f, parameter("noise", 0.3)), obs=y)


# %% [markdown]
# Two layers. What makes them train from the start, without pre-training:
#
# * the inner layer's prior mean is the identity, `x.mT` for as many outputs as there are inputs. For fewer, take
#   principal components: `axes = torch.linalg.svd(x - x.mean(0), full_matrices=False).Vh[:P]`, once, outside of the
#   model, and `mean=lambda x: axes @ x.mT`;
# * the outer layer sees the inputs too (a skip connection), so that no layer can lose them;
# * the inner layer starts with a small variance. The outer layer's inputs then start where the data are.


# %%
def deep(x, y=None):
    inner = parameter("scale_1", 0.1) * kernels.RBF(parameter("length_1", 0.3))
    f1 = pyro.sample("f1", GaussianProcess(inner, x, mean=lambda x: x.mT).expand([1]).to_event(1))
    outer = parameter("scale_2", 1.0) * kernels.RBF(parameter("length_2", [0.3, 0.3]))
    f2 = pyro.sample("f2", GaussianProcess(outer, torch.cat([f1.mT, x], -1)))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(f2, parameter("noise", 0.3)), obs=y)


def fit(model, families, *data, lr=0.02, nodes=2):
    pyro.clear_param_store()
    pyro.set_rng_seed(1)
    guide = AutoSparseGP(model, families)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": lr}), TraceQuadrature_ELBO(nodes))
    losses = [svi.step(*data) for _ in tqdm(range(options.steps), mininterval=1.0, disable=IN_NOTEBOOK)]
    return guide, -sum(losses[-50:]) / len(losses[-50:])


figure, axes = plt.subplots(1, 3, figsize=(13, 3.4))
truth = torch.sign(grid[:, 0] - 0.5)
inside = (grid[:, 0] > 0) & (grid[:, 0] < 1)
for axis, (title, model, top, families) in zip(
    axes,
    [
        ("one layer", single, "f", SVGP(20)),
        ("two layers", deep, "f2", {"f1": OrthogonalInducing(8, 8), "f2": OrthogonalInducing(10, 10)}),
    ],
):
    guide, bound = fit(model, families, x, y)
    draws = predict(model, guide, grid, num_samples=200, joint=False)
    mean, spread = draws[top].mean(0), draws[top].std(0)
    error = (mean - truth)[inside].square().mean().sqrt()
    print(f"{title:11} bound {bound:7.1f}, noise {pyro.param('noise').item():.3f} (0.06 is true), RMSE {error:.3f}")
    t = grid[:, 0].cpu()
    axis.fill_between(t, (mean - 2 * spread).cpu(), (mean + 2 * spread).cpu(), alpha=0.3, lw=0)
    axis.plot(t, mean.cpu())
    axis.plot(x[:, 0].cpu(), y.cpu(), "k.", ms=3)
    axis.set(title=title, xlabel="x", ylim=(-1.8, 1.8))

# %% [markdown]
# The inner layer has bent the axis: it moves the two sides of the step apart, so that a longer length scale will do
# above.

# %%
with torch.no_grad():
    f1 = guide.posterior(grid)["f1"]
t, mean, spread = grid[:, 0].cpu(), f1.mean[0].cpu(), 2 * f1.stddev[0].cpu()
axes[2].fill_between(t, mean - spread, mean + spread, alpha=0.3, lw=0)
axes[2].plot(t, mean)
axes[2].set(title="the inner layer, f1", xlabel="x")
figure.tight_layout()
figure.savefig(options.out / "deep_gp.png", dpi=80)
print(f"The picture is in {options.out}")

# %% [markdown]
# ## Several outputs, classes
#
# The wines of UCI's set: 13 measurements, three growers. Both models end in three outputs and a robust-max likelihood,
# `RobustMax(f.mT)`, whose expectation `TraceQuadrature_ELBO` finds by one-dimensional integrals. The deep one has an
# inner layer of two outputs, around the two principal components. Sixty wines are for training.

# %%
wine = load_wine()
order = torch.randperm(len(wine.target))
train_rows, test_rows = order[:60], order[60:]
inputs, label = torch.as_tensor(wine.data), torch.as_tensor(wine.target)
inputs = ((inputs - inputs[train_rows].mean(0)) / inputs[train_rows].std(0)).to(options.device)
label = label.to(options.device)
components = torch.linalg.svd(inputs[train_rows], full_matrices=False).Vh[:2]


def growers(deep):
    def model(x, y=None):
        h = x
        if deep:
            inner = parameter("scale_1", 0.1) * kernels.RBF(parameter("length_1", 3.0))
            prior = GaussianProcess(inner, x, mean=lambda x: components @ x.mT)
            f1 = pyro.sample("f1", prior.expand([2]).to_event(1))
            h = torch.cat([f1.mT, x], -1)
        length = parameter("length", [3.0] * h.shape[-1])
        f = pyro.sample("f", GaussianProcess(parameter("scale", 2.0) * kernels.RBF(length), h).expand([3]).to_event(1))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", RobustMax(f.mT, epsilon=1e-2), obs=y)

    return model


for title, model in [("one layer", growers(False)), ("two layers", growers(True))]:
    guide, bound = fit(model, OrthogonalInducing(15, 15), inputs[train_rows], label[train_rows])
    draws = predict(model, guide, inputs[test_rows], num_samples=500, joint=False)
    probs = RobustMax(draws["f"].mT, 1e-2).probs.mean(0)
    log_density = probs.gather(-1, label[test_rows][:, None]).log().mean()
    accuracy = (probs.argmax(-1) == label[test_rows]).double().mean()
    print(f"{title:11} bound {bound:6.1f}, test accuracy {accuracy:.3f}, test log-likelihood {log_density:.3f}")

# %% [markdown]
# The bound prefers two layers, and so do the wines that were held out (one split; the set is small).
