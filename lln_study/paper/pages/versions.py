"""The versions that were tried, from the rows of ``make test-versions``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lln_study.paper.pages.blocks import NOTHING_YET, Blocks, listed


def _rows(results: Path) -> list[dict[str, Any]]:
    path = results / "versions.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def versions(results: Path) -> str:
    """A line per combination: how many of its tests passed, or why there was none."""
    shown = []
    for row in _rows(results):
        parts = row.get("parts", {}).values()
        passed = sum(part["passed"] for part in parts)
        total = passed + sum(part["failed"] for part in parts)
        shown.append({**row, "count": f"{passed} of {total}" if total else "–"})
    columns = {
        "": "{name}",
        "Python": "{python}",
        "torch": "{torch}",
        "transformers": "{transformers}",
        "tests passed": "{count}",
        "outcome": "{outcome}",
        "machine": "{machine}",
        "when": "{date}, {commit}",
    }
    return listed(shown, columns) if shown else NOTHING_YET


def tested(results: Path) -> str:
    """The same in a sentence, of what passed."""
    found: dict[tuple[str, str], set[str]] = {}
    for row in _rows(results):
        if row["outcome"] == "green":
            place = row["torch"].partition("+")[0], row["python"]
            found.setdefault(place, set()).add(row["transformers"])
    said = [
        f"{torch} with transformers {' and '.join(sorted(names))} on Python {python}"
        for (torch, python), names in found.items()
    ]
    return f"Tested with torch {', '.join(said)}." if said else NOTHING_YET


BLOCKS: Blocks = {"versions": versions, "tested": tested}
