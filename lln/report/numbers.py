"""How numbers are written for people."""

from __future__ import annotations


def short_number(value: float) -> str:
    """Write a number for an axis: 512, "4k" for 4096 (thousands of 1024 when exact), 0.25."""
    if value >= 1024 and value % 1024 == 0:
        return f"{value / 1024:g}k"
    if value >= 10_000:
        return f"{value / 1000:g}k"
    return f"{value:g}"


def three_digits(value: float | None) -> str:
    """Write a number for a table: 0.0412, 3.14, 31.4, 3,142; nothing for None."""
    if value is None:
        return ""
    return f"{value:,.0f}" if value >= 100 else f"{value:.3g}"
