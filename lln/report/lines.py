"""Line and scatter plots of one pair of axes, as SVG elements of a page."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lln.report.canvas import (
    GRID,
    MARKERS,
    PAPER,
    SERIES,
    Axis,
    label_axes,
    new_figure,
    page_svg,
    set_title,
)

DASHES = ("-", "-", "--", "-.", (0, (4, 1.5)), ":")


@dataclass(frozen=True)
class Series:
    """One curve; ``error`` is drawn as bars of ± that much, ``slot`` fixes colour and marker."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    error: Sequence[float] | None = None
    slot: int | None = None


def line_plot(
    name: str, series: Sequence[Series], *, title: str, x: Axis, y: Axis, description: str = ""
) -> str:
    """Draw curves and return an ``<svg>`` element, the same text for the same values.

    Args:
        name: Word that makes the ids of this drawing differ from those of others on the page.
        description: What a screen reader says; the title if left out.
    """
    with new_figure(name, (5.6, 3.9)) as figure:
        axes = figure.add_subplot()
        for index, curve in enumerate(series):
            _draw(axes, curve, index if curve.slot is None else curve.slot)
        set_title(axes, title)
        label_axes(axes, x, y)
        if len(series) > 1:
            _legend(axes, len(series))
        return page_svg(figure, name, description or title)


def _draw(axes, curve: Series, slot: int) -> None:
    turn, slot = divmod(slot, len(SERIES))
    axes.errorbar(
        curve.x,
        curve.y,
        yerr=curve.error,
        label=curve.label,
        color=SERIES[slot],
        marker=MARKERS[slot],
        linestyle=DASHES[(slot + 2 * turn) % len(DASHES)],
        markerfacecolor=PAPER if turn % 2 else SERIES[slot],  # hollow where colours come again
        markersize=4,
        linewidth=1.6,
        elinewidth=0.9,
        capsize=2,
    )


def _legend(axes, count: int) -> None:
    axes.legend(
        loc="upper center",
        bbox_to_anchor=(0.5, -0.17),
        ncols=min(count, 3),
        frameon=False,
        fontsize=9,
        handlelength=2.6,
        columnspacing=1.4,
    )


def scatter_plot(name: str, groups: Sequence[Series], *, title: str, x: Axis, y: Axis) -> str:
    """Draw points and the line y = x; return an ``<svg>`` element as :func:`line_plot` does."""
    with new_figure(name, (5.6, 4.2)) as figure:
        axes = figure.add_subplot()
        for index, group in enumerate(groups):
            slot = (index if group.slot is None else group.slot) % len(SERIES)
            axes.plot(
                group.x,
                group.y,
                linestyle="none",
                marker=MARKERS[slot],
                markersize=4.5,
                color=SERIES[slot],
                label=group.label,
                alpha=0.75,
            )
        axes.axline((0, 0), slope=1, color=GRID, linewidth=1.2, zorder=0)
        set_title(axes, title)
        label_axes(axes, x, y)
        if len(groups) > 1:
            axes.legend(frameon=False, fontsize=9, handletextpad=0.2)
        return page_svg(figure, name, title)
