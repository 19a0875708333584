# ---
# jupyter:
#   kernelspec:
#     display_name: Python 3
#     language: python
#     name: python3
# ---

# %% [markdown]
# # Write your own
#
# *The library lacks a part that you need. How much code is it, and how do you know that it is right?*
#
# A function of the time of day is a function on a circle: the end of the day is next to its start. This notebook
# writes what such data need, each part in a few lines of code on public names: a **kernel**, a **distribution** that
# brings its own expectation, a **basis** with **families** on it, and a **policy** of computation-aware inference. It
# compares each part with a built-in one, and with a dense reference that a cell writes out.
#
# On the command line: `python tutorials/write_your_own.py [--steps 100] [--out DIR] [--short]`.

# %% tags=["hide-input"]
import copy
import math
from dataclasses import dataclass
from functools import partial
from typing import ClassVar

import command_line  # options of the tutorials, in this folder
import matplotlib.pyplot as plt
import pyro
import pyro.distributions as dist
import torch
from pyro.infer import SVI

from pyro_sparsegp import (
    AutoSparseGP,
    GaussianProcess,
    TraceQuadrature_ELBO,
    families,
    kernels,
)
from pyro_sparsegp.bases import Basis, Features
from pyro_sparsegp.gaussians import Diagonal, FullCholesky

options = command_line.options(
    "A kernel, a distribution, a basis, families and a policy of one's own.",
    device=False,
    steps=(100, "training steps of each guide"),
)
torch.set_default_dtype(torch.float64)
pyro.set_rng_seed(0)

# %% [markdown]
# ## The data
#
# The data are a temperature and a count at times of the day. x is the share of the day that has passed. Few rows are
# from around midnight.

# %%
x = 0.08 + 0.84 * torch.rand(400, 1)
grid = torch.linspace(0, 1, 241)[:, None]


def truth(x):
    angle = 2 * math.pi * x[..., 0]
    return (
        1.2 * torch.sin(angle) + 0.6 * torch.cos(2 * angle) + 0.3 * torch.sin(3 * angle)
    )


y = truth(x) + 0.4 * torch.randn(len(x))
counts = torch.poisson((0.5 + truth(x)).exp())
night = (grid[:, 0] < 0.08) | (grid[:, 0] > 0.92)


def trained(model, family, *data, nodes=20, lr=0.05):
    pyro.clear_param_store()
    pyro.set_rng_seed(1)
    guide = AutoSparseGP(model, family, point_estimates=True)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": lr}), TraceQuadrature_ELBO(nodes))
    for _ in range(options.steps):
        svi.step(*data)
    return guide, -svi.evaluate_loss(*data)


# %% [markdown]
# ## A kernel
#
# Periodic cubic splines (Wahba, 1990) are the posterior means under
#
# $$k(x, x') = 1 - 30\,t^2(1 - t)^2, \qquad t = (x - x') \bmod 1.$$
#
# A kernel class has two methods, `__call__` and `diag`. Sums, products, `scale * k`, `k[0]`, names, gradients and
# guides then work.


# %%
class Circle(kernels.Kernel):
    """k(x, x') = 1 − 30 t²(1 − t)², t = x − x' mod 1: functions of period 1 whose mean over it is 0."""

    def __call__(self, x, z=None):
        t = (x - (x if z is None else z).mT).remainder(1.0)
        return 1 - 30 * (t * (1 - t)).square()

    def diag(self, x):
        return torch.ones_like(x[..., 0])


# %% [markdown]
# This is the dense reference. k is −30 B₄(t), with the Bernoulli polynomial B₄, whose Fourier series is known: cosine
# and sine j have the coefficient λⱼ = 720/(2πj)⁴. The sum of 2,000 terms must equal the kernel matrix, and the matrix
# must have no negative eigenvalue.

# %%
j = torch.arange(1, 2001)
eigenvalues = 720 / (2 * math.pi * j) ** 4
series = 2 * (torch.cos(2 * math.pi * (grid - grid.mT)[..., None] * j) @ eigenvalues)
kernel_error = (Circle()(grid) - series).abs().max().item()
smallest = torch.linalg.eigvalsh(Circle()(x)).min().item()
print(f"against the series {kernel_error:.1e}; smallest eigenvalue {smallest:.1e}")

# %% [markdown]
# The program uses the kernel like any other. The bound of `SGPR` is the evidence of the Gaussian model, less what the
# inducing points leave out. One line computes the evidence from dense matrices.


# %%
def temperature(kernel):
    def model(x, y=None):
        level = pyro.sample("level", dist.LogNormal(0.0, 1.0))
        scale = pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        length = (
            pyro.sample("length", dist.LogNormal(-1.0, 1.0))
            if kernel is not Circle
            else None
        )
        noise = pyro.sample("noise", dist.LogNormal(-1.0, 1.0))
        shape = Circle() if kernel is Circle else kernel(length)
        f = pyro.sample(
            "f", GaussianProcess(level * kernels.Constant(1.0) + scale * shape, x)
        )
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(f, noise), obs=y)

    return model


def dense(guide, kernel):
    """log p(y, hyperparameters) in closed form, at the guide's point."""
    at = {
        name: value
        for name, value in guide.median(x, y).items()
        if name in ("level", "scale", "noise")
    }
    k = at["level"] + at["scale"] * kernel(x) + at["noise"] ** 2 * torch.eye(len(x))
    prior = sum(
        dist.LogNormal(-1.0 * (name == "noise"), 1.0).log_prob(value)
        for name, value in at.items()
    )
    return (dist.MultivariateNormal(torch.zeros(len(x)), k).log_prob(y) + prior).item()


fits = {}
for name, kernel in {
    "RBF": kernels.RBF,
    "Periodic": kernels.Periodic,
    "Circle": Circle,
}.items():
    guide, bound = trained(temperature(kernel), families.SGPR(20), x, y, nodes=2)
    with torch.no_grad():
        q = guide.posterior(grid)["f"]
    error = (q.mean - truth(grid))[night].square().mean().sqrt().item()
    seam = (q.mean[0] - q.mean[-1]).abs().item()
    fits[name] = q.mean, q.stddev, bound, error, seam
    print(
        f"{name:9} bound {bound:8.2f}, RMSE at night {error:.3f}, apart at midnight {seam:.1e}"
    )
exact = dense(guide, Circle())
print(f"{'':9} dense {exact:8.2f} for the last")

# %% [markdown]
# `RBF` does not know that the day is a circle, and is wrong where rows are few. The built-in `Periodic` knows it, and
# also has a length scale. The truth here is a few smooth waves, and `Periodic` is closer to it than the spline. You
# learn this only from a comparison.

# %% [markdown]
# ## A distribution that brings its expectation
#
# Any distribution can be a likelihood, and quadrature computes its expectation. For a Poisson whose log rate is θ ~
# N(m, v) the expectation is known: E[log p(y | θ)] = ym − exp(m + v/2) − log y!. A distribution provides it by two
# attributes: `normal_parameter`, the name of θ, and the method `expected_log_prob`. The other methods are those
# that Pyro needs in any distribution.


# %%
class Counts(dist.TorchDistribution):
    """Poisson counts by the logarithm of their rate."""

    arg_constraints: ClassVar = {"log_rate": dist.constraints.real}
    support = dist.constraints.nonnegative_integer
    normal_parameter = "log_rate"

    def __init__(self, log_rate, validate_args=None):
        self.log_rate = log_rate
        super().__init__(log_rate.shape, validate_args=validate_args)

    def log_prob(self, value):
        return value * self.log_rate - self.log_rate.exp() - torch.lgamma(value + 1)

    def expected_log_prob(self, value, variance):
        return (
            value * self.log_rate
            - (self.log_rate + variance / 2).exp()
            - torch.lgamma(value + 1)
        )

    def sample(self, sample_shape=()):
        with torch.no_grad():
            return torch.poisson(
                self.log_rate.exp().expand(self._extended_shape(sample_shape))
            )

    def expand(self, batch_shape, _instance=None):
        return Counts(self.log_rate.expand(batch_shape), validate_args=False)


def circle(scale=1.5, level=1.0):
    return scale * Circle() + level * kernels.Constant(1.0)


def counted(likelihood):
    def model(x, y=None):
        f = pyro.sample("f", GaussianProcess(circle(), x))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", likelihood(f), obs=y)

    return model


# %% [markdown]
# This is the dense reference. Among all Gaussians q(f) = N(m, S), the bound of a Poisson with prior N(0, K) is
# largest at S = (K⁻¹ + diag λ)⁻¹ with λ = exp(m + v/2), where v is the diagonal of S. A damped iteration over whole
# matrices finds it.

# %%
K = circle()(x)
best, linear = torch.ones(len(x)), torch.zeros(len(x))  # λ, and λz of the sites
for _ in range(100):
    S = torch.linalg.solve(torch.eye(len(x)) + K * best, K)
    m, v = S @ linear, S.diagonal()
    rate = (m + v / 2).exp()
    best, linear = (
        best + 0.5 * (rate - best),
        linear + 0.5 * (counts - rate + rate * m - linear),
    )
at_prior = torch.eye(len(x)) + K * best  # S = (I + KΛ)⁻¹K
shrunk = torch.linalg.solve(at_prior, K * best).trace()
divergence = (
    torch.linalg.slogdet(at_prior)[1] - shrunk + m @ (linear - best * m)
) / 2  # K⁻¹m = Λz − Λm
expected = Counts(m).expected_log_prob(counts, v).sum()
poisson_best = (expected - divergence).item()

by_counts = {}
for name, likelihood in {
    "Poisson(exp f)": lambda f: dist.Poisson(f.exp()),
    "Counts": Counts,
}.items():
    guide, _ = trained(
        counted(likelihood), families.SVGP(24, trainable=False), x, counts
    )
    by_counts[name] = [
        -TraceQuadrature_ELBO(nodes).loss(guide.model, guide, x, counts)
        for nodes in (1, 2, 20)
    ]
    print(
        f"{name:15} bound by 1, 2 and 20 nodes: "
        + ", ".join(f"{bound:.4f}" for bound in by_counts[name])
    )
print(f"{'dense optimum':15}                           {poisson_best:.4f}")

# %% [markdown]
# ## A basis, and families on it
#
# On the circle the eigenfunctions of every kernel of x − x' are known: they are waves. Their eigenvalues are λⱼ = ∫
# k(t) cos(2πjt) dt, which an FFT of the kernel gives, with gradients, for any kernel of period 1. The first waves,
#
# $$\varphi_0 = \sqrt{\lambda_0}, \quad \varphi_{2j-1} = \sqrt{2\lambda_j}\,\cos 2\pi jx, \quad
# \varphi_{2j} = \sqrt{2\lambda_j}\,\sin 2\pi jx,$$
#
# are a basis: f = φᵀw + r, where w ~ N(0, I), and the residual r is independent of w. No matrix has to be inverted.
#
# A `Features` object computes φ under one kernel. A `Basis` is a module (here without parameters) that makes
# `Features`. A family chooses a basis and a Gaussian over w. It is a frozen dataclass, whose fields are compared when a
# saved state is loaded. `spec` and `old_basis` rebuild the basis of a saved state. `components` returns the features
# of each summand of the kernel.


# %%
recipe = partial(dataclass, frozen=True, eq=False, repr=False)


class Waves(Features):
    """φ, the leading eigenfunctions of a kernel of period 1."""

    def __init__(self, kernel, num, like):
        super().__init__(kernel, (2 * num + 1,))
        self.num, self.like = num, like
        self.weights = self.eigenvalues(kernel).sqrt()

    def eigenvalues(self, kernel, fine=512):
        circle = torch.arange(fine).to(self.like)[:, None] / fine
        row = kernel(self.like.new_zeros(1, 1), circle)[0]
        return (torch.fft.rfft(row).real[: self.num + 1] / fine).clamp(min=1e-14)

    def __call__(self, x):
        angle = 2 * math.pi * x * torch.arange(1, self.num + 1).to(x)
        level = self.weights[:1].expand(len(x), 1)
        waves = math.sqrt(2) * self.weights[1:]
        return [torch.cat([level, waves * angle.cos(), waves * angle.sin()], -1)]

    def components(self):
        """Features of each summand f_c: its covariance with wⱼ is that of f times λ_cj/λⱼ."""
        found = []
        for term in self.kernel.terms:
            part = copy.copy(self)
            part.cross, part.weights = term, self.eigenvalues(term) / self.weights
            found.append((term, part, (0,)))
        return found


class WaveBasis(Basis):
    def __init__(self, num, like):
        super().__init__()
        self.register_buffer("like", like.new_zeros(()))  # the dtype and device
        self.num, self.sizes = num, (2 * num + 1,)

    def forward(self, kernel, jitter, name):
        return Waves(kernel, self.num, self.like)

    def spec(self):
        return {"kind": "waves", "num": self.num}


@recipe
class OnWaves(families.BasisFamily):
    """What the families below have in common.

    :param num: of waves.
    """

    num: int

    def new_basis(self, process, name):
        return WaveBasis(self.num, process.x)

    def old_basis(self, spec, like):
        return WaveBasis(spec["num"], like)


@recipe
class FreeWaves(OnWaves, families.FreeFormFamily):
    """A full covariance of w, learned, from mini-batches and under any likelihood."""

    def new_coefficients(self):
        return FullCholesky


@recipe
class DiagonalWaves(OnWaves, families.FreeFormFamily):
    """Independent waves: a mean and a variance each."""

    def new_coefficients(self):
        return Diagonal


@recipe
class OptimalWaves(OnWaves, families.OptimalFamily):
    """q(w) as it follows from the likelihood, the collapsed bound."""


# %% [markdown]
# The new families have everything that others have: natural steps, predictions, states, components, expectations. The
# table shows by how many nats each bound is below the dense optimum. Waves have as many coefficients as `SVGP` has
# inducing points.

# %%
sizes = (2, 3, 4, 6, 8, 12)
curves = {name: [] for name in ("SVGP", "FreeWaves", "DiagonalWaves", "OptimalWaves")}
model = counted(Counts)
for num in sizes:
    for name, family in {
        "SVGP": families.SVGP(2 * num + 1),
        "FreeWaves": FreeWaves(num),
        "DiagonalWaves": DiagonalWaves(num),
        "OptimalWaves": OptimalWaves(num),
    }.items():
        lr = 0.005 if name == "SVGP" else 0.05  # inducing inputs take shorter steps
        guide, bound = trained(model, family, x, counts, lr=lr)
        curves[name].append(bound - poisson_best)
        if name == "FreeWaves":
            waves = guide
print("coefficients  " + "".join(f"{2 * num + 1:9}" for num in sizes))
for name, curve in curves.items():
    print(f"{name:14}" + "".join(f"{gap:9.2f}" for gap in curve))

again = AutoSparseGP(model, FreeWaves(sizes[-1]), point_estimates=True)
again.load_state_dict(waves.state_dict())
with torch.no_grad():
    loaded = torch.equal(
        again.posterior(grid)["f"].mean, waves.posterior(grid)["f"].mean
    )
    q = waves.posterior(x)["f"]
    mean_error = (q.mean - m).abs().max().item()
    sd_error = (q.stddev / v.sqrt() - 1).abs().max().item()
print(f"a loaded state predicts the same: {loaded}")
print(
    f"against the dense posterior of f: means to {mean_error:.3f}, sd to {sd_error:.1%}"
)

# %% [markdown]
# `OptimalWaves` computes in one step what `FreeWaves` learns. With 7 or 9 coefficients waves are as good as inducing
# points. With five they are worse, because `SVGP` places its points where the rows are, while waves go around the
# whole circle. If q takes the waves as independent, the bound is some nats lower. They would be independent if rows
# were spread evenly, but there are hardly any rows at night.

# %% [markdown]
# ## A policy
#
# Computation-aware inference learns from the data through a few actions. An action is a weighted sum of rows, and the
# posterior's variance includes what the actions leave out. `ComputationAware(actions=...)` takes any function that
# makes actions from the kernel and the sites. In a function of the time of day, rows of one hour belong together.


# %%
class Hours(torch.nn.Module):
    """An action an hour: the weighted mean of its rows; the weights are learned."""

    def __init__(self, x, num):
        super().__init__()
        self.register_buffer("hour", torch.floor(num * x[:, 0]).long())
        self.weight = torch.nn.Parameter(torch.ones(len(x)))
        self.num = num

    def forward(self, kernel, sites):
        members = torch.nn.functional.one_hot(self.hour, self.num).to(self.weight)
        return self.weight[:, None] * members


def measured(x, y=None):
    f = pyro.sample("f", GaussianProcess(circle(), x))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(f, 0.4), obs=y)


gram = circle()(x) + 0.16 * torch.eye(len(x))
cross = circle()(grid, x)
exact_variance = circle().diag(grid) - (
    cross * torch.linalg.solve(gram, cross.mT).mT
).sum(-1)
evidence = dist.MultivariateNormal(torch.zeros(len(x)), gram).log_prob(y).item()
policies = {}
for name, actions in {
    "sparse, built in": "sparse",
    "random, built in": "random",
    "hours": Hours(x, 10),
}.items():
    guide, bound = trained(
        measured, families.ComputationAware(10, actions=actions), x, y, nodes=2
    )
    with torch.no_grad():
        variance = guide.posterior(grid)["f"].variance
    policies[name] = bound, variance
    print(
        f"{name:17} bound {bound:8.2f}, least variance over exact {(variance / exact_variance).min():.3f}"
    )
print(f"{'dense evidence':17}       {evidence:8.2f}")

# %% [markdown]
# ## The pictures

# %%
figure, axes = plt.subplots(1, 3, figsize=(14, 3.8))
for name, color in (("RBF", "C1"), ("Circle", "C0")):
    mean, spread, *_ = fits[name]
    axes[0].plot(grid[:, 0], mean, color=color, label=name)
    axes[0].fill_between(
        grid[:, 0], mean - 2 * spread, mean + 2 * spread, color=color, alpha=0.2, lw=0
    )
axes[0].plot(x[:, 0], y, "k.", ms=2, alpha=0.4)
axes[0].plot(grid[:, 0], truth(grid), "k--", lw=0.8)
axes[0].set(title="a kernel", xlabel="share of the day", ylim=(-3, 3))
axes[0].legend()
for name, curve in curves.items():
    axes[1].plot(
        [2 * num + 1 for num in sizes],
        [max(-gap, 1e-3) for gap in curve],
        ".-",
        label=name,
    )
axes[1].set(
    title="a basis: nats below the dense optimum", xlabel="coefficients", yscale="log"
)
axes[1].legend()
for name, (_, variance) in policies.items():
    axes[2].plot(grid[:, 0], variance.sqrt(), label=name)
axes[2].plot(grid[:, 0], exact_variance.sqrt(), "k--", lw=0.8, label="exact")
axes[2].set(title="a policy: sd of f", xlabel="share of the day", yscale="log")
axes[2].legend()
figure.tight_layout()
figure.savefig(options.out / "write_your_own.png", dpi=80)
print(f"The picture is in {options.out}")

# %% [markdown]
# ## The claims, as assertions

# %%
if options.full:
    assert (
        kernel_error < 1e-9 < 1e-8 > -smallest
    )  # the kernel is its series, and a kernel;
    assert fits["Circle"][4] < 1e-9 < fits["RBF"][4]  # its functions close,
    assert fits["Circle"][3] < 0.5 * fits["RBF"][3]  # which helps where rows are few
    assert (
        exact - 1 < fits["Circle"][2] < exact
    )  # and SGPR's bound is below the evidence, by less than a nat.
    plain, own = by_counts.values()
    assert max(own) - min(own) < 1e-8  # The expectation has no nodes,
    assert (
        abs(plain[-1] - own[-1]) < 1e-4 < abs(plain[0] - own[0])
    )  # and is what many of them would give,
    assert poisson_best - 1 < own[-1] < poisson_best  # below the dense optimum.
    for name, curve in curves.items():
        assert max(curve) < 1e-3, name  # So are all families,
        assert curve[-1] > curve[0], name  # which come closer with size:
    for free, diagonal, optimal in zip(*list(curves.values())[1:]):
        assert abs(free - optimal) < 0.05  # what is learned is what is given,
        assert diagonal < free + 1e-3  # and what is left out costs.
    at = sizes.index(4)
    gap = curves["FreeWaves"][at] - curves["SVGP"][at]
    assert abs(gap) < 0.5  # Waves are as good as inducing points with 9 coefficients,
    assert curves["FreeWaves"][0] < curves["SVGP"][0]  # and worse with 5.
    assert curves["FreeWaves"][-1] > -0.5
    assert mean_error < 0.02
    assert sd_error < 0.02
    assert loaded
    for bound, variance in policies.values():
        assert bound < evidence
        assert (
            variance > exact_variance - 1e-9
        ).all()  # No action makes f more certain than the data do.
    assert policies["hours"][0] > policies["random, built in"][0]

# %% [markdown]
# ## What to try next
#
# * A summary of these parts: [write your own](../docs/how-to/write-your-own.md).
# * A Gaussian over w that is neither full nor diagonal: [gaussians](../docs/reference/gaussians.md) and [what a basis
#   and a Gaussian are](../docs/explanation/basis-times-gaussian.md).
# * Likelihoods that need no code of your own: [a gallery of likelihoods](likelihoods.ipynb). Your own optimiser and
#   millions of rows: [scale](scale.ipynb).
