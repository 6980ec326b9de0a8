"""Time and memory of a context that is read once, and of the questions about it.

Weights are random: they change neither. Rows are of one table, up to a million.
"""

from __future__ import annotations

import os
import time
from dataclasses import dataclass, field
from typing import Any

import torch

import lln
from lln.records.rows import Row
from lln.records.seeds import seeded
from lln_study.data import tables
from lln_study.tasks import experiment
from lln_study.tasks.experiment import InSweeps, Key
from lln_study.tasks.models.table import TableModel, TableSizes
from lln_study.tasks.recipe import changed, settings
from lln_study.train.config import TrainConfig, check_whole
from lln_study.train.task import Task

AT_ONCE = 65_536  # rows that are drawn together


@dataclass(frozen=True)
class CostRun:
    """A measurement: ``rows`` of the context, ``questions`` that are read together."""

    layers: int = 6
    width: int = 256
    heads: int = 4
    feed_forward: int = 512
    rows: int = 65_536
    questions: int = 1_024
    train: TrainConfig = field(default_factory=lambda: TrainConfig(attention="lln"))

    def __post_init__(self) -> None:
        for name in ("rows", "questions"):
            check_whole(name, getattr(self, name), least=1)


IN_SWEEPS = InSweeps(lists={"rows": "rows"})


def configure(**changes: Any) -> CostRun:
    """6 layers × 256, 4 heads, some of it changed by name.

    Example:
        >>> configure(attention="softmax", rows=65_536)
    """
    config = changed(CostRun(), **changes)
    TableSizes.of(config)  # refuses what cannot serve
    return config


class Cost(Task):
    """What names a measurement."""

    name = "table_cost"

    def __init__(self, config: CostRun) -> None:
        self.settings = {"experiment": "table_cost", **settings(config)}


def reads(config: CostRun) -> dict[str, Any]:
    """Nothing is read."""
    return {}


def load(source: str | os.PathLike[str] | None = None) -> None:
    """Nothing: tables are generated."""


def key(config: CostRun, data: None = None) -> Key:
    """Name the row of a measurement before it was made."""
    return experiment.key(Cost(config), config.train)


@torch.no_grad()
def run(config: CostRun, data: None = None, *, results: Any = None, **unused: Any) -> Row:
    """Read a context, then questions; the row says so if memory ran out.

    In bfloat16 under autocast on a GPU if ``precision`` says so. The first of three readings is
    not counted.
    """
    started = time.perf_counter()
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        columns = {**_measured(config, device), "out_of_memory": False}
    except torch.OutOfMemoryError:
        names = ("remember_seconds", "answer_ms", "remember_mb", "answer_mb", "memory_mb")
        columns = {**dict.fromkeys(names), "out_of_memory": True}
    row = experiment.row_of(Cost(config), config.train, columns, started, str(device))
    experiment.record(results, row)
    return row


def _measured(config: CostRun, device: torch.device) -> dict[str, Any]:
    with seeded(config.train.seed, "weights"):
        model = TableModel(TableSizes.of(config)).to(device).eval()
    parts = [
        tables.draw(1, min(AT_ONCE, config.rows - first), kinds=("network",), seed=0, device=device)
        for first in range(0, config.rows, AT_ONCE)
    ]
    features, labels = (torch.cat(list(part), dim=1) for part in zip(*parts, strict=True))
    questions = tables.draw(1, config.questions, kinds=("network",), seed=1, device=device)[0]
    half = config.train.precision == "bf16"
    with torch.autocast(device.type, torch.bfloat16, enabled=half):
        memory, seconds, peak = _best_of(device, lambda: model.remember(features, labels))
        _, asked_seconds, asked_peak = _best_of(device, lambda: model.answer(memory, questions))
    return {
        "remember_seconds": seconds,
        "answer_ms": 1e3 * asked_seconds,
        "remember_mb": peak,
        "answer_mb": asked_peak,
        "memory_mb": sum(_bytes(kept) for kept in memory.layers) / 2**20,
    }


def _best_of(device: torch.device, call: Any, times: int = 3) -> tuple[Any, float, float | None]:
    """What a call gives, its shortest time without the first, and the memory it takes beside."""
    on_gpu = device.type == "cuda"
    found, seconds, before = call(), [], 0  # the first loads code and compiles
    for _ in range(times - 1):
        found = None
        if on_gpu:
            torch.cuda.synchronize()
            torch.cuda.reset_peak_memory_stats()
            before = torch.cuda.memory_allocated()
        begun = time.perf_counter()
        found = call()
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - begun)
    peak = (torch.cuda.max_memory_allocated() - before) / 2**20 if on_gpu else None
    return found, min(seconds), peak


def _bytes(kept: Any) -> int:
    if isinstance(kept, torch.Tensor):
        return kept.numel() * kept.element_size()
    parts = (kept.log_mass, kept.mean) if isinstance(kept, lln.State) else kept
    return sum(map(_bytes, parts or ()))
