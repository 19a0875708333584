"""A wish to stop that waits for the end of a step."""

from __future__ import annotations

import signal
import sys
import threading
from types import FrameType
from typing import Any, Optional

__all__ = ["Interrupts"]


class Interrupts:
    """While it is entered, SIGINT (Ctrl-C) and SIGTERM are noted, and what runs goes on: a step that is cut in two
    would leave some parameters before it and some after.

    A second SIGINT raises :class:`KeyboardInterrupt` at once. In other threads than the main one, which signals never
    reach, nothing is changed.
    """

    def __init__(self) -> None:
        self.signal: Optional[int] = None
        self._before: dict[int, Any] = {}

    def __enter__(self) -> Interrupts:
        if threading.current_thread() is threading.main_thread():
            for number in (signal.SIGINT, signal.SIGTERM):
                self._before[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *args: Any) -> None:
        for number, handler in self._before.items():
            signal.signal(number, handler if handler is not None else signal.SIG_DFL)
        self._before = {}

    def _note(self, number: int, frame: Optional[FrameType]) -> None:
        if self.signal is not None and number == signal.SIGINT:
            raise KeyboardInterrupt
        self.signal = number
        print("\nfit stops after this step; interrupt again to stop at once", file=sys.stderr, flush=True)
