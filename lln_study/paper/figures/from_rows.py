"""Figures that need training, drawn from the rows that ``lln sweep`` and ``lln train`` wrote."""

from __future__ import annotations

from pathlib import Path

from lln.records import files, saved
from lln.report.panels import as_files
from lln_study.paper import results
from lln_study.paper.figures import from_curves as training_figures
from lln_study.paper.figures import from_results as run_figures
from lln_study.sweep_files import runnable

FIGURES = {**training_figures.FIGURES, **run_figures.FIGURES}


def draw(name: str, rows: Path, folder: Path) -> list[Path]:
    """Write ``figure_NAME.csv``, ``.svg`` and ``.png``; nothing without the rows it needs.

    Args:
        rows: Folder of the result rows.
    """
    read = results.read_curves if name in training_figures.FIGURES else results.read
    panels = FIGURES[name].panels(read(rows))
    if not panels:
        return []
    written = [
        files.write_text(folder / f"figure_{name}.csv", saved.as_csv(run_figures.points(panels)))
    ]
    for kind, content in as_files(f"figure-{name}", panels).items():
        path = folder / f"figure_{name}.{kind}"
        path.write_bytes(content)
        written.append(path)
    return written


def nothing(name: str, rows: Path) -> str:
    """Say what is missing when there are no rows."""
    command = runnable(FIGURES[name].command)
    return f"no rows for figure {name} in {rows}; they come from `{command}`"
