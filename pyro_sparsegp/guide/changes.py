"""Whether a program is still the one that its guide met first: it is asked again, in the same way, at some steps."""

from typing import Any

import pyro
from pyro import poutine

from ..program.data import switches_of
from ..program.explore import explore
from ..program.facts import COUPLED, DATAWISE, ELEMENTWISE, NONE, Structure
from ..program.handlers import held_runs
from ..program.traces import RandomState, bare, is_observation
from .known import KnownGuide
from .runs import Posteriors, Rows, Run

_STEPS = {2**k for k in range(1, 40)}  # at which it is asked, whatever its arguments
_MOST = 16  # combinations of arguments that are no tensors, at which it is, beside
_ORDER = (NONE, ELEMENTWISE, DATAWISE, COUPLED)


def watch(guide: KnownGuide, args: tuple, kwargs: dict[str, Any]) -> None:
    """At a step of training, or the first call after a state was loaded, raise where densities depend on GP sites as
    they did not at the guide's first call.

    A batch may show less than the first call did; more is what q does not know.
    """
    core, switches = guide.core, switches_of(guide.model, args, kwargs)
    is_new = switches not in core.met and len(core.met) < _MOST
    core.met |= {switches} if is_new else set()
    core.steps += 1
    if (is_new or core.steps - 1 in _STEPS) and (why := _changes(guide, args, kwargs)):
        given = ", ".join(f"{'.'.join(map(str, path))}={value!r}" for path, value in switches)
        raise ValueError(
            f"the model is not the one of the guide's first call, or saved state: {why}, which q does not know. Make a "
            f"new guide, and call it first with arguments that show all of the model{given and f', as {given} may'}."
        )


def kinds_of(run: Run) -> dict[str, str]:
    """The names of the distributions of a run's data, by site."""
    return {name: type(bare(site["fn"])).__name__ for name, site in run.sites.items() if is_observation(site)}


def _changes(guide: KnownGuide, args: tuple, kwargs: dict[str, Any]) -> str:
    """What the program shows at these arguments beyond what is known, in words."""
    facts, found = guide.facts, Structure(gps=guide.facts.gps, num_nodes=guide.facts.num_nodes)
    state = RandomState(guide.like)  # of the step, which takes the same rows
    with poutine.block(), pyro.validation_enabled(False):
        run = Posteriors(guide, rows=Rows(same=False), at_medians=True).perform(args, kwargs)
        explore(found, held_runs(guide.model, run.trace, args, kwargs), run.processes)
    state.restore()
    for name, kind in found.dependence.items():
        if _ORDER.index(kind) > _ORDER.index(facts.dependence.get(name, NONE)):
            what = {COUPLED: "values at several inputs of", DATAWISE: "several outputs of"}.get(kind, "values of")
            return f"a density depends on {what} GP site {name!r}"
    for pair in found.interactions:
        if pair not in facts.interactions:
            return f"GP sites {pair[0]!r} and {pair[1]!r} meet in a density"
    if more := [name for name in found.inner if name not in facts.inner]:
        return f"values of GP site {more[0]!r} enter another GP site"
    known, kinds = guide.core.kinds, kinds_of(run)
    for name in known.keys() & kinds.keys() if facts.field else ():
        if kinds[name] != known[name]:
            return f"site {name!r} has a {kinds[name]}, and had a {known[name]}"
    return ""
