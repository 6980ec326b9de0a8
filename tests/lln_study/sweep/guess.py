"""A task as small as one can be, with its table: how far a guess is from a goal."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from lln.report.page import Table
from lln_study.tasks.experiment import InSweeps

IN_SWEEPS = InSweeps(needs=("guess",), chosen_by=("distance", -1))


@dataclass(frozen=True)
class Guess:
    guess: int
    seed: int = 0


def configure(guess: int, **fields: Any) -> Guess:
    return Guess(guess, **fields)


def reads(config: Guess) -> dict[str, Any]:
    return {"goal": 5}


def load(source: Any = None, *, goal: int) -> int:
    return goal


def key(config: Guess, goal: int) -> tuple[str, int]:
    return f"{config.guess}-of-{goal}", config.seed


def run(config: Guess, goal: int, **where: Any) -> dict[str, Any]:
    digest, seed = key(config, goal)
    about = {"subject": "guess", "mechanism": "none", "configuration": asdict(config)}
    return {**about, "digest": digest, "seed": seed, "distance": abs(goal - config.guess)}


def tables(rows: Sequence[Mapping[str, Any]]) -> list[Table]:
    own = [row for row in rows if row["subject"] == "guess"]
    lines = [[str(row["configuration"]["guess"]), str(row["distance"])] for row in own]
    return [Table(["guess", "distance"], lines, "Guesses", records=own)] if own else []
