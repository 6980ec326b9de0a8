"""Processes that work for this one, started fresh: a fork of threads and a GPU may hang."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ProcessPoolExecutor
from contextlib import contextmanager
from multiprocessing import get_context
from types import ModuleType

Submit = Callable[..., Future]


@contextmanager
def processes(count: int) -> Iterator[Submit]:
    """Gives ``submit(function, *arguments)``, which has at most ``count`` processes work at once.

    ``function`` must be importable. The end of the block waits for all of them; if it ends by an
    exception, those that have not begun never do.
    """
    executor = ProcessPoolExecutor(count, mp_context=get_context("spawn"))

    def submit(function: Callable, *arguments: object) -> Future:
        with main_left_out():
            return executor.submit(function, *arguments)

    try:
        yield submit
    except BaseException:
        executor.shutdown(cancel_futures=True)
        raise
    executor.shutdown()


@contextmanager
def main_left_out() -> Iterator[None]:
    """Processes started here do not import the caller's script, which need not expect that."""
    main = sys.modules["__main__"]
    sys.modules["__main__"] = ModuleType("__main__")
    try:
        yield
    finally:
        sys.modules["__main__"] = main
