"""How long a conversion will take: a few updates are tried out on a copy, the rest is counted."""

from __future__ import annotations

import copy
import os
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

import lln.hf
from lln.device.timing import MIN_SAMPLES

TRIED = 2  # updates of a stage; the first loads code
TINY = 1e-9  # learning rate
LEAST = 1.0  # seconds that time is measured for at a length
MEMORY = 2.0  # passes that memory takes there: its blocks go back to the system at once


@dataclass
class Pace:
    """Seconds of one batch.

    Attributes:
        softmax, converted: A forward pass.
        prepared: Calibration, and the error of all layers.
        error: The error of all layers alone.
        transfer, recover: An update; 0 where there are none.
    """

    softmax: float = 0.0
    converted: float = 0.0
    prepared: float = 0.0
    error: float = 0.0
    transfer: float = 0.0
    recover: float = 0.0

    def learning(self, *, batches: int, transfer_steps: int, recover_steps: int) -> float:
        """Seconds of all stages, with as many batches to calibrate by and to measure errors on."""
        steps = self.transfer * transfer_steps + self.recover * recover_steps
        return batches * (self.prepared + self.error) + steps


def try_out(model: Any, batches: Sequence[Mapping[str, Any]], arguments: Mapping[str, Any]) -> Pace:
    """Convert a copy of a model with two updates of every stage, and note how long each takes.

    Args:
        arguments: Those of :func:`lln.hf.convert`; heads that keep softmax are not looked for.
    """
    found = Pace()
    batch = {name: x for name, x in batches[0].items() if name != "labels"}
    tried = copy.deepcopy(model)
    found.softmax = _forward_seconds(tried, batch)
    since = time.perf_counter()

    def lap() -> float:
        nonlocal since
        before, since = since, time.perf_counter()
        return since - before

    def progress(stage: str, step: int, total: int, value: float) -> None:
        setattr(found, stage, lap())

    ended: list[float] = []  # of softmax, calibration, transfer, recovery
    changes: dict[str, Any] = {
        "calibration": 1,
        "held_out": [batches[0]],
        "keep": 0,
        "measure": lambda model: ended.append(lap()) or {},
        "progress": progress,
    }
    for stage in ("transfer", "recover"):
        changes[f"{stage}_steps"] = min(TRIED, arguments[f"{stage}_steps"])
        # So few updates have no warmup: at the usual rate they might diverge where many do not.
        changes[f"{stage}_options"] = {**arguments[f"{stage}_options"], "learning_rate": TINY}
    lln.hf.convert(tried, batches, **{**arguments, **changes})
    found.prepared = ended[1]
    found.error = ended[2] if arguments["transfer_steps"] else 0.0
    found.converted = _forward_seconds(tried, batch)
    return found


@torch.no_grad()
def _forward_seconds(model: Any, batch: Mapping[str, Any]) -> float:
    """Of the second of two passes."""
    started = 0.0
    for _ in range(2):
        started = time.perf_counter()
        model(**batch)
        if model.device.type == "cuda":
            torch.cuda.synchronize(model.device)
    return time.perf_counter() - started


def seconds_since_start() -> float:
    """Age of this process; 0 where the system does not tell, which is where memory is not measured.

    Most of it is imports at the start of a command, and a process that measures memory has as many.
    """
    try:
        fields = Path("/proc/self/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return 0.0
    started = int(fields[19]) / os.sysconf("SC_CLK_TCK")  # starttime, the 22nd, after the system's
    return time.clock_gettime(time.CLOCK_BOOTTIME) - started


def cost_seconds(
    pace: Pace, model: Any, lengths: Sequence[int], *, tokens: int, length: int, loading: float
) -> float:
    """Seconds to measure time and memory of both models at these lengths.

    Args:
        loading: Seconds until a process has imported what it needs; on a CPU one measures memory.
        tokens: Of the batch whose passes are known.
        length: Of its sequences.
    """
    on_cpu = model.device.type == "cpu"
    grows = _growth(model)
    total = loading if on_cpu and lengths else 0.0
    for each in lengths:
        softmax = pace.softmax / tokens * each * (1 + grows * each) / (1 + grows * length)
        turn = softmax + pace.converted / tokens * each
        total += max((1 + MIN_SAMPLES) * turn, LEAST + turn) + (MEMORY * turn if on_cpu else 0.0)
    return total


def _growth(model: Any) -> float:
    """Operations of softmax a token and key, beside those of the weights a token.

    4 D L for the N × N products of L layers of width D against 2 P for P weights.
    """
    config = model.config.get_text_config()
    weights = model.num_parameters(exclude_embeddings=True)
    return 2 * config.hidden_size * config.num_hidden_layers / max(weights, 1)
