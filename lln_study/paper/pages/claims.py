"""Comparisons of two numbers of the tables: docs/results/claims.md, and the table of README.

The error of a number has two parts: the spread over seeds, where there are several, and the one of
the test examples, which no number of seeds makes smaller.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lln.nn import RECOMMENDED, recommended
from lln.report.numbers import three_digits
from lln_study.paper.pages.blocks import NOTHING_YET, Blocks, markdown_table
from lln_study.paper.results import as_published, read, record_of
from lln_study.paper.tables import table as tables
from lln_study.paper.tables.arena import AVERAGED, NAMES

Record = Mapping[str, Any]
SMALL_TASKS = ("rte", "mrpc")  # at the level of the majority for all
CORRELATIONS = ("cola", "stsb")
# Nats of a model that knows little more than how frequent words are.
PLATEAU = 6.5
ON_PLATEAU = "† Still on the plateau of its start: it learns later, its final loss is not known."


@dataclass(frozen=True)
class Model:
    """A mechanism with its options, or as it was published; and what it is called."""

    words: str
    mechanism: str
    options: Mapping[str, Any] | None = None

    def record(self, records: Sequence[Record]) -> Record | None:
        if self.options is None:
            return as_published(records).get(self.mechanism)
        return record_of(records, self.mechanism, self.options)


WIDE_OPTIONS = recommended("encoder", version=2)
WITHOUT_CONV = {name: value for name, value in WIDE_OPTIONS.items() if name != "conv"}
SOFTMAX = Model("softmax", "softmax")
SOFTMAX_CONV = Model("softmax + conv", "softmax", {"conv": RECOMMENDED["conv"]})
PAPER = Model("LLN+Diag (paper)", "lln_diag")
BEST = Model("LLN+Diag (recommended)", "lln_diag", RECOMMENDED)
WIDE = Model("LLN+Diag (blocks of 256)", "lln_diag", WIDE_OPTIONS)
PAIRS = (
    (PAPER, SOFTMAX),
    (BEST, SOFTMAX),
    (BEST, SOFTMAX_CONV),
    (WIDE, SOFTMAX_CONV),
    (WIDE, BEST),
    (Model("LLN+Diag (blocks of 256, no conv)", "lln_diag", WITHOUT_CONV), SOFTMAX),
    (PAPER, Model("Diag alone", "block_diag")),
    (Model("LLN alone", "lln"), SOFTMAX),
    (Model("LLN+Diag (blocks of 16)", "lln_diag", {"diag_block": 16}), PAPER),
    (Model("LLN+Diag (blocks of 32)", "lln_diag", {"diag_block": 32}), PAPER),
    (PAPER, Model("Linformer", "linformer")),
    (BEST, Model("PolaFormer", "polaformer")),
)


@dataclass(frozen=True)
class Value:
    """A number of a table: its error, None if nothing tells it, and its seeds of training."""

    number: float
    error: float | None
    seeds: int


@dataclass(frozen=True)
class Measure:
    """What models are compared by: the records of a table, and the value of one of them."""

    name: str
    records: Sequence[Record]
    value: Callable[[Record], Value | None]
    digits: int = 1

    def of(self, model: Model) -> Value | None:
        record = model.record(self.records)
        return None if record is None else self.value(record)


def claims(results: Path) -> str:
    """A line per measure and pair of models that have a number in it."""
    lines = []
    for measure in (*_losses(results), *_glue(results), *_vision(results), *_arena(results)):
        for pair in PAIRS:
            ours, theirs = (measure.of(model) for model in pair)
            if ours is not None and theirs is not None:
                words = f"{measure.name}: {pair[0].words} – {pair[1].words}"
                lines.append([words, *_compared(ours, theirs, measure.digits)])
    columns = ["claim", "ours", "theirs", "difference", "seeds"]
    return markdown_table(columns, lines) if lines else NOTHING_YET


def _compared(ours: Value, theirs: Value, digits: int) -> list[str]:
    difference = f"{ours.number - theirs.number:+.{digits}f}"
    if ours.error is not None and theirs.error is not None:
        difference += f" ± {math.hypot(ours.error, theirs.error):.{digits}f}"
    numbers = [f"{each.number:.{digits}f}" for each in (ours, theirs)]
    return [*numbers, difference, str(min(ours.seeds, theirs.seeds))]


def _losses(results: Path) -> list[Measure]:
    found = []
    for table in tables.make("pretraining", results):
        about = table.records[0]["configuration"]
        if about.get("precision") != "fp16":
            size = f"{about['layers']} × {about['width']}, N = {about['length']:,}"
            found.append(Measure(f"loss of pre-training, {size}", table.records, _loss, digits=3))
    return found


def _loss(row: Record) -> Value:
    return Value(row["loss"], row["standard_errors"]["loss"], len(row["seeds"]))


def _glue(results: Path) -> list[Measure]:
    examples = {row["configuration"]["task"]: row["test_examples"] for row in read(results, "glue")}
    kept = {task: count for task, count in examples.items() if task not in SMALL_TASKS}

    def average(row: Record, of: Mapping[str, int]) -> Value | None:
        """One seed of pre-training is behind the scores, however often it was fine-tuned."""
        if row["average"] is None:  # lacks a task that others have
            return None
        return _mean({task: row[task] for task in of if task in row}, row["standard_errors"], of, 1)

    records = [record for table in tables.make("1", results)[:1] for record in table.records]
    return [
        Measure("GLUE, average, %", records, lambda row: average(row, examples)),
        Measure("GLUE without RTE and MRPC, %", records, lambda row: average(row, kept)),
    ]


def _vision(results: Path) -> list[Measure]:
    def accuracy(row: Record) -> Value:
        examples = {"": row["configuration"]["examples"]["test"]}
        errors = {"": row["standard_error"]}
        return _mean({"": row["accuracy"]}, errors, examples, len(row["seeds"]))

    found = tables.make("3", results)[:1]
    return [Measure("ViT on Dogs vs Cats, %", table.records, accuracy) for table in found]


def _arena(results: Path) -> list[Measure]:
    def accuracy(row: Record, tasks: Sequence[str]) -> Value | None:
        if any(row.get(task) is None for task in tasks):
            return None
        examples = {task: row["configurations"][task]["examples"]["test"] for task in tasks}
        scores = {task: row[task] for task in tasks}
        return _mean(scores, row["standard_errors"], examples, len(row["seeds"]))

    shown = {NAMES[task]: [task] for task in AVERAGED}
    shown[f"average of {len(AVERAGED)} tasks"] = list(AVERAGED)
    return [
        Measure(
            f"Long Range Arena, {name}, %", table.records, lambda row, own=own: accuracy(row, own)
        )
        for table in tables.make("5", results)[:1]
        for name, own in shown.items()
    ]


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


def _steps(results: Path) -> list[Measure]:
    """Time and memory of a training step at the longest input."""
    records = [record for table in tables.make("2", results)[:1] for record in table.records]
    longest = max((int(N) for row in records for N in row["milliseconds"]), default=0)

    def value(row: Record, name: str, unit: float) -> Value | None:
        number = row[name].get(str(longest))
        return None if number is None else Value(number / unit, None, 1)

    step = f"training step of RoBERTa-base, N = {longest:,}"
    return [
        Measure(f"{step}, ms", records, lambda row: value(row, "milliseconds", 1)),
        Measure(f"{step}, memory, GiB", records, lambda row: value(row, "peak_mb", 1024)),
    ]


def best(results: Path) -> str:
    """README's table: softmax, softmax with the same convolution, and LLN+Diag, at our largest."""
    losses = [measure for measure in _losses(results) if measure.of(BEST)]
    widest = max((_width(measure) for measure in losses), default=0)
    shown = [(each, BEST, ".2f") for each in reversed(losses) if _width(each) == widest]
    shown += [(each, BEST, ".1f") for each in _glue(results)[:1]]
    shown += [(each, PAPER, ".1f") for each in (*_vision(results), *_arena(results)[-1:])]
    shown += [(each, PAPER, form) for each, form in zip(_steps(results), ("", ".1f"), strict=True)]
    lines = []
    for measure, ours, form in shown:
        cells = [_cell(measure.of(model), form) for model in (SOFTMAX, SOFTMAX_CONV, ours)]
        if cells[2] != "–":
            name = f"{measure.name} (recommended)" if ours is BEST else measure.name
            lines.append([name, *cells])
    if not lines:
        return NOTHING_YET
    table = markdown_table(["", "softmax", "softmax + conv", "LLN+Diag"], lines)
    return f"{table}\n\n{ON_PLATEAU}" if "†" in table else table


def _width(measure: Measure) -> int:
    return measure.records[0]["configuration"]["width"]


def _cell(value: Value | None, form: str) -> str:
    if value is None:
        return "–"
    if not form:
        return three_digits(value.number)
    is_on_plateau = form == ".2f" and value.number > PLATEAU
    return format(value.number, form) + (" †" if is_on_plateau else "")


BLOCKS: Blocks = {"claims": claims, "best": best}
