"""Curves of the inverse loss scale, Figs. 8b and 10b: drawn once where equal, and what they say."""

from __future__ import annotations

import itertools
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


def overflows(curves: Sequence[Curve]) -> str:
    """What a title adds where no update was left out in any run."""
    rose = any(b > a for curve in curves for a, b in itertools.pairwise(curve.y))
    return "" if rose else ": no update overflowed"


def falls(curves: Sequence[Curve]) -> str:
    """Say how often the scale of each run fell, its inverse rose, and when for the last time.

    Example:
        >>> falls([Curve("softmax", [0, 1, 2], [1, 2, 1])])
        'The loss scale falls 1 time in softmax, last at step 1.'
    """
    said: dict[str, list[str]] = {}
    for curve in curves:
        pairs = zip(curve.x[1:], itertools.pairwise(curve.y), strict=True)
        steps = [x for x, (before, after) in pairs if after > before]
        times = f"{len(steps)} time" + ("s" if len(steps) > 1 else "")
        words = (
            f"falls {times} in {{}}, last at step {steps[-1]:,}" if steps else "never falls in {}"
        )
        said.setdefault(words, []).append(curve.label)
    parts = [words.format(" and ".join(names)) for words, names in said.items()]
    alike = (
        " They cannot be told apart by it." if len(curves) > 1 and len(once(curves)) == 1 else ""
    )
    return f"The loss scale {'; it '.join(parts)}.{alike}"
