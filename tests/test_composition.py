"""AutoSparseGP beside Pyro's own guides: what works, and what an error says instead."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro import poutine
from pyro.contrib.easyguide import EasyGuide
from pyro.infer import SVI, Trace_ELBO, TraceMeanField_ELBO
from pyro.infer.autoguide import AutoGuideList
from torch.distributions import constraints

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import SVGP

from .models import observed, refused, train


def model(x, y=None):
    length = pyro.sample("length", dist.LogNormal(-0.5, 0.3))
    noise = pyro.sample("noise", dist.LogNormal(-1.5, 0.3))
    f = pyro.sample("f", GaussianProcess(kernels.RBF(length), x))
    return observed(dist.Normal(f, noise), y)


def data(num=20):
    x = torch.linspace(-1, 1, num)[:, None]
    return x, torch.sin(4 * x[:, 0])


SENTENCE = r"for another posterior of a latent override get_posterior\(name, prior\) in a subclass"


@pytest.mark.parametrize("hidden", [{"expose": ["f"]}, {"hide": ["noise"]}])
def test_a_part_of_a_model_is_refused(hidden):
    refused(r"Give it the whole model.*" + SENTENCE, AutoSparseGP, poutine.block(model, **hidden), SVGP(8))
    refused(r"poutine\.block", lambda: AutoSparseGP(poutine.scale(poutine.block(model, **hidden), scale=2.0), SVGP(8)))


@pytest.mark.quick("easy-TraceMeanField_ELBO | list-TraceQuadrature_ELBO | by hand-Trace_ELBO")
@pytest.mark.filterwarnings("ignore")  # Pyro's, of sites that the guide has besides
@pytest.mark.parametrize(
    "elbo", [Trace_ELBO(), TraceMeanField_ELBO(), TraceQuadrature_ELBO()], ids=lambda e: type(e).__name__
)
@pytest.mark.parametrize("compose", ["list", "easy", "by hand"])
def test_a_guide_that_has_it_for_a_part_says_how_to(compose, elbo):
    x, y = data()
    part = AutoSparseGP(model, SVGP(8))
    if compose == "list":
        guide = AutoGuideList(model)
        guide.append(part)
    elif compose == "easy":

        class Guide(EasyGuide):
            def guide(self, *args):
                part(*args)

        guide = Guide(model)
    else:

        def guide(*args):
            return part(*args)

    refused(SENTENCE, lambda: SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), elbo).step(x, y))


class Joint(AutoSparseGP):
    """A hand-written posterior for the rest, in which the noise depends on the lengthscale drawn before it."""

    def get_posterior(self, name, prior):
        if name == "noise":
            loc, slope = (pyro.param(part, torch.tensor(value)) for part, value in (("loc", -1.5), ("slope", 0.0)))
            size = pyro.param("size", torch.tensor(0.1), constraint=constraints.positive)
            return dist.LogNormal(loc + slope * self.upstream_value("length").log(), size)
        return super().get_posterior(name, prior)


def test_a_posterior_of_ones_own_for_the_rest():
    x, y = data()
    guide = Joint(model, SVGP(8))
    losses = train(model, guide, x, y, steps=60, lr=0.05, loss=TraceQuadrature_ELBO(2))
    assert sum(losses[-10:]) < sum(losses[:10])
    assert pyro.param("slope").abs() > 0.01
    assert "noise" not in dict(guide.locs.named_parameters())
    assert guide.posterior(x)["f"].mean.shape == (20,)
