# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # A GP inside a larger program
#
# *A program has plates of groups, offsets, counts and one line with a GP. Does it still run under NUTS?*
#
# Eight clinics count visits in each of ten quarters. Clinics have different numbers of patients (an offset) and
# different rates (a plate of intercepts, partially pooled). All share a trend that nobody has a formula for, so it is
# a GP, one `pyro.sample` site. The same program draws prior predictions, is fitted by SVI, and is sampled by NUTS.
#
# On the command line: `python tutorials/larger_program.py [--steps 150] [--draws 100] [--out DIR] [--short]`.

# %% tags=["hide-input"]
import command_line  # options of the tutorials, in this folder
import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from pyro.infer import MCMC, NUTS, SVI, Predictive
from pyro.infer.autoguide.initialization import init_to_median

from pyro_sparsegp import (
    AutoSparseGP,
    GaussianProcess,
    TraceQuadrature_ELBO,
    Whitening,
    kernels,
    predict,
)
from pyro_sparsegp.diagnostics import to_datatree
from pyro_sparsegp.families import SGPR, SVGP

options = command_line.options(
    "A GP trend beside groups, offsets and counts.",
    device=False,
    steps=(150, "training steps of each guide"),
    draws=(100, "draws of NUTS, and as many to warm up", 5),
)
torch.set_default_dtype(torch.float64)
pyro.set_rng_seed(0)

# %% [markdown]
# ## The data

# %%
num_clinics, num_quarters = 8, 10
clinic = torch.arange(num_clinics).repeat_interleave(num_quarters)
quarter = torch.arange(num_quarters).repeat(num_clinics)
patients = torch.randint(50, 400, (num_clinics,))[clinic].double()
time = quarter / (num_quarters - 1.0)
trend = 0.5 * torch.sin(5 * time)
effect = 0.4 * torch.randn(num_clinics)
visits = torch.poisson(0.1 * patients * (trend + effect[clinic]).exp())

# %% [markdown]
# ## The program
#
# The inputs of the GP are the ten quarters, not the eighty rows. The program looks up each row's value: `f[quarter]`.

# %%
quarters = torch.linspace(0, 1, num_quarters)[:, None]


def model(patients, clinic, quarter, quarters, visits=None):
    spread = pyro.sample("spread", dist.HalfNormal(0.5))
    base = pyro.sample("base", dist.Normal(-2.0, 0.5))
    with pyro.plate("clinics", num_clinics):
        a = pyro.sample("a", dist.Normal(0.0, spread))
    length = pyro.sample("length", dist.LogNormal(-1.0, 0.5))
    f = pyro.sample("f", GaussianProcess(0.25 * kernels.Matern52(length), quarters))
    rate = patients * (base + a[clinic] + f[quarter]).exp()
    with pyro.plate("data", len(patients)):
        return pyro.sample("visits", dist.Poisson(rate), obs=visits)


data = patients, clinic, quarter, quarters, visits

# %% [markdown]
# ## What the model predicts before the data

# %%
prior = Predictive(model, num_samples=200)(*data[:4])
per_patient = prior["visits"] / patients
print(
    f"prior: 90 % of visits per patient and quarter are below {per_patient.quantile(0.9):.2f}; seen: at most "
    f"{(visits / patients).max():.2f}"
)

# %% [markdown]
# ## SVI: two families
#
# Under both families `base`, `a` and f have one joint Gaussian posterior, because the data inform only their sum. The
# guide finds out that each of the ten function values enters eight counts. The expectation of each count's log
# density has a closed form.

# %%
results = {}
for title, family in [("SVI, SVGP", SVGP(quarters)), ("SVI, SGPR", SGPR(quarters))]:
    pyro.set_rng_seed(1)
    guide = AutoSparseGP(model, family, init_loc_fn=init_to_median)
    svi = SVI(
        model,
        guide,
        pyro.optim.ClippedAdam({"lr": 0.05, "lrd": 0.985}),
        TraceQuadrature_ELBO(10),
    )
    losses = [svi.step(*data) for _ in range(options.steps)]
    print(f"{title}: bound {-sum(losses[-20:]) / len(losses[-20:]):.1f} nats")
    draws = predict(model, guide, *data[:4], num_samples=200)
    results[title] = {name: draws[name] for name in ("a", "f", "base", "spread")}

# %% [markdown]
# ## NUTS
#
# The same program runs under NUTS. `Whitening` samples f as independent standard normals, so that the chain mixes.

# %%
white = poutine.reparam(model, config=Whitening())
mcmc = MCMC(
    NUTS(white, init_strategy=init_to_median, max_tree_depth=6),
    num_samples=options.draws,
    warmup_steps=options.draws,
    disable_progbar=True,
)
mcmc.run(*data)
tree = to_datatree(
    model, mcmc, *data, include_f=True, posterior_predictive=False, log_likelihood=False
)
print(f"{int(tree.sample_stats.diverging.sum())} divergences")
results["NUTS"] = {
    name: torch.from_numpy(tree.posterior[name].values[0]).double()
    for name in ("a", "f", "base", "spread")
}

# %% [markdown]
# ## Compared
#
# The picture shows the trend and the clinics' effects with 90 % intervals. A constant can move between `base`, `a`
# and f, so each of their intervals is wide. The interval of `base + f` is about half as wide.

# %%
figure, axes = plt.subplots(1, 2, figsize=(11, 3.6))
for i, (title, found) in enumerate(results.items()):
    low, mid, high = found["f"].quantile(torch.tensor([0.05, 0.5, 0.95]), 0)
    axes[0].errorbar(
        quarters[:, 0] + 0.012 * i,
        mid,
        [mid - low, high - mid],
        fmt="o",
        ms=3,
        label=title,
    )
    low, mid, high = found["a"].quantile(torch.tensor([0.05, 0.5, 0.95]), 0)
    axes[1].errorbar(
        torch.arange(num_clinics) + 0.15 * i,
        mid,
        [mid - low, high - mid],
        fmt="o",
        ms=3,
    )
axes[0].plot(
    quarters[:, 0], 0.5 * torch.sin(5 * quarters[:, 0]), "k--", lw=0.8, label="true"
)
axes[1].plot(torch.arange(num_clinics), effect, "k_", ms=12)
axes[0].set(title="the trend, f", xlabel="time")
axes[1].set(title="the clinics, a", xlabel="clinic")
axes[0].legend(fontsize=7)
figure.tight_layout()
figure.savefig(options.out / "larger_program.png", dpi=80)

spreads = {title: found["f"].std(0).mean() for title, found in results.items()}
sums = {
    title: (found["base"][:, None] + found["f"]).mean(0)
    for title, found in results.items()
}
for title in results:
    print(
        f"{title:10} sd of f {spreads[title]:.3f}, of base {results[title]['base'].std():.3f}, "
        f"of base + f {(results[title]['base'][:, None] + results[title]['f']).std(0).mean():.3f}"
    )
print(f"The picture is in {options.out}")

# %% [markdown]
# ## The claims, as assertions

# %%
if options.full:
    assert (visits / patients).max() < per_patient.max()  # the prior holds the data
    for title in ("SVI, SVGP", "SVI, SGPR"):
        assert (sums[title] - sums["NUTS"]).abs().max() < 0.15  # means agree with NUTS
        nuts = results["NUTS"]["base"].std()
        assert 0.6 < results[title]["base"].std() / nuts < 1.5  # and widths

# %% [markdown]
# ## What to try next
#
# * How the guide treats latents beside f: [other latents](../docs/how-to/other-latents.md).
# * Whether a posterior is too narrow: [diagnostics](diagnostics.ipynb).
# * Other likelihoods: [a gallery](likelihoods.ipynb).
