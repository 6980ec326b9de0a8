"""Bars that were set in advance for an H200, beside the newest rows of ``lln bench gpu``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lln.report.numbers import three_digits
from lln_study.paper.pages.blocks import Blocks, Row, from_file, markdown_table

TOKENS, STEP_TOKENS = 65_536, 16_384
OURS = ("triton", "mixed")  # whichever takes the shape
PYTHON, GRAPH = "eager", "graph"  # as rows have them
LAUNCHED = {PYTHON: "called from Python", GRAPH: "from a graph"}
# What, op, launch, batch, N, and the milliseconds it may take.
TIMES = (
    ("LLN, batch 1", "bidirectional", PYTHON, 1, 512, 0.35),
    ("LLN, batch 1", "bidirectional", PYTHON, 1, 4096, 0.41),
    ("LLN, α and β measured", "measured", PYTHON, TOKENS // 4096, 4096, 0.55),
    ("LLN+Diag, blocks of 128", "lln_diag_128", GRAPH, TOKENS // 4096, 4096, 0.66),
    ("LLN+Diag, blocks of 128", "lln_diag_128", PYTHON, TOKENS // 4096, 4096, 0.75),
    ("causal LLN", "causal", GRAPH, TOKENS // 512, 512, 0.49),
    ("causal LLN", "causal", GRAPH, TOKENS // 4096, 4096, 0.55),
    ("causal LLN", "causal", GRAPH, TOKENS // 16_384, 16_384, 0.60),
)
# N, and how many times as long as the recommended setting SDPA must take.
STEPS = ((512, 1.0), (2048, 1.1), (4096, 1.25))


def table(rows: Sequence[Row]) -> str:
    """A line per bar: what it is about, the bar, and what was measured."""
    lines = []
    for what, op, launch, batch, N, bar in TIMES:
        ms = _ms(rows, op, OURS, launch, batch, N)
        words = f"{what}, N = {N:,}, {LAUNCHED[launch]}: ms"
        lines.append([words, f"≤ {bar:.2f}", three_digits(ms) or "–"])
    for N, bar in STEPS:
        case = (PYTHON, STEP_TOKENS // N, N)
        theirs, ours = (
            _ms(rows, "roberta_step", (impl,), *case) for impl in ("sdpa", "recommended")
        )
        words = f"step of RoBERTa-base, N = {N:,}, called from Python: SDPA ÷ recommended"
        lines.append([words, f"≥ {bar:.2f}", f"{theirs / ours:.2f}" if theirs and ours else "–"])
    return markdown_table(["what", "bar", "measured"], lines)


def _ms(
    rows: Sequence[Row], op: str, impls: Sequence[str], launch: str, batch: int, N: int
) -> float | None:
    """Milliseconds of a forward and backward pass in bfloat16 with heads of 64."""
    wanted = {"op": op, "launch": launch, "B": batch, "N": N, "D": 64, "pass": "fwd+bwd"}
    wanted |= {"dtype": "bfloat16"}
    found = [
        row["ms_p50"]
        for row in rows
        if row["impl"] in impls and all(row[name] == value for name, value in wanted.items())
    ]
    return found[-1] if found else None


def gpu_targets(results: Path) -> str:
    """The table of the newest run."""
    return from_file("gpu", table)(results)


BLOCKS: Blocks = {"gpu_targets": gpu_targets}
