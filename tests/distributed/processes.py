"""Start the processes of a test, and read what they found.

``python -m tests.distributed.processes MODULE COUNT OUT`` imports a module once and forks COUNT
processes, each of which joins the group and writes what ``MODULE.found(rank)`` says.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from datetime import timedelta
from importlib import import_module
from pathlib import Path
from typing import Any

import torch
from torch import distributed

from tests.waiting import HANGS

ROOT = Path(__file__).resolve().parents[2]
PROCESSES = 4
ALONE = {"OMP_NUM_THREADS": "1", "OPENBLAS_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo"}


def run(module: str, out: Path, processes: int = PROCESSES) -> list[dict[str, Any]]:
    """What each of the processes found."""
    done = subprocess.run(
        [sys.executable, "-m", "tests.distributed.processes", module, str(processes), str(out)],
        cwd=ROOT,
        env={**os.environ, **ALONE},
        stderr=subprocess.PIPE,
        text=True,
        timeout=HANGS,
    )
    assert done.returncode == 0, done.stderr[-5000:]
    return [json.loads((out / f"{rank}.json").read_text()) for rank in range(processes)]


def _one(rank: int, module: str, processes: int, out: Path) -> None:
    distributed.init_process_group(
        "gloo",
        init_method=f"file://{out / 'store'}",
        rank=rank,
        world_size=processes,
        timeout=timedelta(seconds=HANGS),
    )
    (out / f"{rank}.json").write_text(json.dumps(import_module(module).found(rank)))
    distributed.destroy_process_group()


def main(module: str, processes: int, out: Path) -> None:
    import_module(module)
    torch.set_num_threads(1)
    # If one fails, the others are ended.
    torch.multiprocessing.start_processes(
        _one, (module, processes, out), nprocs=processes, start_method="fork"
    )


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]), Path(sys.argv[3]))
