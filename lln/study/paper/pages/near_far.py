"""The measured blocks of docs/guide/near-and-far.md, from ``results/near-far_…json``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from lln.study.paper.pages.blocks import NOTHING_YET, Blocks, latest, markdown_table, origin

Row = dict[str, Any]


def concentration(results: Path) -> str:
    """Bits and share of near keys against softmax's, for every size and temperature."""
    content = latest(results, "near-far")
    if content is None:
        return NOTHING_YET
    rows: Sequence[Row] = content["concentration"]
    temperatures = sorted({row["temperature"] for row in rows})
    cells = {(row["tokens"], row["head_dim"], row["temperature"]): row for row in rows}
    lines = []
    for tokens, head_dim in dict.fromkeys((row["tokens"], row["head_dim"]) for row in rows):
        line = [f"{tokens:,}, {head_dim}"]
        for temperature in temperatures:
            row = cells[tokens, head_dim, temperature]
            line.append(f"{row['entropy_difference']:+.2f} / {row['share_difference']:+.3f}")
        lines.append(line)
    names = ["N, D", *(f"τ = {t:g}" for t in temperatures)]
    words = (
        "Difference to softmax, mean of 20 draws: entropy of a row in bits / share of the mass on "
        f"near keys (blocks of 128). ({origin(rows[0])}, {content['date']})"
    )
    return f"{markdown_table(names, lines)}\n\n{words}"


def slots(results: Path) -> str:
    """Targets found against the number of slots."""
    content = latest(results, "near-far")
    if content is None:
        return NOTHING_YET
    rows: Sequence[Row] = content["retrieval"]
    counts = sorted({row["slots"] for row in rows if row["slots"]})
    found = {(row["feature_map"], row["slots"]): f"{row['found']:.0%}" for row in rows}
    lines = [
        [f'LLN, `"{name}"`', *(found.get((name, count), "–") for count in counts)]
        for name in ("rotations", "signs")
    ]
    lines.append(["softmax", *([found["softmax", None]] * len(counts))])
    words = (
        "Targets found: share of 512 queries (D = 64, τ = 1) whose largest weight is on the key "
        f"that they are a copy of. ({origin(rows[0])}, {content['date']})"
    )
    return f"{markdown_table(['slots', *map(str, counts)], lines)}\n\n{words}"


BLOCKS: Blocks = {"near_far": concentration, "near_far_slots": slots}
