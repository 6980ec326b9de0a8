"""What classification tasks share: loss, accuracy, the best weights, and what a row keeps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lln.records.rows import Row, read_rows
from lln.study.train import checkpoint
from lln.study.train.config import TrainConfig
from lln.study.train.engine import AUTOCAST
from lln.study.train.loop import Summary, Task, identity
from lln.study.train.runlog import CURVE, MONITOR

POINTS = 60  # of a curve that a result row keeps


class Classification(Task):
    """Subclasses give :meth:`scores` and :meth:`in_order`.

    Attributes:
        kept: The best accuracy on "valid" of this process so far, and the weights that have it.
        data_mb: Of the device's memory, taken by the data.
    """

    metric, better = "accuracy", "higher"
    kept: tuple[float, dict[str, Tensor]] | None = None
    data_mb: float | None = None

    def scores(self, model: nn.Module, batch: Mapping[str, Tensor]) -> Tensor:
        """Of the classes, ``[rows, classes]``."""
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
        accuracy = right / count
        better = self.kept is None or accuracy > self.kept[0]
        if split == "valid" and math.isfinite(loss) and better:
            weights = {name: x.detach().clone() for name, x in model.state_dict().items()}
            self.kept = accuracy, weights
        return {"loss": loss / count, "accuracy": accuracy}

    def note_memory(self, device: torch.device) -> None:
        """Call at the end of :meth:`prepare`: peaks of memory are counted from here."""
        if device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(device)
            self.data_mb = torch.cuda.memory_allocated(device) / 2**20


def tested(
    task: Classification, summary: Summary, config: TrainConfig, folder: Path | None
) -> dict[str, Any]:
    """Metrics on "test", once, with the weights that were best on "valid"."""
    model, best = summary.model, summary.best
    model.load_state_dict(_best_weights(task, summary, config, folder))
    dtype, device = AUTOCAST[config.precision], torch.device(summary.device)
    with torch.no_grad(), torch.autocast(device.type, dtype, enabled=dtype != torch.float32):
        metrics = task.evaluate(model.eval(), "test")
    return {
        **metrics,
        "valid_accuracy": None if best is None else best[0],
        "data_mb": task.data_mb,
    }


def _best_weights(
    task: Classification, summary: Summary, config: TrainConfig, folder: Path | None
) -> Mapping[str, Tensor]:
    """Those of the step that the run calls its best.

    A run that was continued has forgotten what it was before; its folder has not.
    """
    last = summary.model.state_dict()
    if summary.best is None or summary.best[1] == summary.steps:
        return last
    step = summary.best[1]
    if step == 0:
        return task.build().state_dict()
    stored = None if folder is None else checkpoint.place(Path(folder) / "checkpoints", step)
    if stored is not None and stored.exists():
        return {**last, **_stored_weights(stored, identity(task, config))}
    if step > summary.resumed and task.kept is not None:  # it was this process that found it
        return task.kept[1]
    raise ValueError(
        f"{folder} has no checkpoint of step {step}, the best on validation, so the run cannot be "
        "tested; remove the folder to train again, with save_every (--save-every) to keep the best"
    )


def _stored_weights(stored: Path, owner: str) -> Mapping[str, Tensor]:
    reason = checkpoint.fault(stored, owner, unread=(checkpoint.OPTIMIZER,))
    if reason is not None:
        raise ValueError(
            f"checkpoint {stored} is the best on validation and cannot be tested: {reason}; copy "
            "it again, or remove the folder of the run to train again"
        )
    return checkpoint.Checkpoint(stored, {}).tensors(checkpoint.MODEL)


def curves(folder: Path | None) -> dict[str, Any]:
    """Thinned curves of a run, for its row: accuracy, loss scale, α and β per layer."""
    if folder is None:
        return {}
    found: dict[str, Any] = {}
    rows = read_rows(folder / CURVE) if (folder / CURVE).exists() else []
    evaluations = [row for row in rows if row["kind"] == "eval"]
    found["valid"] = _columns(thinned(evaluations), ("step", "loss", "accuracy"))
    scaled = [row for row in rows if row["kind"] == "train" and row["loss_scale"] is not None]
    if scaled:
        found["loss_scale"] = _columns(thinned(scaled, 4 * POINTS), ("step", "loss_scale"))
    if (folder / MONITOR).exists():
        found |= _scales(read_rows(folder / MONITOR))
    return found


def thinned(rows: Sequence[Any], points: int = POINTS) -> list[Any]:
    """At most so many of the rows, evenly spread, with the first and the last."""
    if len(rows) <= points:
        return list(rows)
    return [rows[round(i * (len(rows) - 1) / (points - 1))] for i in range(points)]


def _columns(rows: Sequence[Row], names: Sequence[str]) -> dict[str, list[Any]]:
    return {name: [row[name] for row in rows] for name in names}


def _scales(rows: Sequence[Row]) -> dict[str, Any]:
    """α and β of each layer, the mean over its heads, at the steps that were measured."""
    measured = [row for row in rows if row.get("alpha") is not None]
    if not measured:
        return {}
    steps = thinned(sorted({row["step"] for row in measured}))
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
