"""Whether a program is still the one that its guide met first: it is asked again, in the same way, at some steps."""

from typing import Any

import pyro
from pyro import poutine

from ..program.data import switches_of
from ..program.explore import explore
from ..program.handlers import held_runs
from ..program.structure import Structure
from ..program.traces import RandomState
from .calls import Call
from .known import KnownGuide
from .runs import Posteriors

_STEPS = {2**k for k in range(1, 40)}  # at which it is asked, whatever its arguments
_MOST = 16  # combinations of arguments that are no tensors, at which it is, beside


def watch(guide: KnownGuide, args: tuple, kwargs: dict[str, Any]) -> None:
    """At a step of training, or the first call after a state was loaded, raise where densities depend on GP sites as
    they did not at the guide's first call.

    A batch may show less than the first call did; more is what q does not know.
    """
    core, switches = guide.core, switches_of(guide.model, args, kwargs)
    is_new = switches not in core.met and len(core.met) < _MOST
    seen = _seen(guide, args, kwargs) if is_new or core.steps in _STEPS else None
    if seen is not None and (told := "; ".join(_changes(guide, seen))):
        given = ", ".join(f"{'.'.join(map(str, path))}={value!r}" for path, value in switches)
        raise ValueError(
            f"the model is not the one of the guide's first call, or saved state: {told}, which q does not know. Make a"
            f" new guide, and call it first with arguments that show all of the model{given and f', as {given} may'}."
        )
    # A prediction by a loaded state shows no data, as training does: test_a_latent_that_a_state_does_not_have.
    if seen is not None and (seen.data == guide.facts.data or not core.loaded):
        core.met.add(switches)
    core.steps += 1


def _seen(guide: KnownGuide, args: tuple, kwargs: dict[str, Any]) -> Structure:
    """The program at these arguments."""
    state = RandomState(guide.like)  # of the step, which takes the same rows
    with poutine.block(), pyro.validation_enabled(False):
        run = Posteriors(guide, call=Call(), at_medians=True).perform(args, kwargs)
        found, _ = explore(run, held_runs(guide.model, run.trace, args, kwargs))
    state.restore()
    return found


def _changes(guide: KnownGuide, seen: Structure) -> list[str]:
    """What the program shows beyond what is known, in words."""
    return guide.q.lacks(guide, seen)
