"""Losses of pre-trainings: the blocks of docs/results/lln-alone.md and docs/guide/near-and-far.md.

Three scales: the pre-trainings on a GPU behind Table 1, a screen of a fifth of their tokens, and a
study of minutes on a CPU; the rows of the last two lie in folders of their own.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lln.nn import RECOMMENDED
from lln.report.canvas import Axis
from lln.report.panels import Curve, Panel
from lln_study.paper.pages.blocks import NOTHING_YET, Blocks, Row, crossed
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
CPU = "lln_alone"  # folder of the rows of sweeps/lln_alone_cpu.json
SCREEN = "near_far"  # folder of the rows of sweeps/near_far_screen.json
USUAL: Fields = {"learning_rate": 7e-4, "positions": "sinusoid", "heads": 8, "precision": "bf16"}
LONG: Fields = {"recipe": "roberta-small", "length": 512, "steps": 15_300}
MOMENTS = (1_000, 4_000, 8_000, 12_000, 15_300)  # updates of the long runs
ALONE = ("softmax", "lln", "lln_authors")
BRANCHES = ("softmax", "lln_diag", "lln_nearfar")
SHOWN: tuple[tuple[str, Fields], ...] = (
    ("softmax", {}),
    ("softmax", {"conv": RECOMMENDED["conv"]}),
    ("block_diag", {}),
    ("lln", {}),
    ("lln_diag", {}),
    ("lln_diag", RECOMMENDED),
)
DRAWN = 6  # curves of a panel that can be told apart
SETTLED = 500  # updates after which a large gradient is no start


def _agrees(row: Row, fields: Fields) -> bool:
    return all(row["configuration"].get(name, value) == value for name, value in fields.items())


def _mean(own: Sequence[Row]) -> str:
    """The mean over seeds, its standard error and their number."""
    mean = Mean.of(row["loss"] for row in own)
    if mean is None or any(row.get("diverged") for row in own):
        return "diverged"
    return mean.text(3) + (f" ({mean.count})" if mean.count > 1 else "")


def table(rows: Sequence[Row], usual: Fields, cell: Callable[[Sequence[Row]], str] = _mean) -> str:
    """A line per mechanism and what else is not ``usual``, a column per convolution."""
    if not rows:
        return NOTHING_YET

    def place(row: Row) -> tuple[str, str]:
        given = dict(row["configuration"]["options"])
        conv = given.pop("conv", None)
        own = {"mechanism": row["mechanism"], "configuration": {"options": given}}
        others = [
            f"{name} = {row['configuration'][name]}".replace("_", " ")
            for name, value in usual.items()
            if row["configuration"].get(name, value) != value
        ]
        return ", ".join([mechanism(own), *others]), f"conv {conv}" if conv else "no conv"

    groups = grouped(sorted(rows, key=in_paper_order), place)
    found = {where: cell(own) for where, own in groups.items()}
    return f"{crossed('loss', found)}\n\n({origin_text(rows)})"


def alone_screen(results: Path) -> str:
    """Short pre-trainings of LLN alone with one thing changed, and softmax beside them."""
    rows = [row for row in read(results / SCREEN, "mlm") if row["mechanism"] in ALONE]
    return table(rows, USUAL)


def alone_cpu(results: Path) -> str:
    """The study on a CPU."""
    return table(read(results / CPU, "mlm"), {"heads": 2})


def branches_screen(results: Path) -> str:
    """Short pre-trainings with two branches; the largest norm of the gradient in brackets."""
    rows = read(results / SCREEN, "mlm")
    norms = {
        (line["digest"], line["seed"]): max(
            (row.get("gradient_norm") or 0 for row in line["rows"] if row["step"] > SETTLED),
            default=0,
        )
        for line in read_curves(results / SCREEN)
    }

    def loss(own: Sequence[Row]) -> str:
        norm = norms.get((own[-1]["digest"], own[-1]["seed"]))
        return f"{own[-1]['loss']:.2f}" + (f" ({norm:.1f})" if norm else "")

    shown = [row for row in rows if row["mechanism"] in BRANCHES and _agrees(row, USUAL)]
    return table(shown, {}, loss)


def branches_long(results: Path) -> str:
    """Long pre-trainings: one normaliser and learned mixes beside softmax."""
    return table([row for row in read(results, "mlm") if _is_compared(row)], {})


def _is_compared(row: Row) -> bool:
    is_learned = row["configuration"]["options"].get("mix") == "learned"
    has_branches = row["mechanism"] in ("softmax", "lln_nearfar") or is_learned
    return has_branches and _agrees(row, LONG)


def _long_curves(results: Path) -> list[Row]:
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


def alone_long(results: Path) -> str:
    """Loss on validation at some moments of the long pre-trainings."""
    lines = _long_curves(results)
    if not lines:
        return NOTHING_YET
    found = {
        (mechanism(line), f"{step:,}"): f"{loss:.2f}"
        for line in lines
        for step, loss in _evaluations(line).items()
        if step in MOMENTS
    }
    keys = {(line["digest"], line["seed"]) for line in lines}
    rows = [row for row in read(results, "mlm") if (row["digest"], row["seed"]) in keys]
    return f"{crossed('loss after updates', found)}\n\n({origin_text(rows)})"


def figure(results: Path) -> list[Panel]:
    """Validation loss against updates: the long pre-trainings, their screen, the CPU's study."""
    screen = [
        line
        for line in read_curves(results / SCREEN)
        if line["mechanism"] in ALONE and _agrees(line, USUAL)
    ]
    cpu = [line for line in read_curves(results / CPU) if _agrees(line, {"heads": 2})]
    titles = {
        "Large: {layers} layers × {width}, N = {length}": _long_curves(results),
        "The same with a fifth of the tokens": sorted(screen, key=in_paper_order),
        "On a CPU: {layers} layers × {width}, N = {length}, mean over seeds": sorted(
            cpu, key=in_paper_order
        ),
    }
    slots: dict[str, int] = {}  # one colour in all panels
    drawn = []
    for title, lines in titles.items():
        curves = [
            _curve(name, own, slots.setdefault(name, len(slots)))
            for name, own in list(grouped(lines, _short).items())[:DRAWN]
        ]
        if curves:
            words = title.format(**lines[0]["configuration"])
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


BLOCKS: Blocks = {
    "lln_alone_large": alone_long,
    "lln_alone_screen": alone_screen,
    "lln_alone_small": alone_cpu,
    "near_far_screen": branches_screen,
    "near_far_long": branches_long,
}
