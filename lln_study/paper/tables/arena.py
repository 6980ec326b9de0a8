"""Table 5: accuracy on the Long Range Arena, the paper's numbers below ours."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lln.report.page import Table
from lln_study.paper.accuracy import TESTED, at_best_rate, rate, rates_tried
from lln_study.paper.results import (
    PLAIN,
    Mean,
    Row,
    grouped,
    in_paper_order,
    mechanism,
    origin_text,
    record,
    shown,
    value,
)
from lln_study.paper.values import ARENA, TABLE_5

NAMES = {
    "text": "Text",
    "listops": "ListOps",
    "retrieval": "Retrieval",
    "retrieval_wiki": "Retrieval (stand-in)",
    "retrieval_short": "Retrieval (short stand-in)",
    "pathfinder": "Pathfinder",
    "image": "Image",
}
AVERAGED = ("text", "listops", "pathfinder", "image")  # what everyone can run
EQUAL = ("steps", "batch_size", "layers", "width", "heads", "pool", "precision", "data", "examples")


def tables(rows: Sequence[Row]) -> list[Table]:
    """One table; per task the setting that most mechanisms were trained in."""
    by_task = comparable(rows)
    return [_table(by_task)] if by_task else []


def comparable(rows: Sequence[Row]) -> dict[str, list[Row]]:
    """Per task, in the order of the table, the rows of the setting it compares."""
    own = [row for row in rows if row["subject"] == "lra"]
    by_task = {task: _comparable(found) for task, found in grouped(own, _task).items()}
    return {task: by_task[task] for task in NAMES if task in by_task}


def _task(row: Row) -> str:
    return row["configuration"]["task"]


def _comparable(rows: list[Row]) -> list[Row]:
    """Runs of equal steps and data: those of most mechanisms, of most steps among these."""
    settings = grouped(rows, lambda row: str([row["configuration"].get(name) for name in EQUAL]))
    return max(
        settings.values(),
        key=lambda own: (len({row["mechanism"] for row in own}), own[0]["configuration"]["steps"]),
    )


def _table(by_task: dict[str, list[Row]]) -> Table:
    everything = sorted((row for rows in by_task.values() for row in rows), key=in_paper_order)
    groups: dict[Any, dict[str, list[Row]]] = {}
    for row in everything:
        own = groups.setdefault((name_of(row), row["mechanism"]), {})
        own.setdefault(_task(row), []).append(row)
    columns = ["", *(NAMES[task] for task in by_task), "avg of 4"]
    lines, records = [], []
    for (name, word), own in groups.items():
        best = {task: at_best_rate(rows) for task, rows in own.items()}
        means = {task: Mean.of(row["accuracy"] for row in rows) for task, rows in best.items()}
        lines.append([name, *(shown(means.get(task), 2, 100) for task in by_task), _average(means)])
        if word in TABLE_5:
            lines.append(["  in the paper", *_printed(word, by_task)])
        records.append(_record(name, best, means))
    return Table(columns, lines, _title(by_task), _notes(by_task, everything), records)


def name_of(row: Row) -> str:
    """The mechanism; options that belong to the published setting are not named."""
    if row["mechanism"] in PLAIN:
        return mechanism(row)
    return mechanism({**row, "configuration": {**row["configuration"], "options": {}}})


def _average(means: dict[str, Mean | None]) -> str:
    known = [means.get(task) for task in AVERAGED]
    if any(mean is None for mean in known):
        return "–"
    return f"{25 * sum(mean.value for mean in known if mean is not None):.2f}"


def _printed(word: str, by_task: dict[str, list[Row]]) -> list[str]:
    own = dict(zip(ARENA, TABLE_5[word], strict=True))
    cells = [f"{own[task]:.2f}" if task in own else "" for task in by_task]
    average = sum(own[task] or 0 for task in AVERAGED) / 4
    return [*cells, f"{average:.2f}"]


def _title(by_task: dict[str, list[Row]]) -> str:
    steps = {rows[0]["configuration"]["steps"] for rows in by_task.values()}
    few = f"{min(steps):,}" if len(steps) == 1 else f"{min(steps):,} to {max(steps):,}"
    return f"Table 5: accuracy on the Long Range Arena, %, {few} steps (paper: 50,000)"


def _notes(by_task: dict[str, list[Row]], everything: list[Row]) -> list[str]:
    setting = "; ".join(
        f"{NAMES[task]}: {rows[0]['configuration']['steps']:,} steps of "
        f"{rows[0]['configuration']['batch_size']}, {rates_tried(rows)}, "
        f"{rows[0]['configuration']['data']}"
        for task, rows in by_task.items()
    )
    chosen = f"Of several learning rates, the best on validation is shown; {TESTED}"
    notes = [f"{setting}.", chosen]
    if "retrieval_wiki" in by_task and "retrieval" not in by_task:
        notes.append(
            "Retrieval (stand-in): do two passages of 4,000 bytes come from the same Wikipedia "
            "article? The official pairs may not be redistributed."
        )
    if "retrieval_short" in by_task:
        notes.append(
            "Retrieval (short stand-in): do two passages of 64 bytes share 48 of them, or come "
            "from two articles?"
        )
    return [*notes, "avg of 4: Text, ListOps, Pathfinder, Image.", origin_text(everything)]


def _record(name: str, best: dict[str, list[Row]], means: dict[str, Mean | None]) -> dict[str, Any]:
    rows = [row for own in best.values() for row in own]
    printed = TABLE_5.get(rows[0]["mechanism"])
    return {
        **record(name, rows),
        **{task: value(mean) for task, mean in means.items()},
        "standard_errors": {
            task: None if mean is None else mean.error for task, mean in means.items()
        },
        "paper": None if printed is None else dict(zip(ARENA, printed, strict=True)),
        "learning_rates": {task: rate(own[0]) for task, own in best.items()},
        "configurations": {task: own[0]["configuration"] for task, own in best.items()},
    }
