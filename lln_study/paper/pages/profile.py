"""The block of docs/results/speed.md on the kernels of a call, from ``results/profile…json``."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from lln.report.numbers import three_digits
from lln_study.paper.pages.blocks import NOTHING_YET, Blocks, Row, latest, markdown_table, origin

OURS = "_kernel"  # how the names of our kernels end
PYTORCH = "PyTorch's own"


def gpu_profile(results: Path) -> str:
    """A line per op: its microseconds, and its kernels with theirs, the longest first."""
    content = latest(results, "profile")
    if content is None:
        return NOTHING_YET
    rows: list[Row] = content["rows"]
    lines = []
    for op, width in dict.fromkeys((row["op"], row["D"]) for row in rows):
        own = [row for row in rows if (row["op"], row["D"]) == (op, width)]
        total = sum(row["us"] for row in own)
        lines.append([f"`{op}`, heads of {width}", f"{total:,.0f}", _kernels(own)])
    words = (
        "Microseconds of a forward and backward pass, with the number of launches if there are "
        f"several. ({rows[0]['configuration']}; {origin(rows[0])}, {content['date']})"
    )
    return f"{markdown_table(['op', 'µs', 'kernels'], lines)}\n\n{words}"


def _kernels(rows: Sequence[Row]) -> str:
    """Ours by name, PyTorch's together."""
    named: dict[str, list[float]] = {}
    for row in rows:
        name = row["kernel"]
        key = name.removesuffix(OURS) if name.endswith(OURS) else PYTORCH
        found = named.setdefault(key, [0.0, 0])
        found[0] += row["us"]
        found[1] += row["launches"]
    ordered = sorted(named.items(), key=lambda item: -item[1][0])
    return ", ".join(
        f"{name} {three_digits(us)}" + (f" ({launches:.0f})" if launches > 1 else "")
        for name, (us, launches) in ordered
    )


BLOCKS: Blocks = {"gpu_profile": gpu_profile}
