"""Turns cases into rows, and rows into ratios, growth exponents and files."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from lln.device.timing import time_call
from lln.records import files, machine, saved
from lln.records.rows import Row
from lln_study.bench.cases import Case, call, inputs
from lln_study.bench.check import check
from lln_study.bench.memory import peaks

GROWTH_SPAN = 16  # growth is fitted over the last factor of 16 in N: caches flatter short lengths


def measure(
    cases: Sequence[Case], *, min_seconds: float = 1.0, watch: Callable[[str], None] | None = None
) -> Iterator[Row]:
    """Check all implementations, then yield a finished row per case.

    ``watch`` is told what is being measured, for a progress display.
    """
    watch = watch or (lambda _: None)
    watch("correctness check")
    check(cases)
    facts = machine.facts()
    configuration = f"seed=0 min_seconds={min_seconds:g} {machine.conditions()}"
    memory = peaks(cases)
    for case in cases:
        watch(case.name)
        peak = next(memory)
        timing = time_call(call(case, inputs(case)), min_seconds=min_seconds)
        numbers = {name: round(value, 4) for name, value in asdict(timing).items()}
        yield {
            **case.row(),
            **numbers,
            "peak_mb": None if peak is None else round(peak, 2),
            **facts,
            "configuration": configuration,
        }


RIVALS = {"recommended": "bidirectional"}  # under which op softmax was measured


def ratios(rows: Sequence[Row], *, ours: str = "eager", theirs: str = "sdpa") -> list[Row]:
    """How many times faster ``ours`` is than ``theirs``, per op, pass and length of one run."""
    median = {(r["op"], r["pass"], r["N"], r["impl"]): r["ms_p50"] for r in rows}
    found = []
    for (op, passes, N, impl), fast in median.items():
        slow = median.get((RIVALS.get(op, op), passes, N, theirs))
        if impl == ours and slow is not None:
            found.append({"op": op, "pass": passes, "N": N, "ratio": round(slow / fast, 2)})
    return found


def growth(rows: Sequence[Row]) -> list[Row]:
    """Exponent p of cost ∝ N**p, for time and memory at the long end of every curve."""
    curves: dict[tuple[str, str, str], list[Row]] = {}
    for row in rows:
        curves.setdefault((row["op"], row["impl"], row["pass"]), []).append(row)
    found = []
    for (op, impl, passes), whole in curves.items():
        longest = max(row["N"] for row in whole)
        curve = [row for row in whole if row["N"] * GROWTH_SPAN >= longest]
        if len(curve) < 3:
            continue
        lengths = [row["N"] for row in curve]
        memory = [row["peak_mb"] for row in curve]
        # Pages are counted roughly: a small peak may come out as 0 or below.
        is_known = all(peak is not None and peak > 0 for peak in memory)
        found.append(
            {
                "op": op,
                "impl": impl,
                "pass": passes,
                "from": min(lengths),
                "to": max(lengths),
                "time": round(exponent(lengths, [row["ms_p50"] for row in curve]), 3),
                "memory": round(exponent(lengths, memory), 3) if is_known else None,
            }
        )
    return found


def exponent(x: Sequence[float], y: Sequence[float]) -> float:
    """Slope of the least-squares line through (ln x, ln y)."""
    a, b = [math.log(value) for value in x], [math.log(value) for value in y]
    mean_a, mean_b = sum(a) / len(a), sum(b) / len(b)
    covariance = sum((u - mean_a) * (w - mean_b) for u, w in zip(a, b, strict=True))
    return covariance / sum((u - mean_a) ** 2 for u in a)


def save(rows: Sequence[Row], folder: Path, *, subject: str, device: str = "cpu") -> list[Path]:
    """Write ``subject_hardware_date.json`` (rows, ratios, growth) and ``.csv`` (rows)."""
    content = {"ratios": ratios(rows), "growth": growth(rows), "rows": list(rows)}
    written = saved.save_json(content, folder, subject=subject, device=device)
    return [written, files.write_text(written.with_suffix(".csv"), saved.as_csv(rows))]
