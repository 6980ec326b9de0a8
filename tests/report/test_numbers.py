"""Numbers as they stand in plots and tables."""

from __future__ import annotations

from lln.report.numbers import short_number, three_digits


def test_numbers_on_axes_are_short():
    given = (0.25, 512, 1024, 65_536, 30_000)
    assert [short_number(x) for x in given] == ["0.25", "512", "1k", "64k", "30k"]


def test_numbers_in_tables_have_three_digits_or_more():
    given = (None, 0.04123, 3.14159, 31.4159, 3141.59)
    assert [three_digits(x) for x in given] == ["", "0.0412", "3.14", "31.4", "3,142"]
