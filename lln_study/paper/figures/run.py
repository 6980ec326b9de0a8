"""Compute figures with a progress bar, and write CSV, SVG and PNG."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path

from rich.console import Console
from rich.progress import Progress

from lln.device.threads import one_thread
from lln.records import files, machine, saved
from lln.records.rows import Row
from lln.report.panels import as_files
from lln.report.progress import counting
from lln_study.paper.figures import FIGURES
from lln_study.paper.figures.drawing import PANELS


def run(
    names: Sequence[str], folder: Path, *, quick: bool = False, console: Console | None = None
) -> list[Path]:
    """Write ``figure_NAME.csv``, ``.svg`` and ``.png`` per name."""
    console = console or Console()
    written: list[Path] = []
    bars = counting(console)
    with bars, one_thread():
        facts = machine.facts()
        for name in names:
            written += _write(name, _compute(name, quick, bars), folder, facts)
    for path in written:
        console.print(f"  {path}", highlight=False)
    return written


def _compute(name: str, quick: bool, bars: Progress) -> list[Row]:
    figure = FIGURES[name]
    task = bars.add_task(f"figure {name}", total=None)
    rows, start = [], time.perf_counter()
    for row in figure.quick() if quick else figure.rows():
        rows.append(row)
        bars.advance(task)
    bars.update(task, total=len(rows), completed=len(rows))
    bars.console.print(f"figure {name}: {figure.title}, {time.perf_counter() - start:.0f} s")
    return rows


def _write(name: str, rows: list[Row], folder: Path, facts: dict[str, str]) -> list[Path]:
    table = saved.as_csv([row | facts for row in rows])
    paths = [files.write_text(folder / f"figure_{name}.csv", table)]
    for kind, content in as_files(f"figure-{name}", PANELS[name](rows)).items():
        path = folder / f"figure_{name}.{kind}"
        path.write_bytes(content)
        paths.append(path)
    return paths
