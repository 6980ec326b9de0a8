"""``lln report``: every table and figure of the paper beside ours, from the files in ``results/``.

Nothing is computed here and no number is typed in: ours come from rows and CSV files, the paper's
from :mod:`lln_study.paper.values`.
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from lln.report.page import Block, Page, Plot, Plots, Section, Table, Text
from lln.report.panels import Panel, as_page_plots
from lln_study.paper import results
from lln_study.paper import values as paper_values
from lln_study.paper.figures.drawing import PANELS
from lln_study.paper.figures.from_curves import FIGURES as CURVE_FIGURES
from lln_study.paper.figures.from_results import FIGURES as ROW_FIGURES
from lln_study.paper.tables import table as tables
from lln_study.paper.tables.arena import AVERAGED

LEDE = (
    "Every table and figure of Linear Log-Normal Attention with Unbiased Concentration "
    "(arXiv:2311.13541) beside what this project measured, with scale, data, seeds, device and "
    "commit. What has not been measured says so."
)


@dataclass(frozen=True)
class Item:
    """A table or figure of the paper: its number, what it shows, and what differs here.

    ``beside`` is a figure of our own that belongs to a table.
    """

    kind: str
    number: str
    title: str
    differs: str
    beside: str = ""


ITEMS = (
    Item(
        "figure",
        "1",
        "Temperature, entropy and spectral gap during training",
        "The paper's small RoBERTa is not described further; ours has a single head per layer, as "
        "there, and is trained on 2015 Wikipedia text.",
    ),
    Item(
        "figure",
        "2",
        "Concentration against temperature",
        "Inputs are Gaussian, as in the paper, which does not print N, d and the kernels; ours are "
        "in the CSV file. Exact calibrations and the unbiased variant are added.",
    ),
    Item(
        "table",
        "1",
        "GLUE",
        "The paper pre-trains RoBERTa-base on WikiText-103 and fine-tunes on the complete GLUE "
        "data. Ours are smaller models, pre-trained on fewer tokens of 2015 Wikipedia and "
        "fine-tuned on what the data folder holds: compare mechanisms with each other, not with "
        "the paper's level.",
    ),
    Item(
        "table",
        "2",
        "Time and memory of a training step",
        "Another GPU, another model size and torch's fused softmax (SDPA), which did not build the "
        "N × N matrix that ran out of memory in the paper; softmax with its matrix is beside it.",
    ),
    Item(
        "figure",
        "5a",
        "The law of softmax attention",
        "Computed as in the paper, with the number of tokens and draws of the CSV file.",
    ),
    Item(
        "figure",
        "5b",
        "Moment matching",
        "Computed as in the paper; the exact fits for each head size are added.",
    ),
    Item("figure", "6a", "Fenton's law in the moderate case", "Computed as in the paper."),
    Item("figure", "6b", "Fenton's law in the broad case", "Computed as in the paper."),
    Item(
        "figure",
        "7",
        "Histogram of the attention weights",
        "Weights of a model trained here instead of the paper's.",
    ),
    Item(
        "figure",
        "8a",
        "Loss during pre-training",
        "A smaller RoBERTa, other text and fewer steps than RoBERTa-base on WikiText-103.",
    ),
    Item(
        "figure",
        "8b",
        "Loss scale during pre-training",
        "A smaller RoBERTa; torch's GradScaler instead of fairseq's, which starts and grows "
        "differently.",
    ),
    Item(
        "table",
        "3",
        "ViT on Dogs vs Cats",
        "Images of 64 × 64 instead of the originals, fewer epochs, a split of our own with a "
        "validation set. Absolute accuracies are not comparable, the order of mechanisms is.",
    ),
    Item(
        "table",
        "4",
        "Cost on the Long Range Arena",
        "Milliseconds of a step on another GPU instead of seconds of 50,000 steps; memory without "
        "the data. Retrieval is a stand-in of the same shape.",
    ),
    Item(
        "table",
        "5",
        "Accuracy on the Long Range Arena",
        "The same network and batch sizes, far fewer steps at larger learning rates, data "
        "generated from the published parameters (ListOps, Pathfinder), validation examples held "
        "out of train where the benchmark validates on its test set (Text), and a stand-in for "
        "Retrieval.",
        beside="arena",
    ),
    Item(
        "figure",
        "9",
        "α and β during training",
        "64 × 64 images in 257 tokens; the paper does not print its number of tokens, and reports "
        "values of 2 to 2.2.",
    ),
    Item(
        "figure",
        "10a",
        "Accuracy against fixed α = β",
        "The ViT of Table 3 at our scale; the figure of the paper has no numbers to print beside.",
    ),
    Item(
        "figure",
        "10b",
        "Loss scale of deit-tiny in fp16",
        "64 × 64 images in patches of 4 instead of ImageNet's 224 × 224 in patches of 16.",
    ),
)


def page(folder: Path, facts: dict[str, str] | None = None) -> Page:
    """The page of all rows in ``folder``."""
    rows, curves = results.read(folder), results.read_curves(folder)
    sections = []
    for item in ITEMS:
        if item.kind == "table":
            blocks = [*_printed(item.number), *_ours(item.number, folder)]
            if item.beside and ROW_FIGURES[item.beside].panels(rows):
                blocks += _figure(item.beside, folder, rows, curves)
        else:
            blocks = _figure(item.number, folder, rows, curves)
        title = f"{item.kind.capitalize()} {item.number}. {item.title}"
        sections.append(Section(title, [*blocks, Text(f"What differs: {item.differs}")]))
    summary = [Text(_summary(sections)), *_coverage(rows)]
    first = Section("What there is", summary)
    return Page(
        "LLN attention: the paper's results beside ours", LEDE, [first, *sections], facts or {}
    )


def _coverage(rows: Sequence[results.Row]) -> list[Block]:
    """How many rows of what, and where they come from."""
    groups = results.grouped(rows, lambda row: (row["subject"], row["device"]))
    if not groups:
        return [Text("There are no result rows yet.")]
    names = {"mlm": "pre-training", "glue": "fine-tuning", "step": "step times", "vit": "images"}
    names |= {"lra": "Long Range Arena", "lra_step": "step times, Long Range Arena"}
    lines = [
        [
            names.get(subject, subject),
            str(len(own)),
            str(len({row["mechanism"] for row in own})),
            ", ".join(map(str, sorted({row["seed"] for row in own}))),
            device,
            ", ".join(sorted({row["commit"] for row in own})),
        ]
        for (subject, device), own in groups.items()
    ]
    columns = ["experiment", "rows", "mechanisms", "seeds", "device", "commits"]
    return [Table(columns, lines, "Result rows.")]


def _summary(sections: Sequence[Section]) -> str:
    missing = [
        section.title.split(".")[0]
        for section in sections
        if any(
            isinstance(block, Text) and block.body.startswith(NOTHING) for block in section.blocks
        )
    ]
    done = len(sections) - len(missing)
    text = f"{done} of the {len(sections)} tables and figures with experiments have numbers here."
    return text + (f" Still missing: {', '.join(missing)}." if missing else "")


NOTHING = "Nothing measured yet"


def _printed(number: str) -> list[Block]:
    """The paper's table."""
    v = paper_values
    caption = f"In the paper (Table {number})."
    if number == "1":
        columns = ["", "MNLI", "QNLI", "QQP", "SST-2", "avg"]
        return [Table(columns, _lines(v.TABLE_1), caption + " Accuracy, %.")]
    if number == "2":
        columns = ["N", *(f"{n:,}" for n in v.TABLE_2_LENGTHS)]
        lines = _lines(v.TABLE_2_GB, ": memory, GB", "OOM")
        lines += _lines(v.TABLE_2_SECONDS, ": time, s", "OOM")
        return [Table(columns, lines, caption)]
    if number == "3":
        lines = _lines({name: (value,) for name, value in v.TABLE_3.items()})
        return [Table(["", "accuracy, %"], lines, caption)]
    columns = ["", "Text", "ListOps", "Retrieval", "Pathfinder", "Image"]
    if number == "4":
        lines = _lines(v.TABLE_4_SECONDS, ": time, s") + _lines(v.TABLE_4_MB, ": memory, MB")
        return [Table(columns, lines, caption)]
    four = [v.ARENA.index(task) for task in AVERAGED]
    averages = [sum(values[i] or 0 for i in four) / 4 for values in v.TABLE_5.values()]
    lines = [[*line, f"{mean:.2f}"] for line, mean in zip(_lines(v.TABLE_5), averages, strict=True)]
    return [Table([*columns, "avg of 4"], lines, caption + " Accuracy, %.")]


def _lines(numbers: paper_values.Numbers, what: str = "", none: str = "–") -> list[list[str]]:
    return [
        [
            (results.NAMES.get(name) or name.replace("_", " ").capitalize()) + what,
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
        own = [line for line in table.lines if not line[0].startswith(" ")]  # not the paper's
        blocks.append(Table(table.columns, own, f"Ours. {table.title}."))
        blocks.append(Text("\n\n".join(table.notes)))
    return blocks


def _figure(
    number: str, folder: Path, rows: Sequence[results.Row], curves: Sequence[results.Row]
) -> list[Block]:
    if number in ROW_FIGURES:
        panels, command = ROW_FIGURES[number].panels(rows), ROW_FIGURES[number].command
    elif number in CURVE_FIGURES:
        panels, command = CURVE_FIGURES[number].panels(curves), CURVE_FIGURES[number].command
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
