"""Heat maps and scatter plots: valid SVG, every number in its cell, readable colours."""

from __future__ import annotations

import re
import xml.etree.ElementTree as ElementTree

import pytest

from lln.report.canvas import STYLE_VARIABLES
from lln.report.heat_map import colour, heat_map, ink_on, limits_of, share_of
from lln.report.lines import Axis, Series, scatter_plot


def draw(cells, **options):
    options = {"title": "Entropy <bits>", "rows": "layer", "columns": "head", **options}
    return heat_map("entropy", cells, **options)


def test_every_number_stands_in_its_cell():
    root = ElementTree.fromstring(draw([[1.0, 2.25], [None, 4.0]]))
    titles = [each.text for each in root.iter("{http://www.w3.org/2000/svg}title")]
    assert titles == [
        "layer 0, head 0: 1.00",
        "layer 0, head 1: 2.25",
        "layer 1, head 0: not measured",
        "layer 1, head 1: 4.00",
    ]
    words = [each.text for each in root.iter("{http://www.w3.org/2000/svg}text")]
    assert "Entropy <bits>" in words and "2.25" in words
    assert words.count("4.00") == 2  # the cell and the end of the scale


def test_wide_maps_keep_numbers_for_the_pointer():
    svg = draw([[0.5] * 64])
    words = re.findall(r">([^<>]+)</text>", svg)
    assert svg.count("head 63: 0.50</title>") == 1
    assert words.count("0.50") == 2  # only the scale
    assert "62" in words and "63" not in words  # every second column is labelled


def test_colours_span_the_scale_and_ink_is_readable():
    assert colour(0) == (0x44, 0x01, 0x54) and colour(1) == (0xFD, 0xE7, 0x24)
    assert colour(-3) == colour(0) and colour(7) == colour(1)
    assert ink_on(colour(0)) == "#ffffff" and ink_on(colour(1)) == "#000000"
    assert limits_of([[2.0, None], [5.0]]) == (2.0, 5.0)
    assert limits_of([[None]]) == (0.0, 1.0)
    assert share_of(3.0, (2.0, 4.0)) == 0.5 == share_of(2.0, (2.0, 2.0))


@pytest.mark.parametrize("cells", [[], [[None, None]], [[1.0]]])
def test_small_maps_are_drawn(cells):
    assert ElementTree.fromstring(draw(cells)).get("viewBox")


def test_scatter_plot_has_points_and_page_colours():
    groups = [Series("Prop. 3.1", [1.0, 2.0], [1.5, 2.5]), Series("Fenton", [1.0], [1.0])]
    svg = scatter_plot("law", groups, title="Variance", x=Axis("predicted"), y=Axis("measured"))
    root = ElementTree.fromstring(svg)
    words = "".join(root.itertext())
    assert "Prop. 3.1" in words and "predicted" in words
    assert not any(marker in svg for marker in STYLE_VARIABLES)
    assert svg == scatter_plot(
        "law", groups, title="Variance", x=Axis("predicted"), y=Axis("measured")
    )
