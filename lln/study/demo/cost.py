"""Time and peak memory of one forward call against the number of tokens."""

from __future__ import annotations

from lln.study.bench.cases import Case, powers

LABELS = {
    ("bidirectional", "matrix"): "softmax, N×N matrix",
    ("bidirectional", "sdpa"): "softmax, torch SDPA",
    ("bidirectional", "eager"): "LLN",
}
SHORT = {"matrix": "matrix", "sdpa": "SDPA", "eager": "LLN"}


def cases(*, quick: bool = False) -> list[Case]:
    """12 heads of 64 in float32; softmax up to where a call still takes about a second."""
    longest = (
        {"matrix": 1024, "sdpa": 2048, "eager": 8192}
        if quick
        else {
            "matrix": 2048,
            "sdpa": 8192,
            "eager": 65_536,
        }
    )
    return [Case(op, impl, length) for op, impl in LABELS for length in powers(512, longest[impl])]


def label(row: dict) -> str:
    """The name under which a row is shown."""
    return LABELS[row["op"], row["impl"]]
