"""What a run leaves to read: curves in its folder, and one result row in a file of results.

Curves are ``curve.jsonl`` (rows of kind "train" and "eval") and ``monitor.jsonl`` (rows of
attention heads), also written for TensorBoard. A run that is resumed cuts them back to the step it
resumes from, so that they end up as if it had never stopped.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from lln.records import files, machine
from lln.records.rows import Row, RowFile, number, read_rows, thinned
from lln_study.train.config import TrainConfig

T = TypeVar("T")
CURVE, MONITOR = "curve.jsonl", "monitor.jsonl"


class RunLog:
    """The curves of a run.

    Args:
        folder: Of the run.
        step: Updates done so far: later rows of an interrupted run are removed.
        tensorboard: Also write event files, if the package is there.
    """

    def __init__(self, folder: Path, *, step: int = 0, tensorboard: bool = True) -> None:
        _cut(folder / CURVE, lambda row: step > 0 and row["step"] <= step)
        _cut(folder / MONITOR, lambda row: row["step"] < step)
        self._curve, self._monitor = RowFile(folder / CURVE), None
        self._folder = folder
        self._writer = _writer(folder / "tensorboard", step) if tensorboard else None

    def curve(self, row: Mapping[str, Any]) -> None:
        """Append a row with ``kind``, ``step`` and numbers; NaN and infinity become None."""
        clean = {name: _finite(value) for name, value in row.items()}
        self._curve.write([clean])
        self._scalars(clean, prefix=f"{clean.get('kind', 'train')}/")

    def monitor(self, rows: list[Row]) -> None:
        """Append rows of :func:`lln.instruments.monitor`."""
        if self._monitor is None:
            self._monitor = RowFile(self._folder / MONITOR)
        self._monitor.write(rows)
        for row in rows:
            self._scalars(row, suffix=f"/layer {row['layer']}/head {row['head']}")

    def close(self) -> None:
        self._curve.close()
        if self._monitor is not None:
            self._monitor.close()
        if self._writer is not None:
            self._writer.close()

    def _scalars(self, row: Mapping[str, Any], *, prefix: str = "", suffix: str = "") -> None:
        if self._writer is None:
            return
        for name, value in row.items():
            if isinstance(value, float):
                self._writer.add_scalar(f"{prefix}{name}{suffix}", value, row["step"])


def _finite(value: Any) -> Any:
    return number(value) if isinstance(value, float) else value


def _cut(path: Path, keep: Callable[[Row], bool]) -> None:
    """Leave only the rows that hold; the file is replaced at once."""
    if not path.exists():
        return
    kept = [row for row in read_rows(path) if keep(row)]
    files.write_text(path, "".join(json.dumps(row) + "\n" for row in kept))


def _writer(folder: Path, step: int) -> Any:
    try:
        from torch.utils.tensorboard import SummaryWriter
    except ImportError:
        return None
    return SummaryWriter(str(folder), purge_step=step or None)


def result_row(
    subject: str,
    config: TrainConfig,
    settings: Mapping[str, Any],
    metrics: Mapping[str, Any],
    *,
    seconds: float,
    device: str,
) -> Row:
    """A row that says all that is needed to judge and repeat it.

    ``shared`` says that other runs may have used the device at the same time, so that its speed
    says nothing: a sweep of several jobs sets it (:mod:`lln_study.sweep`).

    Args:
        subject: "mlm", "glue", "vit", "lra" or "step".
        settings: Those of the task, kept in ``configuration`` beside the fields of ``config``.
        metrics: Columns of their own, such as ``loss``, ``accuracy``, ``tokens_per_second``.
    """
    return {
        "subject": subject,
        "mechanism": config.attention,
        **{name: _finite(value) for name, value in metrics.items()},
        "seed": config.seed,
        "configuration": {**config.as_dict(), **settings},
        "digest": config.digest(settings),
        **machine.facts(device),
        "transformers": machine.version("transformers"),
        "shared": False,
        "seconds": round(seconds, 2),
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
    }


def thinned_curve(rows: Sequence[Row], steps: int = 200) -> list[Row]:
    """Keep rows of at most so many steps, and all evaluations, of a long curve."""
    kept = {*thinned(sorted({row["step"] for row in rows if row.get("kind") != "eval"}), steps)}
    return [row for row in rows if row.get("kind") == "eval" or row["step"] in kept]
