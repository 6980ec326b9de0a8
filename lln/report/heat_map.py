"""Heat maps: a coloured cell per row and column, with its number where it fits.

The colours carry meaning, so they stay the same on light and dark pages; words and axes follow the
page.
"""

from __future__ import annotations

import functools
import math
import re
from collections.abc import Iterator, Sequence

from lln.report.canvas import GRID, load_matplotlib, new_figure, page_svg, set_title

# Inches. Places are given, as finding them by the extent of every word would take most of the time.
CELL = (0.47, 0.31)
LEFT, RIGHT, TOP, BOTTOM = 0.55, 0.08, 0.75, 0.55
LEAST_WIDTH = 4.6  # of all cells
SCALE = (2.6, 0.08)
LEVELS = 48  # of the scale: from 50 on matplotlib would put a picture into the drawing
NUMBERS_UP_TO = 24  # columns; beyond, cells are too narrow on a page to be read


@functools.cache
def _palette() -> list[tuple[int, int, int]]:
    """List the colours of viridis: even steps of lightness, distinct to colour-blind eyes."""
    colours = load_matplotlib().colormaps["viridis"](range(256), bytes=True)[:, :3].tolist()
    return [(red, green, blue) for red, green, blue in colours]


def colour(share: float) -> tuple[int, int, int]:
    """Return red, green and blue of a position between 0 (dark) and 1 (bright)."""
    return _palette()[round(255 * min(max(share, 0.0), 1.0))]


def ink_on(background: tuple[int, int, int]) -> str:
    """Return white or black, whichever is easier to read on the colour."""
    red, green, blue = background
    return "#ffffff" if 0.299 * red + 0.587 * green + 0.114 * blue < 140 else "#000000"


def limits_of(cells: Sequence[Sequence[float | None]]) -> tuple[float, float]:
    """Return the smallest and the largest number among the cells; (0, 1) without any."""
    numbers = [value for line in cells for value in line if value is not None]
    return (min(numbers), max(numbers)) if numbers else (0.0, 1.0)


def share_of(value: float, limits: tuple[float, float]) -> float:
    """Say where a value lies between the limits; in the middle if they are equal."""
    low, high = limits
    return 0.5 if math.isclose(low, high) else (value - low) / (high - low)


def heat_map(
    name: str,
    cells: Sequence[Sequence[float | None]],
    *,
    title: str,
    rows: str,
    columns: str,
    form: str = ".2f",
    limits: tuple[float, float] | None = None,
) -> str:
    """Draw a table of numbers as an ``<svg>`` element; None leaves a cell grey.

    Args:
        name: Word that makes the ids of this drawing differ from those of others on the page.
        rows, columns: What they are, in the singular: "layer", "head".
        form: How numbers are written, in cells and in the scale.
        limits: Ends of the colour scale; those of the numbers if left out.
    """
    low, high = limits or limits_of(cells)
    height, width = len(cells), max(map(len, cells), default=0)
    inner = (max(LEAST_WIDTH, width * CELL[0]), max(1, height) * CELL[1])
    with new_figure(name, (LEFT + inner[0] + RIGHT, TOP + inner[1] + BOTTOM)) as figure:
        figure.set_layout_engine("none")
        axes = _axes_at(figure, (LEFT, BOTTOM), inner)
        set_title(axes, title)
        for line, column, value in _numbered(cells):
            _draw_cell(axes, line, column, value, (low, high))
            if value is not None and width <= NUMBERS_UP_TO:
                ink = ink_on(colour(share_of(value, (low, high))))
                centred = {"ha": "center", "va": "center"}
                axes.text(column, line, f"{value:{form}}", color=ink, fontsize=9, **centred)
        _label_cells(axes, (height, width), rows, columns)
        _draw_scale(figure, [f"{end:{form}}" for end in (low, high)])
        svg = page_svg(figure, name, f"{title}: a heat map, from {low:{form}} to {high:{form}}")
    said = {
        f'<g id="{name}-{_cell_id(line, column)}">': f"{rows} {line}, {columns} {column}: "
        + ("not measured" if value is None else f"{value:{form}}")
        for line, column, value in _numbered(cells)
    }
    return re.sub(
        rf'<g id="{name}-cell-\d+-\d+">', lambda g: f"{g[0]}<title>{said[g[0]]}</title>", svg
    )


def _numbered(
    cells: Sequence[Sequence[float | None]],
) -> Iterator[tuple[int, int, float | None]]:
    for index, line in enumerate(cells):
        for column, value in enumerate(line):
            yield index, column, value


def _cell_id(line: int, column: int) -> str:
    return f"cell-{line}-{column}"


def _draw_cell(
    axes, line: int, column: int, value: float | None, limits: tuple[float, float]
) -> None:
    from matplotlib.patches import Rectangle

    fill = GRID
    if value is not None:
        fill = "#{:02x}{:02x}{:02x}".format(*colour(share_of(value, limits)))
    cell = Rectangle((column - 0.485, line - 0.475), 0.97, 0.95, facecolor=fill, linewidth=0)
    cell.set_gid(_cell_id(line, column))
    axes.add_artist(cell)


def _label_cells(axes, shape: tuple[int, int], rows: str, columns: str) -> None:
    """Number lines and columns, every so many where there are too many; columns above."""
    height, width = (max(1, count) for count in shape)
    axes.set(xlim=(-0.5, width - 0.5), ylim=(height - 0.5, -0.5), xlabel=columns, ylabel=rows)
    for axis, count in ((axes.xaxis, width), (axes.yaxis, height)):
        axis.set_ticks(range(0, count, -(-count // 32)))
    axes.xaxis.tick_top()
    axes.xaxis.set_label_position("top")
    axes.tick_params(length=0)
    axes.spines[:].set_visible(False)


def _draw_scale(figure, ends: Sequence[str]) -> None:
    from matplotlib.cm import ScalarMappable

    colours = ScalarMappable(cmap=load_matplotlib().colormaps["viridis"].resampled(LEVELS))
    axes = _axes_at(figure, (LEFT, BOTTOM - 0.2), SCALE)
    bar = figure.colorbar(colours, cax=axes, ticks=[0, 1], orientation="horizontal")
    bar.solids.set_edgecolor("face")  # or the page shines through between the levels
    bar.outline.set_visible(False)
    axes.tick_params(length=0)
    for label, side in zip(axes.set_xticklabels(ends), ("left", "right"), strict=True):
        label.set_horizontalalignment(side)


def _axes_at(figure, corner: tuple[float, float], size: tuple[float, float]):
    """Add axes of this size with their lower left corner there, in inches."""
    width, height = figure.get_size_inches()
    place = (corner[0] / width, corner[1] / height, size[0] / width, size[1] / height)
    return figure.add_axes(place)
