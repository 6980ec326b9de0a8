"""``lln report``: every table and figure of the paper beside ours, from the files in ``results/``.

Our numbers come from rows and CSV files, the paper's from :mod:`lln_study.paper.values`, and what
differs from docs/results/differences.md, written by hand.
"""

from __future__ import annotations

import csv
from pathlib import Path

from lln.report.page import Block, Page, Plot, Plots, Section, Table, Text
from lln.report.panels import Panel, as_page_plots
from lln_study.paper import results
from lln_study.paper import values as paper_values
from lln_study.paper.figures import from_rows
from lln_study.paper.figures.drawing import PANELS
from lln_study.paper.tables import table as tables

DIFFERENCES = Path(__file__).resolve().parents[2] / "docs" / "results" / "differences.md"
LEDE = (
    "Every table and figure of Linear Log-Normal Attention with Unbiased Concentration "
    "(arXiv:2311.13541) beside what this project measured, with scale, data, seeds, device and "
    "commit. What has not been measured says so."
)
NOTHING = "Nothing measured yet"


def items() -> list[list[str]]:
    """Name, title and what differs of every table and figure with an experiment."""
    lines = DIFFERENCES.read_text(encoding="utf-8").splitlines()
    own = [line for line in lines if line.startswith(("| Table ", "| Figure "))]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in own]


def page(folder: Path, facts: dict[str, str] | None = None) -> Page:
    """The page of all rows in ``folder``."""
    sections = []
    for name, title, differs in items():
        kind, number = name.split()
        if kind == "Figure":
            blocks = _figure(number, folder)
        else:
            blocks = [*_printed(number), *_ours(number, folder)]
        if number == "5":
            blocks += _figure("arena", folder)
        blocks.append(Text(f"What differs: {differs}"))
        sections.append(Section(f"{name}. {title}", blocks))
    title = "LLN attention: the paper's results beside ours"
    return Page(title, LEDE, sections, facts or {})


def _printed(number: str) -> list[Block]:
    """The paper's lines of the tables in which ours do not have them."""
    v = paper_values
    caption = f"In the paper (Table {number})."
    if number == "1":
        columns = ["", "MNLI", "QNLI", "QQP", "SST-2", "avg"]
        return [Table(columns, _lines(v.TABLE_1), f"{caption} Accuracy, %.")]
    if number == "2":
        lines = _lines(v.TABLE_2_GB, ": memory, GB", "OOM")
        lines += _lines(v.TABLE_2_SECONDS, ": time, s", "OOM")
        return [Table(["N", *(f"{n:,}" for n in v.TABLE_2_LENGTHS)], lines, caption)]
    return []


def _lines(numbers: paper_values.Numbers, what: str = "", none: str = "–") -> list[list[str]]:
    return [
        [
            results.mechanism({"mechanism": name, "configuration": {}}) + what,
            *(none if value is None else f"{value:,g}" for value in values),
        ]
        for name, values in numbers.items()
    ]


def _ours(number: str, folder: Path) -> list[Block]:
    found = tables.make(number, folder)
    if not found:
        return [Text(f"{NOTHING}: {tables.nothing(number, folder)}.")]
    blocks: list[Block] = []
    for table in found:
        blocks.append(Table(table.columns, table.lines, f"Ours. {table.title}."))
        blocks.append(Text("\n\n".join(table.notes)))
    return blocks


def _figure(number: str, folder: Path) -> list[Block]:
    if number in from_rows.FIGURES:
        panels, command = from_rows.panels(number, folder), from_rows.FIGURES[number].command
    else:
        panels, command = _computed(number, folder), f"lln figure {number}"
    if not panels:
        return [Text(f"{NOTHING}; the rows come from `{command}`.")]
    plots = as_page_plots(f"figure-{number}", panels)
    return [Plots([Plot(svg, note) for svg, note in plots])]


def _computed(number: str, folder: Path) -> list[Panel]:
    """A figure that needs no training, from its CSV file."""
    found = sorted(folder.glob(f"figure-{number}_*.csv"))
    if not found:
        return []
    with found[-1].open(encoding="utf-8", newline="") as stream:
        rows = [
            {name: _value(text) for name, text in row.items()} for row in csv.DictReader(stream)
        ]
    return PANELS[number](rows)


def _value(text: str | None) -> float | str | None:
    if not text:
        return None
    for kind in (int, float):
        try:
            return kind(text)
        except ValueError:
            continue
    return text
