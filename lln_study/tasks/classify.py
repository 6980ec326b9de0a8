"""What classification tasks share: loss, accuracy, and what a row keeps."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lln.records.rows import Row, read_rows, thinned
from lln_study.tasks.experiment import RowTask
from lln_study.train.runlog import CURVE, MONITOR
from lln_study.train.task import Summary

POINTS = 60  # of a curve that a result row keeps


class Classification(RowTask):
    """Subclasses give :meth:`scores` and :meth:`in_order`.

    Attributes:
        data_mb: Of the device's memory, taken by the data.
    """

    metric, better = "accuracy", "higher"
    keeps_best = True
    data_mb: float | None = None

    def scores(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Scores of the classes, ``[rows, classes]``."""
        raise NotImplementedError

    def in_order(self, split: str) -> Iterator[Mapping[str, Tensor]]:
        """All examples of a split."""
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        labels = batch["labels"]
        total = F.cross_entropy(self.scores(model, batch).float(), labels, reduction="sum")
        return total, torch.full_like(total, len(labels))

    def evaluate(self, model: nn.Module, split: str) -> dict[str, float]:
        sums: Tensor | None = None
        for batch in self.in_order(split):
            labels = batch["labels"]
            scores = self.scores(model, batch).float()
            found = torch.stack(
                [
                    F.cross_entropy(scores, labels, reduction="sum"),
                    (scores.argmax(-1) == labels).sum(),
                    torch.full_like(scores[0, 0], len(labels)),
                ]
            ).double()
            sums = found if sums is None else sums + found
        assert sums is not None, f"the {split} split is empty"
        loss, right, count = sums.tolist()
        return {"loss": loss / count, "accuracy": right / count}

    def row(self, summary: Summary, folder: Path | None) -> dict[str, Any]:
        """Columns of a result row; metrics on "test" are those of the best weights on "valid"."""
        best = summary.best
        return {
            **summary.row(),
            **summary.test_best(),
            "valid_accuracy": None if best is None else best[0],
            "data_mb": self.data_mb,
            "curves": curves(folder),
        }

    def note_memory(self, device: torch.device) -> None:
        """Count peaks of memory from here; called at the end of :meth:`prepare`."""
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.data_mb = torch.cuda.memory_allocated(device) / 2**20


def curves(folder: Path | None) -> dict[str, Any]:
    """Thinned curves of a run, for its row: accuracy, loss scale, α and β per layer."""
    if folder is None:
        return {}
    found: dict[str, Any] = {}
    rows = read_rows(folder / CURVE) if (folder / CURVE).exists() else []
    evaluations = [row for row in rows if row["kind"] == "eval"]
    found["valid"] = _columns(thinned(evaluations, POINTS), ("step", "loss", "accuracy"))
    scaled = [row for row in rows if row["kind"] == "train" and row["loss_scale"] is not None]
    if scaled:
        found["loss_scale"] = _columns(thinned(scaled, 4 * POINTS), ("step", "loss_scale"))
    if (folder / MONITOR).exists():
        found |= _scales(read_rows(folder / MONITOR))
    return found


def _columns(rows: Sequence[Row], names: Sequence[str]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in names}


def _scales(rows: Sequence[Row]) -> dict[str, Any]:
    """α and β of each layer, the mean over its heads, at the steps that were measured."""
    measured = [row for row in rows if row.get("alpha") is not None]
    if not measured:
        return {}
    steps = thinned(sorted({row["step"] for row in measured}), POINTS)
    layers = sorted({row["layer"] for row in measured})
    table: dict[tuple[int, int], list[Row]] = {}
    for row in measured:
        table.setdefault((row["step"], row["layer"]), []).append(row)

    def mean(step: int, layer: int, name: str) -> float | None:
        values = [row[name] for row in table.get((step, layer), []) if row[name] is not None]
        return round(sum(values) / len(values), 5) if values else None

    scales = {
        name: [[mean(step, layer, name) for layer in layers] for step in steps]
        for name in ("alpha", "beta")
    }
    return {"scales": {"step": steps, "layers": layers, **scales}}
