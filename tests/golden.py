"""Goldens: what every family gives on every kind of program, as the last commit before the redesign gave it.

``python tests/golden.py check [--quick] [NAME ...]`` trains each case again and prints what differs.
``record NAME ...`` writes new values for these cases, which takes a test that shows the old ones wrong.

A case is a program, a family and a dtype. Its values are the losses of steps 1, 5 and 50, mean and sd of each GP site
at new inputs, mean and sd of 200 predictions (compared within sampling error), and the state's keys with their shapes.
Every step begins with its own seed, so that what a first call draws beside does not matter.
"""

from __future__ import annotations

import json
import math
import sys
import time
import warnings
from contextlib import nullcontext
from pathlib import Path

import pyro
import pyro.distributions as dist
import torch
from pyro import poutine
from torch import nn

from pyro_sparsegp import (
    AutoSparseGP,
    ExpectationPropagation,
    GaussianProcess,
    TraceQuadrature_ELBO,
    families,
    kernels,
    predict,
)
from pyro_sparsegp.distributions import Probit, RobustMax

FILE = Path(__file__).parent / "golden.json"
STEPS = (1, 5, 50)
NUM = 40  # rows
PREDICTIONS = 200


# Data


def inputs(num: int = NUM) -> torch.Tensor:
    """Rows (num, 2) of a lattice that looks random and needs no generator."""
    i = torch.arange(1, num + 1)
    return torch.stack([(0.7548776662466927 * i) % 1, (0.5698402909980532 * i) % 1], -1)


def noise(num: int = NUM) -> torch.Tensor:
    """Standard normal numbers by quantiles in a mixed order."""
    u = (0.6180339887498949 * torch.arange(1, num + 1)) % 1
    return math.sqrt(2) * torch.erfinv(2 * u.clamp(0.01, 0.99) - 1)


def curve(x: torch.Tensor) -> torch.Tensor:
    return torch.sin(6 * x[:, 0]) + x[:, 1]


def reals(x: torch.Tensor) -> torch.Tensor:
    return curve(x) + 0.2 * noise(len(x)).to(x)


def counts(x: torch.Tensor) -> torch.Tensor:
    return (1 + curve(x) + 0.3 * noise(len(x)).to(x)).exp().round()


def binary(x: torch.Tensor) -> torch.Tensor:
    return (reals(x) > 0.5).to(x)


def labels(x: torch.Tensor) -> torch.Tensor:
    return (2 * x[:, 0] + x[:, 1]).long()


# Programs; each has its data, and what it is called with to look at new inputs.


def parameters(x: torch.Tensor) -> kernels.Kernel:
    """A kernel of two terms, its hyperparameters parameters of the model."""
    scale = pyro.param("scale", x.new_tensor(1.0), constraint=dist.constraints.positive)
    length = pyro.param("length", x.new_tensor([0.4, 0.8]), constraint=dist.constraints.positive)
    return scale * kernels.Matern32(length[:1])[0] + kernels.RBF(length[1:])[1]


def sampled(x: torch.Tensor) -> kernels.Kernel:
    """The same kernel, its hyperparameters latent."""
    scale = pyro.sample("scale", dist.LogNormal(x.new_tensor(0.0), 1.0))
    length = pyro.sample("length", dist.LogNormal(x.new_zeros(2), 1.0).to_event(1))
    return scale * kernels.Matern32(length[:1])[0] + kernels.RBF(length[1:])[1]


def observed(likelihood, kernel=parameters, data=reals, mean=None, mask=False, outputs=0, other=None):
    """A GP, or several outputs of one, and one observed site; perhaps another GP beside."""

    def model(x, y=None, size=None):
        process = GaussianProcess(kernel(x), x, mean=mean)
        f = pyro.sample("f", process.expand([outputs]).to_event(1) if outputs else process)
        values = [f, pyro.sample("g", GaussianProcess(other[0], x, mean=other[1]))] if other else [f]
        with pyro.plate("data", size or len(x), subsample=x):
            y = data(x) if y is None and mask else y
            with poutine.mask(mask=torch.arange(len(x)) % 4 != 0) if mask else nullcontext():
                return pyro.sample("y", likelihood(*values), obs=y)

    model.data = data
    return model


def around(f):
    return dist.Normal(f, 0.2)


def rate(f):
    return dist.Poisson(f.exp())


def pair(x):
    """Two columns of data."""
    return torch.stack([reals(x), -reals(x)], -1)


def additive(x):
    return kernels.Anova(kernels.RBF(0.4))[0] + 0.5 * kernels.Anova(kernels.Matern32(0.6))[1] + kernels.Constant(1.0)


normal = observed(around)
poisson = observed(rate, data=counts, mean=1.0)
poisson_latents = observed(rate, kernel=sampled, data=counts, mean=1.0)
bernoulli = observed(lambda f: dist.Bernoulli(logits=f), data=binary)
probit = observed(Probit, data=binary)
student = observed(lambda f: dist.StudentT(4.0, f, 0.2))
gamma = observed(lambda f: dist.Gamma(2.0, 2.0 * (-f).exp()), data=lambda x: reals(x).exp())
masked = observed(rate, data=counts, mean=1.0, mask=True)
classes = observed(lambda f: dist.Categorical(logits=f.mT), data=labels, outputs=3)
robust = observed(lambda f: RobustMax(f.mT, 1e-2), data=labels, outputs=3)
outputs = observed(lambda f: around(f.mT).to_event(1), data=pair, outputs=2)
heteroscedastic = observed(lambda f, g: dist.Normal(f, g.exp()), other=(0.2 * kernels.RBF(0.5), -1.5))
sums = observed(lambda f, g: around(f + g), other=(0.5 * kernels.RBF(0.2), None))
averages = observed(lambda f: dist.Normal(f.cumsum(-1) / torch.arange(1, f.shape[-1] + 1).to(f), 0.1))
anova = observed(around, kernel=additive)


def of(data):
    """What a program is trained on."""

    def marked(program):
        program.data = data
        return program

    return marked


@of(reals)
def regression(x, y=None, size=None):
    s = pyro.sample("noise", dist.HalfNormal(x.new_tensor(1.0)))
    f = pyro.sample("f", GaussianProcess(sampled(x), x))
    with pyro.plate("data", size or len(x), subsample=x):
        return pyro.sample("y", dist.Normal(f, s), obs=y)


@of(counts)
def subsampled(x, y=None):
    plate = pyro.plate("data", len(x), subsample_size=16 if y is not None else None)
    with plate as i:
        pass
    f = pyro.sample("f", GaussianProcess(parameters(x), x[i]))
    with plate:
        return pyro.sample("y", rate(f), obs=None if y is None else y[i])


@of(reals)
def deep(x, y=None):
    prior = GaussianProcess(0.1 * kernels.RBF(0.5), x, mean=lambda x: x.mT)
    h = pyro.sample("h", prior.expand([2]).to_event(1))
    f = pyro.sample("f", GaussianProcess(kernels.RBF(0.7), torch.cat([h.mT, x], -1)))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", dist.Normal(f, 0.3), obs=y)


@of(counts)
def groups(x, y=None):
    """An intercept and effects of groups beside f."""
    mu = pyro.sample("mu", dist.Normal(x.new_tensor(0.0), 2.0))
    with pyro.plate("groups", 4):
        a = pyro.sample("a", dist.Normal(x.new_tensor(0.0), 0.5))
    f = pyro.sample("f", GaussianProcess(parameters(x), x))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", rate(mu + a[torch.arange(len(x)) % 4] + f), obs=y)


@of(counts)
def per_row(x, y=None):
    """A latent for each row, which overdispersed counts have."""
    f = pyro.sample("f", GaussianProcess(parameters(x), x))
    with pyro.plate("data", len(x)):
        e = pyro.sample("e", dist.Normal(x.new_tensor(0.0), 0.3))
        return pyro.sample("y", rate(f + e), obs=y)


@of(reals)
def outliers(x, y=None):
    f = pyro.sample("f", GaussianProcess(parameters(x), x))
    with pyro.plate("data", len(x)):
        z = pyro.sample("z", dist.Bernoulli(0.2), infer={"enumerate": "parallel"})
        return pyro.sample("y", dist.Normal(f, torch.where(z == 1, 10.0, 1.0) * 0.2), obs=y)


@of(pair)
def latent_inputs(x, y=None):
    with pyro.plate("rows", len(x)):
        t = pyro.sample("t", dist.Normal(x.new_zeros(1), 1.0).to_event(1))
    f = pyro.sample("f", GaussianProcess(kernels.RBF(1.0), t).expand([2]).to_event(1))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", around(f.mT).to_event(1), obs=y)


def basis_model(correction):
    network = nn.Sequential(nn.Linear(2, 8), nn.Tanh(), nn.Linear(8, 5)).double()

    def start():
        for i, p in enumerate(network.parameters()):
            p.data = 0.5 * torch.sin(1.0 + i + torch.arange(p.numel(), dtype=torch.float64)).reshape(p.shape)

    def kernel(x):
        pyro.module("network", network)
        return kernels.DeepBasis(network, correction)

    model = observed(around, kernel=kernel)
    model.start = start
    return model


basis, corrected = basis_model(False), basis_model(True)


@of(reals)
def derivative(x, y=None):
    at = kernels.Derivative.at(x, torch.arange(len(x)) % 3)
    f = pyro.sample("f", GaussianProcess(kernels.Derivative(kernels.RBF(torch.tensor([0.6, 0.9]))), at))
    with pyro.plate("data", len(x)):
        return pyro.sample("y", around(f), obs=y)


@of(reals)
def coloured(x, y=None):
    """Multivariate normal noise."""
    f = pyro.sample("f", GaussianProcess(parameters(x), x))
    noise = 0.04 * torch.eye(len(x)).to(x) + 0.02
    return pyro.sample("y", dist.MultivariateNormal(f, noise), obs=y)


FREE = {
    "SVGP": families.SVGP(8),
    "SVGPGradients": families.SVGP(8, natural=False),
    "OrthogonalInducing": families.OrthogonalInducing(5, 5),
    "OrthogonallyDecoupled": families.OrthogonallyDecoupled(5, 5),
    "DecoupledColumns": families.OrthogonallyDecoupled(5, 6, num_columns=4),
    "MeanFieldAdditive": families.MeanFieldAdditive(5),
    "CoupledCovariance": families.CoupledCovariance(5),
    "CoupledPrecision": families.CoupledPrecision(5),
    "CoupledPrecisionGradients": families.CoupledPrecision(5, natural=False),
    "CoupledPrecisionIdentity": families.CoupledPrecision(5, rank=6, base="identity"),
}
ON_SITES = {
    "SGPR": families.SGPR(8),
    "CollapsedOrthogonal": families.CollapsedOrthogonal(5, 5),
    "SemiCollapsedOrthogonal": families.SemiCollapsedOrthogonal(5, 5),
    "ConditionalSGPR": families.ConditionalSGPR(8),
    "AdditiveSGPR": families.AdditiveSGPR(5),
    "ComputationAware": families.ComputationAware(8),
    "ComputationAwareCG": families.ComputationAware(8, "cg"),
}
ALL = FREE | ON_SITES
WEIGHTS = {"WeightSpace": families.WeightSpace(), "ExactWeightSpace": families.ExactWeightSpace()}


# A program, what its cases are called, the families by name, options.
CASES = [
    (regression, "regression", [*ALL], {}),
    (poisson, "poisson", [*ALL], {}),
    (normal, "normal", ["SVGP", "SVGPGradients", "OrthogonalInducing", "CoupledPrecision", "SGPR"], {}),
    (bernoulli, "bernoulli", ["SVGP", "SVGPGradients", "OrthogonalInducing", "CoupledPrecision", "SGPR"], {}),
    (poisson_latents, "poisson_latents", ["SVGP", "SGPR", "CoupledPrecision"], {}),
    (student, "student", ["SVGP", "SGPR", "ComputationAware"], {}),
    (gamma, "gamma", ["SVGP", "SGPR"], {}),
    (probit, "probit", ["SVGP", "SGPR"], {}),
    (masked, "masked", ["SVGP", "SGPR"], {}),
    (subsampled, "subsampled", ["SVGP", "CoupledPrecision", "OrthogonallyDecoupled"], {}),
    (heteroscedastic, "heteroscedastic", ["SVGP", "SGPR", "CoupledPrecision"], {}),
    (heteroscedastic, "joint", {"SVGP": {("f", "g"): families.SVGP(6)}}, {}),
    (sums, "sums", ["SVGP", "SGPR"], {}),
    (sums, "sums_joint", {name: {("f", "g"): ALL[name]} for name in ("SVGP", "CoupledPrecision")}, {}),
    (averages, "averages", ["SVGP", "OrthogonalInducing"], {}),
    (coloured, "coloured", ["SVGP", "CoupledPrecision"], {}),
    (classes, "classes", ["SVGP", "SGPR"], {}),
    (robust, "robust", ["SVGP"], {}),
    (outputs, "outputs", ["SVGP", "SGPR"], {}),
    (deep, "deep", {"SVGP": families.SVGP(6), "Orthogonal": families.OrthogonalInducing(4, 4)}, {}),
    (groups, "groups", ["SVGP", "SGPR"], {}),
    (groups, "groups_points", ["SVGP"], {"guide": {"point_estimates": True}}),
    (per_row, "per_row", ["SVGP"], {}),
    (outliers, "outliers", ["SVGP", "SGPR"], {}),
    (latent_inputs, "latent_inputs", {"SVGP": families.SVGP(6)}, {}),
    (anova, "anova", ["SVGP", "CoupledPrecision", "AdditiveSGPR"], {}),
    (basis, "basis", WEIGHTS, {}),
    (corrected, "corrected", WEIGHTS, {}),
    (derivative, "derivative", ["SVGP", "SGPR"], {}),
    (normal, "ep_normal", {"SparseEP": families.SparseEP(8)}, {"ep": True}),
    (probit, "ep_probit", {"SparseEP": families.SparseEP(8)}, {"ep": True}),
    (poisson, "ep_poisson", {"SparseEP": families.SparseEP(8)}, {"ep": {"power": 0.5}}),
]
SINGLE = ("regression-SVGP", "poisson-SVGP", "regression-SGPR", "poisson-CoupledPrecision", "classes-SVGP")


def cases() -> dict[str, tuple]:
    """By name: a program, a family, options."""
    found = {}
    for program, label, named, options in CASES:
        for name, family in (named if isinstance(named, dict) else {name: ALL[name] for name in named}).items():
            found[f"{label}-{name}"] = program, family, options
    return found | {f"{name}-float32": (*found[name][:2], {"dtype": torch.float32}) for name in SINGLE}


QUICK = [
    "regression-SVGP",
    "regression-SGPR",
    "poisson-OrthogonalInducing",
    "poisson-CoupledPrecision",
    "bernoulli-SVGPGradients",
    "poisson-SGPR",
    "regression-ComputationAware",
    "heteroscedastic-SVGP",
    "classes-SVGP",
    "deep-SVGP",
    "groups-SVGP",
    "sums_joint-SVGP",
    "corrected-ExactWeightSpace",
    "ep_probit-SparseEP",
    "poisson-SVGP-float32",
    "subsampled-SVGP",
]


def outcome(name: str) -> dict:
    """What a case gives."""
    program, family, options = cases()[name]
    dtype = options.get("dtype", torch.float64)
    torch.set_default_dtype(dtype)
    pyro.clear_param_store()
    pyro.set_rng_seed(0)
    getattr(program, "start", lambda: None)()
    x = inputs().to(dtype)
    y = program.data(x)
    new = inputs(NUM + 5)[NUM:].to(dtype)
    guide = AutoSparseGP(program, family, independent=True, **options.get("guide", {}))  # as it was then
    optim = pyro.optim.Adam({"lr": 0.02})
    if ep := options.get("ep"):
        trainer = ExpectationPropagation(program, guide, optim, **(ep if isinstance(ep, dict) else {}))
    else:
        trainer = pyro.infer.SVI(program, guide, optim, TraceQuadrature_ELBO())
        guide(x, y)
    losses = {}
    for step in range(1, max(STEPS) + 1):
        pyro.set_rng_seed(step)
        loss = trainer.step(x, y)
        if step in STEPS:
            losses[step] = loss
    found: dict = {"losses": list(losses.values()), "posterior": {}, "predictions": {}}
    pyro.set_rng_seed(99)
    if program is not latent_inputs:  # which has no inputs to look at
        for site, posterior in guide.posterior(new).items():
            found["posterior"][site] = [posterior.mean.tolist(), posterior.variance.sqrt().tolist()]
        draws = predict(program, guide, new, num_samples=PREDICTIONS)
        for site in found["posterior"]:
            values = draws[site].double()
            found["predictions"][site] = [values.mean(0).tolist(), values.std(0).tolist()]
    state = guide.state_dict()
    found["state"] = {k: list(v.shape) if isinstance(v, torch.Tensor) else type(v).__name__ for k, v in state.items()}
    torch.set_default_dtype(torch.float64)
    return found


def differences(found: dict, golden: dict, tolerance: float) -> list[str]:
    """What of a case is not as it was, in words."""
    wrong = []
    for step, now, then in zip(STEPS, found["losses"], golden["losses"]):
        if not abs(now - then) <= tolerance * max(1.0, abs(then)):
            wrong.append(f"loss of step {step} is {now:.8g}, was {then:.8g}")
    for site, then in golden["posterior"].items():
        for what, a, b in zip(("mean", "sd"), found["posterior"][site], then):
            off = (torch.tensor(a) - torch.tensor(b)).abs().max().item()
            if not off <= tolerance * max(1.0, torch.tensor(b).abs().max().item()):
                wrong.append(f"{what} of {site} is off by {off:.2g}")
    for site, then in golden["predictions"].items():
        (mean, sd), (mean_then, sd_then) = (map(torch.tensor, pair) for pair in (found["predictions"][site], then))
        error = (sd_then + 1e-6) * math.sqrt(2 / PREDICTIONS)
        off = torch.maximum((mean - mean_then).abs() / error, (sd - sd_then).abs() / error).max().item()
        if not off <= 6:
            wrong.append(f"predictions of {site} are off by {off:.1f} standard errors")
    gone, new = (
        sorted(golden["state"].keys() - found["state"].keys()),
        sorted(found["state"].keys() - golden["state"].keys()),
    )
    if gone or new:
        wrong.append(f"the state has lost {gone} and gained {new}")
    shapes = [k for k in golden["state"].keys() & found["state"].keys() if golden["state"][k] != found["state"][k]]
    if shapes:
        wrong.append(f"shapes of the state differ at {sorted(shapes)}")
    return wrong


def compare(name: str, golden: dict) -> list[str]:
    """:func:`differences` of a case from its golden, or the error that it raises."""
    tolerance = 3e-3 if "float32" in name else 1e-6
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            return differences(outcome(name), golden[name], tolerance)
        except Exception as error:
            return [f"{type(error).__name__}: {str(error)[:200]}"]


def main(arguments: list[str]) -> int:
    torch.set_num_threads(1)
    verb, *rest = arguments or ["check"]
    names = [name for name in rest if not name.startswith("--")] or (QUICK if "--quick" in rest else list(cases()))
    golden = json.loads(FILE.read_text()) if FILE.exists() else {}
    if verb == "record":
        for name in names:
            start = time.process_time()
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                try:
                    golden[name] = outcome(name)
                except Exception as error:
                    print(name, "FAILED", type(error).__name__, str(error)[:300], flush=True)
                    continue
            print(name, golden[name]["losses"], f"{time.process_time() - start:.1f} s", flush=True)
            FILE.write_text(json.dumps(golden, separators=(",", ":")).replace('"losses"', '\n"losses"') + "\n")
        return 0
    broken = 0
    for name in names:
        wrong = compare(name, golden)
        broken += bool(wrong)
        print(name, "as before" if not wrong else "; ".join(wrong), flush=True)
    print(f"{len(names) - broken} of {len(names)} goldens as before")
    return int(broken > 0)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
