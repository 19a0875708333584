"""Effects of additive models, and how they go together."""

import pyro.distributions as dist
import pytest
import torch
from torch.testing import assert_close

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels
from pyro_sparsegp.families import (
    SGPR,
    SVGP,
    ComputationAware,
    CoupledCovariance,
    CoupledPrecision,
    Exact,
    MeanFieldAdditive,
    OrthogonalInducing,
)

from .models import additive, data, gaussian, maximise, one_function, refused, trained

NOISE = 0.2
KERNEL = additive(torch.tensor(1.0, dtype=torch.float64), torch.tensor([0.4, 0.7], dtype=torch.float64))


def exact(kernel, x, y, new):
    """Mean and joint covariance of all effects given y = Σ_c f_c(x) + ε (Rasmussen and Williams, 2006, eq. 2.23)."""
    weights = torch.linalg.inv(kernel(x) + NOISE**2 * torch.eye(len(x)))
    cross = torch.cat([term(new, x) for term in kernel.terms])
    prior = torch.block_diag(*[term(new) for term in kernel.terms])
    return cross @ weights @ y, prior - cross @ weights @ cross.mT


def effects_of(kernel, x, new, family, y):
    model = gaussian(kernel, NOISE, jitter=1e-12)
    guide = AutoSparseGP(model, family)
    TraceQuadrature_ELBO(2)(model, guide)(x, y)
    return guide.posterior(new)["f"].components


@pytest.mark.parametrize("family", [SGPR, lambda z: ComputationAware(len(z), lambda kernel, sites: torch.eye(len(z)))])
def test_exact_effects(family):
    """Families that are exact with all inputs as inducing points have the dense posterior of all effects jointly."""
    x, y = data(num=15)
    new = torch.rand(4, 2)
    given = SGPR(x, trainable=False) if family is SGPR else family(x)
    parts = effects_of(KERNEL, x, new, given, y)
    mean, covariance = exact(KERNEL, x, y, new)
    assert_close(torch.cat([part.mean for part in parts]), mean, rtol=1e-5, atol=1e-6)
    assert_close(parts.covariance_matrix, covariance, rtol=1e-5, atol=1e-6)


@pytest.mark.filterwarnings("ignore:.*independent noise at each row")
@pytest.mark.parametrize("kernel", [KERNEL, KERNEL + kernels.White(0.3)], ids=["smooth", "with white noise"])
def test_effects_at_the_tensor_trained_on(kernel):
    """The basis of ``Exact`` is f at this very tensor: an effect there is that summand's, not the sum."""
    x, y = data(num=15)
    parts = effects_of(kernel, x, x, Exact(), y)
    weights = torch.linalg.inv(kernel(x) + NOISE**2 * torch.eye(15))
    cross = torch.cat([term(x) for term in kernel.terms])  # white noise in f is in the data at the same rows
    assert_close(torch.cat([part.mean for part in parts]), cross @ weights @ y, rtol=1e-5, atol=1e-6)
    covariance = torch.block_diag(*[term(x) for term in kernel.terms]) - cross @ weights @ cross.mT
    assert_close(parts.covariance_matrix, covariance, rtol=1e-5, atol=1e-6)


FAMILIES = [
    SVGP(9),
    OrthogonalInducing(5, 4),
    MeanFieldAdditive(5),
    CoupledCovariance(5),
    CoupledPrecision(5),
    CoupledPrecision(5, base="identity"),
]


def shaken(family, kernel=KERNEL, batch=()):
    """A posterior away from the prior, where effects are coupled."""
    x, _ = data(num=30)
    process = GaussianProcess(kernel, x, jitter=1e-10).expand(batch)
    module = family.build(process, "f")
    for name, parameter in module.named_parameters():
        if "inputs" not in name:
            parameter.data.add_(0.3 * torch.randn(parameter.shape))
    return module(process, "f")


@pytest.mark.parametrize("batch", [(), (2,)], ids=["one", "two outputs"])
@pytest.mark.parametrize("family", FAMILIES, ids=lambda family: repr(family).split("(")[0])
def test_joint_posterior(family, batch):
    q = shaken(family, batch=batch)
    x = torch.rand(4, 2)
    parts = q.at(x).components
    assert len(parts) == 4
    # One input each, the sum of all effects is f.
    joint = parts.covariance_matrix
    assert joint.shape == (*batch, 16, 16)
    summed = joint.unflatten(-1, (4, 4)).unflatten(-3, (4, 4)).sum((-4, -2))
    assert_close(summed, q.at(x).covariance_matrix)
    assert (torch.linalg.eigvalsh(joint) > -1e-10).all()
    for c, part in enumerate(parts):
        assert_close(joint.diagonal(dim1=-2, dim2=-1)[..., 4 * c : 4 * c + 4], part.variance)
    # At inputs of their own.
    inputs = [torch.rand(n, 2) for n in (2, 3, 1, 4)]
    own = q.components.at(inputs)
    assert [part.mean.shape[-1] for part in own] == [2, 3, 1, 4]
    assert own.covariance_matrix.shape == (*batch, 10, 10)
    # Draws.
    draws = torch.cat(list(own.rsample((20_000,)).values()), -1)
    assert_close(draws.mean(0), torch.cat([part.mean for part in own], -1), atol=0.08, rtol=0.02)
    centred = (draws - draws.mean(0)).movedim(0, -1)
    assert_close(centred @ centred.mT / len(draws), own.covariance_matrix, atol=0.12, rtol=0.05)


def test_a_basis_has_a_component_for_each_summand(monkeypatch):
    x, y = data()
    q = trained(gaussian(KERNEL), SVGP(6), x, y, steps=1).posterior(x)["f"]
    monkeypatch.setattr(type(q.basis), "components", lambda self: [(self.kernel, self, (0,))])
    with pytest.raises(ValueError, match=r"'f' has 1 components\(\), not one for each of"):
        assert q.components


@pytest.mark.parametrize(
    "family",
    [MeanFieldAdditive(5), SVGP(9), CoupledPrecision(5), CoupledPrecision(5, base="identity")],
    ids=["a basis each", "one basis", "block plus low rank", "low rank"],
)
def test_white_noise_is_an_effect_of_its_own(family):
    """And a draw has what the basis leaves out of each effect."""
    q = shaken(family, KERNEL + kernels.White(0.3))
    parts = q.components
    assert parts.names[-1] == "white"
    assert_close(parts["white"].mean, torch.zeros(30))
    assert_close(parts["white"].variance, torch.full((30,), 0.3))
    assert_close(parts.covariance_matrix[-30:, -30:], 0.3 * torch.eye(30))
    assert (parts.covariance_matrix[-30:, :30] == 0).all()
    assert_close(parts.rsample((20_000,))["white"].std(0), torch.full((30,), 0.3**0.5), rtol=0.05, atol=0)


def test_names():
    smooth = kernels.RBF(0.3)
    kernel = (
        kernels.Constant(1.0)
        + 2.0 * smooth[1]
        + (smooth[0] * smooth[2]).named("te(a, c)")
        + kernels.Linear()[1]
        + kernels.Linear()
    )
    assert kernel.terms[0].name is None
    q = GaussianProcess(kernel, torch.rand(5, 3))
    posterior = MeanFieldAdditive(3).build(q, "f")(q, "f")
    assert posterior.components.names == ("constant", "x1", "te(a, c)", "x1 (2)", "linear")
    assert posterior.components["te(a, c)"] is posterior.components[2]
    assert [name for name, _ in posterior.components.items()] == list(posterior.components.names)
    # Names outlive the algebra, and leave the kernel they were given to as it was.
    named = smooth.named("wind")
    assert smooth.name is None
    for again in (
        2.0 * named,
        named[1],
        (3.0 * named[0]).terms[0],
        (named + 1.0).terms[0],
        (2.0 * (named + 1.0)).terms[0],
    ):
        assert again.name == "wind"
    assert (named * smooth).name is None
    assert repr(named) == repr(smooth)
    with pytest.raises(ValueError, match="no term 'rain'; its terms are"):
        posterior.components["rain"]
    refused("name its terms one by one", kernel.named, "all")
    refused("got 2 matrices of inputs", posterior.components.at, [torch.rand(5, 3)] * 2)


def line(low, high):
    """Lines through 0 at the middle of an interval."""
    return kernels.Anova(kernels.Linear(3.0) + kernels.Constant(1.0), low, high)


def test_sobol_indices_of_known_lines():
    """f = a(x₀ − 1) + b(x₁ − ½) + c(x₀ − 1)(x₁ − ½) on [0, 2] x [0, 1]: variances a²/3, b²/12 and c²/36."""
    kernel = (
        kernels.Constant(1.0) + line(0, 2)[0].named("a") + line(0, 1)[1] + (line(0, 2)[0] * line(0, 1)[1]).named("c")
    )
    x = torch.rand(40, 2) * torch.tensor([2.0, 1.0])
    a, b, c = 1.3, -2.0, 4.0
    f = a * (x[:, 0] - 1) + b * (x[:, 1] - 0.5) + c * (x[:, 0] - 1) * (x[:, 1] - 0.5) + 7.0

    model = one_function(100.0 * kernel, lambda f: dist.Normal(f, 1e-3), jitter=1e-10)
    guide, _ = maximise(model, CoupledCovariance(5), x, f, iterations=60)
    posterior = guide.posterior(x)["f"]
    found = posterior.components.sobol_indices(200, draws=True)
    total = a**2 / 3 + b**2 / 12 + c**2 / 36
    assert list(found) == ["constant", "a", "x1", "c"]
    expected = [0.0, a**2 / 3 / total, b**2 / 12 / total, c**2 / 36 / total]
    for draws, share in zip(found.values(), expected):
        assert draws.shape == (200,)
        assert abs(draws.mean() - share) < 0.01
    assert_close(sum(found.values()), torch.ones(200))


def test_sobol_indices_show_what_is_not_known():
    """At the prior of two equal effects either may have the larger share, and both average to a half."""
    kernel = kernels.Anova(kernels.RBF(0.5), -1.0, 1.0)[0] + kernels.Anova(kernels.RBF(0.5), -1.0, 1.0)[1]
    process = GaussianProcess(kernel, torch.rand(20, 2))
    q = MeanFieldAdditive(8).build(process, "f")(process, "f")
    share = q.components.sobol_indices(2000, draws=True)["x0"]
    assert not share.requires_grad
    mean, low, high = q.components.sobol_indices(2000, prob=0.9)["x0"]  # numbers
    assert (mean, low, high) == pytest.approx((0.5, *share.quantile(torch.tensor([0.05, 0.95])).tolist()), abs=0.05)
    assert abs(share.mean() - 0.5) < 0.03
    assert share.quantile(0.05) < 0.2
    assert share.quantile(0.95) > 0.8


def test_sobol_indices_want_orthogonal_effects():
    q = shaken(MeanFieldAdditive(5))
    refused(r"term 'x0' of site 'f' is .*Matern32.*Write kernels.Anova", q.components.sobol_indices)
    process = GaussianProcess(kernels.Constant(1.0), torch.rand(20, 2))
    q = MeanFieldAdditive(8).build(process, "f")(process, "f")
    refused("no term that varies", q.components.sobol_indices)
