"""The Long Range Arena: recipes of the code base that the paper used, the task, a run."""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lln.records.rows import Row
from lln.study.data.arena import datasets as data
from lln.study.data.order import shuffled
from lln.study.data.shards import Progress as DataProgress
from lln.study.tasks.changes import changed
from lln.study.tasks.classify import Classification
from lln.study.tasks.models.lra import Classifier, LRASizes
from lln.study.train import runfolder, runlog
from lln.study.train.config import TrainConfig
from lln.study.train.loop import Summary, train
from lln.study.train.progress import Progress
from lln.study.train.seeds import seeded

# Of the code base, where they differ from the defaults of the zoo; --option replaces them all.
OPTIONS: dict[str, dict[str, Any]] = {
    "performer": {"num_features": 128},
    "reformer": {"rounds": 2},
    "skyformer": {"landmarks": 128},
    "nystromformer": {"landmarks": 128},
    "linformer": {"rank": 128, "share": True},
}
SOFTMAX = {"softmax": "sdpa", "softmax_eager": "matrix"}


@dataclass(frozen=True)
class LRAConfig:
    """A run; see :func:`recipe`.

    Attributes:
        dropout: Of the model; none in the attention weights, whatever the mechanism.
        pool: See :class:`lln.study.tasks.models.lra.LRASizes`.
        train_size: Training examples, where they are generated; None for as many as published.
        validate_on: Examples that are looked at while training, drawn once and for all.
    """

    task: str
    layers: int = 2
    width: int = 64
    heads: int = 2
    feed_forward: int = 128
    dropout: float = 0.1
    pool: str = "padded"
    train_size: int | None = None
    validate_on: int = 2_000
    train: TrainConfig = field(default_factory=TrainConfig)

    def settings(self) -> dict[str, Any]:
        """What a row says beside the fields of ``train``."""
        names = [item.name for item in dataclasses.fields(self) if item.name != "train"]
        return {name: getattr(self, name) for name in names}


# rows of a step, learning rate, warm-up; 50,000 steps each
PUBLISHED = {
    "listops": (32, 1e-4, 1000),
    "text": (32, 1e-4, 80),
    "image": (256, 1e-4, 175),
    "pathfinder": (128, 2e-4, 312),
    "retrieval": (16, 2e-4, 800),
    "retrieval_wiki": (16, 2e-4, 800),
}


def recipe(task: str, **changes: Any) -> LRAConfig:
    """The published settings of a task, some of them changed.

    Example:
        >>> recipe("image", attention="performer", steps=5_000, learning_rate=1e-3, seed=1)
    """
    if task not in PUBLISHED:
        raise ValueError(f"task={task!r} is unknown; choose from {', '.join(PUBLISHED)}")
    rows, rate, warmup = PUBLISHED[task]
    start = LRAConfig(
        task,
        train=TrainConfig(
            steps=50_000,
            batch_size=rows,
            learning_rate=rate,
            warmup=warmup,
            weight_decay=0.0,
            betas=(0.9, 0.999),
            precision="bf16",
            eval_every=500,
            save_every=500,
            keep=1,
        ),
    )
    own = OPTIONS.get(changes.get("attention", start.train.attention), {})
    changes = {**changes, "options": changes.get("options") or own}
    return changed(start, fixed=("task",), **changes)


class LRA(Classification):
    """Classify a long sequence, or a pair of them."""

    name = "lra"

    def __init__(self, config: LRAConfig, arrays: data.LRAData) -> None:
        self.config, self.arrays = config, arrays
        self.tokens = arrays.length * (2 if arrays.paired else 1)
        counts = {name: len(split) for name, split in arrays.splits.items()}
        self.settings = {
            "experiment": "lra",
            **config.settings(),
            "data": arrays.source,
            "length": arrays.length,
            "examples": counts,
        }

    def prepare(self, device: torch.device) -> None:
        """All sequences go to the device, a byte per token."""
        shared: dict[int, Tensor] = {}  # passages that the pairs of all splits point into
        self.parts: dict[str, tuple[Tensor, Tensor, Tensor | None]] = {}
        for name, split in self.arrays.splits.items():
            if name == "valid" and len(split) > self.config.validate_on:
                # Files may be sorted by class: not simply the first ones.
                order = np.random.default_rng(0).permutation(len(split))
                split = split.take(np.sort(order[: self.config.validate_on]))
            labels = torch.tensor(split.labels, device=device)
            if split.pairs is None:
                tokens, pairs = torch.tensor(split.tokens, device=device), None
            else:
                if id(split.tokens) not in shared:
                    shared[id(split.tokens)] = torch.tensor(split.tokens, device=device)
                tokens = shared[id(split.tokens)]
                pairs = torch.tensor(split.pairs, device=device)
            self.parts[name] = tokens, labels, pairs
        self.note_memory(device)

    def build(self) -> nn.Module:
        config, arrays = self.config, self.arrays
        attention, options = config.train.attention, dict(config.train.options)
        if attention in SOFTMAX:
            attention, options = "softmax", {"impl": SOFTMAX[attention], **options}
        sizes = LRASizes(
            vocabulary=arrays.vocabulary,
            length=arrays.length,
            classes=arrays.classes,
            attention=attention,
            options=options,
            layers=config.layers,
            width=config.width,
            heads=config.heads,
            feed_forward=config.feed_forward,
            dropout=config.dropout,
            pool=config.pool,
        )
        with seeded(config.train.seed, "weights"):
            return Classifier(sizes, paired=arrays.paired)

    def batch(self, step: int, rows: slice) -> Mapping[str, Tensor]:
        size, seed = self.config.train.batch_size, self.config.train.seed
        count = len(self.parts["train"][1])
        index = shuffled(step, rows, batch_size=size, count=count, seed=seed)
        return self._examples("train", index.to(self.parts["train"][1].device, non_blocking=True))

    def _examples(self, split: str, index: Tensor) -> dict[str, Tensor]:
        tokens, labels, pairs = self.parts[split]
        found = tokens[index if pairs is None else pairs[index]]
        found = F.pad(found, (0, self.arrays.length - found.shape[-1]))
        return {"tokens": found, "labels": labels[index]}

    def row(self, summary: Summary, folder: Path | None) -> dict[str, Any]:
        return {"task": self.config.task, **super().row(summary, folder)}

    def scores(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        return model(batch["tokens"])

    def in_order(self, split: str) -> Iterator[Mapping[str, Tensor]]:
        labels = self.parts[split][1]
        for index in torch.arange(len(labels), device=labels.device).split(
            self.config.train.batch_size
        ):
            yield self._examples(split, index)


def load(
    config: LRAConfig,
    folder: str | os.PathLike[str] | None = None,
    *,
    on_damaged: str = "stop",
    workers: int | None = None,
    progress: DataProgress | None = None,
) -> data.LRAData:
    """The data of a run, generated if they must be."""
    return data.load(
        config.task,
        folder,
        on_damaged=on_damaged,
        train_size=config.train_size,
        workers=workers,
        progress=progress,
    )


def run(
    config: LRAConfig,
    arrays: data.LRAData,
    *,
    folder: Path | None = None,
    results: Path | None = None,
    progress: Progress | None = None,
    tensorboard: bool = True,
) -> Row:
    """Train, test once with the weights that were best on "valid"; the row is also appended, once.

    Args:
        arrays: From :func:`load`.
        folder: Of the run, see :func:`lln.study.train.loop.train`; None keeps nothing.
        results: File that the row is appended to, by the first process.
    """
    started = time.perf_counter()
    task = LRA(config, arrays)
    with runfolder.held(folder):
        summary = train(task, config.train, folder, progress=progress, tensorboard=tensorboard)
        if results is not None and summary.was_finished:
            key = config.train.digest(task.settings), config.train.seed
            if (row := runlog.find_row(results, *key)) is not None:
                return row
        metrics = task.row(summary, folder)
        spent = time.perf_counter() - started
        row = runlog.result_row(
            task.name, config.train, task.settings, metrics, seconds=spent, device=summary.device
        )
        if results is not None and runfolder.is_first_process():
            runlog.append_row(results, row, once=summary.was_finished)
        return row


def digest(config: LRAConfig, arrays: data.LRAData, *, timed: bool = False) -> str:
    """Names a run but for its seed, known before it has run."""
    task = _Timed(config, arrays) if timed else LRA(config, arrays)
    return config.train.digest(task.settings)


class _Timed(LRA):
    """The same updates without evaluation."""

    name = "lra_step"

    def __init__(self, config: LRAConfig, arrays: data.LRAData) -> None:
        super().__init__(config, arrays)
        launched = {"compile": config.train.compile, "graph": config.train.graph}
        self.settings = {**self.settings, "timed": launched}  # for a time, how decides what

    def evaluate(self, model: nn.Module, split: str) -> dict[str, float]:
        return {}


def as_timed(config: LRAConfig) -> LRAConfig:
    """The same updates and nothing else."""
    nothing = {"eval_every": 0, "save_every": 0, "keep": 0, "monitor_every": 0}
    quick = dataclasses.replace(config.train, **nothing, log_every=config.train.steps)
    return dataclasses.replace(config, train=quick)


def throughput(config: LRAConfig, arrays: data.LRAData) -> Row:
    """Time of an update and peak memory, for Table 4; the row says so if memory ran out."""
    started = time.perf_counter()
    config = as_timed(config)
    task = _Timed(config, arrays)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    try:
        metrics: dict[str, Any] = {**train(task, config.train, None).row(), "out_of_memory": False}
    except torch.OutOfMemoryError:
        metrics = {"step_ms": None, "peak_mb": None, "out_of_memory": True}
    metrics |= {"task": config.task, "data_mb": task.data_mb}
    spent = time.perf_counter() - started
    return runlog.result_row(
        task.name, config.train, task.settings, metrics, seconds=spent, device=device
    )
