"""What is known of LLN without a diagonal: the blocks of docs/results/lln-alone.md.

Three scales: the pre-trainings on a GPU behind Table 1, a screen of a fifth of their tokens, and a
study of minutes on a CPU; the rows of the last two lie in folders of their own. No sentence here
compares one scale with another.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lln.nn import RECOMMENDED
from lln.report.canvas import Axis
from lln.report.panels import Curve, Panel
from lln_study.paper.pages.blocks import NOTHING_YET, Blocks, markdown_table
from lln_study.paper.pages.claims import Value, strength
from lln_study.paper.pages.costs import PRETRAINING, least_seconds
from lln_study.paper.results import (
    Mean,
    Row,
    grouped,
    in_paper_order,
    mechanism,
    origin_text,
    read,
    read_curves,
)
from lln_study.sweep_files import FOLDER

Fields = Mapping[str, Any]
SMALL = "lln_alone"  # folder of the rows of sweeps/lln_alone_cpu.json
SCREEN = "near_far"  # folder of the rows of sweeps/near_far_screen.json, softmax and others beside
SCREENED = ("softmax", "lln", "lln_authors")
# what the screen of near and far keys keeps, and that of LLN alone varies
USUAL: Fields = {"learning_rate": 7e-4, "positions": "sinusoid", "heads": 8, "precision": "bf16"}
LARGE: Fields = {"recipe": "roberta-small", **PRETRAINING, "precision": "bf16"}
CONV: Fields = {"conv": RECOMMENDED["conv"]}
SHOWN: tuple[tuple[str, Fields], ...] = (
    ("softmax", {}),
    ("softmax", CONV),
    ("block_diag", {}),
    ("lln", {}),
    ("lln_diag", {}),
    ("lln_diag", RECOMMENDED),
)
DRAWN = 6  # curves of the small study that can be told apart
MOMENTS = (1_000, 4_000, 8_000, 12_000)  # updates, and the last
# Fields of a sweep that decide nothing about what is learned.
MANNER = frozenset({"run", "slots", "save_every", "keep", "compile", "eval_every"})


def _agrees(row: Row, fields: Fields) -> bool:
    return all(row["configuration"].get(name) == value for name, value in fields.items())


def _large(results: Path) -> list[Row]:
    """Curves of the large pre-trainings that are shown, the first seed of each."""
    lines = [line for line in read_curves(results) if line["subject"] == "mlm"]
    found = []
    for name, options in SHOWN:
        own = [
            line
            for line in lines
            if line["mechanism"] == name
            and _agrees(line, {**LARGE, "options": dict(options), "positions": "sinusoid"})
            and _evaluations(line)
        ]
        if own:
            found.append(min(own, key=lambda line: (line["seed"], _evaluations(line)[-1][1])))
    return found


def _evaluations(line: Row) -> list[tuple[int, float]]:
    """Updates and loss on validation, without the start."""
    return [
        (row["step"], row["loss"])
        for row in line["rows"]
        if row.get("kind") == "eval" and row["step"] > 0 and row["loss"] is not None
    ]


def large(results: Path) -> str:
    """Loss on validation at some moments of the large pre-trainings."""
    lines = _large(results)
    if not lines:
        return NOTHING_YET
    cells = []
    for line in lines:
        known = dict(_evaluations(line))
        last = max(known)
        shown = [f"{known[step]:.2f}" if step in known else "–" for step in MOMENTS]
        cells.append([mechanism(line), *shown, f"{known[last]:.2f}"])
    last = max(step for line in lines for step, _ in _evaluations(line))
    names = ["loss after updates", *(f"{step:,}" for step in MOMENTS), f"{last:,}"]
    return f"{markdown_table(names, cells)}\n\n{_origin(results, lines)}"


def _origin(results: Path, lines: Sequence[Row]) -> str:
    """The size of models, and where the rows of these curves come from."""
    keys = {(line["digest"], line["seed"]) for line in lines}
    rows = [row for row in read(results, "mlm") if (row["digest"], row["seed"]) in keys]
    of = lines[0]["configuration"]
    return (
        f"RoBERTa of {of['layers']} layers × {of['width']}, {of['heads']} heads, N = "
        f"{of['length']}, batches of {of['batch_size']}, {of['corpus']}, {of['precision']}, rate "
        f"{of['learning_rate']:g}. ({origin_text(rows)})"
    )


def known(results: Path) -> str:
    """Sentences about LLN alone with the numbers of the rows."""
    lines = {
        (line["mechanism"], not line["configuration"]["options"]): line for line in _large(results)
    }
    alone, softmax = lines.get(("lln", True)), lines.get(("softmax", True))
    if alone is None or softmax is None:
        return NOTHING_YET
    ours, theirs = _evaluations(alone), _evaluations(softmax)
    half = next(loss for step, loss in ours if step >= ours[-1][0] / 2)
    first = ours[0]
    said = [
        f"After {ours[-1][0]:,} updates LLN alone has {ours[-1][1]:.2f} nats, softmax "
        f"{theirs[-1][1]:.2f}.",
        f"The loss of LLN alone: {first[1]:.2f} after {first[0]:,} updates, "
        f"{half:.2f} half-way, {ours[-1][1]:.2f} at the end.",
    ]
    reached = next((step for step, loss in theirs if loss <= ours[-1][1]), None)
    if reached is not None:
        said.append(f"Softmax is below that when it is evaluated after {reached:,} updates.")
    diag = lines.get(("block_diag", True))
    both = lines.get(("lln_diag", True))
    if diag is not None and both is not None:
        said.append(
            f"The diagonal alone has {_evaluations(diag)[-1][1]:.2f}, both branches "
            f"{_evaluations(both)[-1][1]:.2f}."
        )
    said += _of_others(results)
    return "\n".join(f"- {sentence}" for sentence in said)


def _of_others(results: Path) -> list[str]:
    """The linear mechanisms of the small recipe, and tiny models with a convolution."""
    said = []
    names = ("lln", "cosformer", "elu", "performer")
    own = [
        row
        for row in read(results, "mlm")
        if row["mechanism"] in names and _agrees(row, {"width": 256, "length": 256, "options": {}})
    ]
    if {row["mechanism"] for row in own} == set(names):
        shown = sorted({(row["loss"], mechanism(row)) for row in own})
        listed = ", ".join(f"{name} {loss:.2f}" for loss, name in shown)
        of = own[0]["configuration"]
        said.append(
            f"It is in company: with {of['layers']} layers of {of['width']} and N = {of['length']} "
            f"the linear mechanisms without window, gate or convolution end at {listed}."
        )
    tiny = _rows(results / "convolution")
    longest = max((row["steps"] for row in tiny), default=0)
    ends = {mechanism(row): row["loss"] for row in tiny if row["steps"] == longest}
    if ends:
        listed = ", ".join(f"{name} {loss:.2f}" for name, loss in sorted(ends.items()))
        said.append(
            f"Tiny models on a CPU, after {longest:,} updates: {listed} "
            f"([training](../guide/training.md#the-plateau-at-the-start))."
        )
    return said


def screen(results: Path) -> str:
    """Short pre-trainings of LLN alone with one thing changed, and softmax beside them."""
    rows = [row for row in _rows(results / SCREEN) if row["mechanism"] in SCREENED]
    if all(row["mechanism"] == "softmax" for row in rows):
        return NOTHING_YET
    lines = []
    for row in sorted(rows, key=in_paper_order):
        others = [
            f"{name} = {row['configuration'][name]}".replace("_", " ")
            for name, usual in USUAL.items()
            if row["configuration"][name] != usual
        ]
        shown = "diverged" if row["diverged"] else f"{row['loss']:.2f}"
        lines.append([", ".join([mechanism(row), *others]), shown])
    of = rows[0]
    words = (
        f"Loss on held-out text after {of['tokens'] / 1e6:.0f}M tokens, {of['steps']:,} updates, "
        f"the same models; one seed each. ({origin_text(rows)})"
    )
    return f"{markdown_table(['', 'loss'], lines)}\n\n{words}"


def _rows(folder: Path) -> list[Row]:
    return read(folder, "mlm") if folder.exists() else []


def _most(values: Sequence[Any]) -> Any:
    return max(set(values), key=values.count)


def _variant(row: Row, usual: int) -> str:
    heads = row["configuration"]["heads"]
    word = "head" if heads == 1 else "heads"
    return mechanism(row) if heads == usual else f"{mechanism(row)}, {heads} {word}"


def _small(results: Path) -> dict[str, list[Row]]:
    """Rows of the small study by variant, in the order of tables."""
    rows = _rows(results / SMALL)
    if not rows:
        return {}
    usual = _most([row["configuration"]["heads"] for row in rows])
    order = sorted(rows, key=lambda row: (in_paper_order(row), -row["configuration"]["heads"]))
    return grouped(order, lambda row: _variant(row, usual))


def small(results: Path) -> str:
    """The study on a CPU: loss, and its difference from softmax of the same heads."""
    variants = _small(results)
    if not variants:
        return NOTHING_YET
    means = {name: _mean(rows) for name, rows in variants.items()}
    plain = {
        rows[0]["configuration"]["heads"]: means[name]
        for name, rows in variants.items()
        if rows[0]["mechanism"] == "softmax" and not rows[0]["configuration"]["options"]
    }
    lines = []
    for name, rows in variants.items():
        mean, beside = means[name], plain.get(rows[0]["configuration"]["heads"])
        if beside is None or beside is mean:
            compared = ["", ""]
        else:
            said = strength(_value(mean), _value(beside), less_is_better=True)
            compared = [f"{mean.value - beside.value:+.3f}", said]
        lines.append([name, mean.text(3), *compared, f"{rows[0]['parameters']:,}"])
    names = ["", "loss", "– softmax", "against softmax", "parameters"]
    every = [row for rows in variants.values() for row in rows]
    return f"{markdown_table(names, lines)}\n\n{_scale(every)}"


def _mean(rows: Sequence[Row]) -> Mean:
    found = Mean.of(row["loss"] for row in rows)
    assert found is not None
    return found


def _value(mean: Mean) -> Value:
    return Value(mean.value, mean.error, mean.count)


def _scale(rows: Sequence[Row]) -> str:
    of = rows[0]["configuration"]
    minutes = sum(row["seconds"] for row in rows) / 60
    return (
        f"RoBERTa of {of['layers']} layers × {of['width']}, N = {of['length']}, "
        f"{rows[0]['tokens'] / 1e6:.1f}M tokens of {of['corpus']}, a vocabulary of "
        f"{of['vocabulary']}, {of['precision']}: a model for a CPU, {minutes:.0f} minutes for all "
        "runs, and no measure of the large ones. ±: standard error over seeds. ("
        f"{origin_text(rows)})"
    )


def varied(results: Path) -> str:
    """The runs of sweeps/lln_alone.json that have a row."""
    found = [(asked, row) for asked, row in _asked(results) if row is not None]
    if not found:
        return NOTHING_YET
    lines = [
        [asked.name, asked.others, "diverged" if row["diverged"] else f"{row['loss']:.2f}"]
        for asked, row in found
    ]
    rows = [row for _, row in found]
    words = f"{rows[0]['tokens'] / 1e6:.0f}M tokens each, one seed. ({origin_text(rows)})"
    table = markdown_table(["run", "other than in the table above", "loss"], lines)
    return f"{table}\n\n{words}"


def missing(results: Path) -> str:
    """The runs of sweeps/lln_alone.json without a row, and what each costs at least."""
    asked = _asked(results)
    seconds = least_seconds(read(results, "mlm"), "mlm", PRETRAINING)
    if seconds is None or not asked:
        return NOTHING_YET
    minutes = f"{seconds / 60:.0f}"
    lines = [[run.name, run.others, minutes] for run, row in asked if row is None]
    if not lines:
        return "Nothing: every run of `sweeps/lln_alone.json` has its row."
    lines.append(["together", "", f"{len(lines) * seconds / 60:.0f}"])
    return markdown_table(["run", "other than in the table above", "GPU minutes, at least"], lines)


@dataclass(frozen=True)
class Asked:
    """A run that a sweep asks for: its mechanism, and what else is not as usual, for people."""

    name: str
    others: str


def _asked(results: Path) -> list[tuple[Asked, Row | None]]:
    """The runs of sweeps/lln_alone.json with their rows; none before there is softmax beside."""
    rows = read(results, "mlm")
    plain = [
        row
        for row in rows
        if row["mechanism"] == "softmax"
        and _agrees(row, {**LARGE, "options": {}, "positions": "sinusoid"})
    ]
    if not plain:
        return []
    content = json.loads((FOLDER / "lln_alone.json").read_text(encoding="utf-8"))
    specs = [{**content["base"], **entry} for entry in content["runs"]]
    names = {name for spec in specs for name in spec} - MANNER
    usual = {name: plain[0]["configuration"].get(name) for name in names}
    found = []
    for entry, spec in zip(content["runs"], specs, strict=True):
        told = {name: value for name, value in spec.items() if name in names}
        wanted = {**usual, "options": {}, **told}
        others = [
            f"{name} = {value}"
            for name, value in entry.items()
            if name not in ("attention", "options", *MANNER)
        ]
        run = Asked(
            mechanism({"mechanism": entry["attention"], "configuration": entry}), ", ".join(others)
        )
        found.append((run, next((row for row in rows if _agrees(row, wanted)), None)))
    return found


def figure(results: Path) -> list[Panel]:
    """Validation loss against updates: the large pre-trainings, their screen, the CPU's study."""
    updates, nats = Axis("updates"), Axis("nats per hidden token")
    drawn = []
    lines = _large(results)
    slots = {_short(line): slot for slot, line in enumerate(lines)}  # one colour in both panels
    if lines:
        curves = [_curve(_short(line), [line], slots[_short(line)]) for line in lines]
        title = "Large: {layers} layers × {width}, N = {length}".format(**lines[0]["configuration"])
        drawn.append(Panel(title, curves, updates, nats, _origin(results, lines)))
    found = [
        line
        for line in read_curves(results / SCREEN)
        if line["mechanism"] in SCREENED and _agrees(line, USUAL)
    ]
    if found:
        curves = [
            _curve(name, own, slots.setdefault(name, len(slots)))
            for name, own in grouped(sorted(found, key=in_paper_order), mechanism).items()
        ]
        title = "The same with a fifth of the tokens"
        drawn.append(Panel(title, curves[:DRAWN], updates, nats))
    found = read_curves(results / SMALL)
    if found:
        usual = _most([line["configuration"]["heads"] for line in found])
        own = [line for line in found if line["configuration"]["heads"] == usual]
        variants = grouped(sorted(own, key=in_paper_order), mechanism)
        curves = [
            _curve(name, lines, slots.setdefault(name, len(slots)))
            for name, lines in list(variants.items())[:DRAWN]
        ]
        title = "On a CPU: {layers} layers × {width}, N = {length}, mean over seeds"
        of = found[0]["configuration"]
        drawn.append(Panel(title.format(**of), curves, updates, nats))
    return drawn


def _short(line: Row) -> str:
    own = line["configuration"]["options"]
    return "LLN+Diag, recommended" if own == RECOMMENDED else mechanism(line)


def _curve(label: str, lines: Sequence[Row], slot: int) -> Curve:
    """The mean over seeds at the updates that all of them were evaluated at."""
    losses: dict[int, list[float]] = {}
    for line in lines:
        for step, loss in _evaluations(line):
            losses.setdefault(step, []).append(loss)
    steps = sorted(step for step, found in losses.items() if len(found) == len(lines))
    means = [sum(losses[step]) / len(lines) for step in steps]
    return Curve(label, steps, means, slot=slot, named=True)


BLOCKS: Blocks = {
    "lln_alone_large": large,
    "lln_alone_known": known,
    "lln_alone_screen": screen,
    "lln_alone_varied": varied,
    "lln_alone_small": small,
    "lln_alone_missing": missing,
}
