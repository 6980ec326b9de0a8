"""Whose turn it is: a process may prepare itself long before it may go on.

    gate = Gate(path)          in the sweep, which starts a process with LLN_TURN=path
    wait_for_turn()            in that process, before it would disturb others
    gate.open()                in the sweep: the process goes on
    shares_device()            in any process: whether others run at the same time

The gate is a lock that the sweep holds, so that it also opens when the sweep ends, however that may
be, and nobody waits for ever.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import time
from pathlib import Path

from lln.records import files

TURN = "LLN_TURN"  # the file of the gate; not set: there is nothing to wait for
SHARED = "LLN_SHARED"  # set: other runs may use the device at the same time


def wait_for_turn(*modules: str) -> float:
    """Wait until the gate of this process opens, once; the seconds that this took.

    Args:
        modules: Imported before, which takes a while and disturbs nobody.
    """
    for name in modules:
        with contextlib.suppress(ImportError):  # who needs it will say so
            importlib.import_module(name)
    path = os.environ.pop(TURN, None)
    if path is None:
        return 0.0
    since = time.perf_counter()
    with files.locked(path):
        return time.perf_counter() - since


def shares_device() -> bool:
    """Whether other runs of the sweep may use the device now, so that speed says nothing."""
    return SHARED in os.environ


class Gate:
    """Keeps one process waiting until it is opened."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self._closed = contextlib.ExitStack()
        self._closed.enter_context(files.locked(path))

    def open(self) -> None:
        self._closed.close()


def can_wait() -> bool:
    """Whether there are such locks here: not on Windows."""
    return os.name == "posix"
