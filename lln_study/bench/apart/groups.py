"""Many processes at once, all of which have ended when the work is over.

A process that is stopped while it compiles leaves its compiler behind, which would disturb what is
measured next: each is the head of a group of processes, and the group is killed.
"""

from __future__ import annotations

import contextlib
import os
import signal
import time
from collections.abc import Callable, Sequence
from multiprocessing import get_context
from typing import Any

from lln.device.processes import main_left_out


def in_processes(
    work: Callable[[Any], None],
    items: Sequence[Any],
    *,
    seconds: float,
    processes: int | None = None,
) -> None:
    """Call ``work`` on each of ``items``, whichever process is free, for as long as ``seconds``.

    Args:
        processes: All cores but one if None.
    """
    context = get_context("spawn")
    taken = context.Value("i", 0)
    count = min(processes or max(1, (os.cpu_count() or 2) - 1), len(items))
    with main_left_out():
        started = [
            context.Process(target=_take, args=(work, list(items), taken), daemon=True)
            for _ in range(count)
        ]
        for process in started:
            process.start()
    end = time.monotonic() + seconds
    try:
        for process in started:
            process.join(max(0.0, end - time.monotonic()))
    finally:
        for process in started:
            end_group(process)


def _take(work: Callable[[Any], None], items: list[Any], taken: Any) -> None:
    """Work on the next item that nobody has begun, until there is none."""
    lead_group()
    while True:
        with taken.get_lock():
            place = taken.value
            taken.value += 1
        if place >= len(items):
            return
        work(items[place])


def lead_group() -> None:
    """Make this process the head of a group, to which those belong that it starts."""
    if hasattr(os, "setpgid"):
        os.setpgid(0, 0)


def end_group(process: Any) -> None:
    """Kill a process and all that it started, and wait until it has gone."""
    if process.exitcode != 0 and hasattr(os, "killpg"):
        with contextlib.suppress(ProcessLookupError, PermissionError):  # it has begun none
            os.killpg(process.pid, signal.SIGKILL)
    if process.is_alive():
        process.kill()
    process.join()
