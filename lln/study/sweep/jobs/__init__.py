"""The kinds of runs that a sweep may hold, one per file, all called the same way.

    keys(spec, place) -> [(digest, seed), ...]     of the rows it will write, known before it runs
    run(spec, place)                               runs, or continues, and appends those rows

``spec`` is what the sweep file says: fields of the run's configuration. ``python -m
lln.study.sweep.jobs`` runs one of them in a process of its own.
"""

from __future__ import annotations

import importlib
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from lln.records.rows import Row
from lln.study.train.runlog import append_row

Spec = dict[str, Any]
Key = tuple[str, int]
KINDS = ("mlm", "glue", "step", "vit", "lra")


@dataclass(frozen=True)
class Place:
    """Where a job reads and writes.

    Attributes:
        data: Folder of the data; None looks at ``LLN_DATA``.
        out: Folder of the result rows, ``KIND.jsonl`` each.
        folder: Of the run itself, for checkpoints and curves.
        source: Of the pre-training that a fine-tuning starts from.
        shared: Whether other runs may use the device at the same time; rows say so, and no table
            shows their speed.
    """

    data: Path | None
    out: Path
    folder: Path
    source: Path | None = None
    shared: bool = False

    def to_json(self) -> dict[str, Any]:
        return {key: str(x) if isinstance(x, Path) else x for key, x in vars(self).items()}

    @staticmethod
    def from_json(fields: dict[str, Any]) -> Place:
        return Place(**{key: Path(x) if isinstance(x, str) else x for key, x in fields.items()})  # type: ignore[arg-type]

    def results(self, kind: str) -> Path:
        return self.out / f"{kind}.jsonl"

    def add(self, kind: str, row: Row) -> None:
        """Append a row unless it is there."""
        append_row(self.results(kind), {**row, "shared": self.shared}, once=True)

    def keep_curves(self, row: Row, name: str, curve: list[Row]) -> None:
        """Append a curve of a run as one line, beside what names its row."""
        if curve:
            names = ("subject", "mechanism", "digest", "seed", "shared", "configuration")
            line = {**{key: row[key] for key in names}, "shared": self.shared, "rows": curve}
            append_row(self.out / f"{name}.jsonl", line, once=True)


class Kind(Protocol):
    """A module of this package."""

    def keys(self, spec: Spec, place: Place) -> list[Key]: ...
    def run(self, spec: Spec, place: Place) -> None: ...


def find(kind: str) -> Kind:
    """The module of a kind of runs."""
    if kind not in KINDS:
        raise ValueError(f"run={kind!r} is unknown; choose from {', '.join(KINDS)}")
    return importlib.import_module(f"lln.study.sweep.jobs.{kind}")  # type: ignore[return-value]
