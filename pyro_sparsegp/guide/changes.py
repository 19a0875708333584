"""Whether a program is still the one that its guide met first: it is asked again, in the same way, at some steps."""

from typing import Any

import pyro
import torch
from pyro import poutine

from ..program.data import switches_of
from ..program.explore import explore
from ..program.handlers import held_runs
from ..program.traces import RandomState
from .calls import Call
from .known import KnownGuide
from .runs import Posteriors
from .state import require_parameters

STEPS = {2**k for k in range(1, 40)}  # at which it is asked, whatever its arguments
_MOST = 16  # combinations of arguments that are no tensors, at which it is, beside


def watch(guide: KnownGuide, args: tuple, kwargs: dict[str, Any], is_due: bool) -> None:
    """Where it is due, or switches are new, raise if densities depend on GP sites as they did not at the first call: a
    batch may show less, and more is what q does not know. Where closed forms are lost, all are.
    """
    core, switches = guide.core, switches_of(guide.model, args, kwargs)
    if not is_due and (switches in core.met or len(core.met) >= _MOST):
        return
    state = RandomState(guide.like)  # of the step, which takes the same rows
    with poutine.block(), pyro.validation_enabled(False):
        inputs = torch.is_grad_enabled() or guide.relation(args, kwargs).inputs
        run = Posteriors(guide, call=Call(inputs=inputs), at_medians=True).perform(args, kwargs)
        seen, forms = explore(run, held_runs(guide.model, run.trace, args, kwargs))
    state.restore()
    if core.loaded:
        require_parameters(core.own)
    if told := "; ".join(guide.kind.lacks(guide, seen)):
        given = ", ".join(f"{'.'.join(map(str, path))}={value!r}" for path, value in switches)
        raise ValueError(
            f"the model is not that of the guide's first call, or saved state: {told}, which q does not know. Make a "
            f"new guide, and call it first with arguments that show all of the model{given and f', as {given} may'}."
        )
    # Densities that were normal around f at the first call may not stay so.
    core.facts = core.facts.bent(seen)
    # A prediction draws data, whose density has no expectation.
    if core.forms is not None and {*core.facts.data}.isdisjoint(seen.latents) and not core.forms.fit(forms):
        core.forms = core.forms.opened(core.facts)
    # A prediction by a loaded state shows no data, as training does: test_a_latent_that_a_state_does_not_have.
    if seen.data == guide.facts.data or not core.loaded:
        core.met.add(switches)
