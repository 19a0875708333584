"""What arguments may be (numbers that name something or count, one of several words), and how errors say so."""

import re
from collections.abc import Mapping
from inspect import cleandoc, signature
from textwrap import indent

from torch import Tensor


def require_codes(codes: Tensor, num: int, what: str, remedy: str) -> None:
    """Refuse codes that are no whole numbers from 0 to ``num`` − 1, with ``what`` they are, and the ``remedy``."""
    # NaN is none of them, and fails the first comparison; an error shows few of many.
    unknown = codes.detach()[(codes != codes.round()) | (codes < 0) | (codes >= num)][:1000]
    if unknown.numel():
        some = sorted({float(code) for code in unknown})[:5]
        raise ValueError(f"{what} must be whole numbers from 0 to {num - 1}, got {some}; {remedy}.")


def refuse(faults: Mapping[str, object]) -> None:
    """Raise with the first of these reasons that applies."""
    if found := [why for why, applies in faults.items() if applies]:
        raise ValueError(found[0])


def require_count(value: object, what: str, least: int = 1) -> None:
    """Refuse what is no whole number of at least so much."""
    if isinstance(value, bool) or not isinstance(value, int) or value < least:
        raise ValueError(f"{what} must be a whole number of at least {least}, got {value!r}")


def require_share(value: object, what: str) -> None:
    """Refuse what is no number in (0, 1]."""
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value <= 1:
        raise ValueError(f"{what} must be a number in (0, 1], got {value!r}")


def require_choice(value: object, what: str, *choices: object) -> None:
    """Refuse what is none of some words."""
    if value not in choices:
        listed = " or ".join(f'"{word}"' if isinstance(word, str) else repr(word) for word in choices)
        raise ValueError(f"{what} must be {listed}, got {value!r}")


_PARAM = re.compile(r"^:param (\w+):.*(?:\n[ ]+.*)*", re.M)


class Documented:
    """A class whose subclasses' docstrings inherit its words on arguments: ``help(SVGP)`` and the reference have
    ``init`` and ``start``, too.
    """

    def __init_subclass__(cls, **kwargs: object) -> None:
        super().__init_subclass__(**kwargs)
        if cls.__doc__ is None:  # as under python -OO
            return
        own = _PARAM.findall(cleandoc(cls.__doc__))
        # A dataclass has its own __init__ only after this: its bases have theirs.
        fields = (vars(base).get("__dataclass_fields__", ()) for base in cls.__mro__)
        taken = {*signature(cls.__init__).parameters}.union(own, *fields)
        found: dict[str, str] = {}
        for base in cls.__mro__:
            for field in _PARAM.finditer(cleandoc(vars(base).get("__doc__") or "")):
                found.setdefault(field[1], field[0].rstrip())
        told = [text for name, text in found.items() if name in taken]
        text = "\n\n".join([_PARAM.sub("", cleandoc(cls.__doc__)).strip(), "\n".join(told)])
        cls.__doc__ = indent(text, "    ").strip() + "\n"
