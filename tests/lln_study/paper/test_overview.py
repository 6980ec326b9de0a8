"""The figures of the start page of results that no other page has."""

from __future__ import annotations

from pathlib import Path

import pytest

from lln.report.panels import as_files
from lln_study.paper.figures import overview

pytestmark = pytest.mark.slow  # the study

RESULTS = Path(__file__).parents[3] / "results"
ROW = {"length": 1000, "layers": 10, "near_keys": 100, "kept": [], "kept_heads": {}}


def test_tokens_kept_are_a_mean_over_layers_and_key_heads():
    assert overview.kept_tokens(ROW) == 100
    assert overview.kept_tokens({**ROW, "kept": [1, 2]}) == (2 * 1000 + 8 * 100) / 10
    three = {**ROW, "kept_heads": {"4": [0, 2, 8]}}  # heads 0 and 2 read one key head
    assert overview.kept_tokens(three) == pytest.approx(100 + 1000 * 2 / 3 / 10)


def test_conversion_compares_what_is_kept():
    (panel,) = overview.conversion(RESULTS)
    curves = {curve.label: curve for curve in panel.curves}
    assert list(curves) == [
        "more near keys",
        "heads keep softmax",
        "layers keep softmax",
        "softmax",
    ]
    for name, curve in curves.items():
        assert list(curve.x) == sorted(curve.x) and len(curve.x) > 1
        assert all(0 <= x <= 100 for x in curve.x)
        assert curve.y[-1] < curve.y[0] or name == "softmax"


def test_bars_are_the_table():
    from lln_study.paper.tables import table as tables

    (panel,) = overview.arena(RESULTS)
    records = {row["name"]: row for row in tables.make("5", RESULTS)[0].records}
    tasks = ("text", "listops", "retrieval_wiki", "pathfinder", "image")
    assert panel.bars and panel.curves[0].slot == 0
    for curve in panel.curves:
        assert curve.y == [100 * records[curve.label][task] for task in tasks]


def test_bars_are_drawn_side_by_side_with_their_names():
    svg = as_files("bars", overview.arena(RESULTS))["svg"].decode()
    assert all(f">{word}<" in svg for word in ("Text", "ListOps", "Pathfinder", "LLN+Diag"))
