"""The page of claims: what counts as level, and that it is said of the rows in results/."""

from __future__ import annotations

import itertools
import math
from pathlib import Path

import pytest

from lln.study.paper.pages.blocks import NOTHING_YET
from lln.study.paper.pages.claims import Value, claims, disagreements, flat_from, strength
from lln.study.paper.pages.costs import PLANS, costs, least_seconds
from lln.study.sweep import plan

RESULTS = Path(__file__).resolve().parents[3] / "results"


@pytest.mark.parametrize(
    ("ours", "theirs", "less", "said"),
    [
        (Value(0.80, 0.01, 3), Value(0.778, 0.005, 3), False, "level, 3 seeds"),
        (Value(0.80, 0.01, 3), Value(0.77, 0.01, 3), False, "ahead, 3 seeds"),
        (Value(0.77, 0.01, 3), Value(0.80, 0.01, 2), False, "behind, 2 seeds"),
        (Value(2.4, 0.01, 2), Value(2.5, 0.01, 1), True, "ahead, one seed"),
        (Value(2.6, None, 1), Value(2.5, None, 1), True, "behind, one seed, error unknown"),
    ],
)
def test_two_errors_decide(ours, theirs, less, said):
    assert strength(ours, theirs, less_is_better=less) == said


def test_flat_from():
    assert flat_from([0.1, 0.345, 0.34, 0.352], [0, 500, 1000, 1500]) == 500
    assert flat_from([0.1, 0.2, 0.3], [0, 5, 10]) == 10
    assert flat_from([], []) is None


def test_errors_are_those_of_seeds_and_examples():
    """One line by hand: three seeds of the ViT, 2,500 images."""
    line = next(
        x for x in claims(RESULTS).splitlines() if "Diag (paper) – softmax" in x and "ViT" in x
    )
    ours, theirs = [0.8416, 0.8376, 0.8356], [0.826, 0.8232, 0.8332]

    def error(runs):
        mean = sum(runs) / 3
        spread = sum((run - mean) ** 2 for run in runs) / 2 / 3
        return mean, math.sqrt(spread + mean * (1 - mean) / 2500)

    (a, da), (b, db) = error(ours), error(theirs)
    assert f"{100 * (a - b):+.1f} ± {100 * math.hypot(da, db):.1f}" in line


def test_nothing_is_claimed_without_rows(tmp_path):
    assert claims(tmp_path) == disagreements(tmp_path) == costs(tmp_path) == NOTHING_YET


@pytest.mark.parametrize("name", PLANS)
def test_costs_count_the_runs_of_the_sweep_files(name):
    content = plan.read(RESULTS.parent / "sweeps" / name)
    repeat = content.get("repeat")
    seeds = len(repeat["seed"]) if repeat else 0
    tried = len(content["grid"][repeat["best_of"]]) if repeat else 1
    runs = plan.expand(content)
    count = sum(len(jobs(spec)) for spec in runs) + seeds * len(runs) // tried
    count += sum(len(jobs(after)) for run in runs for after in plan.expand(run.get("then", [])))
    assert count == sum(part.runs for part in PLANS[name].parts)


def jobs(spec) -> list:
    """Every combination of the fields of a run that are lists of runs."""
    several = [spec.get(name) for name in ("task", "seed", "lengths", "attentions")]
    return list(itertools.product(*(value for value in several if isinstance(value, list))))


def test_the_cost_of_a_run_is_that_of_the_quickest_row():
    rows = [
        {"subject": "vit", "seconds": seconds, "configuration": {"steps": steps}}
        for seconds, steps in ((50.0, 10), (40.0, 10), (1.0, 5))
    ]
    assert least_seconds(rows, "vit", {"steps": 10}) == 40.0
    assert least_seconds(rows, "lra", {}) is None
