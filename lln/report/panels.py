"""Figures of several panels, as SVG and PNG files and as plots of a page.

Unlike :func:`lln.report.lines.line_plot` a panel can hold more than six curves, curves without
markers, and theory beside measurement.
"""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lln.report.canvas import (
    GREY,
    GRID,
    PAGE,
    SERIES,
    SOLID,
    Axis,
    encode,
    label_axes,
    new_figure,
    page_svg,
    set_title,
)
from lln.report.names import End, name_ends

PANEL_SIZE = (5.2, 3.6)
LEGEND_LINE = 0.21  # inches, as the two below
LETTER, HANDLE = 0.073, 0.6
MOST_COLUMNS = 9
NAME_SIZE, NAME_GAP = 8, 0.055  # of names at the ends of curves


@dataclass(frozen=True)
class Curve:
    """A curve; ``slot`` chooses the colour (None: grey), ``dashed`` marks theory.

    Where the colours come again curves are dash-dotted. What is ``named`` has its label at its
    right end instead of in the legend.
    """

    label: str
    x: Sequence[float]
    y: Sequence[float]
    error: Sequence[float] | None = None
    slot: int | None = None
    marker: str = ""
    dashed: bool = False
    named: bool = False


@dataclass(frozen=True)
class Panel:
    """One pair of axes; ``note`` says in a sentence what to see.

    ``span`` shades a range of x, which ``span_label`` names inside the plot. With ``bars`` the
    points of each curve are bars beside those of the others, from x = 0, 1, … on.
    """

    title: str
    curves: Sequence[Curve]
    x: Axis
    y: Axis
    note: str = ""
    span: tuple[float, float] | None = None
    span_label: str = ""
    bars: bool = False


def as_files(name: str, panels: Sequence[Panel]) -> dict[str, bytes]:
    """Return ``{"svg": ..., "png": ...}``; the same bytes for the same values."""
    with _drawn(name, panels, SOLID) as figure:
        return {form: encode(figure, form) for form in ("svg", "png")}


def as_page_plots(name: str, panels: Sequence[Panel]) -> list[tuple[str, str]]:
    """Return ``(svg element, note)`` of each panel, in colours that follow the page."""
    plots = []
    for index, panel in enumerate(panels):
        own = f"{name}-{index}"
        with _drawn(own, [panel], PAGE) as figure:
            plots.append((page_svg(figure, own, panel.title), panel.note))
    return plots


@contextlib.contextmanager
def _drawn(name: str, panels: Sequence[Panel], colours: Mapping[str, str]) -> Iterator[Any]:
    """Draw all panels in one figure, to be encoded inside the block."""
    columns = {1: 1, 2: 2, 4: 2}.get(len(panels), 3)
    lines = -(-len(panels) // columns)
    labels = _labels(panels)
    width = PANEL_SIZE[0] * columns
    wide = _legend_columns(labels, width)
    legend = -(-len(labels) // wide) * LEGEND_LINE if len(labels) > 1 else 0
    with new_figure(name, (width, PANEL_SIZE[1] * lines + legend), colours) as figure:
        for index, panel in enumerate(panels):
            _draw_panel(figure.add_subplot(lines, columns, index + 1), panel, colours)
        _legend(figure, labels, wide)
        yield figure


def _draw_panel(axes, panel: Panel, colours: Mapping[str, str]) -> None:
    if panel.span is not None:
        axes.axvspan(*panel.span, color=colours[GRID], alpha=0.5, linewidth=0)
        _name_span(axes, panel, colours)
    if panel.bars:
        _draw_bars(axes, panel, colours)
    for curve in () if panel.bars else panel.curves:
        again = curve.slot is not None and curve.slot >= len(SERIES)
        axes.errorbar(
            curve.x,
            curve.y,
            yerr=curve.error,
            label=curve.label,
            color=_colour(curve, colours),
            marker=curve.marker or None,
            linestyle="--" if curve.dashed else "-." if again else "-",
            markersize=4.5,
            linewidth=1.1 if curve.dashed else 1.6,
            elinewidth=0.9,
            capsize=2,
        )
    set_title(axes, panel.title)
    label_axes(axes, panel.x, panel.y)
    ends = [
        End(curve.label, curve.x[-1], curve.y[-1], _colour(curve, colours))
        for curve in panel.curves
        if curve.named and len(curve.x)
    ]
    name_ends(axes, ends, size=NAME_SIZE, gap=NAME_GAP)


def _draw_bars(axes, panel: Panel, colours: Mapping[str, str]) -> None:
    """Draw a bar of each curve at every x; the bars of one x take four fifths of the space."""
    width = 0.8 / len(panel.curves)
    for n, curve in enumerate(panel.curves):
        shift = (n - (len(panel.curves) - 1) / 2) * width
        axes.bar(
            [x + shift for x in curve.x],
            curve.y,
            width=0.9 * width,
            yerr=curve.error,
            label=curve.label,
            color=_colour(curve, colours),
            error_kw={"elinewidth": 0.9, "ecolor": colours[GREY]},
        )


def _colour(curve: Curve, colours: Mapping[str, str]) -> str:
    return colours[GREY if curve.slot is None else SERIES[curve.slot % len(SERIES)]]


def _name_span(axes, panel: Panel, colours: Mapping[str, str]) -> None:
    assert panel.span is not None
    axes.text(
        sum(panel.span) / 2,
        0.97,
        panel.span_label,
        transform=axes.get_xaxis_transform(),
        ha="center",
        va="top",
        fontsize=NAME_SIZE,
        color=colours[GREY],
    )


def _labels(panels: Sequence[Panel]) -> list[str]:
    """List each label of the legend once, in order of appearance."""
    curves = [curve for panel in panels for curve in panel.curves if not curve.named]
    return list(dict.fromkeys(curve.label for curve in curves))


def _legend_columns(labels: Sequence[str], width: float) -> int:
    """Return the most columns of a legend that fit ``width``.

    It is filled column by column, the first ones with a line more if they cannot be equal.
    """

    def needed(columns: int) -> float:
        lines, longer = divmod(len(labels), columns)
        left, total = list(labels), 0.0
        for column in range(columns):
            count = lines + (column < longer)
            total += HANDLE + LETTER * max(map(len, left[:count]))
            left = left[count:]
        return total

    most = min(MOST_COLUMNS, len(labels))
    return max((n for n in range(1, most + 1) if needed(n) <= width), default=1)


def _legend(figure, labels: Sequence[str], columns: int) -> None:
    """Draw one legend for all panels: a label means the same curve everywhere in a figure."""
    if len(labels) < 2:
        return
    handles = {}
    for axes in figure.axes:
        for handle, label in zip(*axes.get_legend_handles_labels(), strict=True):
            handles.setdefault(label, handle)
    figure.legend(
        [handles[label] for label in labels],
        labels,
        loc="outside lower center",
        ncols=min(len(labels), columns),
        frameon=False,
        fontsize=9,
        handlelength=2.6,
        columnspacing=1.4,
    )
