"""Ctrl-C waits for the end of an update, so that a run can save before it stops."""

from __future__ import annotations

import contextlib
import signal
import sys
import threading
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def held_back() -> Iterator[Callable[[], bool]]:
    """Yield a function that says whether Ctrl-C was pressed; pressed twice it stops at once.

    Only the main thread gets signals. A process that ignores Ctrl-C goes on ignoring it.

    Example:
        >>> with held_back() as is_asked_to_stop:
        ...     while not is_asked_to_stop():
        ...         update()
    """
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or before is signal.SIG_IGN:
        yield lambda: False
        return
    asked = False

    def note(number: int, frame: object) -> None:
        nonlocal asked
        if asked:
            raise KeyboardInterrupt
        asked = True
        print("\nstopping after this update; Ctrl-C again stops at once", file=sys.stderr)

    signal.signal(signal.SIGINT, note)
    try:
        yield lambda: asked
    finally:
        signal.signal(signal.SIGINT, before)
