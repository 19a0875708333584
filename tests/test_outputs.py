"""Several outputs that share functions, observed where they are, against dense models of coregionalisation."""

import pyro
import pyro.distributions as dist
import pytest
import torch
from pyro.infer import SVI
from torch.distributions import constraints

from pyro_sparsegp import AutoSparseGP, GaussianProcess, TraceQuadrature_ELBO, kernels, mix_outputs
from pyro_sparsegp.families import SGPR, SVGP, AdditiveSGPR

from .models import gaussian, observed, prepared, refused, restored, train

NOISE = 0.2
LONG, SHORT = kernels.RBF(0.5), kernels.Matern32(0.3)


MIXING = torch.tensor([[1.0, 0.2], [0.6, -0.8], [-0.7, 0.5]], dtype=torch.float64)
OWN = torch.tensor([0.3, 0.0, 0.5], dtype=torch.float64)


def _data():
    """Outputs at inputs of their own: rows (x, p) and their values."""
    generator = torch.Generator().manual_seed(0)
    rows = torch.cat(
        [
            torch.stack([torch.rand(n, generator=generator), torch.full((n,), float(p))], -1)
            for p, n in enumerate((8, 5, 6))
        ]
    )
    y = MIXING[rows[:, 1].long(), 0] * torch.sin(6 * rows[:, 0]) + 0.3 * rows[:, 0]
    return rows, y + NOISE * torch.randn(len(y), generator=generator)


def _dense(rows, others=None, own=True, same=False):
    """cov f of the linear model: a term a function, LONG and SHORT, and each output's own, LONG."""
    others = rows if others is None else others
    (x, p), (z, q) = ((r[:, :1], r[:, 1].long()) for r in (rows, others))
    shared = LONG(x, z) if same else SHORT(x, z)
    k = torch.outer(MIXING[p, 0], MIXING[q, 0]) * LONG(x, z) + torch.outer(MIXING[p, 1], MIXING[q, 1]) * shared
    return k + (p[:, None] == q) * torch.outer(OWN[p], OWN[q]) * LONG(x, z) if own else k


def _linear(mixing, own=None):
    return (
        kernels.Coregionalisation(mixing[:, :1], own)[1] * LONG[0]
        + kernels.Coregionalisation(mixing[:, 1:])[1] * SHORT[0]
    )


def _evidence(k, y):
    return dist.MultivariateNormal(torch.zeros(len(y)), k + NOISE**2 * torch.eye(len(y))).log_prob(y).item()


@pytest.mark.parametrize("case", ["intrinsic", "linear"])
def test_the_kernel_is_the_dense_model(case):
    rows, y = _data()
    same = case == "intrinsic"
    kernel = kernels.Coregionalisation(MIXING, OWN)[1] * LONG[0] if same else _linear(MIXING, OWN)
    k = _dense(rows, same=same)
    torch.testing.assert_close(kernel(rows), k)
    torch.testing.assert_close(kernel.diag(rows), k.diagonal())
    model = gaussian(kernel, NOISE)
    for family in (SGPR(len(y), trainable=False), *(() if same else (AdditiveSGPR(len(y), trainable=False),))):
        guide = prepared(model, family, rows, y)
        bound = -TraceQuadrature_ELBO(2).loss(model, guide, rows, y)
        assert bound == pytest.approx(_evidence(k, y), abs=2e-3)
        # An output where it was not observed is known by what the others say of it.
        new = torch.stack([torch.linspace(0, 1, 5), torch.full((5,), 1.0)], -1)
        gain = _dense(new, rows, same=same) @ torch.linalg.inv(k + NOISE**2 * torch.eye(len(y)))
        q = guide.posterior(new)["f"]
        torch.testing.assert_close(q.mean, gain @ y, rtol=0.0, atol=2e-3)
        variance = (_dense(new, same=same) - gain @ _dense(rows, new, same=same)).diagonal()
        torch.testing.assert_close(q.variance, variance, rtol=0.0, atol=2e-3)


def test_values_are_the_dense_model_with_one_posterior():
    rows, y = _data()

    def model(rows, y=None):
        x, output = rows[:, :1], rows[:, 1].long()
        g = [pyro.sample(name, GaussianProcess(k, x)) for name, k in (("slow", LONG), ("fast", SHORT))]
        return observed(dist.Normal(mix_outputs(MIXING, torch.stack(g), output=output), NOISE), y)

    guide = AutoSparseGP(model, {("slow", "fast"): SVGP(len(y), rate=1.0, trainable=False)})
    losses = train(model, guide, rows, y, steps=3, lr=0.01, loss=TraceQuadrature_ELBO(2))
    assert -losses[-1] == pytest.approx(_evidence(_dense(rows, own=False), y), abs=2e-3)


def test_missing_entries_of_rows_that_have_all_outputs():
    """Entries that are masked are as if they were not there: the dense model of those that are."""
    x = torch.linspace(0, 1, 7)[:, None]
    generator = torch.Generator().manual_seed(1)
    y = (MIXING[:, :1] * torch.sin(6 * x[:, 0])).mT + NOISE * torch.randn(7, 3, generator=generator)
    seen = torch.rand(7, 3, generator=generator) < 0.7
    kernel = LONG

    def model(x, y=None):
        g = pyro.sample("g", GaussianProcess(kernel, x).expand([1]).to_event(1))
        with pyro.plate("data", len(x)):
            f = mix_outputs(MIXING[:, :1], g).mT
            return pyro.sample("y", dist.Normal(f, NOISE).mask(seen).to_event(1), obs=y)

    guide = AutoSparseGP(model, SVGP(len(x), rate=1.0, trainable=False))
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.01}), TraceQuadrature_ELBO(2))
    for _ in range(3):
        loss = svi.step(x, torch.where(seen, y, torch.nan))
    row, output = seen.nonzero().mT
    k = torch.outer(MIXING[output, 0], MIXING[output, 0]) * LONG(x[row])
    assert -loss == pytest.approx(_evidence(k, y[row, output]), abs=1e-3)


def test_mix_outputs():
    g = torch.randn(2, 4)
    torch.testing.assert_close(mix_outputs(MIXING, g), MIXING @ g)
    output = torch.tensor([2, 0, 0, 1])
    torch.testing.assert_close(mix_outputs(MIXING, g, output=output), (MIXING @ g)[output, torch.arange(4)])


@pytest.mark.parametrize(
    ("call", "match"),
    [
        (lambda: mix_outputs(MIXING, torch.zeros(3, 4)), r"tensors mixing \(P, Q\).*\(3, 2\) and \(3, 4\)"),
        (lambda: mix_outputs(MIXING, torch.zeros(2, 4), output=torch.zeros(4)), "tensor of 4 whole numbers"),
        (lambda: mix_outputs(MIXING, torch.zeros(2, 2), output=[0, 1]), "output must be a tensor of 2 .* got list"),
        (lambda: mix_outputs(MIXING, torch.zeros(2, 2), output=torch.tensor([0, 3])), "from 0 to 2"),
        (lambda: mix_outputs(MIXING, torch.zeros(2, 2), output=torch.tensor([0, -1])), "from 0 to 2"),
        (lambda: mix_outputs([[1.0]], torch.zeros(1, 2)), "takes tensors .* got list"),
        (lambda: kernels.Coregionalisation(torch.zeros(3)), "mixing must be a matrix"),
        (lambda: kernels.Coregionalisation(MIXING, torch.zeros(2)), "each of 3 outputs"),
        (lambda: kernels.Coregionalisation(MIXING)(torch.zeros(4, 2)), "select one"),
        (
            lambda: kernels.Coregionalisation(MIXING)[1].check_inputs(torch.full((2, 2), 3.0)),
            r"outputs in .* from 0 to 2.*\[3.0\]",
        ),
    ],
)
def test_errors(call, match):
    refused(match, call)


def test_inducing_inputs_between_outputs_are_refused():
    x = torch.cat([torch.rand(20, 1), torch.arange(20.0)[:, None] % 2], -1)

    def model(x, y=None):
        kernel = kernels.RBF(0.3)[0] * kernels.Coregionalisation(torch.tensor([[1.0], [0.5]]))[1]
        f = pyro.sample("f", GaussianProcess(kernel, x))
        return observed(dist.Normal(f, 0.1), y)

    with pytest.raises(ValueError, match=r"init='kmeans' places inducing inputs of site 'f' between rows.*greedy"):
        AutoSparseGP(model, SVGP(1, init="kmeans"))(x, x[:, 0])
    AutoSparseGP(model, SVGP(4))(x, x[:, 0])


@pytest.mark.parametrize("family", [SVGP(6), SVGP(6, natural=False), SGPR(6)], ids=["natural", "Adam", "sites"])
def test_trained_inducing_inputs_stay_with_their_outputs(family):
    # A kernel of all columns has a gradient by the output's number, which names something and moves nowhere.
    def model(x, y):
        kernel = kernels.Matern32(0.5) * kernels.Coregionalisation(torch.eye(2, dtype=x.dtype))[-1]
        f = pyro.sample("f", GaussianProcess(kernel, x))
        observed(dist.Normal(f, 0.1), y)

    x = torch.stack([torch.linspace(0, 1, 12), torch.arange(12) % 2], -1).double()
    guide = AutoSparseGP(model, family)
    svi = SVI(model, guide, pyro.optim.Adam({"lr": 0.1}), TraceQuadrature_ELBO())
    svi.step(x, x.sum(-1))
    before = guide.gps.f.basis.inputs[0].detach().clone()
    for _ in range(5):
        svi.step(x, x.sum(-1))
    after = guide.gps.f.basis.inputs[0].detach()
    torch.testing.assert_close(after[:, 1], before[:, 1], rtol=0, atol=0)
    assert (after[:, 0] - before[:, 0]).abs().min() > 1e-3
    again = restored(guide, model, family)
    assert again.gps.f.basis.codes == (1,)


@pytest.mark.parametrize("dtype", [torch.float32, pytest.param(torch.float64, marks=pytest.mark.slow)], ids=str)
def test_a_batch_of_functions_on_one_set_of_inducing_inputs(dtype):
    """As GPyTorch's test/examples/test_batch_svgp_gp_regression.py, whose bounds on both errors are .01 and .02."""
    torch.set_default_dtype(dtype)
    x = torch.linspace(0, 1, 260)[:, None]
    y = torch.cat([(2 * torch.pi * x).cos(), (2 * torch.pi * x).sin()], 1) + 0.01 * torch.randn(260, 2)

    def model(x, y=None):
        variance, length, noise = (
            pyro.param(name, torch.tensor(0.693), constraint=constraints.positive) for name in ("v", "l", "n")
        )
        level = pyro.param("level", torch.tensor(0.0))
        process = GaussianProcess(variance * kernels.RBF(length), x, mean=lambda x: level.expand(len(x)))
        f = pyro.sample("f", process.expand([2]).to_event(1))
        with pyro.plate("data", len(x)):
            return pyro.sample("y", dist.Normal(f.mT, noise.sqrt()).to_event(1), obs=y)

    guide = AutoSparseGP(model, SVGP(torch.linspace(0, 1, 25)[:, None]))
    train(model, guide, x, y, steps=200, lr=0.01)
    errors = (y.mT - guide.posterior(x)["f"].mean).abs().mean(-1) / 2
    assert errors[0] < 0.01
    assert errors[1] < 0.01
