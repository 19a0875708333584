"""What a class's docstring says of arguments that it inherits."""

import re
from inspect import cleandoc, signature
from textwrap import indent
from typing import Any

_PARAM = re.compile(r"^:param (\w+):.*(?:\n[ ]+.*)*", re.M)


class Documented:
    """A class whose subclasses' docstrings have its words for those of their arguments that they have none for.

    A family says only what is its own; ``help(SVGP)`` and the reference tell of ``init`` and ``start``, too.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
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
