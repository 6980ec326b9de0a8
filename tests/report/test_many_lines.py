"""Names beside many curves: apart, in order, close to their values."""

from __future__ import annotations

import itertools

import pytest

from lln.report.lines import Series
from lln.report.many_lines import many_lines_plot
from lln.report.names import spaced


def test_names_that_do_not_collide_stay():
    assert spaced([0.1, 0.5, 0.9], gap=0.1) == pytest.approx([0.1, 0.5, 0.9])


def test_equal_heights_spread_around_their_mean():
    assert spaced([0.5, 0.5, 0.5], gap=0.1) == pytest.approx([0.4, 0.5, 0.6])


def test_gaps_hold_everywhere():
    heights = [0.1, 0.11, 0.12, 0.4, 0.41, 0.9]
    moved = spaced(heights, gap=0.05)
    assert all(b - a >= 0.05 - 1e-12 for a, b in itertools.pairwise(moved))
    assert sum(moved) == pytest.approx(sum(heights))


def test_the_drawing_names_every_curve_and_takes_the_colours_of_the_page():
    curves = [Series(f"curve {n}", [512, 1024], [n + 1, 2 * n + 2]) for n in range(12)]
    options = {"title": "Many", "x": "tokens N", "highlighted": ["curve 0"]}
    svg = many_lines_plot("many", curves, **options)
    assert svg.startswith("<svg ") and all(f"curve {n}" in svg for n in range(12))
    assert "var(--series-1" in svg and "var(--ink" in svg and 'aria-label="Many"' in svg
    assert svg == many_lines_plot("many", curves, **options)
