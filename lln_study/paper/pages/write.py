"""Write every measured block of README.md and docs/ from ``results/``: ``make pages``.

A test compares the pages with what this module would write, so that no number is typed by hand.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path

from lln.records.files import write_text
from lln.report import panels
from lln.report.panels import Panel
from lln_study.paper.figures import from_curves as training_figures
from lln_study.paper.figures import from_results as run_figures
from lln_study.paper.pages import (
    claims,
    conversion,
    losses,
    near_far,
    questions,
    retrieval,
    speed,
    targets,
    versions,
)
from lln_study.paper.pages.blocks import NOTHING_YET, Blocks, rewrite
from lln_study.paper.results import read, read_curves
from lln_study.paper.tables import table as tables

WITH_BLOCKS = (claims, conversion, losses, near_far, questions, retrieval, speed)
WITH_BLOCKS += (targets, versions)


def paper_table(number: str, results: Path) -> str:
    """A table of the paper with our numbers, as ``lln table NUMBER --markdown`` prints it."""
    return _markdown(tables.make(number, results))


def pretraining(results: Path) -> str:
    """The same of pre-trainings, without those in float16: they are for Fig. 8b."""
    found = [
        table
        for table in tables.make("pretraining", results)
        if table.records[0]["configuration"].get("precision") != "fp16"
    ]
    return _markdown(found)


def _markdown(found: Sequence[tables.Table]) -> str:
    return "\n\n".join(table.markdown() for table in found) or NOTHING_YET


def drawing(name: str, results: Path) -> str:
    """The drawing of a figure that :func:`main` has made."""
    path = results / f"{name}.svg"
    return f"![{DRAWINGS[name][0]}](results/{path.name})" if path.exists() else NOTHING_YET


def _of_runs(number: str, results: Path) -> list[Panel]:
    return run_figures.FIGURES[number].panels(read(results))


DRAWINGS: Mapping[str, tuple[str, Callable[[Path], list[Panel]]]] = {
    "figure_time": ("Time against the number of tokens, softmax and LLN+Diag", speed.time_panels),
    "figure_8a": (
        "Loss of pre-training against updates and against time",
        lambda results: training_figures.losses(read_curves(results)),
    ),
    "figure_lln_alone": ("Loss of pre-training of LLN alone and beside it", losses.figure),
    "figure_9": ("α and β of every layer while the ViT trains", partial(_of_runs, "9")),
    "figure_10a": ("Accuracy of the ViT against fixed α = β", partial(_of_runs, "10a")),
    "figure_arena": (
        "Accuracy on validation while training on the Long Range Arena",
        partial(_of_runs, "arena"),
    ),
}
BLOCKS: Blocks = {
    **{name: partial(drawing, name) for name in DRAWINGS},
    **{f"table_{number}": partial(paper_table, number) for number in tables.TABLES},
    "table_pretraining": pretraining,
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
    """Rewrite the pages of ``root`` from ``root/results``, and draw what they show."""
    results = root / "results"
    for name, (_, figure) in DRAWINGS.items():
        drawn = figure(results)
        if drawn:
            write_text(results / f"{name}.svg", panels.as_files(name, drawn)["svg"].decode())
    for page in pages(root):
        write_text(page, written(page, results))


if __name__ == "__main__":
    main(Path(sys.argv[1]) if len(sys.argv) > 1 else Path.cwd())
