"""What a class's docstring says of arguments that it inherits."""

import re
from collections.abc import Container
from inspect import cleandoc, signature
from textwrap import indent
from typing import Any, Optional

_PARAM = re.compile(r"^:param (\w+):.*(?:\n[ ]+.*)*", re.M)


class Documented:
    """A class whose subclasses' docstrings tell of the arguments of theirs that its own docstring tells of."""

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        cls.__doc__ = with_inherited_arguments(cls, signature(cls.__init__).parameters)


def with_inherited_arguments(cls: type, taken: Optional[Container[str]] = None) -> Optional[str]:
    """The docstring of a class, with its bases' words for those of their arguments that it has none for.

    A family says only what is its own; ``help(SVGP)`` and the reference tell of ``init`` and ``start``, too.

    :param taken: the arguments that the class takes; ``None`` is all that its bases tell of.
    """
    if cls.__doc__ is None:  # as under python -OO
        return None
    found: dict[str, str] = {}
    for base in cls.__mro__:
        for field in _PARAM.finditer(cleandoc(vars(base).get("__doc__") or "")):
            if base is cls or taken is None or field[1] in taken:
                found.setdefault(field[1], field[0].rstrip())
    text = "\n\n".join([_PARAM.sub("", cleandoc(cls.__doc__)).strip(), "\n".join(found.values())])
    return indent(text, "    ").strip() + "\n"
