"""The measured block of docs/guide/serving.md, from ``results/serving…json``."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from lln.report.numbers import three_digits
from lln_study.paper.pages.blocks import NOTHING_YET, Blocks, markdown_table, origin


def serving(results: Path) -> str:
    """Time of a step and size of the seats against the length of the streams, beside softmax.

    The newest run on a GPU, then the newest on a CPU.
    """
    found = sorted(results.glob("serving_*.json"), key=lambda path: path.stem.split("_")[-1])
    newest = {"cuda" if "nvidia" in path.stem else "cpu": path for path in found}
    if not newest:
        return NOTHING_YET
    shown = [newest[device] for device in ("cuda", "cpu") if device in newest]
    return "\n\n".join(_table(json.loads(path.read_text(encoding="utf-8"))) for path in shown)


def _table(content: dict[str, Any]) -> str:
    rows = content["rows"]
    names = ["seats", "tokens so far", "ours, ms", "softmax, ms", "softmax ÷ ours"]
    names += ["ours, MiB", "softmax, MiB"]
    lines = [
        [
            f"{row['seats']}",
            f"{row['tokens']:,}",
            three_digits(row["ours_ms"]),
            three_digits(row["softmax_ms"]),
            f"{row['ratio']:.2f}×",
            f"{row['ours_bytes'] / 2**20:,.1f}",
            f"{row['softmax_bytes'] / 2**20:,.1f}",
        ]
        for row in rows
    ]
    first = rows[0]
    words = (
        f"Medians of {first['steps']} steps that alternate; a step gives each stream a token. "
        f"({first['configuration']}; {origin(first)}, {content['date']})"
    )
    return f"{markdown_table(names, lines)}\n\n{words}"


BLOCKS: Blocks = {"serving": serving}
