"""Many curves in one plot: each named at its right end instead of in a legend."""

from __future__ import annotations

from collections.abc import Container, Sequence

from lln.report.canvas import INK, SERIES, Axis, label_axes, new_figure, page_svg, set_title
from lln.report.lines import Series
from lln.report.names import End, name_ends


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
        ends = [
            End(curve.label, curve.x[-1], curve.y[-1], colour, bold=colour != INK)
            for curve, (colour, *_) in zip(curves, styles, strict=True)
        ]
        name_ends(axes, ends)
        return page_svg(figure, name, title)
