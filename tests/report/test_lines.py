"""Plots: valid SVG, the same every time, colours and ids fit for a page."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from lln.report import panels
from lln.report.canvas import STYLE_VARIABLES
from lln.report.lines import Axis, Series, line_plot


def draw(name: str = "one", **options) -> str:
    curves = [
        Series("softmax <&>", [512, 1024, 2048], [1.0, 4.0, 16.0]),
        Series("LLN", [512, 1024, 2048], [1.0, 2.0, 4.0], error=[0.1, 0.1, 0.1]),
    ]
    axes = {"x": Axis("N", log=True, ticks=[512, 1024, 2048]), "y": Axis("ms", log=True)}
    return line_plot(name, curves, title="Time", **{**axes, **options})


def test_the_drawing_is_one_svg_element_with_its_labels():
    root = ElementTree.fromstring(draw())
    assert root.tag.endswith("svg")
    assert root.get("width") is None and root.get("viewBox") is not None
    words = "".join(root.itertext())
    for expected in ("softmax <&>", "LLN", "Time", "512", "1k", "2k"):
        assert expected in words


def test_the_same_values_give_the_same_text():
    assert draw() == draw()


def test_no_marker_colour_is_left_and_the_page_decides():
    svg = draw()
    for colour in STYLE_VARIABLES:
        assert colour not in svg
    assert "var(--series-1, " in svg and "var(--series-2, " in svg and "var(--ink, " in svg
    assert "#ffffff" not in svg.replace(
        "var(--paper, #ffffff)", ""
    )  # no white sheet on a dark page


def test_ids_of_two_drawings_differ_and_references_resolve():
    first, second = draw("first"), draw("second")
    ids = [set(re.findall(r'\bid="([^"]+)"', svg)) for svg in (first, second)]
    assert ids[0] and not ids[0] & ids[1]
    used = set(re.findall(r'url\(#([^)]+)\)|href="#([^"]+)"', first))
    assert used and {a or b for a, b in used} <= ids[0]


def test_a_screen_reader_gets_the_description():
    assert 'aria-label="a &quot;quoted&quot; &lt;word&gt;"' in draw(description='a "quoted" <word>')


@pytest.mark.parametrize(
    ("labels", "width", "columns"),
    [
        (["a"] * 6, 5.2, 6),  # no more columns than labels
        ([f"{x}D = {d}" for d in (16, 64, 256) for x in ("", "line, ")], 5.2, 3),
        (["short", "a label of some forty letters, even more"] * 4, 5.2, 1),
        (["short"] * 4 + ["a label of some forty letters, even more"] * 4, 5.2, 2),
    ],
)
def test_a_legend_has_as_many_columns_as_fit(labels, width, columns):
    assert panels._legend_columns(labels, width) == columns


def test_the_legend_stays_inside_the_figure(monkeypatch):
    figures = []
    monkeypatch.setattr(panels, "encode", lambda figure, form: figures.append(figure) or b"")
    names = ("Softmax", "Nyströmformer", "LLN+Diag (entropy, learned mix, C = 128, conv 33)")
    curves = [panels.Curve(f"{name} {i}", [0, 1], [0, i]) for name in names for i in range(4)]
    for count in (1, 2, 3):
        panel = panels.Panel("loss", curves, Axis("x"), Axis("y"))
        panels.as_files("test", [panel] * count)
        figure = figures[-1]
        figure.canvas.draw()
        box = figure.legends[0].get_window_extent()
        assert box.x0 >= 0 and box.x1 <= figure.bbox.x1 and box.y0 >= 0
