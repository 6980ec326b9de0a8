"""The report of lln inspect in a real browser: heat maps fit a phone and a desk."""

from __future__ import annotations

import pytest
import torch

from lln.inspect import heads, page
from lln.instruments.recording.attention_call import AttentionCall
from lln.report.page import render
from tests.report.browser import DARK, look, needs_browser, write_probed

PROBE = """
const box = (element) => element.getBoundingClientRect();
const maps = [...document.querySelectorAll("svg")].filter((svg) => svg.querySelector("g > title"));
const cells = [...maps[0].querySelectorAll("g > title")].map((title) => title.parentElement);
const text = maps[0].querySelectorAll("text");
document.body.dataset.seen = JSON.stringify({
  document: document.documentElement.scrollWidth, window: innerWidth, maps: maps.length,
  cells: cells.length, right: Math.max(...cells.map((cell) => box(cell).right)),
  cell: box(cells[0]).width, words: [...text].map((each) => box(each).height),
  title: getComputedStyle(text[0]).fill});
"""

pytestmark = [needs_browser, pytest.mark.slow]


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    q, k = torch.randn(2, 1, 12, 40, 8, generator=torch.Generator().manual_seed(0))
    calls = [AttentionCall(n, f"layer.{n}", "softmax", q=q * (n + 1), k=k) for n in range(3)]
    rows = [row for layer in heads.head_rows(calls) for row in layer]
    html = render(page.build(rows, "a model", "Its lede.", {"device": "x" * 120}))
    return write_probed(tmp_path_factory.mktemp("inspect") / "report.html", html, PROBE)


def test_heat_maps_on_a_phone(report, tmp_path):
    seen = look(report, tmp_path, 500)
    assert seen["document"] <= seen["window"] and seen["right"] <= seen["window"]
    assert seen["maps"] == 6 and seen["cells"] == 3 * 12
    assert seen["cell"] >= 20 and min(seen["words"]) >= 8


def test_heat_maps_on_a_dark_desk(report, tmp_path):
    seen = look(report, tmp_path, 1300, DARK)
    assert seen["document"] <= seen["window"]
    assert seen["title"] == "rgb(230, 233, 238)"
