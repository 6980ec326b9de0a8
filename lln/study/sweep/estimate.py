"""How long a run of a sweep will take, from the rows of runs like it."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lln.records.rows import Row, read_rows
from lln.study.sweep.jobs import Key, Spec
from lln.study.train.runlog import key_of

# Fields that make runs alike, where the spec names them; of these, some may be lists, a row each.
ALIKE = ("recipe", "task", "steps", "epochs", "batch_size", "length", "rates")
LISTS = {"length": "lengths", "task": "task", "seed": "seed", "attention": "attentions"}
# Among the runs that are alike, those with the same value tell most, if there are any.
PREFERRED = ("attention", "seed")


def known_seconds(spec: Spec, keys: Sequence[Key], results: Path) -> float | None:
    """The sum over the rows that are still to be written, each as slow as the slowest like it.

    A row that nothing is like counts as the slowest of the others; None if nothing is known at all.
    A run that has all its rows would be run again as a whole, for what follows it.
    """
    if not results.exists():
        return None
    rows = read_rows(results)
    there = {key_of(row) for row in rows}
    parts = _parts(spec)
    left = [part for part, key in zip(parts, keys, strict=True) if tuple(key) not in there]
    known = [_slowest(part, rows) for part in left or parts]
    found = [seconds for seconds in known if seconds is not None]
    if not found:
        return None
    return sum(max(found) if seconds is None else seconds for seconds in known)


def _parts(spec: Spec) -> list[dict[str, Any]]:
    """What each row of a run will say in its configuration, in the order of its keys."""
    fixed = {name: spec[name] for name in (*ALIKE, *PREFERRED) if name in spec}
    fixed.setdefault("seed", 0)
    several = {
        name: spec[plural]
        for name, plural in LISTS.items()
        if isinstance(spec.get(plural), list) and spec[plural]
    }
    points = itertools.product(*several.values())
    return [{**fixed, **dict(zip(several, point, strict=True))} for point in points]


def _slowest(part: dict[str, Any], rows: Sequence[Row]) -> float | None:
    def those(rows: Sequence[Row], *names: str) -> list[Row]:
        asked = [name for name in names if name in part]
        said = [(row, row.get("configuration") or {}) for row in rows]
        return [row for row, own in said if all(own.get(name) == part[name] for name in asked)]

    alike = those(rows, *ALIKE)
    for name in PREFERRED:
        alike = those(alike, name) or alike
    return max((row["seconds"] for row in alike if "seconds" in row), default=None)
