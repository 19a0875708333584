"""Natural steps that bring q to the data before a step: where it has met none, or what moved has left it behind."""

import math
from collections.abc import Callable, Iterable
from itertools import chain, islice
from typing import Optional

from torch import Tensor

from ..gaussians.natural import NaturalGaussian
from ..gaussians.steps import Natural, Record, steppers
from ..guide import AutoSparseGP
from ..numerics.processes import is_shared, joined

_PASSES = 5  # at most
_STANDS = 1e-3  # of all that they have gained: where the last one changes less, they are there
_LOST = 0.1  # of a loss, or a nat a datum, by which a step may raise it

Evaluated = tuple[Tensor, float, Record]


def warm_up(
    guide: AutoSparseGP, evaluate: Callable[[], Evaluated], first: Callable[[], Evaluated], worth: int
) -> tuple[Evaluated, bool]:
    """An evaluation once posteriors that have taken no step were brought to the data by natural steps, and whether
    there were data. A guide with a posterior that learns by gradients is left alone.

    :param first: an evaluation on the rows to be met, the guide's first call's, ``worth`` so many of the step's.
    """
    # Under a q that has met no data, gradients of hyperparameters are hundreds of times those later, which Adam's
    # second moments would remember for hundreds of steps. These passes do not count as steps: where the first that
    # does has a rate of 1, as by default, q forgets all of them but where they led. Under a Gaussian likelihood one
    # leads to the optimum for these data, where the bound stands still, and they end. A batch of which a mask
    # leaves all out has nothing to be met: a later one is.
    modules = steppers(guide)
    natural = all(module.family.get("natural") for module in guide.modules_by_site().values())
    if not natural or any(module.steps for module in modules):
        return evaluate(), True
    found, met = _passed(guide, iter(first, None), Natural)
    for module in modules:
        module.steps = worth if worth > 1 else 0
    return found if found and first is evaluate else evaluate(), met


def _passed(
    guide: AutoSparseGP, evaluations: Iterable[Evaluated], kind: type, most: float = -math.inf
) -> tuple[Optional[Evaluated], bool]:
    """Up to five natural steps, until the loss stands still or is none above ``most``: the last evaluation, if no step
    has followed it, and whether any step had data.
    """
    losses: list[float] = []
    met = False
    for found in islice(evaluations, _PASSES):
        loss, value, record = found
        losses.append(float(joined(loss.detach())[0]))  # the same in all processes
        stands = len(losses) > 1 and abs(losses[-2] - losses[-1]) < _STANDS * abs(losses[0] - losses[-1])
        if stands or value <= most or not loss.requires_grad:  # which it has not if a mask leaves all out
            return found, met
        record.differentiate(loss)
        if not bool(joined(record.largest)[0] != 0):  # of any process; NaN is a pull
            break
        met = True
        record.step(guide.row_share, kind)
    return None, met


def is_whole(guide: AutoSparseGP) -> bool:
    """Whether the guide's last step was on all rows, in one process."""
    return guide.row_share > 0.999 and not is_shared()


def largest_loss(guide: AutoSparseGP, before: float) -> float:
    """The largest loss of a step on all rows after one of this loss that has not lost more than a nat a datum."""
    return before + max(sum(guide.core.sizes.values()), _LOST * abs(before))


def warm_up_again(guide: AutoSparseGP, evaluate: Callable[[], Evaluated], found: Evaluated, most: float) -> Evaluated:
    """An evaluation on all rows once natural steps have brought q to these anew, since one ``found`` there lost more
    than the ``most`` that a step may.
    """
    # Optimisers move inducing inputs and kernels under a q that was right for those of before. Under little noise that
    # loses orders, and the gradients there would train the kernel to make up for q.
    modules = {module: module.steps for module in steppers(guide) if isinstance(module, NaturalGaussian)}
    if not modules:
        return found
    for module in modules:
        module.steps = 0  # a rate of 1, by default
    last, _ = _passed(guide, chain([found], iter(evaluate, None)), NaturalGaussian, most)
    for module, steps in modules.items():
        module.steps = steps
    return last or evaluate()
