"""Heat maps as SVG text: a coloured cell per row and column, with its number where it fits.

The colours carry meaning, so they stay the same on light and dark pages; words and frame follow the
page.
"""

from __future__ import annotations

import html
import math
from collections.abc import Sequence

from lln.study.plots.lines import FONT, INK, STYLE_VARIABLES

# Dark to bright in even steps of lightness, distinct to colour-blind eyes (a form of viridis).
PALETTE = ("#440154", "#472d7b", "#3b528b", "#2c728e", "#21918c", "#28ae80", "#5ec962", "#addc30")
CELL = (34, 22)  # width and height in points
NUMBERS_UP_TO = 24  # columns; beyond, cells are too narrow on a page to be read
SOFT = "var(--soft, #5a6270)"
EMPTY = "var(--grid, #d8dce2)"


def colour(share: float) -> tuple[int, int, int]:
    """Red, green and blue of a position between 0 (dark) and 1 (bright)."""
    place = min(max(share, 0.0), 1.0) * (len(PALETTE) - 1)
    low = min(int(place), len(PALETTE) - 2)
    ends = [[int(PALETTE[i][c : c + 2], 16) for c in (1, 3, 5)] for i in (low, low + 1)]
    red, green, blue = (round(a + (b - a) * (place - low)) for a, b in zip(*ends, strict=True))
    return red, green, blue


def ink_on(background: tuple[int, int, int]) -> str:
    """White or black, whichever is easier to read on the colour."""
    red, green, blue = background
    return "#ffffff" if 0.299 * red + 0.587 * green + 0.114 * blue < 140 else "#000000"


def limits_of(cells: Sequence[Sequence[float | None]]) -> tuple[float, float]:
    """Smallest and largest number among the cells; (0, 1) without any."""
    numbers = [value for line in cells for value in line if value is not None]
    return (min(numbers), max(numbers)) if numbers else (0.0, 1.0)


def share_of(value: float, limits: tuple[float, float]) -> float:
    """Where a value lies between the limits; the middle if they are equal."""
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
    width = max(map(len, cells), default=0)
    left, top = 40, 50
    size = (left + max(width * CELL[0], 200) + 6, top + len(cells) * CELL[1] + 46)
    parts = [_words(left, 16, title, size=13, weight="bold", fill=STYLE_VARIABLES[INK])]
    parts += [_words(left, top - 20, columns), _words(2, top - 6, rows)]
    for column in range(0, width, _stride(width)):
        centre = left + (column + 0.5) * CELL[0]
        parts.append(_words(centre, top - 6, str(column), anchor="middle"))
    for index, line in enumerate(cells):
        y = top + index * CELL[1]
        if index % _stride(len(cells)) == 0:
            parts.append(_words(left - 8, y + 15, str(index), anchor="end"))
        for column, value in enumerate(line):
            place = f"{rows} {index}, {columns} {column}"
            at = (left + column * CELL[0], y)
            parts.append(_cell(at, value, place, form, (low, high), width <= NUMBERS_UP_TO))
    parts += _scale(name, left, top + len(cells) * CELL[1] + 16, form, (low, high))
    label = html.escape(f"{title}: a heat map, from {low:{form}} to {high:{form}}")
    return (
        f'<svg role="img" aria-label="{label}" viewBox="0 0 {size[0]} {size[1]}" '
        f'xmlns="http://www.w3.org/2000/svg" font-family="{FONT}">{"".join(parts)}</svg>'
    )


def _stride(count: int) -> int:
    """Label every cell, or every so many where there are too many."""
    return max(1, -(-count // 32))


def _words(
    x: float,
    y: float,
    text: str,
    *,
    anchor: str = "start",
    size: float = 10,
    fill: str = SOFT,
    weight: str = "normal",
) -> str:
    return (
        f'<text x="{x:g}" y="{y:g}" font-size="{size:g}" font-weight="{weight}" '
        f'text-anchor="{anchor}" style="fill: {fill}">{html.escape(text)}</text>'
    )


def _cell(
    at: tuple[float, float],
    value: float | None,
    place: str,
    form: str,
    limits: tuple[float, float],
    numbered: bool,
) -> str:
    x, y = at
    box = f'<rect x="{x:g}" y="{y:g}" width="{CELL[0] - 1}" height="{CELL[1] - 1}" rx="2"'
    if value is None:
        return f'{box} style="fill: {EMPTY}"><title>{place}: not measured</title></rect>'
    background = colour(share_of(value, limits))
    fill = "#{:02x}{:02x}{:02x}".format(*background)
    drawn = f'{box} fill="{fill}"><title>{place}: {value:{form}}</title></rect>'
    if not numbered:
        return drawn
    centre = (x + (CELL[0] - 1) / 2, y + 14.5)
    return drawn + _words(
        *centre, f"{value:{form}}", anchor="middle", size=9, fill=ink_on(background)
    )


def _scale(name: str, x: float, y: float, form: str, limits: tuple[float, float]) -> list[str]:
    stops = "".join(
        f'<stop offset="{index / (len(PALETTE) - 1):.3f}" stop-color="{each}"/>'
        for index, each in enumerate(PALETTE)
    )
    return [
        f'<defs><linearGradient id="{name}-scale">{stops}</linearGradient></defs>',
        f'<rect x="{x:g}" y="{y:g}" width="200" height="8" rx="2" fill="url(#{name}-scale)"/>',
        _words(x, y + 20, f"{limits[0]:{form}}"),
        _words(x + 200, y + 20, f"{limits[1]:{form}}", anchor="end"),
    ]
