"""Write every measured block of README.md and docs/ from ``results/``, and the notebook of the
tutorial from its page: ``make pages``.

A test compares the pages with what this module would write, so that no number is typed by hand.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path

from lln.records.files import write_text
from lln.report import panels
from lln.report.panels import Panel
from lln_study.paper.figures import converted, cost, from_rows, lln_alone, table_5
from lln_study.paper.pages import (
    claims,
    conversion,
    formulas,
    losses,
    notebook,
    parts,
    speed,
    versions,
)
from lln_study.paper.pages.blocks import NOTHING_YET, Blocks, rewrite

WITH_BLOCKS = (claims, conversion, formulas, losses, parts, speed, versions)
FROM_ROWS = ("8a", "9", "10a", "arena", "sets")


def drawing(name: str, results: Path) -> str:
    """The drawing of a figure that :func:`main` has made."""
    path = results / f"{name}.svg"
    return f"![{DRAWINGS[name][0]}](results/{path.name})" if path.exists() else NOTHING_YET


DRAWINGS: Mapping[str, tuple[str, Callable[[Path], list[Panel]]]] = {
    "figure_time": ("Time against the number of tokens, softmax and LLN+Diag", cost.panels),
    "figure_lln_alone": ("Loss of pre-training of LLN alone and beside it", lln_alone.panels),
    "figure_table_5": ("Accuracy on the Long Range Arena, task by task", table_5.panels),
    "figure_conversion": (
        "Perplexity of converted decoders, and needles they find, against the size of the cache",
        converted.panels,
    ),
    **{
        f"figure_{name}": (from_rows.FIGURES[name].title, partial(from_rows.panels, name))
        for name in FROM_ROWS
    },
}
BLOCKS: Blocks = {
    **{name: partial(drawing, name) for name in DRAWINGS},
    **{name: block for page in WITH_BLOCKS for name, block in page.BLOCKS.items()},
}


def pages(root: Path) -> list[Path]:
    """README and the pages of docs/ that have measured blocks."""
    found = [root / "README.md", *sorted((root / "docs").rglob("*.md"))]
    return [page for page in found if "<!-- measured: " in page.read_text("utf-8")]


def written(page: Path, results: Path) -> str:
    """The text of a page as the rows in ``results`` have it."""
    link = os.path.relpath(results, page.parent)
    return rewrite(page.read_text("utf-8"), results, BLOCKS, link)


def main(root: Path) -> None:
    """Rewrite the pages of ``root`` from ``root/results``, draw what they show, the notebook."""
    results = root / "results"
    for name, (_, figure) in DRAWINGS.items():
        drawn = figure(results)
        if drawn:
            write_text(results / f"{name}.svg", panels.as_files(name, drawn)["svg"].decode())
    for page in pages(root):
        write_text(page, written(page, results))
    notebook.write(root)


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path.cwd())
