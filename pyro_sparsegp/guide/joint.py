"""GP sites that have one posterior: what may be asked for, and the coefficients that they share."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Optional

import torch
from pyro import poutine
from pyro.infer.autoguide.utils import deep_setattr

from ..families import Family, FreeFormFamily, SiteFamily
from ..gaussians import Part, Shared, padded
from ..process import GaussianProcess
from ..program.dependence import COUPLED
from ..program.facts import Structure
from .known import KnownGuide, by_groups


def require_families(families: Any) -> None:
    """Raise if that is no family, nor a mapping from names, or groups of names, to families."""
    named, names = by_groups(families), list[str]()
    # test_guide.py::test_refusals; test_joint.py::test_families_that_can_not_be_shared
    for group, family in named.items():
        names += group
        if not isinstance(family, Family) or not all(isinstance(n, str) and names.count(n) == 1 for n in group):
            raise ValueError(
                "AutoSparseGP's families must be a family, such as SVGP(64) (of a class make an instance, SVGP(...)), "
                "or a mapping to families from GP site names, or tuples of names, whose sites have one posterior; each "
                f"name once. Got {', '.join(map(repr, group))}: {family!r}"
            )
        if len(group) > 1:
            _require_shareable(group, family, named.values())


def _require_shareable(group: tuple[str, ...], family: Family, others: Any) -> None:
    couples = isinstance(family, FreeFormFamily) and family.couples
    if not couples or any(isinstance(other, SiteFamily) for other in others):
        raise ValueError(
            f"GP sites {list(group)} can't have one posterior of {type(family).__name__}: it does not couple sites, or "
            "another family reads likelihoods as if all sites were independent, as SGPR does. Give two names or more "
            "CoupledPrecision, CoupledCovariance, SVGP or WeightSpace, whitened, and other sites free families, such "
            "as SVGP; or each site a family of its own."
        )


def require_joint(found: Structure, priors: Mapping[str, GaussianProcess]) -> None:
    """Raise if sites of one posterior have different outputs, or if one is an inner layer of a deep GP."""
    for group in found.joint:
        shapes = {name: tuple(priors[name].batch_shape) for name in group}
        # test_joint.py::test_sites_that_can_not_have_one_posterior
        if len({*shapes.values()}) > 1 or {*group}.intersection(found.inner):
            raise ValueError(
                f"GP sites {group}, of outputs {shapes}, can't have one posterior. Give each as many outputs, "
                "GaussianProcess(...).expand([P]).to_event(1); and layers of a deep GP, whose values enter another GP "
                "site, take a family each."
            )


def require_by_rows(found: Structure) -> None:
    """Raise where sites of one posterior, that is no field, meet in a density at different inputs or outputs: their
    draws and nodes have the covariance of one row's values, and would leave out others' in silence:
    test_joint.py::test_what_meets_across_rows_needs_a_linear_predictor.
    """
    across = {f for f, _ in found.crossed} | {name for name in found.gps if found.dependence[name] == COUPLED}
    for group in [] if found.field else found.joint:
        if across.intersection(group):
            raise ValueError(
                f"GP sites {group} have one posterior, and their values at different inputs, or outputs, meet in a "
                "density. That takes GP sites of one output, and a likelihood of linear predictors, such as a Normal "
                "around f + g[index] or a Poisson of its exp. Leave independent=True out, or give each "
                "site a family of its own."
            )


def join(guide: KnownGuide, found: Structure, priors: Optional[Mapping[str, GaussianProcess]] = None) -> None:
    """Have groups of GP sites have one posterior, in the place of each one's own.

    :param priors: of a first call, at which these posteriors start; ``None`` if a state is to be loaded.
    """
    for i, group in enumerate(found.joint):
        modules = {name: guide.module_of(name) for name in group}
        deep_setattr(guide, f"joints.group_{i}", _shared(guide.family_of(group[0]), modules, priors))


def _shared(family: Any, modules: Mapping[str, Any], priors: Optional[Mapping[str, GaussianProcess]]) -> Shared:
    """The coefficients of several sites' modules in a family's form, of which each module then has its part.

    :param priors: of a first call, at which they start: each site's as if it had data of its own.
    """
    first = next(iter(modules.values()))
    sizes = [size for module in modules.values() for size in module.basis.sizes]
    made = family.chosen_coefficients()(sizes, first.batch_shape, next(first.coefficients.parameters()))
    whole = Shared(made, {name: len(module.basis.sizes) for name, module in modules.items()})
    if priors is not None and family.start == "data":
        with torch.no_grad(), poutine.block():
            bases = {n: module.basis(priors[n].kernel, priors[n].jitter, n) for n, module in modules.items()}
            shown = {n: modules[n].shown(priors[n], basis) for n, basis in bases.items()}
            rows = zip(*[padded(parts, whole.blocks[n], sizes) for n, parts in shown.items()])
            made.start(None, [torch.cat(parts, -2) for parts in rows])
    for name, module in modules.items():
        module.join(Part(whole, name))
    return whole
