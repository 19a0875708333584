"""Where a fit starts: what the collapsed bound makes of a subset of rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, Optional

import pyro
import torch
from pyro import poutine
from torch import Tensor

from ..approximations.free import SparseGP
from ..bases import InducingPoints
from ..families import SGPR, InducingFamily
from ..gaussians.optimal import from_natural, weighted_gram
from ..guide import AutoSparseGP
from ..modules import at_path, drop_stored
from ..numerics.linalg import side_by_side
from ..process import GaussianProcess
from ..program.traces import all_sites, require_again
from .batches import Batch
from .quadrature import TraceQuadrature_ELBO
from .recipe import FallingAdam

__all__ = ["pays", "warm"]

_ROWS = 2048  # of the subset
_POINTS = 128  # inducing inputs that are trained on it
_STEPS = 100
_RATE = 0.1
_TELLING = 16  # rows that are looked at before the others
_ROWS_A_NUMBER = 10  # that a hyperparameter should have
_TIMES = 4  # that a step of the fit should cost one of these


def pays(guide: AutoSparseGP, rows: int, total: int) -> bool:
    """Whether a step of the fit on so many rows, N M², is much dearer than one on the subset.

    Natural steps on mini-batches mostly find hyperparameters in as many steps as the collapsed bound of a subset does:
    where steps cost the same, a warm start is mostly time lost (tests/benchmarks/arrive.md).

    :param rows: of a step.
    :param total: of those of which there is a subset.
    """
    name = _site(guide)
    if name is None:
        return False
    num = sum(at_path(guide.gps, name).basis.sizes)
    return rows * num**2 >= _TIMES * min(total, _ROWS) * min(num, _POINTS) ** 2


def warm(model: Callable, guide: AutoSparseGP, batch: Batch, takes: Mapping[str, Any], size: Optional[int]) -> bool:
    """Put a guide that has had its first call where the collapsed bound (Titsias, 2009) on a subset of rows leads.

    100 steps of Adam on the bound of :class:`SGPR`, on at most 2,048 rows and with other latents as points, move
    hyperparameters and inducing inputs; q(w) then starts at the optimum for all rows of ``batch``, each of which stands
    for as many as there are in all: P = I + (N/n) ΦᵀΛΦ, m = P⁻¹ (N/n) Φᵀλ(z − μ). It applies to one GP site of one
    output, whose family has inducing points and a free posterior, under a likelihood that is Gaussian in f; never to
    models with a network, or with more numbers than a tenth of the subset's rows, which these would overfit.

    :param batch: random rows, as they were given at the guide's first call.
    :param takes: the names of the model's parameters: it is given ``size`` if it has one.
    :param size: N; as many as the batch has, if not given.
    :returns: whether it applied.
    """
    name = _site(guide)
    if name is None or "indices" in takes:
        return False
    subset = _rows(batch, _ROWS)
    family: Any = guide.family_of(name)
    module = at_path(guide.gps, name)
    given = torch.cat([z.detach() for z in module.basis.inputs])
    few = len(given) > _POINTS  # of many inducing inputs, some are enough to find hyperparameters
    z = given[torch.randperm(len(given))[:_POINTS]] if few else given
    optimal = SGPR(z, trainable=family.trainable)
    new_guide = partial(AutoSparseGP, model, optimal, point_estimates=True, init_loc_fn=guide.init_loc_fn)
    with poutine.block():
        collapsed = _collapsed(new_guide, guide, name, subset, takes)
        if collapsed is None:
            return False
        args, kwargs = _call(subset, takes)
        if not _train(model, collapsed, args, kwargs):
            drop_stored(collapsed._pyro_name)
            return False
        with torch.no_grad():
            if collapsed.structure is not None and collapsed.structure.latents:
                for latent, value in collapsed.locs.named_parameters():
                    guide.start_at(latent.removesuffix("_unconstrained"), value)
            args, kwargs = _call(batch, takes)
            process = guide.priors(args, kwargs)[0][name]
            if few:
                inputs = family.new_basis(process, name).inputs
            else:
                inputs = at_path(collapsed.gps, name).basis.inputs[0].split(module.basis.sizes)
            if family.trainable:
                for i, own in enumerate(inputs):
                    module.basis.place(i, own)
        _start_posterior(collapsed, module, process, name, (args, kwargs), (size or batch.num) / batch.num)
    drop_stored(collapsed._pyro_name)
    return True


def _collapsed(
    new_guide: Callable[[], AutoSparseGP], guide: AutoSparseGP, name: str, subset: Batch, takes: Mapping[str, Any]
) -> Optional[AutoSparseGP]:
    """A guide that has had its first call on the subset; ``None`` where that is not data of its own to the model, or
    the likelihood not Gaussian in f, which a few rows tell of most: sites for all take long.
    """
    few = _rows(subset, _TELLING)

    def on(rows: Batch) -> Optional[AutoSparseGP]:
        collapsed = new_guide()
        return collapsed if _is_gaussian(collapsed, name, rows, takes) else None

    if few is not subset:
        try:
            if on(few) is None:
                return None
        except Exception as error:  # a model with a tensor or a plate of N rows runs on no fewer
            require_again(error, partial(on, few), guide.like)
    if not _fits(guide, subset, takes):
        return None
    try:
        return on(subset)
    except ValueError as error:  # a likelihood that the family refuses, such as one that ties rows together
        require_again(error, partial(on, subset), guide.like)
        return None


def _is_gaussian(collapsed: AutoSparseGP, name: str, rows: Batch, takes: Mapping[str, Any]) -> bool:
    """Whether the likelihood is Gaussian in f at some rows, by a guide's first call on them."""
    args, kwargs = _call(rows, takes)
    try:
        with torch.no_grad():
            collapsed(*args, **kwargs)
        return collapsed.site_status[name]["exact"]
    finally:
        drop_stored(collapsed._pyro_name)


def _train(model: Callable, collapsed: AutoSparseGP, args: tuple, kwargs: dict[str, Any]) -> bool:
    """Train; whether the bound rose. If it did not, the model's parameters are what they were."""
    before = {name: value.detach().clone() for name, value in pyro.get_param_store().named_parameters()}
    optim = FallingAdam(_RATE)
    svi = pyro.infer.SVI(model, collapsed, optim, TraceQuadrature_ELBO(2))
    first = svi.evaluate_loss(*args, **kwargs)
    for step in range(_STEPS):
        optim.at(step, _STEPS)
        svi.step(*args, **kwargs)
    if svi.evaluate_loss(*args, **kwargs) < first:
        return True
    with torch.no_grad():
        for name, value in pyro.get_param_store().named_parameters():
            if name in before:
                value.copy_(before[name])
    return False


def _start_posterior(
    collapsed: AutoSparseGP, module: SparseGP, process: GaussianProcess, name: str, call: tuple, each: float
) -> None:
    """Start q(w) at the optimum for these rows' sites, each of which stands for so many."""
    collapsed.forget_data()
    collapsed(*call[0], **call[1])  # with gradients, so that it is about these rows
    sites = at_path(collapsed.gps, name).sites
    with torch.no_grad():
        features = module.basis(process.kernel, process.jitter, name)
        blocks = [phi.double() for phi in features(process.x)]
        precision, linear = each * sites.precision.double(), each * sites.linear.double()
        phi = side_by_side(blocks)
        pull = (phi.mT @ linear[..., None])[..., 0]
        q = from_natural(weighted_gram(phi, precision), pull, module.basis.sizes, None, name)
        module.coefficients.start(features.anchor, [precision.sqrt()[..., None] * block for block in blocks])
        module.coefficients.start_mean(features.anchor, side_by_side(q.loc).to(process.x))


def _site(guide: AutoSparseGP) -> Optional[str]:
    """The one GP site of a model without a network, if its family has inducing points and a free posterior."""
    structure = guide.structure
    if structure is None or len(structure.gps) != 1 or structure.inner or structure.network:
        return None
    (name,) = structure.gps
    family = guide.family_of(name)
    module = at_path(guide.gps, name)
    basis = getattr(module, "basis", None)
    if not isinstance(family, InducingFamily) or type(basis) is not InducingPoints or module.batch_shape:
        return None
    if any(basis.of_source) or not all(isinstance(z, Tensor) for z in basis.inputs):
        return None
    return None if any(latent["plates"] for latent in structure.latents.values()) else name


def _fits(guide: AutoSparseGP, subset: Batch, takes: Mapping[str, Any]) -> bool:
    """Whether a subset of rows is data of their own to the model, and has rows enough for its hyperparameters."""
    assert guide.structure is not None
    args, kwargs = _call(subset, takes)

    def run() -> poutine.Trace:
        with torch.no_grad(), poutine.block(), poutine.trace(param_only=True) as capture:
            guide(*args, **kwargs)
        return capture.trace

    try:
        trace = run()
    except Exception as error:  # a model with a tensor or a plate of N rows runs on no fewer
        require_again(error, run, guide.like)
        return False
    own = f"{guide._pyro_name}."
    registered = {n: s["value"] for n, s in all_sites(trace) if not n.startswith(own)}
    numbers = sum(value.numel() for value in registered.values())
    numbers += sum(value.numel() for _, value in guide.named_parameters() if _.startswith("locs."))
    sites = [guide.trace.nodes[name] for name in guide.structure.rows if name in guide.trace.nodes]
    whole = all(f.full_size == f.size for site in sites for f in site["cond_indep_stack"])
    return whole and bool(sites) and subset.num >= _ROWS_A_NUMBER * numbers


def _rows(batch: Batch, num: int) -> Batch:
    """Some of a batch's rows."""
    if batch.num <= num:
        return batch
    index = torch.randperm(batch.num)[:num]

    def of(value: Any) -> Any:
        has = isinstance(value, Tensor) and value.dim() and len(value) == batch.num
        return value[index.to(value.device)] if has else value

    return Batch(tuple(map(of, batch.args)), {key: of(value) for key, value in batch.kwargs.items()}, None, num)


def _call(batch: Batch, takes: Mapping[str, Any]) -> tuple[tuple, dict[str, Any]]:
    return batch.args, {**batch.kwargs, **({"size": batch.num} if "size" in takes else {})}
