"""Names of curves at their right ends, instead of in a legend."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

SMALLEST_GAP = 0.028  # between two names, as a share of the height


@dataclass(frozen=True)
class End:
    """The last point of a curve, and how its name is written."""

    label: str
    x: float
    y: float
    colour: str
    bold: bool = False


def name_ends(axes, ends: Sequence[End], *, size: float = 7.5, gap: float = SMALLEST_GAP) -> None:
    """Write names beside the right edge, in the order of the last values, and lines to those.

    Scales and limits of the axes must be set before.
    """
    axes.autoscale_view()  # which matplotlib puts off until somebody asks
    points = [axes.transData.transform((end.x, end.y)) for end in ends]
    heights = [axes.transAxes.inverted().transform(point)[1] for point in points]
    order = sorted(range(len(ends)), key=lambda n: heights[n])
    spread = dict(zip(order, spaced([heights[n] for n in order], gap), strict=True))
    for n, end in enumerate(ends):
        axes.annotate(
            end.label,
            xy=(end.x, end.y),
            xytext=(1.03, spread[n]),
            textcoords="axes fraction",
            fontsize=size,
            color=end.colour,
            fontweight="bold" if end.bold else "normal",
            va="center",
            annotation_clip=False,
            arrowprops={
                "arrowstyle": "-",
                "linewidth": 0.4,
                "color": end.colour,
                "alpha": 0.5,
                "relpos": (0, 0.5),
            },
        )


def spaced(heights: Sequence[float], gap: float = SMALLEST_GAP) -> list[float]:
    """Move ascending heights apart to at least ``gap`` by the least squares of the moves.

    Without the gaps this is isotonic regression: neighbours that would touch share their mean.
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
