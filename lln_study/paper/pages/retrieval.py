"""Concentration and targets found by formulas, and whether a model learns to find them."""

from __future__ import annotations

from pathlib import Path

from lln_study.paper.pages.blocks import NOTHING_YET, Blocks, cells, crossed, latest, origin
from lln_study.paper.results import in_paper_order, origin_text, read
from lln_study.paper.tables.arena import shown

FOLDER = "retrieval_short"  # of the rows of sweeps/retrieval_short_cpu.json


def concentration(results: Path) -> str:
    """Entropy and spectral gap at some temperatures, and the share of targets found."""
    content = latest(results, "demo")
    if content is None:
        return NOTHING_YET
    rows = sorted(content["concentration"], key=lambda row: row["temperature"])
    found = cells(rows, "{kernel}", "τ = {temperature:g}", "{entropy:.2f} / {spectral_gap:.2f}")
    found |= cells(content["retrieval"], "{kernel}", "targets found", "{found:.0%}")
    made = crossed("entropy (bits) / spectral gap", found)
    return f"{made}\n\n({origin(rows)}, {content['date']})"


def retrieval_short(results: Path) -> str:
    """Accuracy on validation while small models train on a CPU, and on test."""
    rows = sorted(read(results / FOLDER, "lra"), key=in_paper_order)
    if not rows:
        return NOTHING_YET
    found = {}
    for row in rows:
        curve = row["curves"]["valid"]
        for step, accuracy in zip(curve["step"], curve["accuracy"], strict=True):
            found[shown(row), f"{step:,}"] = f"{100 * accuracy:.1f}"
        found[shown(row), "test"] = f"{100 * row['accuracy']:.1f}"
    return f"{crossed('accuracy, %, after updates', found)}\n\n({origin_text(rows)})"


BLOCKS: Blocks = {"concentration": concentration, "retrieval_short": retrieval_short}
