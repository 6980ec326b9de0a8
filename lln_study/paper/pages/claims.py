"""Comparisons of two numbers of the tables: docs/results/claims.md, and the table of README.

The error of a number has two parts: the spread over seeds, where there are several, and the one of
the test examples, which no number of seeds makes smaller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from lln.nn import RECOMMENDED
from lln_study.paper.pages.blocks import NOTHING_YET, Blocks, crossed, markdown_table
from lln_study.paper.pages.speed import of_ops
from lln_study.paper.results import as_published, latest, read, record_of
from lln_study.paper.tables import table as tables
from lln_study.paper.tables.arena import AVERAGED, NAMES

Record = Mapping[str, Any]
CORRELATIONS = ("cola", "stsb")
SOFTMAX, WITH_CONV = "softmax", "softmax + conv"
PAPER, BEST, WIDE = "LLN+Diag (paper)", "LLN+Diag (recommended)", "LLN+Diag (blocks of 256)"
# Words -> mechanism and options; without options as it was published.
MODELS: Mapping[str, tuple[str, Mapping[str, Any] | None]] = {
    SOFTMAX: ("softmax", None),
    WITH_CONV: ("softmax", {"conv": RECOMMENDED["conv"]}),
    PAPER: ("lln_diag", None),
    BEST: ("lln_diag", RECOMMENDED),
    WIDE: ("lln_diag", {**RECOMMENDED, "near": 256}),
    "LLN+Diag (blocks of 16)": ("lln_diag", {"near": 16}),
    "LLN+Diag (blocks of 32)": ("lln_diag", {"near": 32}),
    "Diag alone": ("block_diag", None),
    "LLN alone": ("lln", None),
    "Linformer": ("linformer", None),
    "PolaFormer": ("polaformer", None),
}
PAIRS = (
    (PAPER, SOFTMAX),
    (BEST, SOFTMAX),
    (BEST, WITH_CONV),
    (WIDE, WITH_CONV),
    (WIDE, BEST),
    (PAPER, "Diag alone"),
    ("LLN alone", SOFTMAX),
    ("LLN+Diag (blocks of 16)", PAPER),
    ("LLN+Diag (blocks of 32)", PAPER),
    (PAPER, "Linformer"),
    (BEST, "PolaFormer"),
)
LOSS, GLUE, VISION = "loss of pre-training", "GLUE, average, %", "ViT on Dogs vs Cats, %"
ARENA = f"Long Range Arena, average of {len(AVERAGED)} tasks, %"
# What README shows, and of which LLN+Diag.
SHOWN = {
    f"{LOSS}, 6 × 512, N = 512": BEST,
    f"{LOSS}, 6 × 512, N = 8,192": BEST,
    GLUE: BEST,
    VISION: PAPER,
    ARENA: PAPER,
}


class Value(NamedTuple):
    """A number of a table: its error, None if nothing tells it, and its seeds of training."""

    number: float
    error: float | None
    seeds: int


Values = dict[str, Value]  # by the words of a model


def claims(results: Path) -> str:
    """Differences of losses, then of per cents: a line per pair of models, a column per measure."""
    loss, scores = {}, {}
    for measure, values in measures(results).items():
        is_loss = measure.startswith(LOSS)
        for ours, theirs in PAIRS:
            if ours in values and theirs in values:
                cell = _compared(values[ours], values[theirs], 3 if is_loss else 1)
                name = measure.removeprefix(f"{LOSS}, ").removesuffix(", %")
                (loss if is_loss else scores)[f"{ours} – {theirs}", name] = cell
    tables = [crossed(LOSS, loss), crossed("%", scores)]
    return "\n\n".join(tables) if loss or scores else NOTHING_YET


def _compared(ours: Value, theirs: Value, digits: int) -> str:
    """The difference, its error, and the seeds in brackets if there are several."""
    difference = f"{ours.number - theirs.number:+.{digits}f}"
    if ours.error is not None and theirs.error is not None:
        difference += f" ± {math.hypot(ours.error, theirs.error):.{digits}f}"
    seeds = min(ours.seeds, theirs.seeds)
    return f"{difference} ({seeds})" if seeds > 1 else difference


def best(results: Path) -> str:
    """README's table: softmax, softmax with the same convolution, and LLN+Diag, at our largest."""
    found = measures(results)
    lines = []
    for measure, ours in SHOWN.items():
        values = found.get(measure, {})
        digits = 2 if measure.startswith(LOSS) else 1
        if ours in values:
            cells = [
                f"{values[model].number:.{digits}f}" if model in values else "–"
                for model in (SOFTMAX, WITH_CONV, ours)
            ]
            words = f"{measure} (recommended)" if ours == BEST else measure
            lines.append([words, *cells])
    columns = ["", "softmax", "softmax + conv", "LLN+Diag"]
    return markdown_table(columns, lines) if lines else NOTHING_YET


def blocks(results: Path) -> str:
    """What blocks of 128 and of 256 give with the convolution, and what their kernels take."""
    found = measures(results)
    cells = {
        (name, measure): f"{found[measure][model].number:.{3 if measure.startswith(LOSS) else 1}f}"
        for measure in SHOWN
        for name, model in (("`near=128`", BEST), ("`near=256`", WIDE))
        if {BEST, WIDE} <= found.get(measure, {}).keys()
    }
    times = of_ops((latest(results, "gpu") or {"rows": []})["rows"])
    for block in (128, 256):
        if (op := f"lln_diag_{block}") in times:
            cells[f"`near={block}`", "attention, forward and backward, ms"] = times[op]
    return crossed("", cells) if cells else NOTHING_YET


def measures(results: Path) -> dict[str, Values]:
    """What models are compared by, and their values."""
    found = {}
    for table in tables.make("pretraining", results):
        about = table.records[0]["configuration"]
        if about.get("precision") != "fp16":
            size = f"{about['layers']} × {about['width']}, N = {about['length']:,}"
            found[f"{LOSS}, {size}"] = _values(table.records, _loss)
    examples = {row["configuration"]["task"]: row["test_examples"] for row in read(results, "glue")}
    for table in tables.make("1", results)[:1]:
        found[GLUE] = _values(table.records, lambda row: _glue(row, examples))
    for table in tables.make("3", results)[:1]:
        found[VISION] = _values(table.records, _vision)
    for table in tables.make("5", results)[:1]:
        parts = {f"Long Range Arena, {NAMES[task]}, %": (task,) for task in AVERAGED}
        for name, tasks in {**parts, ARENA: AVERAGED}.items():
            found[name] = _values(table.records, lambda row, own=tasks: _arena(row, own))
    return found


def _values(records: Sequence[Record], value: Callable[[Record], Value | None]) -> Values:
    """The values of the models that have a record."""
    published = as_published(records)
    found = {}
    for words, (name, options) in MODELS.items():
        record = published.get(name) if options is None else record_of(records, name, options)
        known = None if record is None else value(record)
        if known is not None:
            found[words] = known
    return found


def _loss(row: Record) -> Value:
    return Value(row["loss"], row["standard_errors"]["loss"], len(row["seeds"]))


def _glue(row: Record, examples: Mapping[str, int]) -> Value | None:
    """One seed of pre-training is behind the scores, however often it was fine-tuned."""
    if row["average"] is None:  # lacks a task that others have
        return None
    scores = {task: row[task] for task in examples if task in row}
    return _mean(scores, row["standard_errors"], examples, 1)


def _vision(row: Record) -> Value:
    examples = row["configuration"]["examples"]
    errors = {"test": row["standard_error"]}
    return _mean({"test": row["accuracy"]}, errors, examples, len(row["seeds"]))


def _arena(row: Record, tasks: Sequence[str]) -> Value | None:
    if any(row.get(task) is None for task in tasks):
        return None
    examples = {task: row["configurations"][task]["examples"]["test"] for task in tasks}
    scores = {task: row[task] for task in tasks}
    return _mean(scores, row["standard_errors"], examples, len(row["seeds"]))


def _mean(
    scores: Mapping[str, float],
    errors: Mapping[str, float | None],
    examples: Mapping[str, int],
    seeds: int,
) -> Value:
    """The mean of scores in per cent; its error from the spread over seeds and the examples."""
    parts = []
    for task, score in scores.items():
        spread = 1 - score**2 if task in CORRELATIONS else math.sqrt(score * (1 - score))
        parts.append(math.hypot(errors.get(task) or 0, spread / math.sqrt(examples[task])))
    mean = sum(scores.values()) / len(scores)
    return Value(100 * mean, 100 * math.hypot(*parts) / len(parts), seeds)


BLOCKS: Blocks = {"claims": claims, "best": best, "blocks": blocks}
