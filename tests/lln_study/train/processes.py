"""Training in processes of its own: started, killed, and several at once."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import torch
from torch.distributed import TCPStore

from lln.records.rows import read_rows
from tests.waiting import HANGS, wait_until

ROOT = Path(__file__).resolve().parents[3]
TIMES = {"seconds"}


def start(*command: str, **environment: str) -> subprocess.Popen:
    variables = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONWARNINGS": "default", **environment}
    return subprocess.Popen(
        [sys.executable, *command],
        cwd=ROOT,
        env=variables,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def finish(process: subprocess.Popen) -> str:
    said, _ = process.communicate(timeout=HANGS)
    assert process.returncode == 0, said
    return said


def finish_all(processes: list[subprocess.Popen]) -> str:
    """What all of them said; if one failed, none is left waiting for it."""
    said = []
    try:
        for process in processes:
            said.append(process.communicate(timeout=HANGS)[0])
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert all(process.returncode == 0 for process in processes), "\n".join(said)
    return "\n".join(said)


def kill_when(process: subprocess.Popen, ready) -> None:
    """SIGKILL as soon as ``ready()``; the process must not have ended before."""
    wait_until(ready, process)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def start_ranks(count: int, *command: str) -> list[subprocess.Popen]:
    """What torchrun does, without its second of start-up; the store is that of this process."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(store.port)}
    shared |= {"WORLD_SIZE": str(count), "TORCHELASTIC_USE_AGENT_STORE": "True"}
    started = [
        start(*command, **shared, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(count)
    ]
    started[0].store = store  # which must not end before them
    return started


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "last" / "model.safetensors")


def curve(folder: Path, name: str = "curve.jsonl") -> list[dict]:
    """Without the clock."""
    rows = read_rows(folder / name)
    return [{key: row[key] for key in row if key not in TIMES} for row in rows]
