"""Line plots as SVG text that takes its colours from the page around it.

The plots are drawn in marker colours which are then replaced by CSS variables with a fall-back, so
that one drawing serves light, dark and print, and still looks right as a file of its own.
"""

from __future__ import annotations

import html
import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from lln.study.plots.numbers import short_number

INK = "#000201"
GRID = "#000202"
PAPER = "#000203"
SERIES = tuple(f"#00010{n}" for n in range(1, 7))
STYLE_VARIABLES = {
    INK: "var(--ink, #1c2026)",
    GRID: "var(--grid, #d8dce2)",
    PAPER: "var(--paper, #ffffff)",
    SERIES[0]: "var(--series-1, #1c2026)",
    SERIES[1]: "var(--series-2, #c2410c)",
    SERIES[2]: "var(--series-3, #0072b2)",
    SERIES[3]: "var(--series-4, #00805e)",
    SERIES[4]: "var(--series-5, #a83a8e)",
    SERIES[5]: "var(--series-6, #8a6d00)",
}
MARKERS = "osD^vP"
DASHES = ("-", "-", "--", "-.", (0, (4, 1.5)), ":")
STYLE: dict[Any, Any] = {
    "svg.fonttype": "none",
    "font.size": 10,
    "figure.facecolor": PAPER,
    "axes.facecolor": PAPER,
    "savefig.facecolor": PAPER,
    "text.color": INK,
    "axes.edgecolor": INK,
    "axes.labelcolor": INK,
    "xtick.color": INK,
    "ytick.color": INK,
    "grid.color": GRID,
    "axes.spines.top": False,
    "axes.spines.right": False,
}
FONT = "system-ui, 'Segoe UI', Roboto, 'Helvetica Neue', sans-serif"


@dataclass(frozen=True)
class Series:
    """One curve; ``error`` is drawn as bars of ± that much, ``slot`` fixes colour and marker."""

    label: str
    x: Sequence[float]
    y: Sequence[float]
    error: Sequence[float] | None = None
    slot: int | None = None


@dataclass(frozen=True)
class Axis:
    """What an axis shows; ``ticks`` None leaves the choice to the scale."""

    label: str
    log: bool = False
    ticks: Sequence[float] | None = None
    limits: tuple[float | None, float | None] | None = None


def line_plot(
    name: str, series: Sequence[Series], *, title: str, x: Axis, y: Axis, description: str = ""
) -> str:
    """Draw curves and return an ``<svg>`` element, the same text for the same values.

    Args:
        name: Word that makes the ids of this drawing differ from those of others on the page.
        description: What a screen reader says; the title if left out.
    """
    try:
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'lln-attention[report]'") from error

    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(5.6, 3.9), layout="constrained")
        axes = figure.add_subplot()
        for index, curve in enumerate(series):
            _draw(axes, curve, index if curve.slot is None else curve.slot)
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
        label_axes(axes, x, y)
        if len(series) > 1:
            _legend(axes, len(series))
        text = io.StringIO()
        FigureCanvasSVG(figure).print_svg(
            text, metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    return for_page(text.getvalue(), name, description or title)


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


def label_axes(axes, x: Axis, y: Axis) -> None:
    """Scales, ticks, labels and grid of a matplotlib plot."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter, NullLocator

    for axis, wanted in ((axes.xaxis, x), (axes.yaxis, y)):
        axis.set_label_text(wanted.label)
        letter = axis.axis_name
        if wanted.log:
            getattr(axes, f"set_{letter}scale")("log")
            low, high = axis.get_view_interval()
            axis.set_major_locator(LogLocator(subs=(1, 2, 5) if high / low < 300 else (1,)))
            axis.set_minor_formatter(NullFormatter())
        axis.set_major_formatter(FuncFormatter(lambda value, _: short_number(value)))
        if wanted.ticks is not None:
            axis.set_ticks(list(wanted.ticks))
            axis.set_minor_locator(NullLocator())
        if wanted.limits is not None:
            getattr(axes, f"set_{letter}lim")(*wanted.limits)
    axes.grid(True, linewidth=0.6)
    axes.set_axisbelow(True)


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


def for_page(svg: str, name: str, description: str) -> str:
    """Cut the XML prologue, make ids unique, let the page decide size, colour and font."""
    svg = svg[svg.index("<svg") :]
    svg = re.sub(r"<metadata>.*?</metadata>\s*", "", svg, flags=re.S)
    svg = re.sub(r'(<svg[^>]*?) width="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'(<svg[^>]*?) height="[^"]*"', r"\1", svg, count=1)
    svg = re.sub(r'\bid="', f'id="{name}-', svg)
    svg = svg.replace("url(#", f"url(#{name}-").replace('href="#', f'href="#{name}-')
    svg = svg.replace("'DejaVu Sans', 'Bitstream Vera Sans'", FONT)
    svg = re.sub(r"'DejaVu Sans'(, [^;\"]*)?(?=[;\"])", FONT, svg)
    for colour, variable in STYLE_VARIABLES.items():
        svg = svg.replace(colour, variable)
    return svg.replace("<svg ", f'<svg role="img" aria-label="{html.escape(description)}" ', 1)
