"""LLN without a diagonal, at three scales: the blocks of docs/results/lln-alone.md.

The pre-trainings on a GPU behind Table 1, a screen of a fifth of their tokens, and a study of
minutes on a CPU; the rows of the last two lie in folders of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lln.nn import RECOMMENDED
from lln.report.canvas import Axis
from lln.report.panels import Curve, Panel
from lln_study.paper.pages.blocks import NOTHING_YET, Blocks, Row, listed, markdown_table
from lln_study.paper.results import (
    Mean,
    grouped,
    in_paper_order,
    mechanism,
    origin_text,
    read,
    read_curves,
)

Fields = Mapping[str, Any]
SMALL = "lln_alone"  # folder of the rows of sweeps/lln_alone_cpu.json
SCREEN = "near_far"  # folder of the rows of sweeps/near_far_screen.json, softmax and others beside
SCREENED = ("softmax", "lln", "lln_authors")
# what the screen of near and far keys keeps, and the one of LLN alone varies
USUAL: Fields = {"learning_rate": 7e-4, "positions": "sinusoid", "heads": 8, "precision": "bf16"}
LARGE: Fields = {"recipe": "roberta-small", "width": 512, "length": 512, "precision": "bf16"}
UPDATES = 15_300  # of the large runs
SHOWN: tuple[tuple[str, Fields], ...] = (
    ("softmax", {}),
    ("softmax", {"conv": RECOMMENDED["conv"]}),
    ("block_diag", {}),
    ("lln", {}),
    ("lln_diag", {}),
    ("lln_diag", RECOMMENDED),
)
DRAWN = 6  # curves of a panel that can be told apart
MOMENTS = (1_000, 4_000, 8_000, 12_000, UPDATES)


def _agrees(row: Row, fields: Fields) -> bool:
    return all(row["configuration"].get(name) == value for name, value in fields.items())


def _large(results: Path) -> list[Row]:
    """Curves of the large pre-trainings that are shown, the first seed of each."""
    lines = [line for line in read_curves(results) if line["subject"] == "mlm"]
    found = []
    for name, options in SHOWN:
        wanted = {**LARGE, "steps": UPDATES, "options": dict(options), "positions": "sinusoid"}
        own = [
            line
            for line in lines
            if line["mechanism"] == name and _agrees(line, wanted) and _evaluations(line)
        ]
        if own:
            found.append(min(own, key=lambda line: (line["seed"], _last(line))))
    return found


def _evaluations(line: Row) -> dict[int, float]:
    """Loss on validation by updates, without the start."""
    return {
        row["step"]: row["loss"]
        for row in line["rows"]
        if row.get("kind") == "eval" and row["step"] > 0 and row["loss"] is not None
    }


def _last(line: Row) -> float:
    return list(_evaluations(line).values())[-1]


def large(results: Path) -> str:
    """Loss on validation at some moments of the large pre-trainings."""
    lines = _large(results)
    if not lines:
        return NOTHING_YET
    found = []
    for line in lines:
        known = _evaluations(line)
        losses = [f"{known[step]:.2f}" if step in known else "–" for step in MOMENTS]
        found.append([mechanism(line), *losses])
    names = ["loss after updates", *(f"{step:,}" for step in MOMENTS)]
    return f"{markdown_table(names, found)}\n\n({origin_text(_rows_of(results, lines))})"


def _rows_of(results: Path, lines: Sequence[Row]) -> list[Row]:
    keys = {(line["digest"], line["seed"]) for line in lines}
    return [row for row in read(results, "mlm") if (row["digest"], row["seed"]) in keys]


def screen(results: Path) -> str:
    """Short pre-trainings of LLN alone with one thing changed, and softmax beside them."""
    rows = [row for row in read(results / SCREEN, "mlm") if row["mechanism"] in SCREENED]
    rows.sort(key=in_paper_order)
    if all(row["mechanism"] == "softmax" for row in rows):
        return NOTHING_YET
    found = []
    for row in rows:
        others = [
            f"{name} = {row['configuration'][name]}".replace("_", " ")
            for name, usual in USUAL.items()
            if row["configuration"][name] != usual
        ]
        loss = "diverged" if row["diverged"] else f"{row['loss']:.2f}"
        found.append({"name": ", ".join([mechanism(row), *others]), "loss": loss})
    return f"{listed(found, {'': '{name}', 'loss': '{loss}'})}\n\n({origin_text(rows)})"


def small(results: Path) -> str:
    """The study on a CPU: loss and parameters, a line per mechanism and number of heads."""
    rows = sorted(read(results / SMALL, "mlm"), key=in_paper_order)
    if not rows:
        return NOTHING_YET
    columns = {"": "{name}", "heads": "{heads}", "loss": "{loss}", "seeds": "{seeds}"}
    found = []
    for (name, heads), own in grouped(rows, _variant).items():
        mean = Mean.of(row["loss"] for row in own)
        loss = "–" if mean is None else mean.text(3)
        about = {"parameters": own[0]["parameters"], "seeds": len(own)}
        found.append({"name": name, "heads": heads, "loss": loss, **about})
    made = listed(found, {**columns, "parameters": "{parameters:,}"})
    return f"{made}\n\n({origin_text(rows)})"


def _variant(row: Row) -> tuple[str, int]:
    return mechanism(row), row["configuration"]["heads"]


def figure(results: Path) -> list[Panel]:
    """Validation loss against updates: the large pre-trainings, their screen, the CPU's study."""
    lines = _large(results)
    short = [
        line
        for line in read_curves(results / SCREEN)
        if line["mechanism"] in SCREENED and _agrees(line, USUAL)
    ]
    tiny = read_curves(results / SMALL)
    heads = max((line["configuration"]["heads"] for line in tiny), default=0)
    usual = [line for line in tiny if line["configuration"]["heads"] == heads]
    titles = {
        "Large: {layers} layers × {width}, N = {length}": lines,
        "The same with a fifth of the tokens": sorted(short, key=in_paper_order),
        "On a CPU: {layers} layers × {width}, N = {length}, mean over seeds": sorted(
            usual, key=in_paper_order
        ),
    }
    slots: dict[str, int] = {}  # one colour in all panels
    drawn = []
    for title, own in titles.items():
        curves = [
            _curve(name, seeds, slots.setdefault(name, len(slots)))
            for name, seeds in list(grouped(own, _short).items())[:DRAWN]
        ]
        if curves:
            words = title.format(**own[0]["configuration"])
            drawn.append(Panel(words, curves, Axis("updates"), Axis("nats per hidden token")))
    return drawn


def _short(line: Row) -> str:
    own = line["configuration"]["options"]
    return "LLN+Diag, recommended" if own == RECOMMENDED else mechanism(line)


def _curve(label: str, lines: Sequence[Row], slot: int) -> Curve:
    """The mean over seeds at the updates that all of them were evaluated at."""
    losses = [_evaluations(line) for line in lines]
    steps = sorted(set.intersection(*(set(own) for own in losses)))
    means = [sum(own[step] for own in losses) / len(losses) for step in steps]
    return Curve(label, steps, means, slot=slot, named=True)


BLOCKS: Blocks = {"lln_alone_large": large, "lln_alone_screen": screen, "lln_alone_small": small}
