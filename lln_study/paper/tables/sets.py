"""Tables as sets of rows: accuracy and loss against the rows of a context, and on real tables."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lln.report.page import Table
from lln_study.paper.results import (
    Mean,
    Row,
    grouped,
    in_paper_order,
    mechanism,
    options,
    origin_text,
    record,
    shown,
)

SCALE = ("layers", "width", "heads", "steps", "batch_size", "most", "kinds", "test_rows", "data")
WORDS = {"network": "networks", "cells": "cells", "tree": "trees", "linear": "linear scores"}


def tables(rows: Sequence[Row]) -> list[Table]:
    """Of each kind of generated tables one, and one of the real ones."""
    own = sorted((row for row in rows if row["subject"] == "table"), key=in_paper_order)
    fitted = [row for row in rows if row["subject"] == "table_fitted"]
    scales = grouped(own, lambda row: str([row["configuration"].get(name) for name in SCALE]))
    found = []
    for same in scales.values():
        kinds = same[0]["configuration"]["test_kinds"]
        found += [_against_rows(same, kind) for kind in kinds]
        if any(row.get("real") for row in same):
            found.append(_real(same, fitted))
    return found


def _title(what: str, rows: Sequence[Row]) -> str:
    about = rows[0]["configuration"]
    return (
        f"{what}: {about['layers']} layers × {about['width']}, {about['heads']} heads, "
        f"{about['steps']:,} updates of {about['batch_size']} tables with {about['least']} to "
        f"{about['most']:,} rows"
    )


def _against_rows(rows: Sequence[Row], kind: str) -> Table:
    sizes = rows[0]["configuration"]["test_rows"]
    cases = [f"{kind}_{size}" for size in sizes]
    first = [shown(Mean.of([rows[0][f"neighbours_{case}"]]), 1, 100) for case in cases]
    lines, records = [["k nearest neighbours", *first]], []
    for name, same in _by_mechanism(rows):
        means: dict[str, dict[str, Mean | None]] = {
            each: {case: Mean.of(row[f"{each}_{case}"] for row in same) for case in cases}
            for each in ("accuracy", "loss")
        }
        cells = [
            f"{shown(means['accuracy'][case], 1, 100)} / {shown(means['loss'][case], 3)}"
            for case in cases
        ]
        lines.append([name, *cells])
        values = {
            each: [None if mean is None else mean.value for mean in of.values()]
            for each, of in means.items()
        }
        records.append({**record(name, same), "kind": kind, "rows": sizes, **values})
    notes = [
        "Accuracy in % / loss of questions, by rows of the context; ± is the standard error over "
        "seeds. All see the same tables, at every size.",
        origin_text(rows),
    ]
    columns = ["", *(f"{size:,} rows" for size in sizes)]
    return Table(columns, lines, _title(f"Generated tables, {WORDS[kind]}", rows), notes, records)


def _real(rows: Sequence[Row], fitted: Sequence[Row]) -> Table:
    names = list(next(row["real"] for row in rows if row.get("real")))

    def line(name: str, same: Sequence[Row]) -> tuple[list[str], dict[str, Any]]:
        means = [Mean.of(row["real"].get(table) for row in same) for table in names]
        values = [None if mean is None else mean.value for mean in means]
        about = {**record(name, same), "tables": names, "accuracy": values}
        return [name, *(shown(mean, 1, 100) for mean in means)], about

    found = [line(name, same) for name, same in _by_mechanism(rows)]
    found += [line(row["mechanism"], [row]) for row in fitted]
    notes = [
        "Accuracy in %, mean over splits into halves. Models see the context and learn nothing "
        "from it; scikit-learn's classifiers are fitted to it, with their defaults.",
        origin_text(rows),
    ]
    columns = ["", *(name.replace("_", " ") for name in names)]
    lines, records = [list(x) for x, _ in found], [about for _, about in found]
    return Table(columns, lines, _title("Real tables", rows), notes, records)


def _by_mechanism(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    groups = grouped(rows, lambda row: (mechanism(row), options(row)))
    return [(name, same) for (name, _), same in groups.items()]
