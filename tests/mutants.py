"""One-line faults, and the quick tests that should see them: what the suite is worth.

    python tests/mutants.py                     # all
    python tests/mutants.py kl-half no-jitter   # some
    python tests/mutants.py --jobs 4

Each fault is planted in a temporary copy of the package and its tests, never in the checkout. A line is looked for in
all files of the package by its text, so that modules may move; where it is not found exactly once, the list is out of
date and the script fails. ``test_mutants.py`` asks that much of the whole list in the quick suite.

Add a fault of your own where a test was missing: it is a line of the package, the line that would be wrong, and the
tests that you would expect to fail.
"""

from __future__ import annotations

import argparse
import functools
import multiprocessing
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
PACKAGE = "pyro_sparsegp"
TIMEOUT = 900  # seconds: a fault may make a test slow
SERVER = multiprocessing.get_context("forkserver")  # of children that have imported what is not ours


@dataclass(frozen=True)
class Mutant:
    """A fault.

    :param where: the class or function that the line belongs to, for the reader.
    :param old: the line, without the space around it.
    :param new: the line in its place.
    :param tests: what should see it: a test's file and name, ``test_x.py::test_y``, wherever the file lies.
    """

    name: str
    where: str
    old: str
    new: str
    tests: tuple[str, ...]


MUTANTS = [
    # Natural steps: what draws and precise data show.
    Mutant(
        "half-a-factor-is-taken",
        "NaturalLowRank.step",
        "fine = (0 * size == failed) & (each > 0).all()  # 0 times a number that is finite is 0",
        "fine = (0 * size == 0 * failed) & (each > 0).all()",
        ("test_low_rank.py::test_a_step_without_a_factor_is_left_out",),
    ),
    Mutant(
        "q-stays-where-features-turn",
        "NaturalAtRows._seen_from",
        "turn = nearest(self.seat, seat)",
        "turn = nearest(seat, seat)",
        ("test_deep_basis.py::test_q_follows_features_that_turn",),
    ),
    Mutant(
        "first-draws-count-in-full",
        "StepsOnBackward.settle",
        "rate = min(rate, _BY_MARGINALS)",
        "rate = min(rate, 1.0)",
        ("test_deep_gp.py::test_single_draws_of_an_inner_layer_do_not_throw_it_away",),
    ),
    Mutant(
        "natural-rates-stay",
        "_Loop._set_rates",
        "self._share(falling(step, self.total))",
        "self._share(1.0)",
        ("test_fit.py::test_mini_batches_leave_the_mean_where_all_rows_have_it",),
    ),
    Mutant(
        "nothing-waits-for-q",
        "meet",
        "for _ in range(_PASSES):",
        "for _ in range(0):",
        ("test_natural.py::test_q_meets_the_data_before_a_gradient_reaches_hyperparameters",),
    ),
    Mutant(
        "a-scaled-prior-counts-in-full",
        "Reader._total",
        "return sum((part.sum() for part in log_densities(trace, skip).values()), none) / scale",
        "return sum((part.sum() for part in log_densities(trace, skip).values()), none)",
        ("test_sites.py::test_a_scaled_model_has_the_same_posterior",),
    ),
    Mutant(
        "quadratic-once-and-for-all",
        "_look_again",
        "if not found.quadratic or before is None or (kinds == before and core.looks not in _LOOKS):",
        "if not found.quadratic or before is None or kinds == before:",
        ("test_sites.py::test_a_likelihood_that_is_gaussian_at_first_only",),
    ),
    Mutant(
        "no-gradient-at-the-floor",
        "above_rounding",
        "return variance + lacking",
        "return variance.clamp(min=variance_floor(prior).expand(variance.shape)) + 0 * lacking",
        ("test_float32.py::test_natural_steps_on_precise_data",),
    ),
    # Divergences and Gaussians over coefficients.
    Mutant(
        "kl-half",
        "gaussian_kl",
        "return 0.5 * (trace + loc.square().sum(-1) - loc.shape[-1] - log_det)",
        "return 0.5 * (trace + loc.square().sum(-1) - loc.shape[-1]) - log_det",
        ("test_linalg.py::test_gaussian_kl_is_that_of_torch",),
    ),
    Mutant(
        "low-rank-trace",
        "LowRankGaussian.kl",
        "trace = -self.low_rank.square().sum((-2, -1))",
        "trace = self.low_rank.square().sum((-2, -1))",
        ("test_posteriors.py::TestAgainstDense::test_kl",),
    ),
    Mutant(
        "low-rank-draws",
        "LowRankGaussian.rsample",
        "v = block - t.mT @ inner",
        "v = block + t.mT @ inner",
        ("test_posteriors.py::TestAgainstDense::test_draws_have_the_moments",),
    ),
    Mutant(
        "block-of-the-factor",
        "from_natural",
        "block = factor[..., :stop, :stop] if start == 0 else cholesky(whole[..., start:stop, start:stop], 0.0, what)",
        "block = factor[..., start:stop, start:stop]",
        ("test_sites.py::test_collapsed_orthogonal_is_the_dense_bound",),
    ),
    Mutant(
        "projected-kl",
        "ProjectedGaussian.kl",
        "fit = ((self.covariance @ weights[..., None])[..., 0] * weights).sum(-1)",
        "fit = self.white.square().sum(-1)",
        ("test_computation_aware.py::test_bound_and_posterior_are_the_papers",),
    ),
    Mutant(
        "unwhitened-mean",
        "Unwhitened.forward",
        "both = torch.cat([root, factor.loc[..., None]], -1).expand(*batch, num, num + 1)",
        "both = torch.cat([root, block @ factor.loc[..., None]], -1).expand(*batch, num, num + 1)",
        ("test_orthogonal.py::test_unwhitened_posterior_is_the_papers",),
    ),
    Mutant(
        "marginal-blocks",
        "Product.marginal",
        "rows = [torch.arange(edges[i], edges[i + 1]) for i, b in enumerate(group) if b in wanted]",
        "rows = [torch.arange(edges[i], edges[i + 1]) for i, b in enumerate(group) if i < len(kept)]",
        ("test_posteriors.py::TestAgainstDense::test_marginal",),
    ),
    # Linear algebra and custom gradients.
    Mutant(
        "no-jitter",
        "cholesky",
        "factor, turn, info = Factor.apply(matrix, level * scale, dtype or matrix.dtype)",
        "factor, turn, info = Factor.apply(matrix, 0 * level * scale, dtype or matrix.dtype)",
        ("test_linalg.py::test_cholesky_adds_a_jitter_relative_to_the_diagonal",),
    ),
    Mutant(
        "jitter-in-silence",
        "cholesky",
        "if attempt > 0:",
        "if attempt > _ESCALATIONS:",
        ("test_linalg.py::test_cholesky_escalates_and_says_so",),
    ),
    Mutant(
        "narrow-factor-gradient",
        "_Factor.backward",
        "both = mirrored(inner if by_factor is None or by_turn is None else inner + by_turn).mul_(0.5)",
        "both = mirrored(inner if by_factor is None or by_turn is None else by_turn).mul_(0.5)",
        ("test_fused.py::test_whitening_is_that_of_the_factor",),
    ),
    Mutant(
        "moments-gradient",
        "_DenseMoments.backward",
        "by_phi = by_phi.addcmul_(phi, each, value=-1).addr_(a, loc)",
        "by_phi = by_phi.addr_(a, loc)",
        ("test_posteriors.py::test_moments_together_and_their_derivatives",),
    ),
    Mutant(
        "gram-gradient",
        "_WeightedGram.backward",
        "by_weights = 0.5 * (half * phi).sum(-1) if ctx.needs_input_grad[1] else None",
        "by_weights = (half * phi).sum(-1) if ctx.needs_input_grad[1] else None",
        ("test_posteriors.py::test_the_weighted_gram_and_its_derivatives",),
    ),
    Mutant(
        "variance-floor-gone",
        "variance_floor",
        "return 10 * info.eps * torch.maximum(prior, info.eps * prior.amax(-1, keepdim=True)).clamp("
        "min=info.tiny / info.eps)",
        "return 0.0 * prior",
        (
            "test_linalg.py::test_the_floor_of_variances_is_positive_and_relative",
            "test_quadrature.py::test_a_row_whose_prior_variance_is_0_trains",
        ),
    ),
    # Kernels.
    Mutant(
        "matern-slope",
        "Matern32.value_and_slope",
        "return a.add_(1).mul_(e), e.mul_(-1.5)",
        "return a.add_(1).mul_(e), e.mul_(-0.5)",
        ("test_kernels.py::test_derivatives_at_distinct_points",),
    ),
    Mutant(
        "periodic-circle",
        "Periodic.scale",
        'angle = x * (2 * math.pi / per_column(self.period, x, "Periodic\'s period"))',
        'angle = x * (math.pi / per_column(self.period, x, "Periodic\'s period"))',
        ("test_kernels.py::test_as_scikit_learn", "test_kernels.py::test_as_pyro"),
    ),
    Mutant(
        "white-is-shared",
        "White.prior_functions",
        "return None  # a draw must remember where it was evaluated: exact conditioning does",
        "return super().prior_functions(num, num_features, x)",
        ("test_process.py::TestPaths::test_a_diagonal_term_has_one_value_an_input",),
    ),
    Mutant(
        "white-has-a-feature",
        "White.features",
        "return x.new_zeros(*broadcast_shapes(self.batch_shape, x.shape[:-2]), x.shape[-2], 0)",
        "return self.diag(x).sqrt()[..., None]",
        ("test_kernels.py::test_white", "test_components.py::test_white_noise_is_an_effect_of_its_own"),
    ),
    Mutant(
        "level-not-of-training",
        "DeepBasis._diagonal",
        "return torch.maximum(self.level, squares)",
        "return squares.amax(-1, keepdim=True).expand(squares.shape)",
        ("test_deep_basis.py::test_level_of_prediction_is_over_the_rows_and_each_input_by_itself",),
    ),
    Mutant(
        "anova-mean",
        "Anova.__call__",
        "value = self.base(x, z) - left[..., :, None] * (right * inverse[..., None])[..., None, :]",
        "value = self.base(x, z) - left[..., :, None] * right[..., None, :]",
        ("test_anova.py",),
    ),
    # Bases.
    Mutant(
        "affine-sums-apart",
        "_of_one_posterior",
        "groups.setdefault(id(posterior if share is None else share.whole), []).append(gp)",
        "groups.setdefault(id(posterior), []).append(gp)",
        ("test_affine.py::test_sums_of_functions_of_one_posterior_have_exact_expectations",),
    ),
    Mutant(
        "affine-without-scale",
        "over_scale",
        "return solve_lower(fn.scale_tril, rows.reshape(*fn.loc.shape, -1)).reshape(rows.shape)",
        "return rows",
        ("test_affine.py::test_one_step_under_precise_correlated_noise_is_the_collapsed_bound",),
    ),
    Mutant(
        "affine-without-other-parameters",
        "_Declared.why_not",
        "if any(self.owners[name][key].touched.any() for name in touching for key in self._others(site, name)):",
        "if False:",
        ("test_affine.py::test_what_a_first_call_does_not_see_move_is_integrated",),
    ),
    Mutant(
        "affine-at-a-parameter-of-zero",
        "_Declared._at_nan",
        "name: (torch.full_like(value, torch.nan) if name in names else value.clone()).requires_grad_()",
        "name: value.clone().requires_grad_()",
        ("test_affine.py::test_what_a_first_call_does_not_see_move_is_integrated",),
    ),
    Mutant(
        "affine-near-the-prior",
        "declared",
        "MOVES = (1.0, -1.0, 30.0, -30.0)",
        "MOVES = (1.0, -1.0, 3.0)",
        ("test_affine.py::test_bent_functions_of_a_value_are_integrated",),
    ),
    Mutant(
        "transposed-solve",
        "InducingFeatures.__call__",
        "phi = over_upper(cross, self.factor) if self._whitened is None else self._whitened(cross)",
        "phi = over_upper(cross, self.factor.mT.tril())",
        ("test_process.py::TestSparsePosterior::test_nested_sets_are_paper_1s_blocks",),
    ),
    Mutant(
        "nested-sets-overlap",
        "InducingPoints.forward",
        "below = side_by_side(rows[b][:-1])",
        "below = 0.0 * side_by_side(rows[b][:-1])",
        ("test_process.py::TestSparsePosterior::test_nested_sets_are_paper_1s_blocks",),
    ),
    Mutant(
        "noise-absorbed-twice",
        "KernelFeatures.gram",
        "precision, linear = precision * shrunk, linear * shrunk",
        "precision, linear = precision * shrunk, linear",
        ("test_deep_basis.py::test_exact_evidence_and_predictions_are_dense_algebra",),
    ),
    Mutant(
        "columns-not-scaled-up",
        "DecoupledFeatures.estimate",
        "return size / num * drawn - self.pull.square().sum(-1)",
        "return drawn - self.pull.square().sum(-1)",
        ("test_orthogonal.py::test_sampled_columns_are_unbiased_in_value_and_gradient",),
    ),
    # The posterior.
    Mutant(
        "prior-mean-forgotten",
        "SparsePosterior._by_rows",
        "return self.process.mean_at(x) + torch.cat(means, -1), torch.cat(variances, -1)",
        "return torch.cat(means, -1), torch.cat(variances, -1)",
        ("test_process.py::TestSparsePosterior::test_moments_in_chunks",),
    ),
    Mutant(
        "wrong-residual",
        "SparsePosterior.residual_tril",
        "prior = prior - block @ block.mT",
        "prior = prior - 0.5 * (block @ block.mT)",
        ("test_process.py::TestSparsePosterior::test_marginals_are_those_of_the_joint",),
    ),
    Mutant(
        "residual-drawn-twice",
        "_Sequential._extend",
        "rest = cholesky(new - white.mT @ white, posterior.process.jitter, what, self.scale)",
        "rest = cholesky(new, posterior.process.jitter, what, self.scale)",
        ("test_process.py::TestPaths::test_exact_conditioning_where_there_are_no_features",),
    ),
    Mutant(
        "paths-keep-their-own-coefficients",
        "sample_paths",
        "update = [a - b for a, b in zip(w, own)]",
        "update = [a + 0.0 * b for a, b in zip(w, own)]",
        ("test_process.py::TestPaths::test_moments",),
    ),
    Mutant(
        "expand-forgets-the-sites",
        "SparsePosterior.at",
        "return SparsePosterior(process, self.basis, self.coefficients, self.name, self.sites)",
        "return SparsePosterior(process, self.basis, self.coefficients, self.name)",
        ("test_computation_aware.py::test_other_inputs_keep_the_sites",),
    ),
    Mutant(
        "conditional-mean",
        "GaussianProcess.given",
        "return self.mean_at(inputs) + (phi.mT @ white)[..., 0]",
        "return (phi.mT @ white)[..., 0]",
        ("test_process.py::TestGaussianProcess::test_given_is_the_conditional_normal",),
    ),
    # Approximations on sites, and reading them.
    Mutant(
        "site-not-kept",
        "SiteReading.keep",
        "kept.keep(self.sites, self.truncated)",
        "kept.keep(self.sites, self.truncated) if kept.empty else None",
        ("test_sites.py::test_prediction_uses_the_sites_of_the_final_parameters",),
    ),
    Mutant(
        "sites-forget-the-mean",
        "update",
        "linear = torch.where(gone, 0.0, pull + change + precision * away)",
        "linear = torch.where(gone, 0.0, pull + change + precision * centre)",
        ("test_sites.py::test_a_prior_mean_is_a_shift_of_the_likelihood",),
    ),
    Mutant(
        "detached-prior-variance",
        "SparsePosterior.variance",
        "prior = self.process.kernel.diag(self.process.x) if known is None else known",
        "prior = self.process.kernel.diag(self.process.x).detach() if known is None else known",
        ("test_sites.py::test_sgpr_gradients_are_the_dense_bounds",),
    ),
    Mutant(
        "negative-curvature-counts",
        "_update.proposed",
        "curvature = (-found.second).clamp(min=0)",
        "curvature = found.second.abs()",
        ("test_sites.py::test_cut_sites_reach_their_fixed_point",),
    ),
    Mutant(
        "second-block-sees-all",
        "SemiCollapsedGP.under",
        "linear = sites.linear - sites.precision * others.mean(phi[1:])",
        "linear = sites.linear",
        ("test_orthogonal.py::test_semi_collapsed_bound_is_equation_9_or_10",),
    ),
    Mutant(
        "outputs-never-meet",
        "explore",
        "if found.dependence[name] == DATAWISE:",
        "if False:",
        ("test_meeting.py",),
    ),
    Mutant(
        "updates-may-lower-the-bound",
        "_update",
        "if value >= (0.9 * bound if lost else bound - slack) or not math.isfinite(bound):",
        "if True:",
        ("test_meeting.py",),
    ),
    Mutant(
        "features-anew-for-each-update",
        "SiteReading.posterior",
        "if self.answer is None:",
        "if True:",
        ("test_sites.py::test_features_are_made_once_for_all_updates",),
    ),
    Mutant(
        "features-stay-after-a-reading",
        "SiteReading.release",
        "self.answer = self.last = self.expected = None",
        "self.last = self.expected = None",
        ("test_sites.py::test_features_of_a_reading_go_with_it",),
    ),
    Mutant(
        "expectation-of-other-marginals",
        "_expect_at",
        "if how == at_mean and all(where.get(name) is marginal for name, marginal in marginals.items()):",
        "if how == at_mean and where[reading.name] is marginals[reading.name]:",
        ("test_sites.py::test_updates_within_a_step_are_those_of_as_many_steps",),
    ),
    Mutant(
        "permutation-not-followed",
        "KeptSites.reorder",
        "self.precision, self.linear = self.precision[..., order], self.linear[..., order]",
        "self.precision, self.linear = self.precision, self.linear[..., order]",
        ("test_data.py::test_rows_in_another_order_are_followed",),
    ),
    # Running the model.
    Mutant(
        "masked-rows-count",
        "log_densities",
        'name: torch.as_tensor(scale_and_mask(site["fn"].log_prob(site["value"]), site["scale"], site["mask"]))',
        'name: torch.as_tensor(scale_and_mask(site["fn"].log_prob(site["value"]), site["scale"], None))',
        ("test_sites.py::test_masked_rows_are_dropped_rows",),
    ),
    Mutant(
        "scale-ignored-by-the-reader",
        "log_densities",
        'name: torch.as_tensor(scale_and_mask(site["fn"].log_prob(site["value"]), site["scale"], site["mask"]))',
        'name: torch.as_tensor(scale_and_mask(site["fn"].log_prob(site["value"]), 1.0, site["mask"]))',
        ("test_conditioned.py::test_handlers_around_are_seen_as_the_objective_sees_them",),
    ),
    Mutant(
        "masked-nan-has-a-gradient",
        "_filled",
        "return torch.where(missing, filler.nan_to_num(), rows)",
        "return rows",
        ("test_quadrature.py::TestMissing::test_masked_nan_is_left_out_of_value_and_gradient",),
    ),
    Mutant(
        "one-warning-silences-all",
        "warn_once",
        "if (kind, site) not in warned:",
        "if not warned:",
        ("test_deep_basis.py::test_one_warning_does_not_silence_another_of_the_same_site",),
    ),
    Mutant(
        "warning-swallowed",
        "warn_once",
        "warnings.warn(message, category, stacklevel=stacklevel + 1)",
        "pass",
        ("test_guide.py::TestRefusals::test_a_mini_batch_without_size_warns_once", "test_data.py"),
    ),
    Mutant(
        "draws-at-the-median",
        "AutoSparseGP.draws",
        "conditions = conditions_now(self, False, known)",
        "conditions = conditions_now(self, True, known)",
        ("test_conditioned.py::test_every_way_to_ask_conditions_on_the_draw",),
    ),
    # Objectives.
    Mutant(
        "scale-ignored",
        "weighted_sum",
        'return scale_and_mask(value, site["scale"], site["mask"]).sum()',
        'return scale_and_mask(value, 1.0, site["mask"]).sum()',
        ("test_theorems.py::test_mini_batches_by_quadrature_are_unbiased",),
    ),
    Mutant(
        "nodes-by-the-variance",
        "RowSite.value_of",
        "value = value + root * site.noise",
        "value = value + root.square() * site.noise",
        ("test_quadrature.py::test_quadrature_against_a_fine_grid",),
    ),
    # Sites with one posterior.
    Mutant(
        "divergence-of-each-site",
        "Whole.share",
        "first, self._counted = not self._counted, True",
        "first, self._counted = True, True",
        ("test_joint.py::test_two_functions_that_are_added_have_the_dense_posterior",),
    ),
    Mutant(
        "rows-apart",
        "RowSite.roots",
        "covariance = covariance - mine * its",
        "covariance = covariance + mine * its",
        ("test_joint.py::test_three_sites_are_drawn_row_by_row",),
    ),
    Mutant(
        "never-crossed",
        "_combined",
        "crossed.append([f, g])",
        "crossed = []",
        ("test_joint.py::test_sites_that_meet_across_rows_have_the_bound_of_joint_draws",),
    ),
    Mutant(
        "a-product-is-a-sum",
        "_summed",
        "both = [(part[k], part[k + 1]) for part in parts for k in (4 * i, 4 * i + 2)]",
        "both = [(part[k], part[k + 1]) for part in parts for k in (4 * i,)]",
        ("test_joint.py::test_separate_posteriors_of_a_sum_are_told_of",),
    ),
    Mutant(
        "own-variance",
        "Coregionalisation.features",
        "alone = rows * self.own.to(x)[..., None, :]",
        "alone = rows * self.own.to(x).sqrt()[..., None, :]",
        ("test_outputs.py::test_the_kernel_is_the_dense_model",),
    ),
    Mutant(
        "meeting-sites-share-an-axis",
        "quadrature_axes",
        "taken = {axis for other in meets[name] if other in axes for axis in axes[other]}",
        "taken: set[int] = set()",
        ("test_quadrature.py::test_two_sites_use_the_product_grid", "test_quadrature.py::test_axes"),
    ),
    Mutant(
        "nan-reaches-the-parameters",
        "TraceQuadrature_ELBO._check_gradients",
        "broken = [name for name, grad in grads.items() if not grad.isfinite().all()]",
        "broken: list[str] = []",
        ("test_quadrature.py::test_a_nan_gradient_never_reaches_the_parameters",),
    ),
    # Expectation propagation.
    Mutant(
        "cavity-not-removed",
        "cavity_of",
        "shift = precision * (centre - linear * spread) / left - linear",
        "shift = 0.0 * (precision * centre / left - linear)",
        ("test_expectation.py::TestProbit::test_sites_and_log_z_are_the_closed_forms",),
    ),
    Mutant(
        "cavity-normaliser-sign",
        "cavity_of",
        "log_ratio=0.5 * (quadratic / left - left.log()),",
        "log_ratio=0.5 * (quadratic / left + left.log()),",
        ("test_expectation.py::TestProbit::test_sites_and_log_z_are_the_closed_forms",),
    ),
    Mutant(
        "power-forgotten",
        "Refinement.refine",
        "precision = beta / left / self.power",
        "precision = beta / left",
        ("test_expectation.py::TestGaussianLikelihood::test_power_ep_is_the_closed_form",),
    ),
    Mutant(
        "batch-not-scaled-up",
        "ExpectationPropagation._log_z",
        "return normaliser.sum(), run.scale * each.sum()",
        "return normaliser.sum(), each.sum()",
        ("test_expectation.py::TestMiniBatches::test_estimates_of_the_loss_average_to_it",),
    ),
    Mutant(
        "prior-of-moving-inputs",
        "prior_of",
        "value = turn.diagonal(dim1=-2, dim2=-1).log().sum(-1) - 0.5 * squares",
        "value = turn.diagonal(dim1=-2, dim2=-1).log().sum(-1) + 0.5 * squares",
        ("test_expectation.py::TestMiniBatches::test_gradients_of_mini_batches_average_to_that_of_all_data",),
    ),
    # Diagnostics.
    Mutant(
        "integrated-density-gain",
        "_closed",
        "change = 0.5 * (first.square() * d / gain - gain.log())",
        "change = 0.5 * (first.square() * d - gain.log())",
        ("test_diagnostics_tree.py::test_integrated_densities",),
    ),
    # Discrete latents, and forward mode.
    Mutant(
        "enumeration-forgets",
        "SummedOut.log_prob",
        "total = total - self._summed(self.before)",
        "pass",
        ("test_enumeration.py::test_sites_that_share_values",),
    ),
    Mutant(
        "enumeration-group-alone",
        "Enumeration._joined",
        "joined.terms += group.terms",
        "joined.terms = group.terms",
        ("test_enumeration.py::test_values_that_first_meet_in_the_data",),
    ),
    Mutant(
        "enumeration-shares",
        "SummedOut._shares",
        "share = total / self.sums.reduced(rows, self.shared).evaluate().clamp(min=1)",
        "share = total",
        ("test_group_classes.py::test_plates_within_each_other",),
    ),
    Mutant(
        "nearest-without-blocks",
        "nearest",
        "blocks = _within(precision - b @ b.mT, sizes)",
        "blocks = _within(precision, sizes)",
        ("test_absorb.py::test_a_lower_rank_is_brought_to_its_form",),
    ),
    Mutant(
        "forward-cholesky",
        "_Factor.jvp",
        "turn = inner.tril() - 0.5 * torch.diag_embed(inner.diagonal(dim1=-2, dim2=-1))",
        "turn = inner.tril()",
        ("test_forward_mode.py::test_fused_operations",),
    ),
    Mutant(
        "whitened-gradient",
        "_Whitened.backward",
        "by_turn = tril_of_product(grad, phi).sum_to_size(factor.shape).neg_()",
        "by_turn = tril_of_product(phi, grad).sum_to_size(factor.shape).neg_()",
        ("test_fused.py::test_whitening_is_that_of_the_factor",),
    ),
    Mutant(
        "blocks-of-a-symmetric-product",
        "gram",
        "whole[i:j, :j] = row = a[first:, i:j].mT @ b[first:, :j]",
        "whole[i:j, :j] = row = a[first:, i:j].mT @ a[first:, :j]",
        ("test_fused.py::test_products_by_blocks",),
    ),
    Mutant(
        "natural-gradient-by-the-mean",
        "_Known.backward",
        "total = total.addr(loc, along, alpha=0.5).addr(along - a, loc, alpha=0.5)",
        "total = total.addr(loc, along, alpha=0.5).addr(along, loc, alpha=0.5)",
        ("test_fused.py::test_what_natural_parameters_say",),
    ),
    # Rows that are absorbed, derivatives, BoTorch.
    Mutant(
        "forgets-half",
        "Absorbing",
        "self._sums = (1 - forget) * gram, (1 - forget) * pull",
        "self._sums = gram, (1 - forget) * pull",
        ("test_absorb.py::test_forgetting_scales_the_old_sums",),
    ),
    Mutant(
        "absorbs-a-guess",
        "NaturalGaussian.sums",
        "return (gram, pull) if self.steps_taken else (torch.zeros_like(gram), torch.zeros_like(pull))",
        "return gram, pull",
        ("test_absorb.py::test_pieces_make_the_posterior_of_all_rows",),
    ),
    Mutant(
        "slopes-lose-noise",
        "Derivative",
        "found = torch.where(values, self.kernel(x), 0.5 * (found + found.mT))",
        "found = 0.5 * (found + found.mT)",
        ("test_derivative.py::test_several_outputs_and_diagonal_terms",),
    ),
    Mutant(
        "nested-jvp-drops",
        "_nested",
        "with _set_fwd_grad_enabled(True):",
        "with _set_fwd_grad_enabled(False):",
        ("test_derivative.py::test_covariances_are_those_of_reverse_mode",),
    ),
    Mutant(
        "noise-is-shared",
        "Model.posterior",
        "covariance = covariance + noises[place].diag_embed()",
        "covariance = covariance + noises[place][..., None]",
        ("test_botorch.py::test_noise_and_its_absence",),
    ),
    Mutant(
        "batches-hold-kernels",
        "rows_of",
        "return Rows(same, inputs, steps and (same or (guide.takes_batches and not fewer)), relation)",
        "return Rows(same, inputs, steps and same, relation)",
        ("test_action_batches.py::test_batches_have_the_bound_of_all_rows_and_its_gradient",),
    ),
    Mutant(
        "batches-read-where-q-was",
        "condition",
        'module.sites.progress["marginals"] = None  # those of another step',
        "pass",
        ("test_action_batches.py::test_batches_of_classes_settle_the_sites_of_the_first_rows",),
    ),
]


def sources(package: Path) -> list[Path]:
    """The package's files."""
    return sorted(package.rglob("*.py"))


@functools.cache
def _lines(package: Path) -> dict[str, list[tuple[Path, int]]]:
    """Where each line of the package stands, without the space around it, before anything is planted."""
    found: dict[str, list[tuple[Path, int]]] = {}
    for path in sources(package):
        for number, line in enumerate(path.read_text().splitlines()):
            found.setdefault(line.strip(), []).append((path, number))
    return found


def find(mutant: Mutant, package: Path) -> tuple[Path, int]:
    """The file and the number, from 0, of the line that a fault stands in.

    :raises ValueError: if it is not found exactly once.
    """
    found = _lines(package).get(mutant.old, [])
    if len(found) != 1:
        places = ", ".join(f"{path.relative_to(package)}:{number + 1}" for path, number in found) or "nowhere"
        raise ValueError(
            f"mutant {mutant.name!r} ({mutant.where}) wants the line {mutant.old!r} exactly once; it is at {places}. "
            "Bring the list in tests/mutants.py up to date."
        )
    return found[0]


def plant(mutant: Mutant, package: Path) -> Path:
    """Put a fault into a copy of the package.

    :returns: the file that has it.
    """
    path, number = find(mutant, package)
    lines = path.read_text().splitlines(keepends=True)
    indent = lines[number][: len(lines[number]) - len(lines[number].lstrip())]
    lines[number] = f"{indent}{mutant.new}\n"
    text = "".join(lines)
    compile(text, str(path), "exec")
    path.write_text(text)
    return path


def node_ids(tests: Iterable[str], directory: Path) -> list[str]:
    """Tests as pytest's node ids, their files found in whatever folder.

    :raises ValueError: if there is no such file, or several.
    """
    found = []
    for test in tests:
        name, _, rest = test.partition("::")
        paths = sorted((directory / "tests").rglob(name))
        if len(paths) != 1:
            raise ValueError(f"tests/mutants.py names {test!r}: {len(paths)} files of that name")
        found.append(str(paths[0].relative_to(directory)) + (f"::{rest}" if rest else ""))
    return found


def _in_child(tests: list[str], directory: str, log: str) -> None:
    """Run pytest on the copy in this process, which has torch and Pyro already, and exit with its status."""
    os.chdir(directory)
    os.environ["PYTHONDONTWRITEBYTECODE"] = "1"
    sys.path[:] = [directory, *(path for path in sys.path if Path(path or ".").resolve() not in (ROOT, ROOT / "tests"))]
    sys.dont_write_bytecode = True
    stream = os.open(log, os.O_WRONLY | os.O_CREAT)
    os.dup2(stream, 1)
    os.dup2(stream, 2)
    import pytest
    import torch

    torch.set_num_threads(1)
    status = pytest.main(["-x", "-q", "-p", "no:cacheprovider", "--no-header", *tests])
    package = sys.modules.get(PACKAGE)
    if package is not None and not str(package.__file__).startswith(directory):
        status = 99  # another checkout's, by an editable install
    sys.stdout.flush()
    os._exit(int(status))


def run(tests: list[str], directory: Path) -> tuple[int | None, str, float]:
    """Exit status of pytest on the copy, ``None`` if it takes too long; the end of its output; seconds of wall time."""
    log, start = directory / "log.txt", time.monotonic()
    child = SERVER.Process(target=_in_child, args=(tests, str(directory.resolve()), str(log)))
    child.start()
    child.join(TIMEOUT)
    if child.is_alive():
        child.kill()
        child.join()
        return None, "", float(TIMEOUT)
    return child.exitcode, "\n".join(log.read_text().strip().splitlines()[-12:]), time.monotonic() - start


def copy(directory: Path) -> Path:
    """The package and its tests in a directory; the package there."""
    ignore = shutil.ignore_patterns("__pycache__", "*.md", "*.png")
    for name in (PACKAGE, "tests"):
        shutil.copytree(ROOT / name, directory / name, ignore=ignore)
    for name in ("conftest.py", "pyproject.toml"):
        shutil.copy(ROOT / name, directory / name)
    return directory / PACKAGE


def check(mutant: Mutant | None, tests: Iterable[str]) -> tuple[str, float, str]:
    """Plant a fault, or none, and run tests: what came of it, "caught", "survived" or an error; seconds; output."""
    with tempfile.TemporaryDirectory(prefix="mutant-") as place:
        directory = Path(place)
        package = copy(directory)
        if mutant is not None:
            plant(mutant, package)
        status, output, seconds = run(node_ids(tests, directory), directory)
    if status is None:
        return f"error: more than {TIMEOUT} seconds", seconds, output
    summary = output.splitlines()[-1] if output else ""
    # Nothing collected, no import, or no test that failed or passed: that tells nothing.
    if (status, True) not in ((0, "passed" in summary), (1, "failed" in summary)):
        return f"error: status {status}", seconds, output
    return ("caught" if status else "survived"), seconds, output


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", help="of mutants; all by default")
    parser.add_argument("--jobs", type=int, default=1, help="how many run at a time")
    parser.add_argument("--no-control", action="store_true", help="do not run the tests on the sound package first")
    arguments = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    SERVER.set_forkserver_preload(["pyro", "pyro.contrib.gp", "pytest"])
    known = {mutant.name: mutant for mutant in MUTANTS}
    unknown = [name for name in arguments.names if name not in known]
    if unknown:
        parser.error(f"no mutants {unknown}; there are {sorted(known)}")
    chosen = [known[name] for name in arguments.names] or MUTANTS
    for mutant in chosen:
        find(mutant, ROOT / PACKAGE)
        node_ids(mutant.tests, ROOT)
    if not arguments.no_control:
        tests = sorted({test for mutant in chosen for test in mutant.tests})
        result, seconds, output = check(None, tests)
        print(f"without a fault: {'pass' if result == 'survived' else result} ({seconds:.0f} s)", flush=True)
        if result != "survived":
            print(output)
            return 2  # a test that fails anyway tells nothing
    results: dict[str, str] = {}
    with ThreadPoolExecutor(max(1, arguments.jobs)) as pool:
        futures = {mutant.name: pool.submit(check, mutant, mutant.tests) for mutant in chosen}
        for name, future in futures.items():
            results[name], seconds, output = future.result()
            print(f"{results[name]:<10} {name} ({known[name].where}; {seconds:.0f} s)", flush=True)
            if results[name].startswith("error"):
                print(output)
    survived = [name for name, result in results.items() if result == "survived"]
    broken = [name for name, result in results.items() if result.startswith("error")]
    print(f"{len(chosen) - len(survived) - len(broken)} of {len(chosen)} caught", end="")
    print(f"; not seen: {', '.join(survived)}" if survived else "", end="")
    print(f"; errors: {', '.join(broken)}" if broken else "")
    return 1 if survived or broken else 0


if __name__ == "__main__":
    sys.exit(main())
