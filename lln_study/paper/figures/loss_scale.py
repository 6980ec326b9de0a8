"""Curves of the inverse loss scale, Figs. 8b and 10b: drawn once where equal."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from lln.report.panels import Curve


def once(curves: Sequence[Curve]) -> list[Curve]:
    """Curves through the same points as one, named after all of them."""
    found: dict[tuple[tuple[float, ...], tuple[float, ...]], list[Curve]] = {}
    for curve in curves:
        found.setdefault((tuple(curve.x), tuple(curve.y)), []).append(curve)
    return [
        replace(same[0], label=" = ".join(curve.label for curve in same)) for same in found.values()
    ]
