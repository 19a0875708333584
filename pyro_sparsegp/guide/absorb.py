"""Rows that arrive after training: their sites are added to a guide's posteriors, without the rows seen before."""

import warnings
from collections.abc import Callable
from itertools import pairwise
from typing import Any

import torch
from pyro import poutine
from torch import Tensor

from ..approximations.free import SparseGP
from ..approximations.on_sites import BySites
from ..gaussians import NaturalGaussian
from ..gaussians.product import Continued, sums_of
from ..gaussians.sites import KeptSites, Sites
from ..numerics.linalg import side_by_side
from ..posterior.sparse_posterior import SparsePosterior
from ..process import GaussianProcess
from ..program.checks import holds_part
from ..program.explore import explore
from ..program.handlers import held_runs
from ..program.reader import Reader
from ..program.rules import require_sites
from ..program.traces import all_sites, is_observation, repeatable, whole_plates
from .known import KnownGuide
from .posteriors.on_sites import require_separate_sites
from .readings import Readings, SiteReading
from .runs import Priors

_MOST = 200  # updates of sites
_TOLERANCE = {torch.float64: 1e-7, torch.float32: 1e-3}  # standard deviations of a marginal that an update may move
_TOGETHER = "Train on old and new rows together"


class _Sums(BySites):
    """q(w) ∝ N(w; 0, I) exp(r₀ᵀw − ½wᵀG₀w) Πₙ N(zₙ | μₙ + φₙᵀw, 1/λₙ): what rows seen before left, and new sites.

    (Bui, Nguyen and Turner, 2017.) Neither the old rows nor their sites are needed.
    """

    rate = 0.7  # of updates, as SiteGP has it

    def __init__(self, run: Priors, name: str, forget: float) -> None:
        guide, process = run.guide, run.processes[name]
        module: SparseGP = guide.module_of(name)
        self.sites = KeptSites(process.x, process.batch_shape)
        self.features = module.features_for(process, name)
        self.phi = self.features(process.x)
        self.coefficients, self.anchor = guide.kind.sums_of(run, name, self.features)
        gram, pull = self.coefficients.sums(self.anchor)
        self._sums = (1 - forget) * gram, (1 - forget) * pull

    def plus(self, sites: Sites) -> tuple[Tensor, Tensor]:
        """G₀ + ΦᵀΛΦ and r₀ + Φᵀλ(z − μ)."""
        gram, pull = sums_of(side_by_side(self.phi), sites.precision, sites.linear)
        return self._sums[0] + gram, self._sums[1] + pull

    def by_sites(self, process: GaussianProcess, name: str) -> Callable[[Sites], SparsePosterior]:
        """The posterior under new sites."""

        def answer(sites: Sites) -> SparsePosterior:
            q = Continued(self.coefficients.of(*self.plus(sites)), *self._sums)
            return SparsePosterior(process, self.features, q, name, sites, self.phi)

        return answer


def absorb(guide: KnownGuide, args: tuple, kwargs: dict[str, Any], forget: float) -> None:
    """As :meth:`AutoSparseGP.absorb`, of a guide that has been called."""
    if not (isinstance(forget, (int, float)) and 0 <= forget <= 1):
        raise ValueError(f"absorb's forget is a share of what was learned, in [0, 1], got {forget!r}")
    _require_sums(guide)
    with torch.inference_mode(False), torch.no_grad(), repeatable(guide.like), poutine.block(), whole_plates():
        # μ and φ at the new rows; no posterior is asked for.
        run = Priors(guide, at_medians=True).perform(args, kwargs)
        trace = run.trace
        if not any(is_observation(site) for _, site in all_sites(trace)):
            raise ValueError("absorb is given no observations: give it the new data, guide.absorb(x, y).")
        if part := holds_part(trace):
            raise ValueError(f"absorb counts each row once, and {part}: give the plate their number, size=len(x).")
        require_sites(run.sites)
        # How the densities of the new rows depend on GP sites' values.
        held = held_runs(guide.model, trace, args, kwargs)
        found, _ = explore(run, held)
        reader = Reader(held, found, guide.core.num_nodes)
        for name in run.processes:
            require_separate_sites(found, name, "rows to absorb, of which absorb", trace, _TOGETHER)
        # Sites of new rows under q of all rows, which they move: as those of SiteGP, with the old sums for a prior.
        readings = [SiteReading(n, process, _Sums(run, n, forget), reader) for n, process in run.processes.items()]
        Readings(reader, readings, {}).settle(_MOST, _TOLERANCE[guide.like.dtype])
        bad = [r.name for r in readings if not all(part.isfinite().all() for part in r.module.plus(r.sites))]
        if bad:
            raise ValueError(
                f"GP site {bad[0]!r}: derivatives of the new rows' densities are not finite. No row was absorbed. Look "
                "for NaN or infinite values, or data outside of the likelihood's support."
            )
        for reading in readings:
            sums: _Sums = reading.module
            sums.coefficients.put_sums(sums.anchor, *sums.plus(reading.sites))
            if reading.change > 1e-2:
                warnings.warn(
                    f"the sites of GP site {reading.name!r} did not converge: another update would move a marginal by "
                    f"{reading.change:.2g} standard deviations. Absorb fewer rows at a time.",
                    stacklevel=4,
                )


def settle(guide: KnownGuide) -> None:
    """Have sums of sites belong to the present inducing inputs: the way to these may need the present dtype."""
    data: Any = guide.core.data
    with torch.inference_mode(False), torch.no_grad(), repeatable(guide.like), poutine.block(), whole_plates():
        run = Priors(guide, at_medians=True).perform(data.args, data.kwargs)
        modules = {name: guide.module_of(name) for name in run.processes}
        free = {name: module for name, module in modules.items() if isinstance(module, SparseGP)}
        # of members of one posterior it is one module's
        found = dict(guide.kind.sums_of(run, n, m.features_for(run.processes[n], n)) for n, m in free.items())
        for coefficients, anchor in found.items():
            coefficients.settle(anchor)


def _require_sums(guide: KnownGuide) -> None:
    """Raise where what the guide learned is no sum over rows."""
    facts, field = guide.facts, guide.joint.field
    beside = [name for name in facts.latents if name in [*field, *facts.local_latents]]
    why = [f"latent site {name!r} has a value for each row, or one posterior with f" for name in beside]
    several = [name for name in field if name in facts.gps and facts.gps[name].outputs]
    why += [f"the functions of GP site {name!r} have one posterior" for name in several]
    why += [f"{name!r} and {other!r} have one posterior" for name, other in pairwise(field)]
    known = {name: (module, getattr(module, "coefficients", None)) for name, module in guide.modules_by_site().items()}
    others = {n: m for n, (m, q) in known.items() if not isinstance(q, NaturalGaussian) or vars(q).get("rank")}
    why += [f"GP site {name!r} has the family {module.family['name']}" for name, module in others.items()]
    if why:
        raise ValueError(
            f"absorb needs the sums over rows that natural steps keep for each GP site by itself, and {why[0]}. "
            f"{_TOGETHER}, under families on sites after guide.forget_data(); or take SVGP, OrthogonalInducing or "
            "CoupledCovariance with natural=True, and the guide's independent=True where several have one posterior."
        )
