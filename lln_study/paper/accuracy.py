"""Accuracies at several learning rates: validation chooses the rate, the same way for all."""

from __future__ import annotations

from collections.abc import Sequence

from lln_study.paper.results import Mean, Row, grouped

TESTED = "test once, with the weights best on validation."


def rate(row: Row) -> float:
    return row["configuration"]["learning_rate"]


def at_best_rate(rows: Sequence[Row]) -> list[Row]:
    """Select, of runs that differ in rate and seed, those of the rate best on validation.

    Only seeds that every rate has are compared, so that a rate is not chosen for its luck with
    another seed.
    """
    by_rate = grouped(rows, rate)
    seeds = [{row["seed"] for row in own} for own in by_rate.values()]
    common = set.intersection(*seeds) or set.union(*seeds)

    def valid(own: list[Row]) -> float:
        mean = Mean.of(row.get("valid_accuracy") for row in own if row["seed"] in common)
        return float("-inf") if mean is None else mean.value

    return max(by_rate.values(), key=valid)


def rates_note(rows: Sequence[Row]) -> str:
    """How the rate was found."""
    several = len({rate(row) for row in rows}) > 1
    chosen = ", the best on validation is shown" if several else ""
    return f"Learning {_listed(rows)} for all{chosen}; {TESTED}"


def rates_tried(rows: Sequence[Row]) -> str:
    """Rates of one task, for a table of several; says so if a mechanism lacks one."""
    tried = {rate(row) for row in rows}
    own = grouped(rows, lambda row: (row["mechanism"], str(row["configuration"].get("options"))))
    complete = all({rate(row) for row in each} == tried for each in own.values())
    return _listed(rows) + ("" if complete else " (some mechanisms at fewer)")


def _listed(rows: Sequence[Row]) -> str:
    tried = sorted({rate(row) for row in rows})
    return ("rate " if len(tried) == 1 else "rates ") + ", ".join(f"{each:g}" for each in tried)


def is_fixed(row: Row) -> bool:
    """Whether α and β were given, as for Fig. 10."""
    return (row["configuration"].get("options") or {}).get("statistics") == "fixed"
