"""Losses of short pre-trainings: the blocks of docs/results/lln-alone.md.

Long pre-trainings are in the table of pre-training, and drawn by :mod:`figures.lln_alone`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

from lln_study.paper.figures.lln_alone import ALONE, CPU, SCREEN, USUAL, USUAL_CPU, Fields
from lln_study.paper.pages.blocks import Blocks, Row, crossed, sourced
from lln_study.paper.results import (
    Mean,
    grouped,
    in_paper_order,
    mechanism,
    read,
    read_curves,
)

SETTLED = 500  # updates after which a large gradient is no start
Run = tuple[str, int]  # digest and seed


def screen(results: Path) -> str:
    """Short pre-trainings with one thing changed; in brackets the largest norm of the gradient."""
    norms = {
        _run(line): max(
            (row.get("gradient_norm") or 0 for row in line["rows"] if row["step"] > SETTLED),
            default=0,
        )
        for line in read_curves(results / SCREEN)
    }
    rows = [row for row in read(results / SCREEN, "mlm") if row["mechanism"] in ALONE]
    return table(rows, USUAL, norms)


def on_cpu(results: Path) -> str:
    """The study on a CPU."""
    return table(read(results / CPU, "mlm"), USUAL_CPU, {})


def table(rows: Sequence[Row], usual: Fields, norms: Mapping[Run, float]) -> str:
    """A line per mechanism and what else is not ``usual``, a column per convolution."""

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

    def cell(own: Sequence[Row]) -> str:
        mean = Mean.of(row["loss"] for row in own)
        if mean is None or any(row.get("diverged") for row in own):
            return "diverged"
        norm = max(norms.get(_run(row), 0) for row in own)
        return mean.text(3) + (f" ({norm:.1f})" if norm else "")

    groups = grouped(sorted(rows, key=in_paper_order), place)
    found = {where: cell(own) for where, own in groups.items()}
    return sourced(crossed("loss", found), rows)


def _run(row: Row) -> Run:
    return row["digest"], row["seed"]


BLOCKS: Blocks = {
    "lln_alone_screen": screen,
    "lln_alone_small": on_cpu,
}
