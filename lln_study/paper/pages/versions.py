"""The versions that were tried, from the rows of ``make test-versions``."""

from __future__ import annotations

import json
from pathlib import Path

from lln_study.paper.pages.blocks import NOTHING_YET, Blocks, listed

COLUMNS = {
    "": "{name}",
    "Python": "{python}",
    "torch": "{torch}",
    "transformers": "{transformers}",
    "outcome": "{outcome}",
    "machine": "{machine}",
    "when": "{date}, {commit}",
}


def versions(results: Path) -> str:
    """A line per combination: whether its tests passed, or why there were none."""
    path = results / "versions.json"
    if not path.exists():
        return NOTHING_YET
    return listed(json.loads(path.read_text(encoding="utf-8")), COLUMNS)


BLOCKS: Blocks = {"versions": versions}
