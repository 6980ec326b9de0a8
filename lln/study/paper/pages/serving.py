"""The measured block of docs/guide/serving.md, from ``results/serving…json``."""

from __future__ import annotations

from pathlib import Path

from lln.study.paper.pages.blocks import NOTHING_YET, Blocks, latest, markdown_table, origin
from lln.study.plots.numbers import three_digits


def serving(results: Path) -> str:
    """Time of a step and size of the seats against the length of the streams, beside softmax."""
    content = latest(results, "serving")
    if content is None:
        return NOTHING_YET
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
