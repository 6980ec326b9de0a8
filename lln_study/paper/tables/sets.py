"""Tables as sets of rows: accuracy and loss against the rows of a context, on real tables, cost."""

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
    """Of each kind of generated tables one, one of the real ones, and one of time and memory."""
    fitted = [row for row in rows if row["subject"] == "table_fitted"]
    found = []
    for same in of_each_model(rows):
        kinds = same[0]["configuration"]["test_kinds"]
        found += [_against_rows(same, kind) for kind in kinds]
        if any(row.get("real") for row in same):
            found.append(_real(same, fitted))
    costs = sorted((row for row in rows if row["subject"] == "table_cost"), key=in_paper_order)
    return [*found, _cost(costs)] if costs else found


def of_each_model(rows: Sequence[Row]) -> list[list[Row]]:
    """Runs by model and budget, the largest first."""
    own = [row for row in rows if row["subject"] == "table"]
    models = grouped(
        sorted(own, key=in_paper_order),
        lambda row: str([row["configuration"].get(name) for name in SCALE]),
    )
    return sorted(models.values(), key=_size, reverse=True)


def _size(same: Sequence[Row]) -> tuple[int, ...]:
    return tuple(same[0]["configuration"][name] for name in ("width", "layers", "steps"))


def sizes_of(rows: Sequence[Row]) -> str:
    """Of one model: "6 layers × 256"."""
    return "{layers} layers × {width}".format(**rows[0]["configuration"])


def _title(what: str, rows: Sequence[Row]) -> str:
    about = rows[0]["configuration"]
    return (
        f"{what}: {sizes_of(rows)}, {about['heads']} heads, "
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


def _cost(rows: Sequence[Row]) -> Table:
    sizes = sorted({row["configuration"]["rows"] for row in rows})
    lines, records = [], []
    for name, same in _by_mechanism(rows):
        by_size = {row["configuration"]["rows"]: row for row in same}
        lines.append([name, *(_cost_cell(by_size.get(size)) for size in sizes)])
        names = ("remember_seconds", "answer_ms", "memory_mb")
        values = {x: [by_size.get(size, {}).get(x) for size in sizes] for x in names}
        records.append({**record(name, same), "rows": sizes, **values})
    questions = rows[0]["configuration"]["questions"]
    notes = [
        f"Seconds to read a context / milliseconds to answer {questions:,} questions / MB kept. "
        "ELU keeps keys and values here, as softmax does, and sums over them for every "
        "65,536 rows; a state as LLN has it would serve it as well.",
        origin_text(rows),
    ]
    columns = ["", *(f"{size:,} rows" for size in sizes)]
    return Table(columns, lines, "Time and memory, random weights", notes, records)


def _cost_cell(row: Row | None) -> str:
    if row is None:
        return ""
    if row["out_of_memory"]:
        return "out of memory"
    values = (row[name] for name in ("remember_seconds", "answer_ms", "memory_mb"))
    return " / ".join(f"{x:,.0f}" if x >= 100 else f"{x:.2g}" for x in values)


def _by_mechanism(rows: Sequence[Row]) -> list[tuple[str, list[Row]]]:
    groups = grouped(rows, lambda row: (mechanism(row), options(row)))
    return [(name, same) for (name, _), same in groups.items()]
