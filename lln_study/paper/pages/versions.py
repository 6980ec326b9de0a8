"""The versions that were tried, from the rows of ``make test-versions``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lln_study.paper.pages.blocks import NOTHING_YET, Blocks, markdown_table


def _rows(results: Path) -> list[dict[str, Any]]:
    path = results / "versions.json"
    return json.loads(path.read_text(encoding="utf-8")) if path.exists() else []


def versions(results: Path) -> str:
    """A line per combination: how many of its tests passed, or why there was none."""
    rows = _rows(results)
    if not rows:
        return NOTHING_YET
    lines = []
    for row in rows:
        parts = row.get("parts", {}).values()
        passed = sum(part["passed"] for part in parts)
        total = passed + sum(part["failed"] for part in parts)
        tried = [row["name"], row["python"], row["torch"], row["transformers"]]
        count = f"{passed} of {total}" if total else "–"
        lines.append([*tried, count, row["outcome"], f"{row['date']}, {row['commit']}"])
    names = ["", "Python", "torch", "transformers", "tests passed", "outcome", "when"]
    parts = ", ".join(next((row["parts"] for row in rows if "parts" in row), {}))
    machines = ", ".join(dict.fromkeys(row["machine"] for row in rows))
    return f"{markdown_table(names, lines)}\n\nParts of the suite ({parts}) on a CPU ({machines})."


def tested(results: Path) -> str:
    """The same in a sentence, of what passed."""
    green = [row for row in _rows(results) if row["outcome"] == "green"]
    if not green:
        return NOTHING_YET
    found: dict[tuple[str, str], set[str]] = {}
    for row in green:
        place = row["torch"].partition("+")[0], row["python"]
        found.setdefault(place, set()).add(row["transformers"])
    said = [
        f"{torch} with transformers {' and '.join(sorted(names))} on Python {python}"
        for (torch, python), names in found.items()
    ]
    return f"Tested with torch {', '.join(said)}."


BLOCKS: Blocks = {"versions": versions, "tested": tested}
