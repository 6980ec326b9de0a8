"""The page of everything: a section per table and figure, numbers from rows, nothing made up."""

from __future__ import annotations

import re
from pathlib import Path

import pytest
from typer.testing import CliRunner

from lln.cli.app import app
from lln.report.page import Table, Text
from lln_study.paper import report
from lln_study.paper.report import NOTHING, items, page
from tests.lln_study.paper.vision_rows import lra, vit, write

RESULTS = Path(__file__).resolve().parents[3] / "results"


def section(found, title: str):
    (own,) = [each for each in found.sections if each.title.startswith(title + ".")]
    return own


def ours(own) -> list[Table]:
    tables = [block for block in own.blocks if isinstance(block, Table)]
    return [table for table in tables if table.title.startswith("Ours")]


def test_without_rows_every_section_says_so(tmp_path):
    found = page(tmp_path)
    assert len(found.sections) == len(items()) == 17
    for own in found.sections:
        texts = [block.body for block in own.blocks if isinstance(block, Text)]
        assert any(text.startswith(NOTHING) and "`lln " in text for text in texts), own.title
        assert texts[-1].startswith("What differs: ")
        assert not ours(own)


def test_rows_stand_beside_the_papers_numbers(tmp_path):
    rows = [vit("softmax", 0.8), vit("lln_diag", 0.82, seed=1)]
    rows += [lra("softmax", "text", 0.6), lra("lln_diag", "text", 0.7)]
    write(tmp_path, rows)
    found = page(tmp_path)
    third = section(found, "Table 3")
    (table,) = ours(third)
    assert ("82.00", "81.72") in [(line[1], line[3]) for line in table.lines]
    fifth = section(found, "Table 5")
    names = ["Softmax", "  in the paper", "LLN+Diag", "  in the paper"]
    assert [line[0] for line in ours(fifth)[0].lines] == names
    first = next(block for block in section(found, "Table 1").blocks if isinstance(block, Table))
    assert ["LLN+Diag", "80", "86.5", "89.7", "91.6", "86.9"] in [list(x) for x in first.lines]


@pytest.mark.parametrize("number", ["2", "5a", "5b", "6a", "6b"])
def test_computed_figures_come_from_their_files(number):
    panels = report._computed(number, RESULTS)
    assert panels and all(len(curve.x) > 1 for panel in panels for curve in panel.curves)


def test_command_writes_a_page_of_its_own(tmp_path):
    write(tmp_path, [vit("softmax", 0.8)])
    words = ["report", "--results", str(tmp_path), "--out", str(tmp_path / "page.html")]
    result = CliRunner().invoke(app, words)
    assert result.exit_code == 0, result.output
    html = (tmp_path / "page.html").read_text(encoding="utf-8")
    assert "Table 3. ViT on Dogs vs Cats" in html and "80.00" in html
    assert not re.search(r"<script|src=.http|@import", html)
