"""What a GPU would refuse or wait for, on a pretended one: mixed devices, copies from the host, numbers read back."""

import pyro
import pyro.distributions as dist
import pytest
import torch

from pyro_sparsegp import (
    AutoSparseGP,
    ExpectationPropagation,
    GaussianProcess,
    TraceQuadrature_ELBO,
    families,
    kernels,
    predict,
)

from .models import data, observed
from .pretended import There, pretended_device

SMALL = {
    "SVGP": families.SVGP(5, natural=False),
    "SVGP by natural steps": families.SVGP(5),
    "OrthogonalInducing": families.OrthogonalInducing(4, 3),
    "OrthogonallyDecoupled": families.OrthogonallyDecoupled(4, 6, num_columns=3, natural=False),
    "SGPR": families.SGPR(5),
    "CollapsedOrthogonal": families.CollapsedOrthogonal(4, 3),
    "SemiCollapsedOrthogonal": families.SemiCollapsedOrthogonal(4, 3),
    "ConditionalSGPR": families.ConditionalSGPR(5),
    "ComputationAware": families.ComputationAware(4),
    "ComputationAware cg": families.ComputationAware(4, "cg"),
    "MeanFieldAdditive": families.MeanFieldAdditive(3),
    "CoupledCovariance": families.CoupledCovariance(3),
    "CoupledPrecision": families.CoupledPrecision(3, rank=2, natural=False),
    "CoupledPrecision by natural steps": families.CoupledPrecision(3, rank=2),
    "AdditiveSGPR": families.AdditiveSGPR(3),
    "SparseEP": families.SparseEP(5),
    "WeightSpace": families.WeightSpace(),
    "ExactWeightSpace": families.ExactWeightSpace(),
}
ADDITIVE = {name for name in SMALL if name.startswith(("MeanField", "Coupled", "Additive"))}
ON_SITES = {"SGPR", "CollapsedOrthogonal", "SemiCollapsedOrthogonal", "ConditionalSGPR", "ComputationAware"}
# Reads of a step beyond two, of sites under any likelihood.
MORE = dict.fromkeys([*ON_SITES, "AdditiveSGPR"], 3) | {"SparseEP": 5}


def model_of(name, likelihood):
    def model(x, y=None):
        scale = pyro.param("scale", lambda: x.new_ones(()), constraint=dist.constraints.positive)
        length = pyro.param("length", lambda: x.new_full((2,), 0.7), constraint=dist.constraints.positive)
        if name in ADDITIVE:
            kernel = scale * kernels.Matern52(length[:1])[0] + scale * kernels.RBF(length[1:])[1]
        elif "WeightSpace" in name:
            kernel = scale * kernels.Polynomial(2, 1.0)
        else:
            kernel = scale * kernels.Matern32(length)
        f = pyro.sample("f", GaussianProcess(kernel, x))
        if likelihood == "normal":
            noise = pyro.param("noise", lambda: x.new_full((), 0.3), constraint=dist.constraints.positive)
            return observed(dist.Normal(f, noise), y, x)
        return observed(dist.Bernoulli(logits=f), y, x)

    return model


def step_there(model, x, y, family, ep=False, **kwargs):
    """What the pretended device notes of step 4; after which there are predictions. At steps 3, 5, 9, ... the guide
    looks whether the program has changed.
    """
    pyro.enable_validation(False)  # Pyro's own looks at numbers
    try:
        with pretended_device() as device:
            x, y = There(x), There(y)
            guide = AutoSparseGP(model, family, **kwargs)
            optim = pyro.optim.Adam({"lr": 0.01})
            trainer = (
                ExpectationPropagation(model, guide, optim)
                if ep
                else pyro.infer.SVI(model, guide, optim, TraceQuadrature_ELBO(4))
            )
            for _ in range(4):
                before = len(device.events)
                trainer.step(x, y)
            step = device.events[before:]
            with torch.no_grad():
                for posterior in guide.posterior(x[:10]).values():
                    posterior.mean, posterior.variance  # noqa: B018
            predict(model, guide, x[:10], num_samples=2)
            guide(x[:10])
    finally:
        pyro.enable_validation(True)
    assert not [event for event in device.events if event[0] == "mix"]
    return step


def require_few_reads(step, most):
    assert not [event for event in step if event[0] == "copy"]
    reads = [event for event in step if event[0] == "read"]
    assert len(reads) <= most, reads


@pytest.mark.quick("normal | SVGP | SGPR | ComputationAware")  # families of each kind with other data
@pytest.mark.parametrize("likelihood", ["normal", "bernoulli"])
@pytest.mark.parametrize("name", SMALL)
def test_a_family_stays_on_its_device(name, likelihood):
    x, y = data(num=24)
    y = (y > 0.5).double() if likelihood == "bernoulli" else y
    model = model_of(name, likelihood)
    require_few_reads(step_there(model, x, y, SMALL[name], ep=name == "SparseEP"), MORE.get(name, 2))


def two_apart(x, y=None):
    f, g = (pyro.sample(name, GaussianProcess(kernels.Matern32(x.new_full((), 0.7)), x)) for name in "fg")
    with pyro.plate("data", len(x)):
        pyro.sample("z", dist.Bernoulli(logits=g), obs=None if y is None else (y > 0.5).to(y))
        return pyro.sample("y", dist.Normal(f, x.new_full((), 0.3)), obs=y)


def deep(x, y=None):
    h = pyro.sample("h", GaussianProcess(kernels.RBF(x.new_full((), 0.5)), x))
    f = pyro.sample("f", GaussianProcess(kernels.RBF(x.new_full((), 0.7)), torch.stack([h, x[:, 0]], -1)))
    return observed(dist.Normal(f, x.new_full((), 0.3)), y)


def with_a_latent(x, y=None):
    scale = pyro.sample("scale", dist.LogNormal(x.new_zeros(()), x.new_ones(())))
    f = pyro.sample("f", GaussianProcess(scale * kernels.RBF(x.new_full((), 0.7)), x))
    return observed(dist.Normal(f, x.new_full((), 0.3)), y)


def with_a_field(x, y=None):
    mu = pyro.sample("mu", dist.Normal(x.new_zeros(()), x.new_ones(())))
    scale = pyro.sample("scale", dist.LogNormal(x.new_zeros(()), x.new_ones(())))
    f = pyro.sample("f", GaussianProcess(scale * kernels.RBF(x.new_full((), 0.7)), x))
    with pyro.plate("groups", 3):
        a = pyro.sample("a", dist.Normal(x.new_zeros(()), x.new_ones(())))
    rate = (mu + f + a[(10 * x[:, 0]).long() % 3]).exp()
    return observed(dist.Poisson(rate), None if y is None else (y > 0.5).to(y))


@pytest.mark.parametrize("family", [families.SVGP(5), pytest.param(families.SparseEP(5), marks=pytest.mark.slow)])
def test_priors_of_numbers_are_on_the_host(family):
    def model(x, y=None):
        mu, scale = pyro.sample("mu", dist.Normal(0.0, 1.0)), pyro.sample("scale", dist.LogNormal(0.0, 1.0))
        f = pyro.sample("f", GaussianProcess(scale * kernels.RBF(0.7), x))
        with pyro.plate("groups", 3):
            a = pyro.sample("a", dist.Normal(0.0, scale))
        return observed(dist.Normal(mu + f + a[(10 * x[:, 0]).long() % 3], scale), y)

    step_there(model, *data(num=24), family, ep=isinstance(family, families.SparseEP))


@pytest.mark.parametrize(
    ("model", "reads"),
    [(two_apart, 2), (deep, 2), (with_a_latent, 3), (with_a_field, 2)],
    ids=["two sites", "deep", "hyperparameter", "field"],
)
def test_several_posteriors_are_read_together(model, reads):
    x, y = data(num=24)
    require_few_reads(step_there(model, x, y, families.SVGP(5)), reads)


def test_the_pretended_device_notes_what_it_should():
    with pretended_device() as device:
        a = There(torch.ones(3))
        b = a * torch.ones(())  # a number of the host's is no mix
        c = a + 1
        assert not device.events
        a * torch.ones(3)
        bool((b > 0).all())
        torch.tensor([1.0], device=a.device)
        c.sum().item()
        a[torch.tensor([0, 1])]
    assert [kind for kind, *_ in device.events] == ["mix", "read", "copy", "read", "copy"]
