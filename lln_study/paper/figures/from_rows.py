"""Figures that need training, drawn from the rows that ``lln sweep`` and ``lln train`` wrote."""

from __future__ import annotations

from pathlib import Path

from lln.records import files, saved
from lln.report.panels import Panel, as_files
from lln_study.paper import results
from lln_study.paper.figures import from_curves as training_figures
from lln_study.paper.figures import from_results as run_figures
from lln_study.sweep_files import runnable

FIGURES = {**training_figures.FIGURES, **run_figures.FIGURES}


def panels(name: str, rows: Path) -> list[Panel]:
    """What a figure shows of the rows in a folder; nothing without those it needs."""
    read = results.read_curves if name in training_figures.FIGURES else results.read
    return FIGURES[name].panels(read(rows))


def draw(name: str, rows: Path, folder: Path) -> list[Path]:
    """Write ``figure_NAME.csv``, ``.svg`` and ``.png``; nothing without the rows it needs.

    Args:
        rows: Folder of the result rows.
    """
    drawn = panels(name, rows)
    if not drawn:
        return []
    table = saved.as_csv(run_figures.points(drawn))
    written = [files.write_text(folder / f"figure_{name}.csv", table)]
    for kind, content in as_files(f"figure-{name}", drawn).items():
        path = folder / f"figure_{name}.{kind}"
        path.write_bytes(content)
        written.append(path)
    return written


def nothing(name: str, rows: Path) -> str:
    """Say what is missing when there are no rows."""
    command = runnable(FIGURES[name].command)
    return (
        f"no rows for figure {name} in {rows}; pass --results with the folder of the rows, or make "
        f"them with `{command}`"
    )
