"""Attention matrices side by side, a coloured cell per query and key, on one logarithmic scale."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from lln.report.canvas import SOLID, encode, load_matplotlib, new_figure

PANEL = (2.45, 3.05)  # inches, with title and note
MARGIN = (1.4, 0.2)  # for labels and colour scale
LEVELS = 24  # of colour: a file of few colours is small


@dataclass(frozen=True)
class Matrix:
    """Rows of numbers above 0 under a title; ``note`` stands below."""

    title: str
    cells: Sequence[Sequence[float]]
    note: str = ""


def matrices(
    name: str,
    lines: Sequence[tuple[str, Sequence[Matrix]]],
    *,
    limits: tuple[float, float],
    step: int,
    scale: str,
) -> bytes:
    """Draw lines of matrices with a label each; return the SVG file.

    Args:
        limits: Ends of the colour scale, the same for all; what lies beyond has the end's colour.
        step: Distance of the ticks, in rows and columns.
        scale: What the colours mean.
    """
    colours = load_matplotlib().colormaps["viridis"].resampled(LEVELS)
    from matplotlib.cm import ScalarMappable
    from matplotlib.colors import LogNorm

    shades = LogNorm(*limits)
    columns = max(len(found) for _, found in lines)
    size = (MARGIN[0] + columns * PANEL[0], MARGIN[1] + len(lines) * PANEL[1])
    with new_figure(name, size, SOLID) as figure:
        figure.get_layout_engine().set(h_pad=0.08, hspace=0.04)
        grid = figure.subplots(len(lines), columns, squeeze=False)
        for (label, found), row in zip(lines, grid, strict=True):
            for matrix, axes in zip(found, row, strict=True):
                axes.imshow(matrix.cells, norm=shades, cmap=colours, interpolation="none")
                count = len(matrix.cells)
                axes.set_xticks(range(0, count, step))
                axes.set_yticks(range(0, count, step))
                axes.set_title(matrix.title, fontsize=10, fontweight="bold")
                axes.set_xlabel(matrix.note, fontsize=9)
                axes.tick_params(length=2, labelsize=8)
            row[0].set_ylabel(label)
        legend = ScalarMappable(norm=shades, cmap=colours)
        bar = figure.colorbar(legend, ax=list(grid.flat), extend="both", aspect=40, pad=0.02)
        bar.set_label(scale)
        return encode(figure, "svg")
