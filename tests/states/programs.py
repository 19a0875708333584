"""The programs whose states are kept."""

import pyro
import pyro.distributions as dist
import torch

from pyro_sparsegp import GaussianProcess, families, kernels

FAMILIES = {
    "SVGP": lambda: families.SVGP(4),
    "SGPR": lambda: families.SGPR(4),
    "SparseEP": lambda: families.SparseEP(4),
    "OrthogonalInducing": lambda: families.OrthogonalInducing(3, 3),
    "OrthogonallyDecoupled": lambda: families.OrthogonallyDecoupled(3, 4),
    "CollapsedOrthogonal": lambda: families.CollapsedOrthogonal(3, 3),
    "ComputationAware": lambda: families.ComputationAware(3),
    "MeanFieldAdditive": lambda: families.MeanFieldAdditive(3),
    "CoupledCovariance": lambda: families.CoupledCovariance(3),
    "CoupledPrecision": lambda: families.CoupledPrecision(3, rank=2),
    "AdditiveSGPR": lambda: families.AdditiveSGPR(3),
    "WeightSpace": lambda: families.WeightSpace(),
    "ExactWeightSpace": lambda: families.ExactWeightSpace(),
}
# Of programs whose latents have one posterior with f, or are summed out.
JOINT = {
    "intercept": lambda: families.SVGP(4),
    "groups": lambda: families.SVGP(4),
    "rows": lambda: families.SVGP(4),
    "classes": lambda: families.SVGP(4),
}


def data() -> tuple[torch.Tensor, torch.Tensor]:
    x = torch.linspace(-1, 1, 24, dtype=torch.float64).reshape(12, 2)
    return x, torch.sin(3 * x[:, 0]) + 0.1 * torch.cos(40 * x[:, 1])


def at() -> torch.Tensor:
    return torch.tensor([[-1.2, 0.3], [0.0, 0.1], [0.5, 0.7]], dtype=torch.float64)


def model_of(name: str):
    def model(x, y=None):
        variance = pyro.sample("variance", dist.LogNormal(torch.zeros((), dtype=x.dtype), 0.3))
        if "WeightSpace" in name:
            kernel = variance * kernels.Polynomial(2, 1.0)
        else:
            kernel = variance * kernels.RBF(lengthscale=0.7)[0] + kernels.Matern32(lengthscale=0.5)[1]
        loc = pyro.sample("f", GaussianProcess(kernel, x))
        zero = torch.zeros((), dtype=x.dtype)
        if name == "intercept":
            loc = loc + pyro.sample("mu", dist.Normal(zero, 1.0))
        if name == "groups":
            with pyro.plate("groups", 3):
                loc = loc + pyro.sample("a", dist.Normal(zero, 1.0))[torch.arange(len(x)) % 3]
        if name == "classes":
            with pyro.plate("kinds", 3):
                z = pyro.sample("z", dist.Bernoulli(zero + 0.5), infer={"enumerate": "parallel"})
            loc = loc + z[..., torch.arange(len(x)) % 3]
        with pyro.plate("data", len(x)):
            if name == "rows":
                loc = loc + pyro.sample("e", dist.Normal(zero, 0.1))
            pyro.sample("y", dist.Normal(loc, 0.2), obs=y)

    return model
