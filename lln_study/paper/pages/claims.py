"""What we say, from which rows, and how strong it is: the blocks of docs/results/claims.md.

A claim compares two numbers of the tables. Their error has two parts: the spread over seeds, where
there are several, and that of the test examples, which no number of seeds makes smaller. Two
numbers are level if they differ by less than two errors of the difference.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lln.nn import RECOMMENDED, recommended
from lln.report.numbers import three_digits
from lln_study.paper.pages.blocks import NOTHING_YET, Blocks, markdown_table
from lln_study.paper.results import as_published, read, read_curves, record_of
from lln_study.paper.tables import table as tables
from lln_study.paper.tables.arena import AVERAGED, NAMES
from lln_study.paper.values import ARENA, TABLE_1, TABLE_1_COLUMNS, TABLE_5

Record = Mapping[str, Any]
Options = Mapping[str, Any]
SMALL_TASKS = ("rte", "mrpc")  # at the level of the majority for all
CORRELATIONS = ("cola", "stsb")
CONV: Options = {"conv": RECOMMENDED["conv"]}
PAPER: Options = {}
WIDE: Options = recommended("encoder", version=2)
BLOCKS_OF_16: Options = {"diag_block": 16}  # the authors' on their ViT
BLOCKS_OF_32: Options = {"diag_block": 32}  # and on the Long Range Arena
WIDE_ALONE: Options = {name: value for name, value in WIDE.items() if name != "conv"}
FAIR, UNFAIR = "all compiled, products in bf16", "the others but softmax in float32"
RULES = (
    "±: the standard error of the difference, from the spread over seeds (where there are several) "
    "and from the number of test examples; that two mechanisms see the same examples is not made "
    "use of, so it is rather too large. *Level*: the difference is within two of them. *One seed*: "
    "the spread over seeds of pre-training or training is unknown, whatever the error says."
)


@dataclass(frozen=True)
class Value:
    """A number of a table: its error, None if nothing tells it, and its seeds of training."""

    value: float
    error: float | None
    seeds: int


def strength(ours: Value, theirs: Value, *, less_is_better: bool = False) -> str:
    """Say what a comparison shows: ahead, level or behind, and on how many seeds.

    Example:
        >>> strength(Value(0.80, 0.01, 3), Value(0.79, 0.01, 3))
        'level, 3 seeds'
    """
    seeds = min(ours.seeds, theirs.seeds)
    counted = "one seed" if seeds == 1 else f"{seeds} seeds"
    difference = ours.value - theirs.value
    word = "ahead" if (difference < 0) == less_is_better else "behind"
    if ours.error is None or theirs.error is None:
        return f"{word}, {counted}, error unknown"
    if abs(difference) <= 2 * math.hypot(ours.error, theirs.error):
        word = "level"
    return f"{word}, {counted}"


def claims(results: Path) -> str:
    """The table claim → rows → strength, and how strength is meant."""
    kinds = (_pretraining, _glue, _vision, _arena, _steps, _arena_steps)
    lines = [line for kind in kinds for line in kind(results)]
    if not lines:
        return NOTHING_YET
    names = ["claim", "rows", "difference", "strength"]
    return f"{markdown_table(names, lines)}\n\n{RULES}"


def _line(
    words: str, ours: Value, theirs: Value, *, digits: int, factor: float = 1.0, less: bool = False
) -> list[str]:
    difference = f"{factor * (ours.value - theirs.value):+.{digits}f}"
    if ours.error is not None and theirs.error is not None:
        difference += f" ± {factor * math.hypot(ours.error, theirs.error):.{digits}f}"
    numbers = " against ".join(f"{factor * each.value:.{digits}f}" for each in (ours, theirs))
    return [words, numbers, difference, strength(ours, theirs, less_is_better=less)]


def _pretraining(results: Path) -> Iterator[list[str]]:
    wanted = {
        "LLN+Diag (paper) – softmax": (("lln_diag", PAPER), ("softmax", PAPER)),
        "LLN+Diag (recommended) – softmax": (("lln_diag", RECOMMENDED), ("softmax", PAPER)),
        "LLN+Diag (recommended) – softmax + conv": (("lln_diag", RECOMMENDED), ("softmax", CONV)),
        "LLN+Diag (blocks of 256) – softmax + conv": (("lln_diag", WIDE), ("softmax", CONV)),
        "LLN+Diag (blocks of 256) – blocks of 128": (("lln_diag", WIDE), ("lln_diag", RECOMMENDED)),
        "LLN+Diag (blocks of 256, no conv) – softmax": (
            ("lln_diag", WIDE_ALONE),
            ("softmax", PAPER),
        ),
        "LLN+Diag (paper) – Diag alone": (("lln_diag", PAPER), ("block_diag", PAPER)),
        "LLN alone – softmax": (("lln", PAPER), ("softmax", PAPER)),
    }
    for table in tables.make("pretraining", results):
        about = table.records[0]["configuration"]
        if about.get("precision") == "fp16":
            continue
        size = f"{about['layers']} × {about['width']}, N = {about['length']:,}"
        for words, pair in wanted.items():
            found = [record_of(table.records, *one) for one in pair]
            if found[0] is not None and found[1] is not None:
                ours, theirs = (
                    Value(row["loss"], row["standard_errors"]["loss"], len(row["seeds"]))
                    for row in found
                    if row is not None
                )
                yield _line(f"loss, {size}: {words}", ours, theirs, digits=3, less=True)


def _sampling(score: float, examples: int, *, correlation: bool = False) -> float:
    """The standard error of an accuracy, or (roughly) of a correlation, on so many examples."""
    spread = 1 - score**2 if correlation else math.sqrt(score * (1 - score))
    return spread / math.sqrt(examples)


def _glue(results: Path) -> Iterator[list[str]]:
    examples = {row["configuration"]["task"]: row["test_examples"] for row in read(results, "glue")}
    wanted = {
        "LLN+Diag (paper) – softmax": (("lln_diag", PAPER), ("softmax", PAPER)),
        "Diag alone – LLN+Diag (paper)": (("block_diag", PAPER), ("lln_diag", PAPER)),
        "LLN+Diag (recommended) – softmax": (("lln_diag", RECOMMENDED), ("softmax", PAPER)),
        "LLN+Diag (recommended) – softmax + conv": (("lln_diag", RECOMMENDED), ("softmax", CONV)),
        "LLN+Diag (blocks of 256) – softmax + conv": (("lln_diag", WIDE), ("softmax", CONV)),
        "LLN alone – softmax": (("lln", PAPER), ("softmax", PAPER)),
    }
    for table in tables.make("1", results)[:1]:
        for words, pair in wanted.items():
            found = [record_of(table.records, *one) for one in pair]
            known = [task for task in examples if all(row and task in row for row in found)]
            kept = [task for task in known if task not in SMALL_TASKS]
            if len(known) < 2:
                continue
            for tasks, what in ((known, "average"), (kept, "without RTE and MRPC")):
                ours, theirs = (_average(row, tasks, examples) for row in found if row is not None)
                label = f"GLUE, {what}, %: {words}"
                yield _line(label, ours, theirs, digits=1, factor=100)


def _average(row: Record, tasks: Sequence[str], examples: Mapping[str, int]) -> Value:
    """Of scores; one seed of pre-training is behind them however often it was fine-tuned."""
    errors = [
        math.hypot(
            row["standard_errors"].get(task) or 0,
            _sampling(row[task], examples[task], correlation=task in CORRELATIONS),
        )
        for task in tasks
    ]
    mean = sum(row[task] for task in tasks) / len(tasks)
    return Value(mean, math.hypot(*errors) / len(tasks), 1)


def _vision(results: Path) -> Iterator[list[str]]:
    for table in tables.make("3", results)[:1]:
        values = as_published(table.records)
        paper, small = values.get("lln_diag"), record_of(table.records, "lln_diag", BLOCKS_OF_16)
        pairs = {
            "LLN+Diag (paper) – softmax": (paper, values.get("softmax")),
            "LLN+Diag (paper) – Linformer": (paper, values.get("linformer")),
            "LLN+Diag, blocks of 16 – of 64": (small, paper),
        }
        tested = [row["configuration"] for row in read(results, "vit")]
        examples = {of["data"]: of["examples"]["test"] for of in tested}
        for words, pair in pairs.items():
            rows = [row for row in pair if row is not None]
            if len(rows) == 2:
                ours, theirs = (
                    Value(
                        row["accuracy"],
                        math.hypot(
                            row["standard_error"] or 0,
                            _sampling(row["accuracy"], examples[row["configuration"]["data"]]),
                        ),
                        len(row["seeds"]),
                    )
                    for row in rows
                )
                yield _line(f"ViT, accuracy, %: {words}", ours, theirs, digits=1, factor=100)


def _arena(results: Path) -> Iterator[list[str]]:
    for table in tables.make("5", results)[:1]:
        values = as_published(table.records)
        paper, small = values.get("lln_diag"), record_of(table.records, "lln_diag", BLOCKS_OF_32)
        best = record_of(table.records, "lln_diag", RECOMMENDED)
        pairs = {
            "LLN+Diag (paper) – softmax": (paper, values.get("softmax")),
            "LLN+Diag, blocks of 32 – of 64": (small, paper),
            "LLN+Diag (recommended) – softmax": (best, values.get("softmax")),
            "LLN+Diag (recommended) – PolaFormer": (best, values.get("polaformer")),
        }
        shown = [
            *((NAMES[task], [task]) for task in AVERAGED),
            (f"average of {len(AVERAGED)}", AVERAGED),
        ]
        for words, pair in pairs.items():
            rows = [row for row in pair if row is not None]
            for where, tasks in shown if len(rows) == 2 else ():
                if all(row.get(task) is not None for row in rows for task in tasks):
                    ours, theirs = (_of_arena(row, tasks) for row in rows)
                    label = f"Long Range Arena, {where}, %: {words}"
                    yield _line(label, ours, theirs, digits=1, factor=100)


def _of_arena(row: Record, tasks: Sequence[str]) -> Value:
    errors = [
        math.hypot(
            row["standard_errors"].get(task) or 0,
            _sampling(row[task], row["configurations"][task]["examples"]["test"]),
        )
        for task in tasks
    ]
    mean = sum(row[task] for task in tasks) / len(tasks)
    return Value(mean, math.hypot(*errors) / len(tasks), len(row["seeds"]))


def _steps(results: Path) -> Iterator[list[str]]:
    for table in tables.make("2", results)[:1]:
        times = {row["mechanism"]: row["milliseconds"] for row in table.records}
        ours, theirs = times.get("lln_diag", {}), times.get("softmax", {})
        both = [int(N) for N, ms in ours.items() if ms and theirs.get(N)]
        for N in sorted({min(both), max(both)}) if both else ():
            pair = ours[str(N)], theirs[str(N)]
            numbers = " against ".join(three_digits(ms) for ms in pair)
            words = f"training step of RoBERTa-base, N = {N:,}, ms: LLN+Diag – softmax (SDPA)"
            yield [words, numbers, f"{pair[1] / pair[0]:.2f}× faster", "one run on one device"]


def _arena_steps(results: Path) -> Iterator[list[str]]:
    for name, unit in (("milliseconds", "ms"), ("memory_mb", "MiB")):
        lines: dict[str, list[str]] = {}
        for table in tables.make("4", results):
            of = {word: row[name] for word, row in as_published(table.records).items()}
            ours = of.pop("lln_diag", {})
            for task, value in ours.items():
                rivals = {word: own[task] for word, own in of.items() if own.get(task)}
                fair = _compiled(table.records, task)
                if not rivals or not value or (task in lines and not fair):
                    continue
                best = min(rivals, key=lambda word: rivals[word])
                numbers = f"{three_digits(value)} against {three_digits(rivals[best])} ({best})"
                words = f"a step on {NAMES[task]}, {unit}: LLN+Diag – the least of the others"
                lines[task] = [
                    *(words, numbers, _times(rivals[best] / value)),
                    f"one run; {FAIR if fair else UNFAIR}",
                ]
        yield from lines.values()


def _times(ratio: float) -> str:
    return f"{ratio:.2f}× less" if ratio >= 1 else f"{1 / ratio:.2f}× more"


def _compiled(records: Sequence[Record], task: str) -> bool:
    """Whether every mechanism of a table ran compiled, as well as plain PyTorch can."""
    known = [row["configurations"][task] for row in records if task in row["configurations"]]
    return all(configuration.get("compile") for configuration in known)


def disagreements(results: Path) -> str:
    """Where our numbers and the paper's differ, side by side."""
    lines = [*_against_table_1(results), *_against_table_5(results), *_against_figure_1(results)]
    if not lines:
        return NOTHING_YET
    return markdown_table(["", "in the paper", "here"], lines)


def _against_table_1(results: Path) -> Iterator[list[str]]:
    place = TABLE_1_COLUMNS.index("average")
    for table in tables.make("1", results)[:1]:
        for name, words in (("softmax", "softmax"), ("lln", "LLN alone"), ("lln_diag", "LLN+Diag")):
            row = record_of(table.records, name, PAPER)
            if row is not None and row["average"] is not None and row["loss"] is not None:
                here = f"{100 * row['average']:.1f}, loss of pre-training {row['loss']:.2f}"
                yield [f"GLUE, average, %: {words}", f"{TABLE_1[name][place]}", here]


def _against_table_5(results: Path) -> Iterator[list[str]]:
    for table in tables.make("5", results)[:1]:
        for row in table.records:
            printed = TABLE_5.get(row["mechanism"])
            if row["mechanism"] not in ("softmax", "lln_diag") or printed is None:
                continue
            known = dict(zip(ARENA, printed, strict=True))
            for task in ("listops", "pathfinder"):
                if row.get(task) is not None:
                    here = f"{100 * row[task]:.1f}{_flat(results, row, task)}"
                    yield [f"{NAMES[task]}, %: {row['name']}", f"{known[task]:.1f}", here]


def _flat(results: Path, row: Record, task: str) -> str:
    """Since which step the run that is shown has gained nothing, of how many."""
    about = row["configurations"][task]
    for run in read(results, "lra"):
        curve = (run.get("curves") or {}).get("valid")
        if run["configuration"] == about and curve and curve.get("accuracy"):
            step = flat_from(curve["accuracy"], curve["step"])
            return f" (within a point of its best from step {step:,} of {about['steps']:,} on)"
    return ""


def _against_figure_1(results: Path) -> Iterator[list[str]]:
    for line in read_curves(results):
        of_figure = line["configuration"].get("recipe") == "figure-1"
        if of_figure and line["mechanism"] == "softmax" and "layer" in line["rows"][0]:
            bits = [row["entropy"] for row in line["rows"] if row.get("entropy") is not None]
            yield ["Fig. 1, softmax: lowest entropy of a head, bits", "near 0", f"{min(bits):.1f}"]


def flat_from(accuracies: Sequence[float], steps: Sequence[int]) -> int | None:
    """The first step from which on accuracy on validation gains less than a point.

    Example:
        >>> flat_from([0.1, 0.345, 0.35], [0, 500, 1000])
        500
    """
    pairs = zip(accuracies, steps, strict=True)
    return next((step for value, step in pairs if max(accuracies) - value < 0.01), None)


BLOCKS: Blocks = {"claims": claims, "disagreements": disagreements}
