"""Start the processes of a test, and read what they found."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PROCESSES = 4


def run(module: str, out: Path, processes: int = PROCESSES) -> list[dict[str, Any]]:
    """What each of the processes of ``python -m module RANK STORE OUT`` wrote to OUT/RANK.json."""
    children = [
        subprocess.Popen(
            [sys.executable, "-m", module, str(rank), str(out / "store"), str(out)],
            cwd=ROOT,
            env={**os.environ, "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank in range(processes)
    ]
    try:
        said = [child.communicate(timeout=180)[1] for child in children]
    finally:
        for child in children:
            child.kill()
    for rank, child in enumerate(children):
        assert child.returncode == 0, f"process {rank} failed:\n{said[rank][-3000:]}"
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(processes)]
