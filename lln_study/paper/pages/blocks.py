"""Measured blocks of Markdown pages: ``<!-- measured: NAME -->`` … ``<!-- end -->``.

A block is a function from the folder of results to Markdown. It links to pictures as
``results/NAME``; :func:`rewrite` turns that into the path from the page.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

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


def newest(results: Path, subject: str) -> Path | None:
    """The newest ``subject_hardware_date.json``, or None if there is none."""
    found = sorted(results.glob(f"{subject}_*.json"), key=lambda path: path.stem.split("_")[-1])
    return found[-1] if found else None


def latest(results: Path, subject: str) -> dict[str, Any] | None:
    """The content of that file."""
    path = newest(results, subject)
    return None if path is None else json.loads(path.read_text(encoding="utf-8"))


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


def origin(row: Row, others: Iterable[Row] = ()) -> str:
    """Where a row comes from, in words; with the commits of ``others`` beside it."""
    commits = dict.fromkeys(each["commit"] for each in (row, *others))
    return f"{row['device']}, torch {row['torch']}, commit {', '.join(commits)}"
