"""Tables in a terminal of any width: no number is ever shortened.

Labels fold, headers break at their spaces, and columns that find no room stand in a table below,
with the labels again.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

BORDERS, BORDER = 3, 1  # of a column, and of the table
LEAST_LABEL = 16
IN_A_PIPE = 100  # columns, where there is no terminal


def show_tables(found: Sequence[Any], most: int | None = None) -> None:
    """Print tables of :mod:`lln_study.paper.tables` as wide as the terminal is.

    Args:
        most: Lines of each that are shown; None for all.
    """
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if not console.is_terminal:
        console.width = IN_A_PIPE
    for each in found:
        wanted = column_widths(each.columns, each.lines, console.width)
        for part, group in enumerate(column_groups(wanted, console.width)):
            title = f"{each.title} (continued)" if part else each.title
            shown = Table(title=title, title_justify="left")
            for n in group:
                side = "right" if n else "left"
                shown.add_column(each.columns[n], justify=side, width=wanted[n], overflow="fold")
            for line in each.lines[:most]:
                shown.add_row(*(line[n] for n in group))
            needed = sum(wanted[n] + BORDERS for n in group) + BORDER
            console.print(shown, width=max(console.width, needed))
        hidden = len(each.lines) - len(each.lines[:most])
        more = [f"{hidden} more lines with --all."] if hidden else []
        for note in (*more, *each.notes):
            console.print(f"  {note}", style="dim", highlight=False)


def column_widths(columns: Sequence[str], lines: Sequence[Sequence[str]], limit: int) -> list[int]:
    """Every cell on one line, and every word of a header; labels in a third of the terminal."""
    wide = []
    for n, column in enumerate(columns):
        words = max(map(len, column.split()), default=1)
        wide.append(max([words, *(len(line[n]) for line in lines)]))
    return [min(wide[0], max(LEAST_LABEL, limit // 3)), *wide[1:]]


def column_groups(widths: Sequence[int], limit: int) -> Iterator[list[int]]:
    """Columns that fit beside each other, in order; the first stands in every group."""
    first = widths[0] + BORDERS + BORDER
    group, used = [0], first
    for n, width in enumerate(widths[1:], start=1):
        if len(group) > 1 and used + width + BORDERS > limit:
            yield group
            group, used = [0], first
        group.append(n)
        used += width + BORDERS
    yield group
