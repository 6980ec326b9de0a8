"""Scatter plots of measurement against prediction, with the line where both are equal."""

from __future__ import annotations

import io
from collections.abc import Sequence

from lln.study.plots.lines import GRID, MARKERS, SERIES, STYLE, Axis, Series, for_page, label_axes


def scatter_plot(name: str, groups: Sequence[Series], *, title: str, x: Axis, y: Axis) -> str:
    """Draw points and the diagonal y = x; return an ``<svg>`` element as ``line_plot`` does."""
    try:
        import matplotlib
        from matplotlib.backends.backend_svg import FigureCanvasSVG
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ImportError("plots need matplotlib: pip install 'lln-attention[report]'") from error

    with matplotlib.rc_context({**STYLE, "svg.hashsalt": name}):
        figure = Figure(figsize=(5.6, 4.2), layout="constrained")
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
        axes.set_title(title, loc="left", fontsize=11, fontweight="bold")
        label_axes(axes, x, y)
        if len(groups) > 1:
            axes.legend(frameon=False, fontsize=9, handletextpad=0.2)
        text = io.StringIO()
        FigureCanvasSVG(figure).print_svg(
            text, metadata={"Date": None, "Creator": None, "Format": None, "Type": None}
        )
    return for_page(text.getvalue(), name, title)
