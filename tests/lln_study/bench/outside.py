"""A process that compiles kernels: without a GPU those of this one are interpreted."""

from __future__ import annotations

import os
import subprocess
import sys


def outside(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Python in another process, which compiles kernels."""
    environment = {k: v for k, v in os.environ.items() if k != "TRITON_INTERPRET"}
    environment |= {"OMP_NUM_THREADS": "1", **variables}
    command = [sys.executable, *arguments]
    return subprocess.run(command, env=environment, capture_output=True, text=True)
