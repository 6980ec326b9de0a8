"""The measured block of docs/results/conversion.md beside its table: loss by position."""

from __future__ import annotations

from pathlib import Path

from lln.study.paper.pages.blocks import NOTHING_YET, Blocks, markdown_table
from lln.study.paper.results import Row, origin_text, read


def positions(results: Path) -> str:
    """Nats a token against the tokens before it, of converted decoders and their teachers."""
    found = [row for row in _rows(results) if row.get("loss_by_position")]
    if not found:
        return NOTHING_YET
    edges = [(part["from"], part["to"]) for part in found[0]["loss_by_position"]["teacher"]]
    lines = []
    for row in found:
        for name, words in (("teacher", "softmax"), ("student", _words(row))):
            parts = row["loss_by_position"][name]
            if [(part["from"], part["to"]) for part in parts] == edges:
                line = [f"{row['model']}, {words}", *(f"{part['nll']:.2f}" for part in parts)]
                lines += [line] if line not in lines else []
    names = ["tokens before", *(f"{first:,}–{last:,}" for first, last in edges)]
    words = f"Mean −ln p of a token in windows of {edges[-1][1] + 1:,}. ({origin_text(found)})"
    return f"{markdown_table(names, lines)}\n\n{words}"


def _rows(results: Path) -> list[Row]:
    return read(results, "conversion") if (results / "conversion.jsonl").exists() else []


def _words(row: Row) -> str:
    kept = f", {len(row['kept'])} layers kept" if row["kept"] else ""
    return f"{row['attention']}, {row['recover_steps']} updates of recovery{kept}"


BLOCKS: Blocks = {"conversion_positions": positions}
