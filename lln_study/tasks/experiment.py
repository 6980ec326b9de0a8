"""What all kinds of runs share, whether the command line or a sweep asks for them.

Every kind is a module with the same functions:

    config = kind.configure(...)                    a recipe, fields changed by name
    data = kind.load(folder, **kind.reads(config))  what it reads
    kind.key(config, data)                          names its row before it has run: digest and seed
    row = kind.run(config, data, folder=..., results=...)

and says in ``IN_SWEEPS`` what a sweep must know of it. Its name stands in :data:`KINDS`.
"""

from __future__ import annotations

import dataclasses
import importlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import nn

from lln.records.rows import Row, append_row, find_row
from lln.report.progress import Progress
from lln_study.train import runfolder, runlog
from lln_study.train.config import TrainConfig
from lln_study.train.loop import train
from lln_study.train.task import Summary, Task

Key = tuple[str, int]
#: Name -> module, imported when it is asked for.
KINDS = {
    name: f"lln_study.tasks.{name}"
    for name in (
        *("mlm", "glue", "vit", "lra", "table", "conversion"),
        *("step", "lra_step", "table_cost"),
    )
}


@dataclass(frozen=True)
class Asked:
    """What a sweep says of the data of a run.

    Attributes:
        folder: Of the data; None looks at ``LLN_DATA``.
        body: The pre-trained model that a fine-tuning starts from, or its folder.
        generate: Whether data that are not there may be generated, which takes minutes.
    """

    folder: Path | None
    body: Any
    generate: bool


def _nothing_else(config: Any, asked: Asked) -> dict[str, Any]:
    return {}


@dataclass(frozen=True)
class InSweeps:
    """What a sweep must know of a kind of runs.

    Attributes:
        needs: Fields without which it cannot say what it would do.
        chosen_by: What a row says of validation, and 1 if more of it is good, else -1; None if no
            run is chosen among others.
        lists: Starting a process takes longer than some runs: fields of which a job may have lists,
            a row each, and what each is called in ``configure``.
        reads: More arguments of ``load`` than its ``reads`` knows, or others.
        throughput: The kind that only times the updates of this one.
        is_followed: Whether others start from its checkpoint: it runs again for them, and its
            curves are kept.
    """

    needs: tuple[str, ...] = ()
    chosen_by: tuple[str, int] | None = None
    lists: Mapping[str, str] = field(default_factory=dict)
    reads: Callable[[Any, Asked], dict[str, Any]] = _nothing_else
    throughput: str | None = None
    is_followed: bool = False


class Kind(Protocol):
    """A module that runs something."""

    IN_SWEEPS: InSweeps

    def configure(self, *words: str, **fields: Any) -> Any: ...
    def reads(self, config: Any) -> dict[str, Any]: ...
    def load(self, source: Any, **reads: Any) -> Any: ...
    def key(self, config: Any, data: Any) -> Key: ...
    def run(self, config: Any, data: Any, **where: Any) -> Row: ...


def find(kind: str) -> Kind:
    """Import the module of a kind."""
    if kind not in KINDS:
        raise ValueError(f"run={kind!r} is unknown; choose from {', '.join(KINDS)}")
    return importlib.import_module(KINDS[kind])  # type: ignore[return-value]


class RowTask(Task):
    """A task that says what its result row holds."""

    def row(self, summary: Summary, folder: Path | None) -> dict[str, Any]:
        """Give the columns of a result row."""
        raise NotImplementedError


def key(task: Task, config: TrainConfig) -> Key:
    """Name the row of a run: digest and seed."""
    return config.digest(task.settings), config.seed


def run(
    task: RowTask,
    config: TrainConfig,
    *,
    folder: Path | None = None,
    results: Path | None = None,
    progress: Progress | None = None,
    tensorboard: bool = True,
    test: bool = False,
) -> Row:
    """Train, or continue; the row is returned, and appended unless a finished run has its row.

    Args:
        folder: Of the run, see :func:`lln_study.train.loop.train`; None keeps nothing.
        results: File that the row is appended to, by the first process.
        test: Evaluate the last weights on "test".
    """
    started = time.perf_counter()
    with runfolder.held(folder):
        watched = {"progress": progress, "tensorboard": tensorboard}
        summary = train(task, config, folder, **watched, test=test)
        if results is not None and summary.was_finished:
            row = find_row(results, *key(task, config))
            if row is not None:
                return row
        columns = task.row(summary, folder)
        row = row_of(task, config, columns, started, summary.device)
        record(results, row, once=summary.was_finished)
        return row


def row_of(
    task: Task, config: TrainConfig, columns: Mapping[str, Any], started: float, device: str
) -> Row:
    """Make a result row of a run that has just ended."""
    seconds = time.perf_counter() - started
    return runlog.result_row(
        task.name, config, task.settings, columns, seconds=seconds, device=device
    )


def record(results: Path | None, row: Row, *, once: bool = False) -> None:
    """Append a row, if there is a file for it and this is the first process."""
    if results is not None and runfolder.is_first_process():
        append_row(results, row, once=once)


class Timed(Task):
    """Updates without evaluation: a base beside that of the task whose updates are timed."""

    def evaluate(self, model: nn.Module, split: str) -> dict[str, float]:
        return {}

    def facts(self) -> dict[str, Any]:
        """Give more columns of the row, known also if memory ran out."""
        return {}


def only_updates(config: Any) -> Any:
    """Copy a configuration without evaluations, checkpoints and measurements."""
    nothing = {"eval_every": 0, "save_every": 0, "keep": 0, "monitor_every": 0}
    quick = dataclasses.replace(config.train, **nothing, log_every=config.train.steps)
    return dataclasses.replace(config, train=quick)


def time_updates(task: Timed, config: TrainConfig, results: Path | None = None) -> Row:
    """Measure the time of an update and peak memory; the row says so if memory ran out."""
    started = time.perf_counter()
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        columns = {**train(task, config, None).row(), "out_of_memory": False}
    except torch.OutOfMemoryError:
        unknown = dict.fromkeys(("step_ms", "tokens_per_second", "peak_mb"))
        columns = {**unknown, "out_of_memory": True}
    row = row_of(task, config, {**columns, **task.facts()}, started, device)
    record(results, row)
    return row
