"""How a program is asked in a way that it may refuse, and whose errors are whose.

>>> with attempt() as asked:  # here the program's errors are Unsupported, and end the attempt
...     with asks_program():  # a run of the program, in which the package answers by functions marked ``answers``
...         torch.linalg.cholesky(-torch.eye(2))
>>> asked.error is None  # then follows the general way
False
"""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from contextvars import ContextVar
from traceback import walk_tb
from types import CodeType
from typing import Any, Optional, TypeVar

import torch

M = TypeVar("M", bound=Callable[..., None])
_ANSWERS: set[CodeType] = set()
_IS_ATTEMPT: ContextVar[bool] = ContextVar("is_attempt", default=False)
_REFUSALS = "vmap", "atching rule", "functorch", "doesn't have storage"  # in what torch.func.vmap says where it refuses


class Unsupported(ValueError):  # noqa: N818
    """The program cannot be asked in this way: a more general one is to be taken."""


class attempt(AbstractContextManager["attempt"]):
    """A way of asking that has another behind it, which follows where this one ends by :class:`Unsupported`.

    So do errors of the program, what vmap does not map, and a matrix without a factor. ``error`` is what ended it.
    """

    error: Optional[Exception] = None

    def __enter__(self) -> "attempt":
        self._token = _IS_ATTEMPT.set(True)
        return self

    def __exit__(self, kind: object, error: Any, traceback: object) -> bool:
        _IS_ATTEMPT.reset(self._token)
        self.error = error
        return _is_unsupported(error)


@contextmanager
def asks_program() -> Iterator[None]:
    """A run of the user's program, or of what its distributions compute."""
    try:
        yield
    except Exception as error:
        is_own = any(frame.f_code in _ANSWERS for frame, _ in walk_tb(error.__traceback__))
        if _IS_ATTEMPT.get() and not (is_own or isinstance(error, Unsupported)):
            raise Unsupported(str(error)) from error
        raise


def answers(method: M) -> M:
    """Mark what the package does within a run of the program, such as answers at GP sites; its errors are its own."""
    _ANSWERS.add(method.__code__)  # type: ignore[attr-defined]
    return method


def _is_unsupported(error: Optional[Exception]) -> bool:
    is_refusal = isinstance(error, RuntimeError) and any(word in str(error) for word in _REFUSALS)
    return is_refusal or isinstance(error, (Unsupported, torch.linalg.LinAlgError))  # type: ignore[attr-defined]
