"""Time and peak memory of one forward call against the number of tokens."""

from __future__ import annotations

from lln_study.bench.cases import Case, powers

LABELS = {
    ("bidirectional", "matrix"): "softmax, N×N matrix",
    ("bidirectional", "sdpa"): "softmax, torch SDPA",
    ("bidirectional", "eager"): "LLN",
}
SHORT = {"matrix": "matrix", "sdpa": "SDPA", "eager": "LLN"}


def cases(*, quick: bool = False) -> list[Case]:
    """List the calls: 12 heads of 64 in float32, up to where one takes a few tenths of a second."""
    longest = {"matrix": 2048, "sdpa": 4096, "eager": 16_384}
    if quick:
        longest = {"matrix": 1024, "sdpa": 2048, "eager": 8192}
    return [Case(op, impl, length) for op, impl in LABELS for length in powers(512, longest[impl])]


def label(row: dict) -> str:
    """The name under which a row is shown."""
    return LABELS[row["op"], row["impl"]]
