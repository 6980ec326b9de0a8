"""Table 4: time and memory of training on the Long Range Arena, the paper's numbers below ours."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

from lln.report.numbers import three_digits
from lln.report.page import Table
from lln_study.paper.results import Row, grouped, in_paper_order, origin_text, record
from lln_study.paper.tables.arena import NAMES, name_of
from lln_study.paper.values import ARENA, TABLE_4_MB, TABLE_4_SECONDS, Numbers

PRINTED_AS = {"softmax_eager": "softmax"}  # the paper's softmax builds its matrix
SETTING = ("layers", "width", "heads", "precision", "compile", "graph")


def tables(rows: Sequence[Row]) -> list[Table]:
    """One for each device, precision and way of running."""
    timed = [row for row in rows if row["subject"] == "lra_step"]
    keys = grouped(timed, lambda row: (*map(row["configuration"].get, SETTING), row["device"]))
    return [_table(own) for own in keys.values()]


def _table(rows: list[Row]) -> Table:
    tasks = [task for task in NAMES if any(row["configuration"]["task"] == task for row in rows)]
    ordered = sorted(rows, key=in_paper_order)
    groups = grouped(ordered, lambda row: (_name(row), row["mechanism"]))
    cells = {key: {row["configuration"]["task"]: row for row in own} for key, own in groups.items()}
    lines = [
        *_block(cells, tasks, "time, ms a step", _time, TABLE_4_SECONDS, "s in all"),
        *_block(cells, tasks, "memory, MiB", _memory, TABLE_4_MB, "MB"),
    ]
    about = rows[0]["configuration"]
    compiled = "compiled" if about.get("compile") else "not compiled"
    batches = ", ".join(
        f"{NAMES[task]} {own['configuration']['batch_size']}"
        for task in tasks
        for own in rows
        if own["configuration"]["task"] == task and own is _first(rows, task)
    )
    notes = [
        "A step is forward, backward and update; memory is the peak that torch allocated, less "
        "the data that lie on the device.",
        f"Rows of a step: {batches}. The paper gives seconds of 50,000 steps on its device.",
        "Retrieval (stand-in) has the shape of the official task: pairs of 4,000 bytes."
        if "retrieval_wiki" in tasks
        else "",
        origin_text(rows),
    ]
    title = (
        f"Table 4 on this hardware: training {about['layers']} layers × {about['width']}, "
        f"{about['precision']}, {compiled}, "
        f"{'replayed from CUDA graphs' if about.get('graph') else 'launched kernel by kernel'}"
    )
    columns = ["", *(NAMES[task] for task in tasks)]
    records = [_record(name, own) for (name, _), own in cells.items()]
    return Table(columns, lines, title, [note for note in notes if note], records)


def _name(row: Row) -> str:
    """Name a mechanism; two kinds of softmax, which differ in cost alone, are told apart."""
    return f"{name_of(row)} (SDPA)" if row["mechanism"] == "softmax" else name_of(row)


def _first(rows: list[Row], task: str) -> Row:
    return next(row for row in rows if row["configuration"]["task"] == task)


def _block(
    cells: dict[Any, dict[str, Row]],
    tasks: list[str],
    what: str,
    show: Callable[[Row | None], str],
    printed: Numbers,
    unit: str,
) -> list[list[str]]:
    lines = []
    for (name, word), own in cells.items():
        lines.append([f"{name}: {what}", *(show(own.get(task)) for task in tasks)])
        numbers = printed.get(PRINTED_AS.get(str(word), str(word)))
        if numbers is not None and word != "softmax":
            known = dict(zip(ARENA, numbers, strict=True))
            known["retrieval_wiki"] = known["retrieval"]
            values = (known.get(task) for task in tasks)
            shown = ["" if value is None else f"{value:,.0f}" for value in values]
            lines.append([f"  in the paper, {unit}", *shown])
    return lines


def _time(row: Row | None) -> str:
    if row is None:
        return "–"
    return "OOM" if row["out_of_memory"] else three_digits(row["step_ms"])


def own_memory(row: Row) -> float | None:
    """Return the peak of memory without the data."""
    peak = row.get("peak_mb")
    return None if peak is None else peak - (row.get("data_mb") or 0)


def _memory(row: Row | None) -> str:
    if row is None:
        return "–"
    return "OOM" if row["out_of_memory"] else three_digits(own_memory(row)) or "–"


def _record(name: str, own: dict[str, Row]) -> dict[str, Any]:
    rows = list(own.values())
    return {
        **record(name, rows),
        "milliseconds": {task: row.get("step_ms") for task, row in own.items()},
        "memory_mb": {task: own_memory(row) for task, row in own.items()},
        "out_of_memory": [task for task, row in own.items() if row["out_of_memory"]],
        "configurations": {task: row["configuration"] for task, row in own.items()},
    }
