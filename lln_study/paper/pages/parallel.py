"""The block of docs/guide/distributed.md on paper: from which length on a sequence is split.

Times of kernels are rows of ``lln bench gpu``; the network is assumed, and stated in the block.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from lln_study.paper.pages.blocks import NOTHING_YET, Blocks, latest, markdown_table, origin

GPUS = (8, 64, 1024)
MACHINE = 8  # GPUs of a machine
INSIDE, BETWEEN = 450e9, 50e9  # bytes a second of a GPU, one way: NVLink 4, and 400 Gb/s
STEP = 10e-6  # seconds until the first byte of a message arrives
HALF, WIDE = 2, 4  # bytes of keys and values, and of states
LONGEST, MILLION = 2**40, 2**20


@dataclass(frozen=True)
class Layer:
    """The attention of one layer in training, on one GPU.

    Attributes:
        linear: Seconds per token of LLN.
        softmax: Seconds per token and key of softmax.
    """

    heads: int
    width: int
    linear: float
    softmax: float
    causal: bool

    @property
    def state(self) -> int:
        """Bytes of the state of a slice."""
        return WIDE * self.heads * self.width * (self.width + 1)

    def states(self, gpus: int) -> float:
        """Bytes a GPU receives: all states forward, backward a sum of gradients, or all if causal.

        As :class:`lln.distributed.exchange.Exchange` sends them.
        """
        others = gpus - 1
        return self.state * (2 * others if self.causal else others + 2 * others / gpus)

    def keys(self, tokens: float) -> float:
        """Bytes of the keys and values of a slice."""
        return 2 * HALF * self.heads * self.width * tokens

    def ours(self, tokens: float, gpus: int) -> tuple[float, float]:
        """Seconds of computing, and of sending."""
        computing = self.linear * tokens / gpus
        if gpus == 1:
            return computing, 0.0
        begun = 2 * math.ceil(math.log2(gpus)) * STEP
        return computing, self.states(gpus) / _speed(gpus) + begun

    def ring(self, tokens: float, gpus: int) -> tuple[float, float]:
        """The same of softmax: slices of keys go around, backward with their gradients."""
        computing = self.softmax * tokens**2 / gpus
        if gpus == 1:
            return computing, 0.0
        around = self.keys(tokens / gpus) / _speed(gpus)
        return computing, (gpus - 1) * (3 * around + 2 * STEP)


def _speed(gpus: int) -> float:
    return INSIDE if gpus <= MACHINE else BETWEEN


def first_length(holds: Callable[[float], bool]) -> float | None:
    """The least number of tokens from which on a statement holds; None if it never does."""
    least, most = 1.0, float(LONGEST)
    if not holds(most):
        return None
    if holds(least):
        return least
    while most / least > 1.001:
        middle = math.sqrt(least * most)
        least, most = (least, middle) if holds(middle) else (middle, most)
    return most


def parallel(results: Path) -> str:
    """Lengths from which on it pays to split a sequence, for LLN and for softmax's ring."""
    content = latest(results, "gpu")
    if content is None:
        return NOTHING_YET
    lines, used = [], []
    for op in ("bidirectional", "causal"):
        rows = [_row(content, op, "triton"), _row(content, op, "flash", "cudnn")]
        if None in rows:
            return NOTHING_YET
        used += rows
        linear, softmax = (row["ms_p50"] / 1e3 / row["B"] / row["N"] for row in rows)
        layer = Layer(rows[0]["H"], rows[0]["D"], linear, softmax / rows[1]["N"], op == "causal")
        lines += [_line(op, layer, gpus) for gpus in GPUS]
    names = [
        "attention, GPUs",
        "LLN: bytes received",
        "LLN: faster than one GPU from",
        "LLN: computing takes half of the time from",
        "ring: bytes received at 1M tokens",
        "ring: computing hides sending from",
        "time of the ring over LLN's, 1M tokens",
    ]
    words = (
        f"One layer of {used[0]['H']} heads of {used[0]['D']}, one sequence, forward and backward. "
        "*Measured*, in bfloat16: "
        + ", ".join(map(_shown, used))
        + f" ({origin(used[0])}, {content['date']}). *Assumed*: LLN grows with N and softmax with "
        "N²; no GPU waits for another (causal slices of equal work); a GPU receives "
        f"{INSIDE / 1e9:.0f} GB/s from its machine of {MACHINE} and {BETWEEN / 1e9:.0f} GB/s from "
        f"others, the slowest link counts; a message takes {STEP * 1e6:.0f} µs to begin, log₂ P of "
        "them for states, P − 1 for a ring in each pass. Nothing overlaps in LLN's time; the ring "
        "sends while it computes, and its time is the longer of the two. Launches and the merging "
        "of P states are left out, and short slices use a GPU less well: near the lengths shown "
        "expect less."
    )
    return f"{markdown_table(names, lines)}\n\n{words}"


def _row(content: dict[str, Any], op: str, *impls: str) -> Any:
    """The row of the longest sequences, the fastest of these implementations; None without one."""
    wanted = {"op": op, "pass": "fwd+bwd", "D": 64, "dtype": "bfloat16", "launch": "graph"}
    found = [
        row
        for row in content["rows"]
        if row["impl"] in impls and all(row[key] == value for key, value in wanted.items())
    ]
    return min(found, key=lambda row: (-row["N"], row["ms_p50"]), default=None)


def _shown(row: Any) -> str:
    size = f"{row['B']} × {row['N']:,} tokens"
    return f"{row['op']} {row['impl']} {row['ms_p50']:.2f} ms for {size}"


def _line(op: str, layer: Layer, gpus: int) -> list[str]:
    def faster(tokens: float) -> bool:
        return sum(layer.ours(tokens, gpus)) < sum(layer.ours(tokens, 1))

    def busy(way: Callable[[float, int], tuple[float, float]]) -> Callable[[float], bool]:
        def holds(tokens: float) -> bool:
            computing, sending = way(tokens, gpus)
            return computing >= sending

        return holds

    ring = 3 * (gpus - 1) * layer.keys(MILLION / gpus)
    ratio = max(layer.ring(MILLION, gpus)) / sum(layer.ours(MILLION, gpus))
    return [
        f"{op}, {gpus:,}",
        _bytes(layer.states(gpus)),
        _tokens(first_length(faster)),
        _tokens(first_length(busy(layer.ours))),
        _bytes(ring),
        _tokens(first_length(busy(layer.ring))),
        f"{ratio:,.0f}",
    ]


def _bytes(count: float) -> str:
    return f"{count / 1e6:,.1f} MB" if count < 1e8 else f"{count / 1e6:,.0f} MB"


def _tokens(count: float | None) -> str:
    """Two digits, in thousands or millions."""
    if count is None:
        return "never"
    if count <= 1:
        return "always"
    digits = 10 ** (math.floor(math.log10(count)) - 1)
    rounded = math.ceil(count / digits) * digits
    for size, name in ((1e6, "M"), (1e3, "k")):
        if rounded >= size:
            return f"{rounded / size:g}{name}"
    return f"{rounded:g}"


BLOCKS: Blocks = {"parallel": parallel}
