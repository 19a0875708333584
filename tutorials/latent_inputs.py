# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Latent inputs
#
# *Nobody observed the inputs. Can a GP find them from the outputs?*
#
# In a Gaussian process latent variable model (Lawrence, 2005) the inputs are latents. Each wine of UCI's data set has
# 13 measurements. They are the values of 13 GPs at one place in the plane. Nobody knows this place. In Pyro this is an
# ordinary program, `x = pyro.sample("x", ...)`, and the guide treats the places like any other latents: it draws them
# in each step. (Titsias and Lawrence, 2010, integrate over them in closed form.) The program does not know who grew
# the wines.
#
# On the command line: `python tutorials/latent_inputs.py [--steps 300] [--out DIR] [--short]`.

# %% tags=["hide-input"]
import command_line  # options of the tutorials, in this folder
import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI
from pyro.infer.autoguide.initialization import init_to_median, init_to_value
from sklearn.datasets import load_wine

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import SVGP

options = command_line.options(
    "A GP latent variable model.", device=False, steps=(300, "training steps")
)
torch.set_default_dtype(torch.float64)
pyro.set_rng_seed(0)

wine = load_wine()
Y = torch.as_tensor(wine.data)
Y = (Y - Y.mean(0)) / Y.std(0)
label = torch.as_tensor(wine.target)
num, outputs = Y.shape

# %% [markdown]
# ## The program


# %%
def model(y):
    length = pyro.sample("length", dist.LogNormal(torch.zeros(2), 0.5).to_event(1))
    noise = pyro.sample("noise", dist.LogNormal(-0.5, 0.5))
    with pyro.plate("wines", len(y)):
        x = pyro.sample("x", dist.Normal(torch.zeros(2), 1.0).to_event(1))
    f = pyro.sample(
        "f", GaussianProcess(kernels.RBF(length), x).expand([outputs]).to_event(1)
    )
    with pyro.plate("data", len(y)):
        pyro.sample("y", dist.Normal(f.mT, noise).to_event(1), obs=y)


# %% [markdown]
# We start twice: from draws of the prior, which is the default, and from the first two principal components.

# %%
components = Y @ torch.linalg.svd(Y, full_matrices=False).Vh[:2].mT
components = components / components.std(0)
starts = {
    "draws": {},
    "principal components": {
        "init_loc_fn": init_to_value(values={"x": components}, fallback=init_to_median)
    },
}


def separated(places):
    """The share of wines whose nearest neighbour is of the same grower."""
    distance = torch.cdist(places, places).fill_diagonal_(torch.inf)
    return (label[distance.argmin(-1)] == label).double().mean().item()


found = {}
for title, start in starts.items():
    pyro.set_rng_seed(1)
    guide = AutoSparseGP(model, SVGP(16), **start)
    svi = SVI(
        model,
        guide,
        pyro.optim.ClippedAdam({"lr": 0.05, "lrd": 0.1 ** (1 / 300)}),
        TraceQuadrature_ELBO(2),
    )
    losses = [svi.step(Y) for _ in range(options.steps)]
    places, width = guide.locs.x.detach(), guide.scales.x.detach()
    bound = -sum(losses[-20:]) / len(losses[-20:])
    found[title] = places, width, bound, separated(places)
    print(
        f"from {title}: bound {bound:.0f} nats, {100 * separated(places):.0f} % of nearest neighbours share the grower"
    )
print(f"principal components themselves: {100 * separated(components):.0f} %")

# %%
figure, axes = plt.subplots(1, 3, figsize=(13, 4))
pictures = {"principal components": components}
pictures |= {f"GPs, from {title}": places for title, (places, *_) in found.items()}
for axis, (title, places) in zip(axes, pictures.items()):
    for grower in range(3):
        rows = label == grower
        axis.plot(*places[rows].T, ".", label=f"grower {grower}")
    axis.set(title=title)
axes[0].legend(fontsize=7)
figure.tight_layout()
figure.savefig(options.out / "latent_inputs.png", dpi=80)
print(f"The picture is in {options.out}")

# %% [markdown]
# The objective has many optima, and the start decides which one training finds. So compare the bounds of several
# starts. Each place in the picture is uncertain: `guide.scales.x` holds its standard deviations. Two places that
# are closer than that cannot be told apart.

# %%
for title, (places, width, *_) in found.items():
    print(
        f"from {title}: the places' sd is {places.std():.2f}, each known to about {width.mean():.2f}"
    )

# %% [markdown]
# ## The claims, as assertions

# %%
if options.full:
    for places, width, _, share in found.values():
        assert share > 0.85  # growers are told apart though nobody named them
        assert (
            width.mean() < 0.5 * places.std()
        )  # places are known well enough to look at
    assert (
        found["principal components"][2] > found["draws"][2] - 20
    )  # a good start is no worse

# %% [markdown]
# ## What to try next
#
# * Layers of latents: [deep GPs](deep_gp.ipynb).
# * Other posteriors for the places: [other latents](../docs/how-to/other-latents.md).
# * Outputs that share functions: [several outputs](several_outputs.ipynb).
