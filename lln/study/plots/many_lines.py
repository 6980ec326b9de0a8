"""Many curves in one plot: each named at its right end instead of in a legend."""

from __future__ import annotations

import math
from collections.abc import Container, Sequence

from lln.study.plots.canvas import INK, SERIES, Axis, label_axes, new_figure, page_svg, set_title
from lln.study.plots.lines import Series

SMALLEST_GAP = 0.028  # between two names, as a share of the height


def many_lines_plot(
    name: str, curves: Sequence[Series], *, title: str, x: str, highlighted: Container[str] = ()
) -> str:
    """Draw curves over logarithmic axes and return an ``<svg>`` element.

    Args:
        name: Word that makes the ids of this drawing differ from those of others on the page.
        highlighted: Labels of the curves that are drawn in colour; the others are grey.
    """
    with new_figure(name, (7.2, 6.4)) as figure:
        axes = figure.add_subplot()
        colours = iter(SERIES * len(curves))
        styles = [
            (next(colours), 1.8, 1.0) if curve.label in highlighted else (INK, 0.7, 0.45)
            for curve in curves
        ]
        for curve, (colour, width, opacity) in zip(curves, styles, strict=True):
            axes.plot(curve.x, curve.y, color=colour, linewidth=width, alpha=opacity, marker=".")
        set_title(axes, title)
        lengths = sorted({value for curve in curves for value in curve.x})
        label_axes(axes, Axis(x, log=True, ticks=lengths), Axis("milliseconds", log=True))
        _name_ends(axes, curves, [style[0] for style in styles])
        return page_svg(figure, name, title)


def _name_ends(axes, curves: Sequence[Series], colours: Sequence[str]) -> None:
    """Write names beside the right edge, in the order of the last values, and lines to those."""
    low, high = (math.log(value) for value in axes.get_ylim())
    heights = [(math.log(curve.y[-1]) - low) / (high - low) for curve in curves]
    order = sorted(range(len(curves)), key=lambda n: heights[n])
    spread = dict(zip(order, spaced([heights[n] for n in order]), strict=True))
    for n, curve in enumerate(curves):
        axes.annotate(
            curve.label,
            xy=(curve.x[-1], curve.y[-1]),
            xytext=(1.03, spread[n]),
            textcoords="axes fraction",
            fontsize=7.5,
            color=colours[n],
            fontweight="normal" if colours[n] == INK else "bold",
            va="center",
            arrowprops={
                "arrowstyle": "-",
                "linewidth": 0.4,
                "color": colours[n],
                "alpha": 0.5,
                "relpos": (0, 0.5),
            },
        )


def spaced(heights: Sequence[float], gap: float = SMALLEST_GAP) -> list[float]:
    """Move ascending heights apart to at least ``gap`` by the least squares of the moves.

    Without the gaps this is isotonic regression: neighbours that would overlap share their mean.
    """
    groups: list[list[float]] = []  # sum, size
    for n, height in enumerate(heights):
        groups.append([height - n * gap, 1])
        while len(groups) > 1 and groups[-2][0] / groups[-2][1] > groups[-1][0] / groups[-1][1]:
            total, size = groups.pop()
            groups[-1][0] += total
            groups[-1][1] += size
    means = [total / size for total, size in groups for _ in range(int(size))]
    return [mean + n * gap for n, mean in enumerate(means)]
