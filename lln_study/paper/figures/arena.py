"""Accuracy on validation while the models of Table 5 train: what a final number does not tell."""

from __future__ import annotations

from collections.abc import Sequence

from lln.report.canvas import Axis
from lln.report.panels import Curve, Panel
from lln_study.paper.accuracy import at_best_rate, rate
from lln_study.paper.results import Row, grouped, in_paper_order
from lln_study.paper.tables.arena import NAMES, comparable, name_of


def panels(rows: Sequence[Row]) -> list[Panel]:
    """A panel per task, a curve per mechanism: the first seed at the rate of the table."""
    by_task = comparable(rows)
    everything = [row for own in by_task.values() for row in own]
    names = list(dict.fromkeys(name_of(row) for row in sorted(everything, key=in_paper_order)))
    return [
        panel for task, own in by_task.items() if (panel := _panel(task, own, names)) is not None
    ]


def _panel(task: str, rows: Sequence[Row], names: Sequence[str]) -> Panel | None:
    curves, chosen = [], []
    found = grouped(rows, name_of)
    for slot, name in enumerate(names):
        best = at_best_rate(found[name]) if name in found else []
        drawn = [row for row in best if ((row.get("curves") or {}).get("valid") or {}).get("step")]
        if drawn:
            first = min(drawn, key=lambda row: row["seed"])
            valid = first["curves"]["valid"]
            accuracy = [100 * value for value in valid["accuracy"]]
            curves.append(Curve(name, valid["step"], accuracy, slot=slot))
            chosen.append(f"{name} {rate(first):g}")
    if not curves:
        return None
    note = f"Rates: {', '.join(chosen)}."
    return Panel(NAMES[task], curves, Axis("step"), Axis("accuracy on validation, %"), note)
