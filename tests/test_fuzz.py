"""Random configurations have no silent fault and no raw exception: see :mod:`tests.fuzz`."""

import pytest

from .fuzz import CLEAN, ERROR, EXPLOSION, LATER, RAW, SILENT, Configuration, judge, run

# A family of each kind at least once, most likelihoods, kernels and latents, and none that is slow.
QUICK = (8, 13, 14, 16, 51, 67, 85, 89, 90, 94, 103, 105, 106, 107, 135, 153, 157, 358, 486)


def require_sound(indices):
    bad = [str(result) for result in map(run, indices) if result.outcome in (SILENT, RAW)]
    assert not bad, f"{len(bad)} of {len(indices)}:\n" + "\n".join(bad)


def test_quick_sweep():
    assert len({Configuration.draw(index).family.name for index in QUICK}) == 15
    require_sound(QUICK)


@pytest.mark.slow  # the test above draws a family of each kind
def test_sweep():
    require_sound(range(500))


@pytest.mark.slow
def test_later_sweep():
    """Posteriors of several sites, absorbed rows, indicators, actions on some rows, outputs by rows."""
    require_sound(range(LATER, LATER + 150))


def test_a_configuration_depends_on_its_index_alone():
    assert repr(Configuration.draw(7)) == repr(Configuration.draw(7)) != repr(Configuration.draw(8))
    assert run(3).outcome in (CLEAN, ERROR, EXPLOSION, SILENT, RAW)


def test_outcomes_of_exceptions():
    from pyro_sparsegp import families

    def outcome(function):
        try:
            function()
        except Exception as error:
            return judge("here", error).outcome

    assert outcome(lambda: families.SVGP(4, start="nowhere")) == ERROR  # the package's own, naming the argument
    assert outcome(lambda: [][0]) == RAW
    assert outcome(lambda: families.SVGP(4).missing) == RAW
