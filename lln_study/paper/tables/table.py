"""The paper's tables from result rows: for the terminal, for pages, and as JSON.

An entry of TABLES is a function from rows to tables: several if rows were measured at several
scales, none if there are no rows. Numbers come from rows only.
"""

from __future__ import annotations

import importlib
from pathlib import Path

from lln.report.page import Table
from lln_study.paper import results
from lln_study.sweep_files import runnable

# number -> where the function is, what it needs, and how to get the rows
TABLES: dict[str, tuple[str, str, str]] = {
    "1": ("lln_study.paper.tables.glue", "fine-tunings on GLUE", "lln sweep sweeps/tier_a.json"),
    "2": ("lln_study.paper.tables.step", "timed training steps", "lln sweep sweeps/table2.json"),
    "3": ("lln_study.paper.tables.vit", "ViT on images", "lln sweep sweeps/vit.json"),
    "4": ("lln_study.paper.tables.arena_cost", "timed LRA steps", "lln sweep sweeps/table4.json"),
    "5": ("lln_study.paper.tables.arena", "the Long Range Arena", "lln sweep sweeps/lra.json"),
    "sets": (
        "lln_study.paper.tables.sets",
        "classified tables",
        "lln sweep sweeps/tables.json",
    ),
    "pretraining": (
        "lln_study.paper.tables.pretraining",
        "two pre-trainings of one size",
        "lln sweep sweeps/tier_a.json",
    ),
    "conversion": (
        "lln_study.paper.tables.conversion",
        "converted models",
        "lln convert MODEL_FOLDER --data TEXT --out FOLDER --results results",
    ),
}
WITH_CURVES = ("pretraining",)


def make(number: str, folder: Path) -> list[Table]:
    """Return the tables of a number, from the rows in ``folder``."""
    if number not in TABLES:
        raise ValueError(f"table {number!r} is unknown; there are {', '.join(TABLES)}")
    module = importlib.import_module(TABLES[number][0])
    if number in WITH_CURVES:
        return module.tables(results.read(folder), results.read_curves(folder))
    return module.tables(results.read(folder))


def nothing(number: str, folder: Path) -> str:
    """Say what is missing when there are no rows."""
    _, what, command = TABLES[number]
    return (
        f"no rows of {what} in {folder}; pass --results with the folder of the rows, or make them "
        f"with `{runnable(command)}`"
    )
