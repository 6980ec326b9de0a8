"""Loss of pre-training of LLN alone and beside it, at three scales: docs/results/lln-alone.md.

The pre-trainings on a GPU behind Table 1, a screen of a fifth of their tokens, and a study of
minutes on a CPU; the rows of the last two lie in folders of their own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from lln.report.panels import Curve, Panel
from lln_study.paper.figures.from_curves import MOST, NATS, SHOWN, UPDATES, label
from lln_study.paper.results import Row, grouped, in_paper_order, read_curves

Fields = Mapping[str, Any]
CPU = "lln_alone"  # folder of the rows of sweeps/lln_alone_cpu.json
SCREEN = "near_far"  # folder of the rows of sweeps/near_far_screen.json
USUAL: Fields = {"learning_rate": 7e-4, "positions": "sinusoid", "heads": 8, "precision": "bf16"}
USUAL_CPU: Fields = {"heads": 2}
LONG: Fields = {"recipe": "roberta-small", "length": 512, "steps": 15_300}
ALONE = ("softmax", "lln", "lln_authors")


def panels(results: Path) -> list[Panel]:
    """Validation loss against updates: the long pre-trainings, their screen, the CPU's study."""
    screen = [line for line in read_curves(results / SCREEN) if line["mechanism"] in ALONE]
    titles = {
        "Large: {layers} layers × {width}, N = {length}": _long(results),
        "The same with a fifth of the tokens": _usual(screen, USUAL),
        "On a CPU: {layers} layers × {width}, N = {length}, mean over seeds": _usual(
            read_curves(results / CPU), USUAL_CPU
        ),
    }
    slots: dict[str, int] = {}  # one colour in all panels
    drawn = []
    for title, lines in titles.items():
        curves = [
            _curve(name, own, slots.setdefault(name, len(slots)))
            for name, own in list(grouped(lines, label).items())[:MOST]
        ]
        if curves:
            words = title.format(**lines[0]["configuration"])
            drawn.append(Panel(words, curves, UPDATES, NATS))
    return drawn


def _usual(lines: Sequence[Row], fields: Fields) -> list[Row]:
    return sorted((line for line in lines if _agrees(line, fields)), key=in_paper_order)


def _agrees(line: Row, fields: Fields) -> bool:
    return all(line["configuration"].get(name, value) == value for name, value in fields.items())


def _long(results: Path) -> list[Row]:
    """Curves of the long pre-trainings that are shown, the first seed of each."""
    lines = [line for line in read_curves(results) if line["subject"] == "mlm"]
    found = []
    for name, options in SHOWN:
        wanted = {**USUAL, **LONG, "options": dict(options)}
        own = [line for line in lines if line["mechanism"] == name and _agrees(line, wanted)]
        found += sorted(filter(_evaluations, own), key=lambda line: line["seed"])[:1]
    return found


def _evaluations(line: Row) -> dict[int, float]:
    """Loss on validation by updates, without the start."""
    return {
        row["step"]: row["loss"]
        for row in line["rows"]
        if row.get("kind") == "eval" and row["step"] > 0 and row["loss"] is not None
    }


def _curve(label: str, lines: Sequence[Row], slot: int) -> Curve:
    """The mean over seeds at the updates that all of them were evaluated at."""
    losses = [_evaluations(line) for line in lines]
    steps = sorted(set.intersection(*(set(own) for own in losses)))
    means = [sum(own[step] for own in losses) / len(losses) for step in steps]
    return Curve(label, steps, means, slot=slot, named=True)
