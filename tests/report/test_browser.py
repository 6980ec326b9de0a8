"""The page in a real browser: it fits a phone and a desk, and follows light and dark."""

from __future__ import annotations

import pytest

from lln.report.lines import Axis, Series, line_plot
from lln.report.page import Page, Plot, Plots, Section, Table, Text, render
from tests.report.browser import DARK, look, needs_browser, write_probed

PROBE = """
const plot = document.querySelector("svg").getBoundingClientRect();
const ink = getComputedStyle(document.querySelector("svg text")).fill;
document.body.dataset.seen = JSON.stringify([
  document.documentElement.scrollWidth, innerWidth, Math.round(plot.width), ink]);
"""

pytestmark = needs_browser


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    curve = Series("a curve", [512, 1024, 2048], [1.0, 2.0, 4.0])
    axes = {"x": Axis("N", log=True, ticks=[512, 1024, 2048]), "y": Axis("ms")}
    plots = [Plot(line_plot(name, [curve], title="Title", **axes)) for name in ("one", "two")]
    wide = Table([f"column {n}" for n in range(14)], [["a long cell"] * 14] * 3)
    blocks = [Text("Some words. " * 40), Plots(plots), wide]
    page = Page("A report", "Its lede.", [Section("Section", blocks)], {"device": "x" * 120})
    return write_probed(tmp_path_factory.mktemp("page") / "report.html", render(page), PROBE)


def test_a_phone_in_light(report, tmp_path):
    document, window, plot, ink = look(report, tmp_path, 500)
    assert document <= window and plot >= 0.3 * window
    assert ink == "rgb(28, 32, 38)"


def test_a_desk_in_the_dark(report, tmp_path):
    document, window, plot, ink = look(report, tmp_path, 1300, DARK)
    assert document <= window and plot >= 0.3 * window
    assert ink == "rgb(230, 233, 238)"
