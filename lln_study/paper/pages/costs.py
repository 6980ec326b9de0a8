"""What the runs that are still missing would cost: the block of docs/results/claims.md.

A run costs at least the seconds of the quickest stored row of its kind, which counts everything
from the start of the process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lln_study.paper.pages.blocks import NOTHING_YET, Blocks, markdown_table
from lln_study.paper.results import Row, read

Fields = Mapping[str, Any]
PRETRAINING: Fields = {"width": 512, "length": 512, "steps": 15300}
COMPILED: Fields = {"width": 512, "compile": True}
VIT: Fields = {"recipe": "paper", "steps": 5000}
ARENA: tuple[Fields, ...] = (
    {"task": "text", "steps": 2000},
    {"task": "listops", "steps": 5000},
    {"task": "image", "steps": 2500},
    {"task": "pathfinder", "steps": 20000},
)
GLUE = ("sst2", "cola", "stsb", "mrpc", "rte", "qqp", "mnli")


@dataclass(frozen=True)
class Part:
    """So many runs, each ``times`` as long as the stored rows of a subject with these fields."""

    runs: int
    subject: str
    fields: Fields
    times: float = 1.0


@dataclass(frozen=True)
class Plan:
    """A sweep file: what it is for, and its runs."""

    words: str
    parts: Sequence[Part]


def _arena(runs: int) -> list[Part]:
    return [Part(runs, "lra", task) for task in ARENA]


PLANS: Mapping[str, Plan] = {
    "seeds.json": Plan(
        "three seeds of pre-training, two of every fine-tuning (the first seed again, since its "
        "checkpoints are gone)",
        [
            Part(15, "mlm", PRETRAINING),
            *(Part(30, "glue", {"task": task, "max_length": 128}) for task in GLUE),
        ],
    ),
    "lln_alone.json": Plan(
        "LLN alone: two rates, conv, RoBERTa's positions, four times the updates, float32, wider "
        "heads, the authors' form, learned maps to 256 slots, softmax beside each setting; "
        "float32 and small batches cost more than is said here",
        [Part(17, "mlm", PRETRAINING)],
    ),
    "table4_fair.json": Plan(
        "Table 4 compiled, with products in bf16 (counted as compiled steps of RoBERTa)",
        [Part(40, "step", COMPILED)],
    ),
    "tier_a_speed_fair.json": Plan(
        "a step of the model of Table 1, the same", [Part(14, "step", COMPILED)]
    ),
    "block_size_vit.json": Plan("the authors' block on the ViT, 16", [Part(4, "vit", VIT)]),
    "block_size_lra.json": Plan("their block on the Long Range Arena, 32", _arena(2)),
    "lra_seeds.json": Plan(
        "Table 5, three seeds: softmax, LLN+Diag, recommended, PolaFormer", _arena(16)
    ),
    "lra_rivals.json": Plan("Table 5, one seed: Reformer, Skyformer, Nyströmformer", _arena(6)),
    "listops_schedule.json": Plan(
        "the schedule under which softmax learns ListOps, by validation; batches of 128 cost more "
        "than is said here",
        [
            Part(2, "lra", ARENA[1], times=2),
            Part(5, "lra", ARENA[1], times=4),
            Part(1, "lra", ARENA[1], times=10),
        ],
    ),
}


def least_seconds(rows: Sequence[Row], subject: str, fields: Fields) -> float | None:
    """Seconds of the quickest row of a subject with these fields."""
    found = [
        row["seconds"]
        for row in rows
        if row["subject"] == subject
        and row.get("seconds")
        and all(row["configuration"].get(name) == value for name, value in fields.items())
    ]
    return min(found, default=None)


def costs(results: Path) -> str:
    """A line per sweep file: runs, and the GPU time they take at least."""
    rows = read(results)
    lines, total = [], 0.0
    for name, plan in PLANS.items():
        known = [least_seconds(rows, part.subject, part.fields) for part in plan.parts]
        if None in known:
            return NOTHING_YET
        parts = zip(plan.parts, known, strict=True)
        minutes = sum(part.runs * part.times * (seconds or 0) for part, seconds in parts) / 60
        total += minutes
        count = sum(part.runs for part in plan.parts)
        lines.append([f"`sweeps/{name}`", plan.words, str(count), f"{minutes:,.0f}"])
    lines.append(["together", "", "", f"{total:,.0f}"])
    return markdown_table(["sweep", "for", "runs", "GPU minutes, at least"], lines)


BLOCKS: Blocks = {"costs": costs}
