"""One job of a sweep: what its fields ask for, which rows it will write, and running it."""

from __future__ import annotations

import contextlib
import gc
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import torch

from lln.records.rows import Row, append_row, has_row, read_rows
from lln_study.tasks import experiment
from lln_study.tasks.experiment import Asked, Key
from lln_study.tasks.pretrained import Pretrained
from lln_study.train.runlog import CURVE, MONITOR, thinned_curve

Spec = dict[str, Any]


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
        known: dict[str, Any] = {k: Path(x) if isinstance(x, str) else x for k, x in fields.items()}
        return Place(**known)

    def results(self, kind: str) -> Path:
        return self.out / f"{kind}.jsonl"

    def add(self, name: str, row: Row) -> None:
        """Append a row to a file unless it is there."""
        append_row(self.results(name), {**row, "shared": self.shared}, once=True)


def runs(kind: str, spec: Spec) -> tuple[str, list[Any]]:
    """Give the kind of experiment that a job asks for, and its configurations, a row each."""
    fields = {name: value for name, value in spec.items() if name not in ("from", "throughput")}
    found = experiment.find(kind)
    if spec.get("throughput") and found.IN_SWEEPS.throughput:
        kind = found.IN_SWEEPS.throughput
        found = experiment.find(kind)
    several = {
        name: value if isinstance(value := fields.pop(plural), list) else [value]
        for plural, name in found.IN_SWEEPS.lists.items()
        if fields.get(plural)
    }
    points = itertools.product(*several.values())
    each = [{**fields, **dict(zip(several, point, strict=True))} for point in points]
    return kind, [found.configure(**own) for own in each]


def keys(
    kind: str,
    spec: Spec,
    place: Place,
    pretrained: Pretrained | None = None,
    *,
    generate: bool = True,
) -> list[Key]:
    """Name the rows that a job will write, known before it runs; see :func:`data_of`."""
    kind, configs = runs(kind, spec)
    how = {"pretrained": pretrained, "generate": generate}
    found = experiment.find(kind)
    return [found.key(config, data_of(kind, config, spec, place, **how)) for config in configs]


def data_of(
    kind: str,
    config: Any,
    spec: Spec,
    place: Place,
    *,
    pretrained: Pretrained | None = None,
    generate: bool = True,
) -> Any:
    """Load the data of a configuration, once for all runs of a process that share them.

    Args:
        pretrained: What a fine-tuning will start from, where that is not there yet.
        generate: Whether data that are not there may be generated, which takes minutes.
    """
    found = experiment.find(kind)
    body = pretrained or place.source or spec.get("from")
    asked = Asked(place.data, body, generate)
    reads = {"source": place.data, **found.reads(config), **found.IN_SWEEPS.reads(config, asked)}
    return _load(kind, tuple(reads.items()))


@lru_cache(maxsize=8)
def _load(kind: str, reads: Sequence[tuple[str, Any]]) -> Any:
    return experiment.find(kind).load(**dict(reads))


def run(kind: str, spec: Spec, place: Place) -> None:
    """Run, or continue, what has no row yet, and append the rows."""
    path = place.results(kind)
    for name, row in made(kind, spec, place, is_done=lambda *key: has_row(path, *key)):
        place.add(name, row)


def made(
    kind: str, spec: Spec, place: Place, *, is_done: Callable[[str, int], bool]
) -> Iterator[tuple[str, Row]]:
    """Run, or continue, what has no row yet, and give each row with the name of its file."""
    experiment_kind, configs = runs(kind, spec)
    found = experiment.find(experiment_kind)
    with _cheap_collections():
        for config in configs:
            data = data_of(experiment_kind, config, spec, place)
            digest, seed = found.key(config, data)
            # A pre-training that has its row runs again for what follows it.
            if not found.IN_SWEEPS.is_followed and is_done(digest, seed):
                continue
            folder = place.folder / f"{digest}-seed{seed}" if len(configs) > 1 else place.folder
            row = found.run(config, data, folder=folder, tensorboard=False)
            yield kind, row
            if found.IN_SWEEPS.is_followed:
                yield from _curves(row, place.folder)
            gc.collect()
            if torch.cuda.is_available():
                torch.cuda.empty_cache()


def _curves(row: Row, folder: Path) -> Iterator[tuple[str, Row]]:
    """Give the curves of a run, thinned, as one line each beside what names its row."""
    names = ("subject", "mechanism", "digest", "seed", "shared", "configuration")
    for name in (CURVE, MONITOR):
        path = folder / name
        rows = thinned_curve(read_rows(path)) if path.exists() else []
        if rows:
            yield f"{path.stem}s", {**{key: row[key] for key in names}, "rows": rows}


@contextlib.contextmanager
def _cheap_collections() -> Iterator[None]:
    """Keep half a million objects that imports have made out of garbage collections.

    Recording a CUDA graph collects garbage, and every learning rate of a fine-tuning records one
    for each length.
    """
    gc.collect()
    gc.freeze()
    try:
        yield
    finally:
        gc.unfreeze()
