"""Other work on the machine, so that a time on a busy one can be repeated."""

from __future__ import annotations

import contextlib
import subprocess
import sys
from collections.abc import Iterator

# Ends by itself with the process that started it, however that ends: its pipe is closed then.
BUSY = """
import sys, threading
threading.Thread(target=lambda: (sys.stdin.read(), __import__("os")._exit(0)), daemon=True).start()
while True:
    pass
"""


@contextlib.contextmanager
def busy_processes(count: int) -> Iterator[list[subprocess.Popen[bytes]]]:
    """Keep ``count`` processes computing, each on one core at most, until the block ends."""
    started = [
        subprocess.Popen([sys.executable, "-c", BUSY], stdin=subprocess.PIPE) for _ in range(count)
    ]
    try:
        yield started
    finally:
        for process in started:
            process.kill()
            process.wait()
            if process.stdin is not None:
                process.stdin.close()
