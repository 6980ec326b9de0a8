"""The page of claims: what counts as level, and that it is said of the rows in results/."""

from __future__ import annotations

import math
from pathlib import Path

import pytest

from lln.study.paper.pages.blocks import NOTHING_YET
from lln.study.paper.pages.claims import Value, claims, disagreements, flat_from, strength

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
    assert claims(tmp_path) == disagreements(tmp_path) == NOTHING_YET
