"""Table 5 as bars, for the start page of results."""

from __future__ import annotations

from pathlib import Path

from lln.report.canvas import Axis
from lln.report.panels import Curve, Panel
from lln_study.paper.tables import table as tables
from lln_study.paper.tables.arena import NAMES

FIRST = ("softmax", "lln_diag")  # have the colours that they have elsewhere
WIDE = 6  # most mechanisms that bars can tell apart


def panels(results: Path) -> list[Panel]:
    """Accuracy on each task of Table 5, of the mechanisms that were run on all of them."""
    drawn = []
    for table in tables.make("5", results)[:1]:
        tasks = [task for task in NAMES if task in table.records[0]]
        whole = [row for row in table.records if all(row.get(task) is not None for task in tasks)]
        first = [name for name in FIRST if any(row["mechanism"] == name for row in whole)]
        named = dict.fromkeys((*first, *(row["mechanism"] for row in whole)))
        slots = {name: slot for slot, name in enumerate(named)}
        curves = [
            Curve(
                row["name"],
                list(range(len(tasks))),
                [100 * row[task] for task in tasks],
                [100 * (row["standard_errors"][task] or 0) for task in tasks],
                slot=slots[row["mechanism"]],
            )
            for row in whole[:WIDE]
        ]
        if curves:
            names = [NAMES[task].replace(" (", "\n(") for task in tasks]
            x = Axis("", ticks=range(len(tasks)), names=names)
            accuracy = Axis("accuracy, %", limits=(0, None))
            drawn.append(Panel("Long Range Arena", curves, x, accuracy, bars=True))
    return drawn
