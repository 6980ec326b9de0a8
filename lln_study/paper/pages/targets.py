"""Bars that were set in advance for an H200, beside the newest rows of ``lln bench gpu``."""

from __future__ import annotations

from collections.abc import Sequence

from lln.report.numbers import three_digits
from lln_study.paper.pages.blocks import Row, from_file, markdown_table, where

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
    rows = where(rows, {"D": 64, "pass": "fwd+bwd", "dtype": "bfloat16"})

    def ms(impls: Sequence[str], op: str, launch: str, batch: int, N: int) -> float | None:
        own = where(rows, {"op": op, "launch": launch, "B": batch, "N": N})
        return next((row["ms_p50"] for row in reversed(own) if row["impl"] in impls), None)

    lines = []
    for what, op, launch, batch, N, bar in TIMES:
        words = f"{what}, N = {N:,}, {LAUNCHED[launch]}: ms"
        measured = three_digits(ms(OURS, op, launch, batch, N))
        lines.append([words, f"≤ {bar:.2f}", measured or "–"])
    for N, bar in STEPS:
        case = ("roberta_step", PYTHON, STEP_TOKENS // N, N)
        theirs, ours = ms(("sdpa",), *case), ms(("recommended",), *case)
        words = f"step of RoBERTa-base, N = {N:,}, called from Python: SDPA ÷ recommended"
        lines.append([words, f"≥ {bar:.2f}", f"{theirs / ours:.2f}" if theirs and ours else "–"])
    return markdown_table(["what", "bar", "measured"], lines)


newest = from_file("gpu", table)
