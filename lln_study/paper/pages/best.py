"""The table of README: LLN+Diag beside softmax at our largest scale, from the tables' records."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lln.nn import RECOMMENDED
from lln.report.numbers import three_digits
from lln_study.paper.pages.blocks import NOTHING_YET, markdown_table
from lln_study.paper.results import as_published, record_of
from lln_study.paper.tables import table as tables
from lln_study.paper.tables.arena import AVERAGED

Record = Mapping[str, Any]
CONVOLUTION = {"conv": RECOMMENDED["conv"]}
# Nats of a model that knows little more than how frequent words are.
PLATEAU = 6.5
ON_PLATEAU = "† Still on the plateau of its start: it learns later, its final loss is not known."


def best(results: Path) -> str:
    """Softmax, softmax with the same convolution, and LLN+Diag, at the largest scale of each."""
    kinds = (_pretraining, _glue, _vision, _arena, _step)
    lines = [line for kind in kinds for line in kind(results)]
    if not lines:
        return NOTHING_YET
    table = markdown_table(["", "softmax", "softmax + conv", "LLN+Diag"], lines)
    return f"{table}\n\n{ON_PLATEAU}" if "†" in table else table


def _three(records: Sequence[Record], key: str, form: str) -> list[str]:
    """Cells of the three columns, LLN+Diag with the recommended options."""
    wanted = [("softmax", {}), ("softmax", CONVOLUTION), ("lln_diag", RECOMMENDED)]
    rows = [record_of(records, *one) for one in wanted]
    return ["–" if row is None else format(row[key], form) for row in rows]


def _loss(cell: str) -> str:
    """The same, marked where a model has hardly begun to learn."""
    return f"{cell} †" if cell != "–" and float(cell) > PLATEAU else cell


def _pretraining(results: Path) -> list[list[str]]:
    made = [
        table
        for table in tables.make("pretraining", results)
        if record_of(table.records, "lln_diag", RECOMMENDED)
    ]
    widest = max((table.records[0]["configuration"]["width"] for table in made), default=0)
    lines = []
    for table in made[::-1]:
        configuration = table.records[0]["configuration"]
        if configuration["width"] == widest:
            size = f"{configuration['layers']} layers × {widest}, N = {configuration['length']:,}"
            words = f"loss of pre-training, {size} (recommended)"
            lines.append([words, *map(_loss, _three(table.records, "loss", ".2f"))])
    return lines


def _glue(results: Path) -> list[list[str]]:
    for table in tables.make("1", results)[:1]:
        complete = [row for row in table.records if row["average"] is not None]  # has all tasks
        records = [{**row, "average": 100 * row["average"]} for row in complete]
        return [["GLUE, average of Table 1, % (recommended)", *_three(records, "average", ".1f")]]
    return []


def _vision(results: Path) -> list[list[str]]:
    for table in tables.make("3", results)[:1]:
        plain = as_published(table.records)
        values = {name: f"{100 * row['accuracy']:.1f}" for name, row in plain.items()}
        return _two("ViT on Dogs vs Cats, accuracy, %", values)
    return []


def _arena(results: Path) -> list[list[str]]:
    for table in tables.make("5", results)[:1]:
        values = {
            name: f"{100 * sum(row[task] for task in AVERAGED) / len(AVERAGED):.1f}"
            for name, row in as_published(table.records).items()
            if all(row.get(task) is not None for task in AVERAGED)
        }
        return _two(f"Long Range Arena, average of {len(AVERAGED)} tasks, %", values)
    return []


def _step(results: Path) -> list[list[str]]:
    for table in tables.make("2", results)[:1]:
        longest = max((int(N) for row in table.records for N in row["milliseconds"]), default=0)
        times = {row["mechanism"]: row["milliseconds"].get(str(longest)) for row in table.records}
        peaks = {row["mechanism"]: row["peak_mb"].get(str(longest)) for row in table.records}
        step = f"training step of RoBERTa-base, N = {longest:,}"
        memory = {name: f"{peak / 1024:.1f}" for name, peak in peaks.items() if peak}
        return [
            *_two(f"{step}, ms", {name: three_digits(time) for name, time in times.items()}),
            *_two("memory of that step, GiB", memory),
        ]
    return []


def _two(words: str, values: Mapping[str, str]) -> list[list[str]]:
    """A line of what was measured with the paper's constants, if both have a value."""
    pair = [values.get(name) for name in ("softmax", "lln_diag")]
    return [[words, pair[0], "–", pair[1]]] if pair[0] and pair[1] else []
