"""Whether the short stand-in for Retrieval is learned: a block of the Long Range Arena's page."""

from __future__ import annotations

from pathlib import Path

from lln_study.paper.pages.blocks import NOTHING_YET, Blocks, markdown_table
from lln_study.paper.results import in_paper_order, origin_text, read
from lln_study.paper.tables.arena import shown

FOLDER = "retrieval_short"  # of the rows of sweeps/retrieval_short_cpu.json


def retrieval_short(results: Path) -> str:
    """Accuracy on validation while small models train on a CPU, and on test."""
    folder = results / FOLDER
    rows = sorted(read(folder, "lra"), key=in_paper_order) if folder.exists() else []
    if not rows:
        return NOTHING_YET
    curves = [row["curves"]["valid"] for row in rows]
    steps = curves[0]["step"]
    lines = [
        [
            shown(row),
            *(f"{100 * curve['accuracy'][curve['step'].index(step)]:.1f}" for step in steps),
            f"{100 * row['accuracy']:.1f}",
        ]
        for row, curve in zip(rows, curves, strict=True)
    ]
    of = rows[0]["configuration"]
    names = ["accuracy, %, after updates", *(f"{step:,}" for step in steps), "test"]
    words = (
        f"Validation on {of['validate_on']:,} pairs, test on {of['examples']['test']:,}; batch "
        f"{of['batch_size']}, rate {of['learning_rate']:g}, {of['precision']}, "
        f"{sum(row['seconds'] for row in rows) / 60:.0f} minutes on a CPU. ({origin_text(rows)})"
    )
    return f"{markdown_table(names, lines)}\n\n{words}"


BLOCKS: Blocks = {"retrieval_short": retrieval_short}
