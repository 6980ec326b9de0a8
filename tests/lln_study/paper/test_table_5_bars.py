"""Table 5 as bars: the numbers of the table, with their names."""

from __future__ import annotations

from pathlib import Path

import pytest

from lln.report.panels import as_files
from lln_study.paper.figures import table_5

pytestmark = pytest.mark.slow  # the study

RESULTS = Path(__file__).parents[3] / "results"


def test_bars_are_the_table():
    from lln_study.paper.tables import table as tables

    (panel,) = table_5.panels(RESULTS)
    records = {row["name"]: row for row in tables.make("5", RESULTS)[0].records}
    tasks = ("text", "listops", "retrieval_wiki", "pathfinder", "image")
    assert panel.bars and panel.curves[0].slot == 0
    for curve in panel.curves:
        assert curve.y == [100 * records[curve.label][task] for task in tasks]


def test_bars_are_drawn_side_by_side_with_their_names():
    svg = as_files("bars", table_5.panels(RESULTS))["svg"].decode()
    assert all(f">{word}<" in svg for word in ("Text", "ListOps", "Pathfinder", "LLN+Diag"))
