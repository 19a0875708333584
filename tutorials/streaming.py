# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Data that arrive in pieces
#
# *Can a GP follow a stream of data that nobody keeps?*
#
# A guide with M inducing points keeps all that it has learned of f in two sums over the rows: an M × M matrix and a
# vector. `guide.absorb(x, y)` adds new rows to these sums, and the rows may then be thrown away (Bui, Nguyen and
# Turner, 2017). This notebook first learns a function in pieces, and gets the same posterior as from all rows at once.
# Then it follows a function that drifts. There old rows mislead, and `forget=` gives them less weight in the sums.
#
# On the command line: `python tutorials/streaming.py [--pieces 60] [--steps 150] [--out DIR] [--short]`.

# %% tags=["hide-input"]
import copy
import math

import command_line  # options of the tutorials, in this folder
import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import SVGP

options = command_line.options(
    "A stream of data, absorbed piece by piece.",
    device=False,
    pieces=(60, "pieces of thirty rows", 8),
    steps=(150, "training steps on the first rows"),
)
torch.set_default_dtype(torch.float64)
pyro.set_rng_seed(0)


def truth(x, t):
    return torch.sin(2 * math.pi * (x[:, 0] + t)) + 0.5 * torch.cos(
        6 * math.pi * x[:, 0]
    )


def piece(t, num=30):
    x = torch.rand(num, 1)
    return x, truth(x, t) + 0.1 * torch.randn(num)


# %% [markdown]
# ## The program, and its hyperparameters from the first rows


# %%
def model(x, y=None):
    length = pyro.sample("length", dist.LogNormal(-1.0, 1.0))
    noise = pyro.sample("noise", dist.LogNormal(-2.0, 1.0))
    f = pyro.sample("f", GaussianProcess(kernels.Matern52(length), x))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(f, noise), obs=y)


first_x, first_y = piece(0.0, 200)
trained = AutoSparseGP(model, SVGP(25), point_estimates=True)
svi = SVI(model, trained, pyro.optim.Adam({"lr": 0.03}), TraceQuadrature_ELBO(2))
for _ in range(options.steps):
    svi.step(first_x, first_y)
print("noise:", round(trained.median(first_x, first_y)["noise"].item(), 3))

# %% [markdown]
# ## In pieces, or all at once
#
# `forget=1.0` removes all that was learned of f, and keeps the hyperparameters. The likelihood is Gaussian, so
# absorbing the pieces gives the posterior of all rows, up to rounding. The guide holds the same number of values
# after each piece.

# %%
stream = [(first_x, first_y), *(piece(0.0) for _ in range(options.pieces))]
in_pieces, at_once = copy.deepcopy(trained), copy.deepcopy(trained)
for i, (x, y) in enumerate(stream):
    in_pieces.absorb(x, y, forget=0.0 if i else 1.0)
at_once.absorb(
    torch.cat([x for x, _ in stream]), torch.cat([y for _, y in stream]), forget=1.0
)

grid = torch.linspace(0, 1, 200)[:, None]
q, p = in_pieces.posterior(grid)["f"], at_once.posterior(grid)["f"]
apart = max(
    (q.mean - p.mean).abs().max().item(), (q.variance - p.variance).abs().max().item()
)
held = sum(
    value.numel()
    for value in in_pieces.state_dict().values()
    if isinstance(value, torch.Tensor)
)
rows = sum(len(x) for x, _ in stream)
print(
    f"{rows} rows in {len(stream)} pieces: {apart:.1e} apart from all at once; {held} numbers are held"
)

# %% [markdown]
# ## A function that drifts
#
# Now the wave moves by a fifth of its period in 60 pieces. We predict each piece before we absorb it, and compare the
# mean log density of these new rows for four values of `forget`. With `forget=0` the posterior becomes more and more
# certain of an average over the past. With `forget=1` it knows only the last thirty rows.


# %%
def followed(forget, drift):
    pyro.set_rng_seed(1)
    guide, scores = copy.deepcopy(trained), []
    guide.absorb(first_x, first_y, forget=1.0)
    for i in range(1, options.pieces + 1):
        x, y = piece(drift * i)
        with torch.no_grad():
            q = guide.posterior(x)["f"]
            noise = guide.median(x, y)["noise"]
        scores.append(
            dist.Normal(q.mean, (q.variance + noise**2).sqrt())
            .log_prob(y)
            .mean()
            .item()
        )
        guide.absorb(x, y, forget=forget)
    return guide, torch.tensor(scores)


shares = [0.0, 0.1, 0.3, 1.0]
drifting = {forget: followed(forget, 0.003) for forget in shares}
resting = {forget: followed(forget, 0.0) for forget in shares}
half = options.pieces // 2
score = {forget: drifting[forget][1][half:].mean().item() for forget in shares}
rest = {forget: resting[forget][1][half:].mean().item() for forget in shares}
for forget in shares:
    print(
        f"forget={forget}: log density of rows to come {score[forget]:7.3f} under drift, {rest[forget]:6.3f} without"
    )

# %%
figure, axes = plt.subplots(1, 3, figsize=(13, 3.8), sharey=True)
for axis, forget in zip(axes, [0.0, 0.3, 1.0]):
    guide, _ = drifting[forget]
    with torch.no_grad():
        q = guide.posterior(grid)["f"]
    mean, spread = q.mean, 2 * q.stddev
    axis.fill_between(grid[:, 0], mean - spread, mean + spread, alpha=0.3)
    axis.plot(grid, mean, label="posterior")
    axis.plot(
        grid, truth(grid, 0.003 * options.pieces), "k--", label="the function now"
    )
    axis.plot(grid, truth(grid, 0.0), "k:", label="at the start")
    axis.set(title=f"forget={forget}")
axes[0].legend(fontsize=7)
figure.tight_layout()
figure.savefig(options.out / "streaming.png", dpi=80)
print(f"The picture is in {options.out}")

# %% [markdown]
# ## The claims, as assertions

# %%
assert apart < 1e-8
if options.full:
    assert max(score, key=score.get) in (
        0.1,
        0.3,
    )  # under drift, some forgetting is best
    assert score[0.0] < 0.0  # and none is worse than knowing little
    assert max(rest, key=rest.get) == 0.0  # without drift, none is

# %% [markdown]
# ## What to try next
#
# * Training after `absorb`: [data in pieces](../docs/how-to/mini-batches.md#data-that-arrive-in-pieces).
# * Drift as a part of the model, with time as an input of the kernel: [kernels](../docs/how-to/kernels-and-means.md).
# * Counts or classes: only the likelihood changes ([a gallery](likelihoods.ipynb)).
