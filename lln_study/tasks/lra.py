"""The Long Range Arena: recipes of the code base that the paper used, the task, a run."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lln.records.order import shuffled
from lln.records.rows import Row
from lln.records.seeds import seeded
from lln_study.data.arena import datasets as data
from lln_study.tasks import experiment
from lln_study.tasks.classify import Classification
from lln_study.tasks.experiment import Asked, InSweeps, Key
from lln_study.tasks.models.lra import Classifier, LRASizes
from lln_study.tasks.recipe import changed, settings
from lln_study.train.config import TrainConfig, check_whole
from lln_study.train.task import Summary

# Of the code base, where they differ from the defaults of the zoo; options given replace them all.
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
    """A run; see :func:`configure`.

    Attributes:
        dropout: Of the model; none in the attention weights, whatever the mechanism.
        pool: See :class:`lln_study.tasks.models.lra.LRASizes`.
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

    def __post_init__(self) -> None:
        if self.train_size is not None:
            check_whole("train_size", self.train_size, least=1)


# rows of a step, learning rate, warm-up; 50,000 steps each
PUBLISHED = {
    "listops": (32, 1e-4, 1000),
    "text": (32, 1e-4, 80),
    "image": (256, 1e-4, 175),
    "pathfinder": (128, 2e-4, 312),
    "retrieval": (16, 2e-4, 800),
    "retrieval_wiki": (16, 2e-4, 800),
    "retrieval_short": (32, 2e-4, 800),
}


def configure(task: str, **changes: Any) -> LRAConfig:
    """The published settings of a task, some of them changed.

    Example:
        >>> configure("image", attention="performer", steps=5_000, learning_rate=1e-3, seed=1)
    """
    if task not in PUBLISHED:
        raise ValueError(f"task={task!r} is unknown; choose from {', '.join(PUBLISHED)}")
    if "attentions" in changes:
        raise ValueError('"attentions" is for "throughput": true; put them into "grid"')
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
            **settings(config),
            "data": arrays.source,
            "length": arrays.length,
            "examples": counts,
        }

    def prepare(self, device: torch.device) -> None:
        """Put all sequences onto the device, a byte per token."""
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


def reads(config: LRAConfig) -> dict[str, Any]:
    """Name the data of a configuration, as arguments of :func:`load`."""
    return {"task": config.task, "train_size": config.train_size}


def reads_in_sweeps(config: LRAConfig, asked: Asked) -> dict[str, Any]:
    """Let nothing be generated where only rows are looked for."""
    return {} if asked.generate else {"workers": 1, "progress": _refuse_to_generate}


def _refuse_to_generate(done: int, total: int) -> None:
    raise ValueError("its data have not been generated yet")


IN_SWEEPS = InSweeps(
    needs=("task",),
    chosen_by=("valid_accuracy", 1),
    reads=reads_in_sweeps,
    throughput="lra_step",
)


def load(source: str | os.PathLike[str] | None = None, *, task: str, **how: Any) -> data.LRAData:
    """Read the data of a task, generated if they must be.

    Args:
        source: A folder; None looks at ``LLN_DATA``.
        how: ``train_size``, ``on_damaged``, ``workers``, ``progress`` of
            :func:`lln_study.data.arena.datasets.load`.
    """
    return data.load(task, source, **how)


def key(config: LRAConfig, arrays: data.LRAData) -> Key:
    """Name the row of a run before it has run: digest and seed."""
    return experiment.key(LRA(config, arrays), config.train)


def run(config: LRAConfig, arrays: data.LRAData, **where: Any) -> Row:
    """Train and test the best weights; see :func:`lln_study.tasks.experiment.run`."""
    return experiment.run(LRA(config, arrays), config.train, **where)
