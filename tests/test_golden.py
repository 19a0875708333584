"""Goldens of a few kinds; all of them with ``-m slow``, or by ``python tests/golden.py check``."""

import json

import pytest

from .golden import FILE, QUICK, cases, compare

FIRST = QUICK[::2]
SLOW = [pytest.param(name, marks=pytest.mark.slow) for name in cases() if name not in FIRST]


@pytest.mark.parametrize("name", [*FIRST, *SLOW])
def test_a_case_gives_what_it_gave(name):
    assert compare(name, json.loads(FILE.read_text())) == []
