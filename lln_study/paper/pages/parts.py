"""The paper's tables on the pages: the part that a page speaks of. ``lln table`` prints all."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

from lln.report.page import Table
from lln_study.paper.pages.blocks import NOTHING_YET, Blocks
from lln_study.paper.tables import table as tables


class Part(NamedTuple):
    """What a page shows of the tables of a number.

    Attributes:
        titles: A pattern of the titles that are shown.
        without: Columns that are left out, as are those without a value.
        lines: A pattern of the lines and notes that are left out, as is a repeated line.
    """

    titles: str = ""
    without: Sequence[str] = ()
    lines: str = "^$"


PARTS = {
    "1": Part(
        titles="6 layers",
        without=["MLM loss", "parameters"],
        lines=r"C = 256\) \||^QNLI|^Where several",
    ),
    "pretraining": Part(
        titles="bf16",
        without=["peak GiB", "parameters", "LLN share"],
        lines="LLN share|^No speed|^Learning rates|^Loss: of",
    ),
    "4": Part(titles=", compiled", lines="in the paper|eager"),
    "conversion": Part(
        titles="^(?!.*N = 1,024)",
        without=["softmax", "calibrate", "near alone", "far alone", "seconds"],
        lines=r"t2r|elu|2e-05|slots 256, rec|(rotation|slots 128)\) \| 260 \| none|^[A-Z].*[;:] "
        "|^The converted",
    ),
    "sets": Part(without=["16,384 rows"], lines="learn_scale"),
}


def shown(number: str, results: Path) -> str:
    """The part of a table that a page shows; a note stands below the first table it is about."""
    part = PARTS.get(number, Part())
    found = [each for each in tables.make(number, results) if re.search(part.titles, each.title)]
    seen: set[str] = set()
    made = []
    for table in found:
        notes = [note for note in table.notes if not re.search(part.lines, note)]
        notes = [note for note in notes if note not in seen]
        seen |= set(notes)
        lines = list(_lines(table, part))
        made.append(Table(lines[0], lines[1:], table.title, notes).markdown())
    return "\n\n".join(made) or NOTHING_YET


def _lines(table: Table, part: Part) -> Iterator[list[str]]:
    """The columns and the lines that are shown."""
    given = dict.fromkeys(map(tuple, table.lines))
    lines = [line for line in given if not re.search(part.lines, " | ".join(line))]
    kept = [
        place
        for place, name in enumerate(table.columns)
        if name not in part.without and any(line[place] not in ("–", "") for line in lines)
    ]
    for line in (table.columns, *lines):
        yield [line[place] for place in kept]


BLOCKS: Blocks = {f"table_{number}": partial(shown, number) for number in tables.TABLES}
