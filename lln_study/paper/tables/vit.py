"""Table 3: accuracy of the Vision Transformer, one table per model and data set."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from lln.report.numbers import three_digits
from lln.report.page import Table
from lln_study.paper.accuracy import at_best_rate, is_fixed, rate, rates_note
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
    value,
    was_alone,
)
from lln_study.paper.values import TABLE_3

SCALE = (
    *("recipe", "layers", "width", "heads", "patch", "side", "length", "steps", "batch_size"),
    *("precision", "data"),
)
COLUMNS = (
    "",
    "accuracy, %",
    "validation, %",
    "paper, %",
    "rate",
    "ms a step",
    "peak, MiB",
    "parameters",
)


def tables(rows: Sequence[Row]) -> list[Table]:
    """One for each model, number of steps and data set that mechanisms can be compared in.

    Runs for Fig. 10 are left out, and what has one line only, unless there is nothing else.
    """
    own = [row for row in rows if row["subject"] == "vit" and not is_fixed(row)]
    own = [row for row in own if row["configuration"]["recipe"] != "deit-tiny"]
    scales = grouped(own, lambda row: tuple(map(row["configuration"].get, SCALE)))
    found = [_table(same) for same in sorted(scales.values(), key=len, reverse=True)]
    return [table for table in found if len(table.lines) > 1] or found


def _table(rows: list[Row]) -> Table:
    ordered = sorted(rows, key=in_paper_order)
    by_mechanism = grouped(ordered, lambda row: (mechanism(row), options(row)))
    about = rows[0]["configuration"]
    alike = len({row["configuration"].get("monitor_every") for row in rows}) == 1
    found = [_line(name, own, alike=alike) for (name, _), own in by_mechanism.items()]
    epochs = about["steps"] * about["batch_size"] / about["examples"]["train"]
    title = (
        f"Table 3 at our scale: ViT of {about['layers']} layers × {about['width']}, "
        f"{about['heads']} heads, {about['length']} tokens, {about['data']}, {epochs:.0f} epochs"
    )
    notes = [
        rates_note(rows),
        f"{about['examples']['train']:,} images for training, {about['examples']['valid']:,} for "
        f"validation, {about['examples']['test']:,} for the test; ± is the standard error over "
        "seeds.",
        "The paper trained 100 epochs with vit-pytorch; its image size, patches and split are not "
        "printed.",
        origin_text(rows),
    ]
    columns, lines = _filled(COLUMNS, [line for line, _ in found])
    return Table(columns, lines, title, notes, [record for _, record in found])


def _filled(columns: Sequence[str], lines: list[list[str]]) -> tuple[list[str], list[list[str]]]:
    """Drop columns that no line has a value for, such as times where every run shared its GPU."""
    kept = [i for i, name in enumerate(columns) if not name or any(line[i] for line in lines)]
    return [columns[i] for i in kept], [[line[i] for i in kept] for line in lines]


def _line(name: str, rows: list[Row], *, alike: bool) -> tuple[list[str], dict[str, Any]]:
    """``alike``: attention was measured equally often in all runs of the table.

    Otherwise runs in which it was have no peak: measuring takes memory, too.
    """
    best = at_best_rate(rows)
    accuracy = Mean.of(row["accuracy"] for row in best)
    valid = Mean.of(row["valid_accuracy"] for row in best)
    first = best[0]
    same_task = first["configuration"].get("classes") == ["cat", "dog"]
    printed = TABLE_3.get(first["mechanism"]) if same_task else None
    time = Mean.of(row.get("step_ms") for row in best if was_alone(row))
    bare = [row for row in best if alike or not row["configuration"].get("monitor_every")]
    memory = Mean.of(row.get("peak_mb") for row in bare)
    line = [
        name,
        shown(accuracy, 2, 100),
        shown(valid, 2, 100),
        "" if printed is None else f"{printed:.2f}",
        f"{rate(first):g}",
        three_digits(value(time)),
        three_digits(value(memory)),
        f"{first['parameters']:,}",
    ]
    found = {
        **record(name, best),
        "accuracy": value(accuracy),
        "standard_error": None if accuracy is None else accuracy.error,
        "valid_accuracy": value(valid),
        "paper": printed,
        "learning_rate": rate(first),
        "step_ms": value(time),
        "peak_mb": value(memory),
        "parameters": first["parameters"],
        "configuration": first["configuration"],
    }
    return line, found
