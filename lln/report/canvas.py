"""The one way to draw: a matplotlib figure in the house style, encoded as SVG or PNG.

Figures are drawn in marker colours. On a page these become CSS variables with a fall-back, so that
one drawing serves light, dark and print, and still looks right as a file of its own; in files
(:data:`SOLID`) they are plain colours.
"""

from __future__ import annotations

import contextlib
import html
import io
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from lln.report.numbers import short_number

INK = "#000201"
GRID = "#000202"
PAPER = "#000203"
GREY = "#000301"
SERIES = tuple(f"#00010{n}" for n in range(1, 7))
STYLE_VARIABLES = {
    INK: "var(--ink, #1c2026)",
    GRID: "var(--grid, #d8dce2)",
    PAPER: "var(--paper, #ffffff)",
    GREY: "var(--muted, #7d8590)",
    SERIES[0]: "var(--series-1, #1c2026)",
    SERIES[1]: "var(--series-2, #c2410c)",
    SERIES[2]: "var(--series-3, #0072b2)",
    SERIES[3]: "var(--series-4, #00805e)",
    SERIES[4]: "var(--series-5, #a83a8e)",
    SERIES[5]: "var(--series-6, #8a6d00)",
}
PAGE = {marker: marker for marker in STYLE_VARIABLES}  # replaced by CSS variables afterwards
SOLID = {marker: re.findall(r"#\w+", css)[-1] for marker, css in STYLE_VARIABLES.items()}
MARKERS = "osD^vP"
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
class Axis:
    """What an axis shows; ``ticks`` None leaves the choice to the scale, ``names`` label them."""

    label: str
    log: bool = False
    ticks: Sequence[float] | None = None
    limits: tuple[float | None, float | None] | None = None
    names: Sequence[str] | None = None


def load_matplotlib() -> Any:
    """Import matplotlib, or say which extra brings it."""
    try:
        import matplotlib
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'lln-attention[report]'") from error
    return matplotlib


@contextlib.contextmanager
def new_figure(
    name: str, size: tuple[float, float], colours: Mapping[str, str] = PAGE
) -> Iterator[Any]:
    """Open an empty figure; draw and encode it inside the block.

    Args:
        name: Makes the ids of this drawing, the same every time, differ from those of others.
        size: Width and height in inches.
        colours: What to draw instead of the marker colours: :data:`PAGE` or :data:`SOLID`.
    """
    matplotlib = load_matplotlib()
    from matplotlib.figure import Figure

    style = {key: colours.get(value, value) for key, value in STYLE.items()}
    with matplotlib.rc_context({**style, "svg.hashsalt": name}):
        yield Figure(figsize=size, layout="constrained")


def set_title(axes, title: str) -> None:
    """Write the title of a plot at its left."""
    axes.set_title(title, loc="left", fontsize=11, fontweight="bold")


def label_axes(axes, x: Axis, y: Axis) -> None:
    """Set scales, ticks, labels and grid of a plot."""
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
            axis.set_ticks(list(wanted.ticks), labels=wanted.names)
            axis.set_minor_locator(NullLocator())
        if wanted.limits is not None:
            getattr(axes, f"set_{letter}lim")(*wanted.limits)
    axes.grid(True, linewidth=0.6)
    axes.set_axisbelow(True)


def encode(figure, form: str) -> bytes:
    """Return a figure as "svg" or "png", the same bytes for the same values."""
    data = io.BytesIO()
    metadata = {"Date": None, "Creator": None} if form == "svg" else {"Software": None}
    figure.savefig(data, format=form, dpi=150, metadata=metadata)
    return data.getvalue()


def page_svg(figure, name: str, description: str) -> str:
    """Return a figure as an ``<svg>`` element of which the page decides size, colour and font.

    Args:
        name: Word that makes the ids of this drawing differ from those of others on the page.
        description: What a screen reader says.
    """
    svg = encode(figure, "svg").decode()
    svg = svg[svg.index("<svg") :]  # without the XML prologue
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
