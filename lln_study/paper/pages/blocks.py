"""Measured blocks of Markdown pages: ``<!-- measured: NAME -->`` … ``<!-- end -->``.

A block is a function from the folder of results to Markdown. It links to pictures as
``results/NAME``; :func:`rewrite` turns that into the path from the page.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from lln_study.paper.results import latest, newest, origin_text

Row = Mapping[str, Any]
Blocks = Mapping[str, Callable[[Path], str]]
NOTHING_YET = "*No rows in `results/` yet.*"


def rewrite(text: str, results: Path, blocks: Blocks, link: str = "results") -> str:
    """A page with every measured block made anew; ``link`` leads from the page to ``results``."""

    def block(match: re.Match[str]) -> str:
        name = match[1]
        if name not in blocks:
            raise ValueError(f"unknown measured block {name!r}; there are {', '.join(blocks)}")
        made = blocks[name](results).replace("](results/", f"]({link}/")
        return f"<!-- measured: {name} -->\n{made}\n<!-- end -->"

    return re.sub(r"<!-- measured: (\w+) -->\n.*?<!-- end -->", block, text, flags=re.S)


def picture(results: Path, subject: str, words: str, ending: str = "") -> str:
    """The plot that was saved beside the rows, as a paragraph of its own; nothing without one."""
    path = newest(results, subject)
    drawing = None if path is None else path.with_name(f"{path.stem}{ending}.svg")
    if drawing is None or not drawing.exists():
        return ""
    return f"![{words}](results/{drawing.name})\n\n"


def markdown_table(columns: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table with its first column left-aligned and the others right-aligned."""
    lines = [columns, ["---", *("---:" for _ in columns[1:])], *rows]
    return "\n".join("| " + " | ".join(line) + " |" for line in lines)


def where(rows: Iterable[Row], fields: Mapping[str, Any]) -> list[Row]:
    """The rows that have these values."""
    return [row for row in rows if all(row.get(name) == fields[name] for name in fields)]


def listed(rows: Iterable[Row], columns: Mapping[str, str]) -> str:
    """A table with a line per row: names of columns, and how they show a row, as for format()."""
    lines = [[cell.format_map(row) for cell in columns.values()] for row in rows]
    return markdown_table(list(columns), lines)


def cells(rows: Iterable[Row], line: str, column: str, cell: str) -> dict[tuple[str, str], str]:
    """Rows as the cells of :func:`crossed`: the names of line and column, and what stands there."""
    return {(line.format_map(row), column.format_map(row)): cell.format_map(row) for row in rows}


def crossed(corner: str, cells: Mapping[tuple[str, str], str]) -> str:
    """A table of cells by the names of line and column, in order of appearance; – for none."""
    lines = dict.fromkeys(line for line, _ in cells)
    columns = dict.fromkeys(column for _, column in cells)
    made = [[line, *(cells.get((line, column), "–") for column in columns)] for line in lines]
    return markdown_table([corner, *columns], made)


def sourced(table: str, rows: Sequence[Row]) -> str:
    """A table of result rows with where they come from."""
    return f"{table}\n\n({origin_text(rows)})" if rows else NOTHING_YET


def origin(rows: Sequence[Row]) -> str:
    """Where the rows of a file come from: how they were measured, device, versions, commits."""
    first = rows[0]
    commits = ", ".join(dict.fromkeys(row["commit"] for row in rows))
    how = f"{first['configuration']}; " if first.get("configuration") else ""
    return f"{how}{first['device']}, torch {first['torch']}, commit {commits}"


def from_file(
    subject: str, table: Callable[[Any], str], part: str = "rows", *, whole: bool = False
) -> Callable[[Path], str]:
    """The block of a table of the newest file of a subject, with where its rows come from.

    Args:
        part: The rows that ``table`` is given.
        whole: Give it all of the file instead.
    """

    def block(results: Path) -> str:
        content = latest(results, subject)
        if content is None:
            return NOTHING_YET
        made = table(content if whole else content[part])
        return f"{made}\n\n({origin(content[part])}, {content['date']})"

    return block
