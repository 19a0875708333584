"""The process and its sparse posterior against dense formulas written out."""

import dataclasses

import pyro
import pyro.distributions as dist
import pytest
import torch
from torch.distributions import kl_divergence

from pyro_sparsegp import GaussianProcess, kernels
from pyro_sparsegp.families import (
    SVGP,
    CoupledCovariance,
    CoupledPrecision,
    FreeFormFamily,
    MeanFieldAdditive,
    OrthogonalInducing,
    WeightSpace,
)
from pyro_sparsegp.gaussians.sites import KeptSites, Sites
from pyro_sparsegp.numerics import functions as chunks
from pyro_sparsegp.posterior.drawing import MarginalSite
from pyro_sparsegp.posterior.sparse_posterior import SparsePosterior
from pyro_sparsegp.process import PriorProcess

from .models import FAMILIES, additive, conditional, refused

KERNEL = additive(torch.tensor(1.3), torch.tensor([0.3, 0.6]))


def mean_function(x):
    return 2 * x[..., 0] - 1


def posterior(family, kernel=KERNEL, x=None, mean=mean_function, batch=(), spread=0.3):
    """A posterior with random variational parameters, or sites."""
    x = torch.rand(20, 2) if x is None else x
    process = GaussianProcess(kernel, x, mean, 1e-10).expand(batch)
    if isinstance(family, FreeFormFamily):  # natural steps leave no parameters to draw
        family = dataclasses.replace(family, natural=False)
    module = family.build(process, "f")
    for name, parameter in module.named_parameters():
        if "inputs" not in name:
            parameter.data.add_(spread * torch.randn(parameter.shape))
    if isinstance(getattr(module, "sites", None), KeptSites):
        shape = (*batch, len(x))
        module.sites.keep(Sites(process.x, 2 * torch.rand(shape), torch.randn(shape)), torch.tensor(0))
    return module(process, "f")


class TestGaussianProcess:
    def test_is_the_multivariate_normal(self):
        x = torch.rand(6, 2)
        process = GaussianProcess(KERNEL, x, mean_function)
        exact = dist.MultivariateNormal(mean_function(x), KERNEL(x) + 1e-8 * KERNEL.diag(x).mean() * torch.eye(6))
        f = exact.sample((3,))
        torch.testing.assert_close(process.log_prob(f), exact.log_prob(f))
        draws = process.sample((200_000,))
        torch.testing.assert_close(draws.mean(0), exact.mean, atol=0.02, rtol=0)
        torch.testing.assert_close(draws.T.cov(), KERNEL(x), atol=0.05, rtol=0)

    def test_independent_outputs(self):
        x = torch.rand(5, 2)
        process = GaussianProcess(KERNEL, x).expand([3]).to_event(1)
        assert process.event_shape == (3, 5)
        assert process.batch_shape == ()
        f = process.sample((2,))
        single = GaussianProcess(KERNEL, x)
        torch.testing.assert_close(process.log_prob(f), single.log_prob(f).sum(-1))

    @pytest.mark.parametrize("rows", [1, 6])
    def test_a_mean_in_a_column(self, rows):
        x, kernel = torch.rand(rows, 2), kernels.RBF(0.4)
        column = torch.nn.Linear(2, 1)
        with pytest.raises(ValueError, match=rf"returned a column, .*\({rows}, 1\).*one value a row, \({rows},\)"):
            GaussianProcess(kernel, x, column).mean_at(x)
        flat = GaussianProcess(kernel, x, lambda x: column(x)[..., 0])
        if rows > 1:
            with pytest.raises(ValueError, match=r"mean is a column, of shape \(6, 1\).*give one value a row, \(6,\)"):
                GaussianProcess(kernel, x, column(x))
            torch.testing.assert_close(flat.mean, GaussianProcess(kernel, x, column(x)[:, 0]).mean)
        # One level an output is no column.
        levels = torch.rand(rows, 1)
        process = GaussianProcess(kernels.RBF(torch.rand(rows, 1)), x, levels)
        torch.testing.assert_close(process.mean, levels.expand(rows, rows))
        torch.testing.assert_close(GaussianProcess(kernel, x, torch.ones(3, 1)).mean, torch.ones(3, rows))

    def test_batches_of_hyperparameters(self):
        x, scale = torch.rand(5, 2), torch.tensor([1.0, 2.0])
        process = GaussianProcess(scale * kernels.RBF(torch.tensor([[0.3, 0.4], [0.5, 0.6]])), x)
        assert process.batch_shape == (2,)
        f = process.sample()
        for s in range(2):
            one = GaussianProcess(scale[s] * kernels.RBF(torch.tensor([[0.3, 0.4], [0.5, 0.6]])[s]), x)
            torch.testing.assert_close(process.log_prob(f)[s], one.log_prob(f[s]))

    @pytest.mark.parametrize("mean", [None, 0.7, -1, torch.tensor(0.7), torch.arange(5.0), mean_function])
    def test_means(self, mean):
        x = torch.rand(5, 2)
        values = mean(x) if callable(mean) else torch.as_tensor(0.0 if mean is None else mean).to(x)
        torch.testing.assert_close(GaussianProcess(KERNEL, x, mean).mean.to(x), values.expand(5))

    def test_given_is_the_conditional_normal(self):
        old, new = torch.rand(7, 2), torch.rand(4, 2)
        f = torch.randn(7)
        conditioned = GaussianProcess(KERNEL, new, mean_function, jitter=1e-12).given(old, f)
        mean, covariance = conditional(KERNEL, old, f - mean_function(old), 0.0, new)
        torch.testing.assert_close(conditioned.mean, mean_function(new) + mean)
        torch.testing.assert_close(conditioned.covariance_matrix, covariance, atol=1e-8, rtol=0)
        torch.testing.assert_close(conditioned.variance, covariance.diagonal(), atol=1e-8, rtol=0)
        # conditioning on two parts is conditioning on both
        two = GaussianProcess(KERNEL, new, mean_function, 1e-12).given(old[:3], f[:3]).given(old[3:], f[3:])
        torch.testing.assert_close(two.mean, conditioned.mean, atol=1e-7, rtol=0)

    @pytest.mark.parametrize(
        ("x", "message"),
        [
            (torch.rand(5), r"shape \(N, D\), got \(5,\).*x\[:, None\]"),
            (torch.ones(5, 2, dtype=torch.long), "float32 or float64"),
            ([[1.0]], "float64 tensor.*list"),
            (torch.full((5, 2), torch.nan), r"x, of shape \(5, 2\), contains NaN"),
            (torch.zeros(0, 2), "at least one row"),
        ],
    )
    def test_bad_inputs(self, x, message):
        refused(message, lambda: GaussianProcess(kernels.RBF(), x))

    def test_other_bad_arguments(self):
        x = torch.rand(5, 2)
        refused(r"must be a kernel.*from_pyro", GaussianProcess, 3.0, x)
        refused("mean must be a number, a tensor, a callable of x or None, got str", GaussianProcess, KERNEL, x, "zero")
        refused("jitter", lambda: GaussianProcess(kernels.RBF(), x, jitter=-1.0))
        refused(
            r"mean is a tensor, of shape \(4,\), for inputs \(5,", GaussianProcess, kernels.RBF(), x, torch.zeros(4)
        )
        with pytest.raises(ValueError, match=r"mean returned a tensor, of shape \(2,\)"):
            GaussianProcess(kernels.RBF(), x, lambda x: torch.zeros(2)).mean  # noqa: B018
        with pytest.raises(ValueError, match="values at other inputs"):
            GaussianProcess(kernels.RBF(), x, torch.zeros(5)).at(torch.rand(3, 2)).mean  # noqa: B018
        refused("one value a row", lambda: GaussianProcess(kernels.RBF(), x).given(x, torch.zeros(3)))

    def test_a_failed_cholesky_names_the_matrix(self):
        class Negative(kernels.RBF):
            def __call__(self, x, z=None):
                return -super().__call__(x, z)

        with pytest.raises(RuntimeError, match=r"prior covariance of a GaussianProcess \(4 x 4, float64\) failed"):
            GaussianProcess(Negative(), torch.rand(4, 1)).sample()


class TestSparsePosterior:
    def test_inducing_points_dense(self):
        """q(u) = N(L m, L S Lᵀ) at Z, and the textbook formulas (Hensman et al., 2013) at x."""
        q = posterior(SVGP(7))
        z, x = q.basis.z, q.process.x
        m, s = q.coefficients.loc[0], q.coefficients.covariance_matrix
        k_zz = KERNEL(z) + 1e-10 * KERNEL.diag(z).mean() * torch.eye(7)
        factor = torch.linalg.cholesky(k_zz)
        gain = KERNEL(x, z) @ k_zz.inverse()
        mean = mean_function(x) + gain @ factor @ m
        covariance = KERNEL(x) - gain @ (k_zz - factor @ s @ factor.mT) @ gain.mT
        torch.testing.assert_close(q.mean, mean, rtol=1e-7, atol=1e-7)
        torch.testing.assert_close(q.covariance_matrix, covariance, rtol=1e-7, atol=1e-7)
        torch.testing.assert_close(q.variance, covariance.diagonal(), rtol=1e-7, atol=1e-7)
        torch.testing.assert_close(q.marginals.mean, q.mean)
        prior = dist.MultivariateNormal(torch.zeros(7), k_zz)
        torch.testing.assert_close(
            q.kl, kl_divergence(dist.MultivariateNormal(factor @ m, factor @ s @ factor.mT), prior)
        )

    def test_moments_in_chunks(self, monkeypatch):
        q = posterior(SVGP(7))
        fresh, x = q.at(q.process.x), q.process.x
        monkeypatch.setattr(chunks, "_KEPT", 2 * chunks._ROW)
        monkeypatch.setattr(chunks, "_PIECE", 2 * chunks._ROW)
        with torch.no_grad():
            torch.testing.assert_close((q.at(x).mean, q.at(x).variance), (fresh.mean, fresh.variance))
        w = torch.randn(7)
        given = q.at(x).given([w])
        torch.testing.assert_close(given.mean, mean_function(x) + fresh.features[0] @ w)
        torch.testing.assert_close(given.variance, KERNEL.diag(x) - fresh.features[0].square().sum(-1))

    def test_nested_sets_are_paper_1s_blocks(self):
        """φ = [L₁⁻¹k_Z ; L₂⁻¹(k_O − AᵀL₁⁻¹k_Z)], with A = L₁⁻¹K_ZO, L₂L₂ᵀ = K_OO − AᵀA (section 3.1)."""
        q = posterior(OrthogonalInducing(5, 4))
        z, o = q.basis.z[:5], q.basis.z[5:]
        x = q.process.x
        one = torch.linalg.cholesky(KERNEL(z))
        a = one.inverse() @ KERNEL(z, o)
        two = torch.linalg.cholesky(KERNEL(o) - a.mT @ a)
        phi_1 = one.inverse() @ KERNEL(z, x)
        phi_2 = two.inverse() @ (KERNEL(o, x) - a.mT @ phi_1)
        torch.testing.assert_close(q.features[0].mT, phi_1, rtol=1e-6, atol=1e-6)
        torch.testing.assert_close(q.features[1].mT, phi_2, rtol=1e-6, atol=1e-6)

    @pytest.mark.filterwarnings("ignore::pyro_sparsegp.numerics.linalg.NumericalWarning")  # Exact leaves no residual
    @pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
    def test_marginals_are_those_of_the_joint(self, family):
        q = posterior(family)
        torch.testing.assert_close(q.covariance_matrix.diagonal(), q.variance)
        assert torch.linalg.eigvalsh(q.covariance_matrix).min() > -1e-8
        draws = q.rsample((20_000,))
        torch.testing.assert_close(draws.mean(0), q.mean, atol=0.07, rtol=0)
        torch.testing.assert_close(draws.T.cov(), q.covariance_matrix, atol=0.12, rtol=0.05)

    @pytest.mark.filterwarnings("ignore::pyro_sparsegp.numerics.linalg.NumericalWarning")  # Exact leaves no residual
    @pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
    def test_log_prob_is_relative_to_the_prior_process(self, family):
        q = posterior(family)
        value = q.rsample((20_000,))
        ratio = q.log_prob(value)
        assert ratio.shape == (20_000,)
        assert abs(ratio.mean() - q.kl) < 5 * ratio.std() / 20_000**0.5
        refused(r"site 'f'.*not the last draw", q.log_prob, value + 0)
        site = MarginalSite(q.process, q.basis, q.coefficients).paired()
        torch.testing.assert_close(site.log_prob(site.rsample((3,))), q.kl.expand(3))

    def test_registered_kl_and_the_base_measure(self):
        q = posterior(SVGP(5), batch=(2,))
        assert kl_divergence(q, q.process).shape == (2,)
        torch.testing.assert_close(kl_divergence(q, q.process), q.kl)
        base = PriorProcess.of(q.process)
        torch.testing.assert_close(kl_divergence(q.to_event(1), base.to_event(1)), q.kl.sum())
        assert (base.log_prob(q.mean) == 0).all()
        assert base.expand([3, 2]).log_prob(q.mean).shape == (3, 2)

    @pytest.mark.parametrize("family", FAMILIES.values(), ids=FAMILIES)
    def test_components_add_up(self, family):
        q = posterior(family)
        assert len(q.components) == 4
        assert [part.process.kernel for part in q.components] == list(KERNEL.terms)
        total = sum(part.mean for part in q.components) + mean_function(q.process.x)
        torch.testing.assert_close(total, q.mean)
        if isinstance(family, MeanFieldAdditive):  # independent terms: variances add up as well
            torch.testing.assert_close(sum(part.variance for part in q.components), q.variance)

    @pytest.mark.parametrize("family", [SVGP(9), CoupledCovariance(5), CoupledPrecision(5), MeanFieldAdditive(5)])
    def test_components_dense(self, family):
        """Component c is μ_c = Cov(f_c, w)m, Σ_c = k_c + Cov(f_c, w)(S − I)Cov(w, f_c)."""
        q = posterior(family)
        x, s = q.process.x, q.coefficients.covariance_matrix
        start = 0
        for c, part in enumerate(q.components):
            term = KERNEL.terms[c]
            if isinstance(family, SVGP):
                cross = term(x, q.basis.z) @ torch.linalg.cholesky(KERNEL(q.basis.z)).inverse().mT
                rows = slice(0, 9)
            else:
                cross = torch.cat(part.features, -1)
                rows = slice(start, start + cross.shape[-1])
                start = rows.stop
            m = torch.cat(q.coefficients.loc)[rows]
            torch.testing.assert_close(part.mean, cross @ m, rtol=1e-6, atol=1e-6)
            change = cross @ (s[rows, rows] - torch.eye(len(m))) @ cross.mT
            torch.testing.assert_close(part.covariance_matrix, term(x) + change, rtol=1e-6, atol=1e-6)

    def test_at_other_inputs_and_expand(self):
        q = posterior(SVGP(6))
        x = torch.rand(3, 2)
        other = q.at(x)
        assert other.mean.shape == (3,)
        process = GaussianProcess(KERNEL, x, mean_function, 1e-10)
        torch.testing.assert_close(other.mean, SparsePosterior(process, q.basis, q.coefficients).mean)
        assert q.expand([4]).rsample().shape == (4, 20)
        assert q.expand([4]).kl.shape == (4,)


class TestPaths:
    NEW = torch.tensor([[0.1, 0.2], [0.5, 0.9], [0.9, 0.4]], dtype=torch.float64)

    @pytest.mark.parametrize("family", [SVGP(9), OrthogonalInducing(5, 4), CoupledPrecision(5), CoupledCovariance(5)])
    def test_moments(self, family):
        q = posterior(family)
        paths = q.paths(20_000, 16)(self.NEW)  # each of its own waves
        exact = q.at(self.NEW)
        torch.testing.assert_close(paths.mean(0), exact.mean, atol=0.06, rtol=0)
        torch.testing.assert_close(paths.T.cov(), exact.covariance_matrix, atol=0.15, rtol=0.05)

    def test_agree_with_themselves(self):
        for kernel in (KERNEL, kernels.Periodic(0.8) + kernels.White(0.1)):
            path = posterior(SVGP(6), kernel).paths(3)
            first, second = path(self.NEW), path(self.NEW)
            assert first.shape == (3, 3)
            torch.testing.assert_close(first, second)

    @pytest.mark.parametrize("white", [kernels.White(0.5), kernels.RBF(0.3) * kernels.White(0.5)])
    def test_a_diagonal_term_has_one_value_an_input(self, white):
        q = posterior(SVGP(6), kernels.RBF(0.4) + white)
        path = q.paths(2000)
        first = path(torch.cat([self.NEW[:2], self.NEW[:1]]))
        assert torch.equal(first[:, 0], first[:, 2])
        both = path(torch.cat([self.NEW, self.NEW.flip(0)]))
        assert torch.equal(both[:, :3], both[:, 3:].flip(1))
        assert torch.equal(both[:, :2], first[:, :2])
        exact = q.at(self.NEW)
        assert ((both[:, :3].mean(0) - exact.mean).abs() < 5 * exact.stddev / 2000**0.5).all()
        error = 5 * (exact.variance.outer(exact.variance) + exact.covariance_matrix.square()).div(2000).sqrt()
        assert ((both[:, :3].T.cov() - exact.covariance_matrix).abs() < error).all()
        assert path(self.NEW.flip(0)).equal(both[:, 3:])

    def test_a_corrected_basis_has_one_value_an_input(self):
        network = torch.nn.Sequential(torch.nn.Linear(2, 8), torch.nn.Tanh(), torch.nn.Linear(8, 3))
        q = posterior(WeightSpace(), kernels.DeepBasis(network.requires_grad_(False)))
        path = q.paths(20_000)
        first = path(q.process.x)
        assert torch.equal(first[:, :5], path(q.process.x[:5]))
        torch.testing.assert_close(first.var(0), q.variance, atol=0.0, rtol=0.1)

    def test_exact_conditioning_where_there_are_no_features(self):
        q = posterior(SVGP(2), 1.5 * kernels.Periodic(0.5, 2.0), x=torch.rand(20, 1), mean=None)  # which leaves much
        x = torch.linspace(0, 0.4, 4)[:, None]  # near each other
        path = q.paths(20_000)
        values = torch.cat([path(x[:2]), path(x[2:])], -1)
        exact = q.at(x)
        torch.testing.assert_close(values.mean(0), exact.mean, atol=0.06, rtol=0)
        torch.testing.assert_close(values.T.cov(), exact.covariance_matrix, atol=0.1, rtol=0.05)
        torch.testing.assert_close(path(x[:2]), values[:, :2], atol=2e-3, rtol=0)

    def test_batches(self):
        path = posterior(SVGP(6), batch=(2,)).paths(5)
        assert path(self.NEW).shape == (5, 2, 3)
        refused("at least one path", lambda: posterior(SVGP(6)).paths(0))


def test_rsample_is_differentiable_in_all_parameters():
    process = GaussianProcess(KERNEL, torch.rand(8, 2))
    module = OrthogonalInducing(4, 3).build(process, "f")
    pyro.set_rng_seed(3)
    module(process, "f").rsample().sum().backward()
    assert all(p.grad is not None and p.grad.isfinite().all() for p in module.parameters())
