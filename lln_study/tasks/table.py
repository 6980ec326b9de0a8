"""Tables as sets of rows: classes of questions from a context that is generated anew each time."""

from __future__ import annotations

import itertools
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from lln.records.rows import Row
from lln.records.seeds import derived_seed, generator, seeded
from lln_study.data import tables
from lln_study.tasks import experiment, real_tables
from lln_study.tasks.classify import Classification
from lln_study.tasks.experiment import InSweeps, Key
from lln_study.tasks.models.table import Columns, TableModel, TableSizes
from lln_study.tasks.recipe import changed, settings
from lln_study.train.config import TrainConfig, check_whole
from lln_study.train.task import Summary

PRIOR = "generated, version 1"  # changes with what lln_study.data.tables draws
MOST_ROWS = 2**18  # of an evaluation, over its tables
NEIGHBOURS = 10


@dataclass(frozen=True)
class TableRun:
    """A run; see :func:`configure`.

    Attributes:
        kinds: Of the tables that are learned from, see :mod:`lln_study.data.tables`.
        least, most: Rows of a context in training, drawn as often in every octave.
        questions: Rows of every table that are asked for.
        valid_rows: Of the contexts that are looked at while training.
        test_kinds, test_rows: What is tested, each by itself. Contexts of all sizes are of the same
            tables and have the same questions.
        tables: Of every evaluation, the same for all runs.
        real: Whether real tables are classified at the end, too.
    """

    layers: int = 6
    width: int = 256
    heads: int = 4
    feed_forward: int = 512
    kinds: tuple[str, ...] = tables.KINDS
    least: int = 128
    most: int = 4_096
    questions: int = 128
    valid_rows: int = 1_024
    test_kinds: tuple[str, ...] = ("network", "cells")
    test_rows: tuple[int, ...] = (256, 1_024, 4_096, 16_384, 65_536)
    tables: int = 64
    real: bool = True
    train: TrainConfig = field(default_factory=TrainConfig)

    def __post_init__(self) -> None:
        for name in ("least", "questions", "valid_rows", "tables"):
            check_whole(name, getattr(self, name), least=1)
        check_whole("most", self.most, least=self.least)
        for rows in self.test_rows:
            check_whole("test_rows", rows, least=1)
        for name in ("kinds", "test_kinds"):
            unknown = [kind for kind in getattr(self, name) if kind not in tables.KINDS]
            if unknown or not getattr(self, name):
                known = ", ".join(tables.KINDS)
                raise ValueError(f"{name}={list(getattr(self, name))}: choose from {known}")


def configure(**changes: Any) -> TableRun:
    """6 layers × 256, 4 heads, 4,000 updates of 32 tables, some of it changed by name.

    Example:
        >>> configure(attention="elu", steps=500, seed=1)
    """
    start = TableRun(
        train=TrainConfig(
            attention="lln",
            steps=4_000,
            batch_size=32,
            learning_rate=3e-4,
            warmup=200,
            precision="bf16",
            eval_every=500,
            save_every=500,
            keep=1,
        )
    )
    lists = ("kinds", "test_kinds", "test_rows")
    changes |= {name: tuple(changes[name]) for name in lists if name in changes}
    config = changed(start, **changes)
    TableSizes.of(config)  # refuses what cannot serve
    return config


class Table(Classification):
    """Which class a row has, seen from other rows of its table."""

    name = "table"
    device = torch.device("cpu")

    def __init__(self, config: TableRun) -> None:
        self.config = config
        self.settings = {"experiment": "table", **settings(config), "data": PRIOR}

    def prepare(self, device: torch.device) -> None:
        """Tables are drawn where the model is."""
        self.device = device
        self.note_memory(device)

    def build(self) -> nn.Module:
        with seeded(self.config.train.seed, "weights"):
            return TableModel(TableSizes.of(self.config))

    def batch(self, step: int, rows: slice) -> Mapping[str, Tensor]:
        """Contexts of a step have the length of the longest; few lengths are used."""
        config, train = self.config, self.config.train
        chance = generator(train.seed, "contexts", step)
        lengths = context_lengths(config.least, config.most)
        longest = lengths[int(torch.randint(len(lengths), (), generator=chance))]
        least = max(config.least, longest // 2)
        sizes = torch.randint(least, longest + 1, (train.batch_size,), generator=chance)
        features, labels = tables.draw(
            train.batch_size,
            longest + config.questions,
            kinds=config.kinds,
            seed=derived_seed(train.seed, "tables", step),
            device=self.device,
        )
        sizes = sizes[rows].to(self.device)
        return self._asked(features[rows], labels[rows], longest, sizes)

    def _asked(
        self, features: Tensor, labels: Tensor, longest: int, sizes: Tensor | None = None
    ) -> dict[str, Tensor]:
        """The last rows are questions; of those before, ``sizes`` or else all are the context."""
        asked = self.config.questions
        context, answers = labels[:, :longest], labels[:, -asked:].flatten()
        features = torch.cat([features[:, :longest], features[:, -asked:]], dim=1)
        batch = {"features": features, "context": context, "labels": answers}
        if sizes is None:
            return batch
        place = torch.arange(longest, device=features.device)
        return {**batch, "key_mask": place < sizes[:, None]}

    def scores(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        found = model(batch["features"], batch["context"], batch.get("key_mask"))
        return found.flatten(0, 1)

    def in_order(self, split: str) -> Iterator[Mapping[str, Tensor]]:
        """Tables for validation, or of a case of the test, as ``"cells_1024"``."""
        config, kinds, rows = self.config, self.config.kinds, self.config.valid_rows
        most = rows
        if split != "valid":
            kind, _, size = split.rpartition("_")
            kinds, rows, most = (kind,), int(size), max(config.test_rows)
        at_once = min(config.tables, max(len(kinds), MOST_ROWS // most))
        for first in range(0, config.tables, at_once):
            count = min(at_once, config.tables - first)
            seed = derived_seed(0, "valid" if split == "valid" else "test", *kinds, first)
            where = {"seed": seed, "device": self.device}
            yield self._asked(
                *tables.draw(count, most + config.questions, kinds=kinds, **where), rows
            )

    def evaluate(self, model: nn.Module, split: str) -> dict[str, float]:
        """On "test" every case by itself, as ``accuracy_cells_1024``, and the mean of all."""
        if split == "valid":
            return super().evaluate(model, split)
        cases = {case: super(Table, self).evaluate(model, case) for case in self._cases()}
        means = {
            name: sum(found[name] for found in cases.values()) / len(cases)
            for name in ("accuracy", "loss")
        }
        return means | {
            f"{name}_{case}": value
            for case, found in cases.items()
            for name, value in found.items()
        }

    def _cases(self) -> list[str]:
        each = itertools.product(self.config.test_kinds, self.config.test_rows)
        return [f"{kind}_{rows}" for kind, rows in each]

    @torch.no_grad()
    def row(self, summary: Summary, folder: Path | None) -> dict[str, Any]:
        columns = super().row(summary, folder)
        columns |= {f"neighbours_{case}": self._neighbours(case) for case in self._cases()}
        real = real_tables.in_context(summary.model, self.device) if self.config.real else {}
        return {**columns, "real": real}

    def _neighbours(self, case: str) -> float:
        right = [
            (nearest(batch["features"], batch["context"]).flatten() == batch["labels"]).float()
            for batch in self.in_order(case)
        ]
        return torch.cat(right).mean().item()


def context_lengths(least: int, most: int) -> list[int]:
    """What contexts are padded to: an octave has one length, so that few shapes are recorded."""
    lengths = [min(2 * least, most)]
    while lengths[-1] < most:
        lengths.append(min(2 * lengths[-1], most))
    return lengths


def nearest(features: Tensor, labels: Tensor, count: int = NEIGHBOURS) -> Tensor:
    """What the nearest rows of the context say of the questions, by most votes."""
    context = labels.shape[1]
    values = Columns.of(features[:, :context], None).normalized(features)
    distance = tables.distances(values[:, context:], values[:, :context])
    found = distance.topk(min(count, context), largest=False).indices  # [B, Q, count]
    votes = labels[:, None].expand(-1, found.shape[1], -1).gather(2, found)
    return nn.functional.one_hot(votes, tables.CLASSES).sum(2).argmax(-1)


def reads(config: TableRun) -> dict[str, Any]:
    """Nothing is read."""
    return {}


def load(source: str | os.PathLike[str] | None = None) -> None:
    """Nothing: tables are generated."""


IN_SWEEPS = InSweeps(chosen_by=("valid_accuracy", 1))


def key(config: TableRun, data: None = None) -> Key:
    """Name the row of a run before it has run: digest and seed."""
    return experiment.key(Table(config), config.train)


def run(config: TableRun, data: None = None, **where: Any) -> Row:
    """Train and test the best weights; see :func:`lln_study.tasks.experiment.run`."""
    return experiment.run(Table(config), config.train, **where)
