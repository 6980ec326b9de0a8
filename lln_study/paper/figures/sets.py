"""Tables as sets of rows: accuracy, time and memory against the rows of a context."""

from __future__ import annotations

from collections.abc import Sequence

from lln.report.canvas import Axis
from lln.report.panels import Curve, Panel
from lln_study.paper.results import Mean, Row, grouped, in_paper_order, mechanism
from lln_study.paper.tables.sets import WORDS, of_each_model, sizes_of

ROWS = Axis("rows of the context", log=True)
LEFT_OUT = {"landmarks", "learn_scale"}  # options whose variants stand in the table alone


def panels(rows: Sequence[Row]) -> list[Panel]:
    """Accuracy of each model on each kind of generated tables, then what a context costs."""
    rows = [row for row in rows if not LEFT_OUT & set(row["configuration"].get("options") or ())]
    models = of_each_model(rows)
    costs = sorted((row for row in rows if row["subject"] == "table_cost"), key=in_paper_order)
    drawn = sorted([*(row for same in models for row in same), *costs], key=in_paper_order)
    names = list(dict.fromkeys(mechanism(row) for row in drawn))
    found = [
        _accuracy(same, names, kind)
        for same in models
        for kind in same[0]["configuration"]["test_kinds"]
    ]
    if costs:
        read = Axis("seconds to read the context", log=True)
        found.append(_cost(costs, names, "Reading a context", "remember_seconds", read))
        kept = Axis("MB kept for questions", log=True)
        found.append(_cost(costs, names, "What is kept of a context", "memory_mb", kept))
    return found


def _accuracy(rows: Sequence[Row], names: Sequence[str], kind: str) -> Panel:
    sizes = rows[0]["configuration"]["test_rows"]
    neighbours = [100 * rows[0][f"neighbours_{kind}_{size}"] for size in sizes]
    curves = [Curve("k nearest neighbours", sizes, neighbours, dashed=True)]
    for name, own in grouped(rows, mechanism).items():
        means = [Mean.of(row[f"accuracy_{kind}_{size}"] for row in own) for size in sizes]
        known = [(size, mean) for size, mean in zip(sizes, means, strict=True) if mean is not None]
        errors = [100 * (mean.error or 0) for _, mean in known] if len(own) > 1 else None
        x, y = [size for size, _ in known], [100 * mean.value for _, mean in known]
        curves.append(Curve(name, x, y, errors, slot=names.index(name), marker="o"))
    title = f"{WORDS[kind].capitalize()}, {sizes_of(rows)}"
    return Panel(title, curves, ROWS, Axis("accuracy, %"))


def _cost(rows: Sequence[Row], names: Sequence[str], title: str, column: str, y: Axis) -> Panel:
    curves = []
    for name, own in grouped(rows, mechanism).items():
        known = [(row["configuration"]["rows"], row[column]) for row in own if row.get(column)]
        known.sort()
        curves.append(
            Curve(
                name,
                [size for size, _ in known],
                [value for _, value in known],
                slot=names.index(name),
                marker="o",
            )
        )
    return Panel(title, curves, ROWS, y)
