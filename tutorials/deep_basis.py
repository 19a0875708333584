# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Deep basis kernels
#
# *Can a network be the kernel, and keep its uncertainty?*
#
# A network can be a kernel: k(x, x') = φ(x)ᵀφ(x') with φ from D inputs to r features (Zhu, Yuchi and Xie, 2025). Such a
# kernel has rank r, so that a GP is Bayesian linear regression in the weights of the features: exact in time linear in
# the number of rows (`ExactWeightSpace`), or by mini-batches under any likelihood (`WeightSpace`). Left to itself,
# training makes the network memorise the data in one feature, and the uncertainty vanishes. The variance correction
# adds a diagonal that makes the prior variance the same everywhere, c(x) = max k − k(x, x), and undoes that.
#
# On the command line: `python tutorials/deep_basis.py [--device cuda] [--steps 2000] [--out DIR]`.

# %% tags=["hide-input"]
import copy
import math

import command_line  # what can be said on the command line, beside this file
import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from pyro.nn import PyroModule, PyroParam
from torch import nn
from torch.distributions import constraints

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import SVGP, ExactWeightSpace, WeightSpace

options = command_line.options(
    "Networks as kernels.", steps=(2000, "training steps of each guide")
)
torch.set_default_dtype(torch.float64)


# %% [markdown]
# ## With and without the correction
#
# Steps and a little ripple, the paper's example, seen at a hundred places with noise. The network is registered with
# `pyro.module`, as in any Pyro program; a forgotten one raises.
#
# In training the correction is a penalty, Σ c(x)/(2σ²). The features of a network as torch makes it differ in norm, and
# at σ = 0.1 the penalty then outweighs the fit many times: training first makes the features small and nearly
# constant, and is slow to come back. A last layer that gives all rows one learned norm has c = 0 from the first step
# on. It is a part of your network, not of the kernel, and needs r > 1.


# %%
def truth(x):
    steps = [torch.sigmoid(200 * (x + a)) for a in (0.6, 0.0, -0.4)]
    pieces = (
        0.3 * (1 - steps[0]) + 0.9 * (steps[0] - steps[1]) - 0.6 * (steps[1] - steps[2])
    )
    return pieces + 0.01 * torch.sin(50 * torch.sin(10 * x))


def sample(num):
    x = (2 * torch.rand(num, 1) - 1).to(options.device)
    return x, truth(x[:, 0]) + 0.1 * torch.randn(num).to(options.device)


def new_network(rank=32):
    layers = (
        nn.Linear(1, 64),
        nn.Tanh(),
        nn.Linear(64, 64),
        nn.Tanh(),
        nn.Linear(64, rank),
    )
    with torch.no_grad():  # features as short as the steps are, from the start
        for part in layers[0].parameters():
            part.mul_(10)
    return nn.Sequential(*layers).to(options.device)


class EvenRows(nn.Module):
    def __init__(self, network):
        super().__init__()
        self.network, self.log_norm = (
            network,
            nn.Parameter(torch.zeros(()).to(options.device)),
        )

    def forward(self, x):
        return self.log_norm.exp() * nn.functional.normalize(self.network(x), dim=-1)


pyro.set_rng_seed(0)
x, y = sample(100)
grid = torch.linspace(-1.2, 1.2, 600)[:, None].to(options.device)

found = {}  # error, standard deviation of f, share of the largest feature direction
figure, axes = plt.subplots(1, 3, figsize=(14, 3.4), sharey=True)
for axis, (name, correction, even) in zip(
    axes,
    [
        ("no correction", False, False),
        ("correction", True, False),
        ("correction, even norm", True, True),
    ],
):
    pyro.clear_param_store()
    pyro.set_rng_seed(1)
    network = EvenRows(new_network()) if even else new_network()

    def model(x, y=None, network=network, correction=correction):
        pyro.module("network", network)
        noise = pyro.param(
            "noise", torch.tensor(0.1).to(x), constraint=constraints.positive
        )
        f = pyro.sample("f", GaussianProcess(kernels.DeepBasis(network, correction), x))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(f, noise), obs=y)

    guide = AutoSparseGP(model, ExactWeightSpace())
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 3e-3}), TraceQuadrature_ELBO(2))
    for _ in range(options.steps):
        loss = svi.step(x, y)
    with torch.no_grad():
        q = guide.posterior(grid)["f"]
        spectrum = torch.linalg.svdvals(network(x)).square()
        inside = grid[:, 0].abs() < 1
        error = (q.mean - truth(grid[:, 0]))[inside].square().mean().sqrt()
    found[name] = (
        error.item(),
        q.stddev[inside].median().item(),
        (spectrum[0] / spectrum.sum()).item(),
    )
    print(
        f"{name:21} bound {-loss:8.2f}; RMSE to the truth {error.item():.3f}; noise {pyro.param('noise').item():.3f} "
        f"(truth 0.1); share of the largest feature direction {(spectrum[0] / spectrum.sum()).item():.0%}; median sd "
        f"of f {q.stddev.median().item():.3f}"
    )
    t, mean, spread = grid[:, 0].cpu(), q.mean.cpu(), 2 * q.stddev.cpu()
    axis.fill_between(t, mean - spread, mean + spread, alpha=0.3, lw=0)
    axis.plot(t, mean)
    axis.plot(t, truth(t), "k--", lw=0.8)
    axis.plot(x[:, 0].cpu(), y.cpu(), ".", color="0.4", ms=3)
    axis.set(title=name, ylim=(-1.5, 1.8))
figure.tight_layout()
figure.savefig(options.out / "deep_basis.png", dpi=110)

# %% [markdown]
# The correction keeps more than one feature in use, and f uncertain, and is the furthest from the truth. The even norm
# has the best bound and is the surest: its sd of f, 0.014, is a seventh of its error of 0.1, and smaller even than
# without correction. For features of one norm c is 0, so that nothing is corrected in training, and 32 weights seen a
# hundred times are soon known. It cures the training, not the intervals: the truth is no function of these features,
# and the posterior of weights does not know. Where intervals matter look at the coverage of held-out data, and take the
# correction with features as they are.

# %% [markdown]
# ## Mini-batches, weight decay, rates, early stopping
#
# With many rows, mini-batches. A model that is a `PyroModule` owns its network and its noise, so `model.state_dict()`
# is all of it, and the bound is a module for `torch.optim`: parameter groups give the network weight decay and a rate
# of its own. The first call is on all rows: predictions are corrected relative to the training inputs seen there, under
# the network as it is at the time.
#
# `natural=False` lets the optimiser train q(w) beside the network, at half the time of a step. Natural steps, the
# default, are ahead at first, and end behind: this cell with `WeightSpace()` ends at a validation NLL of -0.86, the
# noise's own is -0.88.

# %%
pyro.set_rng_seed(0)
pyro.clear_param_store()
x, y = sample(20_000)
valid, test = sample(2_000), sample(2_000)


class Regression(PyroModule):
    def __init__(self):
        super().__init__()
        self.network = EvenRows(new_network())
        self.noise = PyroParam(
            torch.tensor(0.3).to(options.device), constraints.positive
        )

    def forward(self, x, y=None, size=None):
        f = pyro.sample("f", GaussianProcess(kernels.DeepBasis(self.network), x))
        with pyro.plate("data", size or len(x), subsample=x):
            return pyro.sample("y", dist.Normal(f, self.noise), obs=y)


model = Regression()
guide = AutoSparseGP(model, WeightSpace(natural=False))
bound = TraceQuadrature_ELBO(2)(model, guide)
bound(x, y)

of_network = {id(p) for p in model.network.parameters()}
rest = [p for p in bound.parameters() if id(p) not in of_network]
optimiser = torch.optim.AdamW(
    [
        {"params": model.network.parameters(), "lr": 3e-3, "weight_decay": 1e-4},
        {"params": rest, "lr": 1e-2, "weight_decay": 0.0},
    ]
)


@torch.no_grad()
def nll(guide, x, y):
    q = guide.posterior(x)["f"]
    variance = q.variance + model.noise**2
    return (
        (
            0.5
            * (
                math.log(2 * math.pi)
                + variance.log()
                + (y - q.mean).square() / variance
            )
        )
        .mean()
        .item()
    )


best, patience = (math.inf, {}), 0
for step in range(options.steps):
    rows = torch.randint(len(x), (256,), device=x.device)
    optimiser.zero_grad()
    bound(x[rows], y[rows], size=len(x)).backward()
    optimiser.step()
    if step % 100 == 99 or step == options.steps - 1:
        score, patience = nll(guide, *valid), patience + 1
        if score < best[0]:
            best, patience = (
                (
                    score,
                    copy.deepcopy(
                        {"model": model.state_dict(), "guide": guide.state_dict()}
                    ),
                ),
                0,
            )
        if patience == 10:
            break
model.load_state_dict(best[1]["model"])
guide.load_state_dict(best[1]["guide"])
print(
    f"stopped after {step + 1} steps; validation NLL {best[0]:.4f}, test NLL {nll(guide, *test):.4f}"
)

# %% [markdown]
# Under `SVI` the same is said by names: Pyro's optimisers take a callable of a parameter's name.


# %%
def settings(name):
    return (
        {"lr": 3e-3, "weight_decay": 1e-4}
        if "network" in name
        else {"lr": 1e-2, "weight_decay": 0.0}
    )


svi = SVI(model, guide, pyro.optim.AdamW(settings), TraceQuadrature_ELBO(2))
svi.step(x[:256], y[:256], size=len(x))

# %% [markdown]
# ## The exact posterior of all rows
#
# For a Gaussian likelihood q(w) has a closed form. Under the network that the mini-batches trained, one pass over the
# rows is enough; beyond 32,768 rows it is made in blocks, and memory stays small. Trained further, or from the start,
# by this guide, each step is such a pass. In its predictions the correction is noise of the training data, too; under
# other likelihoods, such as a Bernoulli, it is integrated out of each datum's density at the first prediction.

# %%
model.load_state_dict(best[1]["model"])
exact = AutoSparseGP(model, ExactWeightSpace())
exact(x, y)  # a call with data and gradients enabled: it reads the likelihood
print(f"exact posterior, same network: test NLL {nll(exact, *test):.4f}")


# %% [markdown]
# ## Features of your own; deep kernel learning
#
# A kernel with other features is a class of one method. A network *under* a kernel, deep kernel learning, needs nothing
# new at all: give the process the network's outputs as inputs, and the inducing points live there. The network takes
# small steps, since q(u) follows by natural steps of its own: at a rate of 0.02 training ended in a network that is
# constant.


# %%
class Bumps(kernels.FeatureKernel):
    def features(self, x):
        return torch.exp(-0.5 * ((x - torch.linspace(-1, 1, 20).to(x)) / 0.1) ** 2)


def with_bumps(x, y=None):
    f = pyro.sample("f", GaussianProcess(0.5 * Bumps() + kernels.Constant(1.0), x))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(f, 0.1), obs=y)


pyro.set_rng_seed(0)
pyro.clear_param_store()  # a second run of this cell makes a new network, which would meet the old one's parameters
under = nn.Sequential(nn.Linear(1, 32), nn.Tanh(), nn.Linear(32, 2)).to(options.device)


def deep_kernel(x, y=None):
    pyro.module("under", under)
    f = pyro.sample("f", GaussianProcess(kernels.RBF(0.1), under(x)))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(f, 0.1), obs=y)


for name, other, family, lr in [
    ("bumps", with_bumps, ExactWeightSpace(), 0.02),
    ("deep kernel", deep_kernel, SVGP(32), 0.005),
]:
    guide = AutoSparseGP(other, family)
    svi = SVI(other, guide, pyro.optim.Adam({"lr": lr}), TraceQuadrature_ELBO(2))
    for _ in range(options.steps // 5):
        loss = svi.step(x[:2000], y[:2000])
    print(f"{name}: bound {-loss:.1f}")
print(f"The picture is in {options.out}")

# %% [markdown]
# ## What was claimed

# %%
if options.full:
    plain, corrected, level = found.values()
    assert corrected[2] < plain[2]  # with the correction more features are in use,
    assert corrected[1] > plain[1]  # and f is more uncertain;
    assert level[0] < corrected[0]  # even norms fit better than it,
    assert level[1] < 0.5 * level[0]  # and are too sure;
    assert best[0] < -0.8  # many rows, in mini-batches, come close to the noise

# %% [markdown]
# ## What to try next
#
# * An intensity with such features: [Cox processes](cox_process.ipynb).
# * A million rows: [how to](../docs/how-to/networks.md), and [figures](../docs/explanation/benchmarks.md).
# * Whether intervals hold: `predictive_scores` in [diagnostics](diagnostics.ipynb).
