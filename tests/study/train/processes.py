"""Training in processes of its own: started, killed, and several at once."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from pathlib import Path

import torch

from lln.records.rows import read_rows

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
    said, _ = process.communicate(timeout=120)
    assert process.returncode == 0, said
    return said


def finish_all(processes: list[subprocess.Popen]) -> str:
    """What all of them said; if one failed, none is left waiting for it."""
    said = []
    try:
        for process in processes:
            said.append(process.communicate(timeout=120)[0])
    finally:
        for process in processes:
            process.kill()
            process.communicate()
    assert all(process.returncode == 0 for process in processes), "\n".join(said)
    return "\n".join(said)


def kill_when(process: subprocess.Popen, ready) -> None:
    """SIGKILL as soon as ``ready()``; the process must not have ended before."""
    deadline = time.monotonic() + 60
    while not ready():
        assert process.poll() is None, process.communicate()[0]
        assert time.monotonic() < deadline, "never ready"
        time.sleep(0.005)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    assert process.returncode == -signal.SIGKILL


def start_ranks(count: int, *command: str) -> list[subprocess.Popen]:
    """What torchrun does, without its second of start-up."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    shared = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port, "WORLD_SIZE": str(count)}
    return [
        start(*command, **shared, RANK=str(rank), LOCAL_RANK=str(rank)) for rank in range(count)
    ]


def weights(folder: Path) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    return load_file(folder / "last" / "model.safetensors")


def curve(folder: Path, name: str = "curve.jsonl") -> list[dict]:
    """Without the clock."""
    rows = read_rows(folder / name)
    return [{key: row[key] for key in row if key not in TIMES} for row in rows]
