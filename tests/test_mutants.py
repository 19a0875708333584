"""The list of faults in mutants.py is up to date: each is a line of the package, and names tests that there are."""

import ast
import functools

import pytest

from .mutants import MUTANTS, PACKAGE, ROOT, Mutant, find, node_ids, planted


@functools.cache
def parsed(name):
    return ast.parse((ROOT / name).read_text())


@pytest.mark.parametrize("mutant", MUTANTS, ids=lambda mutant: mutant.name)
def test_a_mutant_applies(mutant):
    assert planted(mutant, ROOT / PACKAGE) != find(mutant, ROOT / PACKAGE)[0].read_text()
    for test, node in zip(mutant.tests, node_ids(mutant.tests, ROOT)):
        body = parsed(node.partition("::")[0]).body
        for name in test.split("::")[1:]:
            (found,) = (part for part in body if getattr(part, "name", None) == name)
            body = found.body


def test_mutants_are_many_and_of_different_names():
    assert len(MUTANTS) >= 60
    assert len({mutant.name for mutant in MUTANTS}) == len(MUTANTS)


def test_a_line_that_is_not_there_is_an_error():
    with pytest.raises(ValueError, match=r"mutant 'absent' .* exactly once; it is at nowhere"):
        find(Mutant("absent", (), "a line that no file has", "another"), ROOT / PACKAGE)
