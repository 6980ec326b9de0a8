"""How long tests wait for other processes: only what hangs takes longer, on the busiest machine."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Callable

HANGS = 600  # seconds


def wait_until(ready: Callable[[], bool], process: subprocess.Popen | None = None) -> None:
    """Wait until ``ready()``; ``process``, if one is given, must not end before."""
    deadline = time.monotonic() + HANGS
    while not ready():
        ended = process is not None and process.poll() is not None
        assert not ended or ready(), f"it ended before: {process.communicate()[0]}"
        assert time.monotonic() < deadline, f"not ready after {HANGS} s"
        time.sleep(0.01)
