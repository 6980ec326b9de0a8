"""``lln bench gpu``: time and share of the memory-bandwidth floor on a CUDA device, in one run.

What is measured stands in :mod:`lln_study.bench.shapes`, by which processes in
:mod:`lln_study.bench.apart.session`; floors are taken with the copy bandwidth of the same run.
"""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lln.records import files, machine, saved
from lln.records.rows import Row
from lln.report.lines import Axis, Series, line_plot
from lln_study.bench import peers
from lln_study.bench.apart.compiling import MOST_SECONDS, compile_ahead
from lln_study.bench.apart.session import Session
from lln_study.bench.cases import ALPHA, OPTIONS, TRAINING
from lln_study.bench.shapes import EAGER, GRAPH, LAUNCHES, TOKENS, gpu_cases
from lln_study.bench.terminal import wide_console

MINE = ("triton", "mixed", "recommended")  # the last in a step of training
RIVALS = ("cudnn", "flash", "sdpa", "torch", "eager", peers.IMPL)
CONFIGURATION = (
    f"seed=0 alpha=beta={ALPHA:g} repeat_ms=60, cache cleared before every call; graphs, calls "
    "from Python, other libraries and training steps in a fresh process each"
)
COMPILING = 1 / 3  # of the minutes, at most


def ratios(rows: Sequence[Row]) -> list[Row]:
    """How many times faster ours is than each rival, on equal shapes and launches."""
    keys = ("op", "pass", "B", "N", "D", "dtype", "launch")
    theirs = {
        (row["impl"], *(row[k] for k in keys)): row["ms_p50"]
        for row in rows
        if row.get("impl") in RIVALS and row.get("ms_p50")
    }
    found = []
    for row in rows:
        if row.get("impl") not in MINE or not row.get("ms_p50"):
            continue
        named = {k: row[k] for k in keys}
        for rival in RIVALS:
            other = {**named, "op": _compared_with(row["op"], rival)}
            if rival == "eager":  # plain PyTorch cannot be captured: its calls against our graphs
                other["launch"] = EAGER if row["launch"] == GRAPH else None
            if slow := theirs.get((rival, *other.values())):
                faster = round(slow / row["ms_p50"], 2)
                found.append({**named, "against": rival, "times_faster": faster})
    return found


def _compared_with(op: str, rival: str) -> str:
    """The op of a rival that one of ours replaces: softmax has two, with a triangle or without."""
    if rival not in ("cudnn", "flash", "sdpa") or op in ("convolution", "decode", "roberta_step"):
        return op
    return "causal" if OPTIONS.get(op, {}).get("is_causal") else "bidirectional"


def plot(rows: Sequence[Row]) -> str:
    """Time of a forward and backward pass against N, both axes logarithmic."""
    chosen = [
        r for r in rows
        if r.get("ms_p50") and r["B"] * r["N"] == TOKENS and r["pass"] == TRAINING
        and r["dtype"] == "bfloat16" and r["D"] == 64 and r["launch"] == GRAPH
    ]  # fmt: skip
    drawn_ops = ("bidirectional", "lln_diag", "causal")  # at every length
    curves = dict.fromkeys((r["op"], r["impl"]) for r in chosen if r["op"] in drawn_ops)
    series = []
    for op, impl in curves:
        mine = [r for r in chosen if (r["op"], r["impl"]) == (op, impl)]
        mine.sort(key=lambda r: r["N"])  # not the order of measuring
        series.append(Series(f"{op}, {impl}", [r["N"] for r in mine], [r["ms_p50"] for r in mine]))
    return line_plot(
        "gpu-time",
        series,
        title="Forward and backward (ms)",
        x=Axis(
            "tokens per sequence (65,536 in all)",
            log=True,
            ticks=sorted({r["N"] for r in chosen}),
        ),
        y=Axis("milliseconds", log=True),
    )


def run(
    folder: Path,
    *,
    quick: bool = False,
    ops: Sequence[str] | None = None,
    minutes: float | None = None,
    console: Console | None = None,
) -> list[Path]:
    """Check, measure, and write ``gpu_hardware_date`` as .json, .csv and .svg.

    Args:
        ops: Only these; the files are named after them, and replace none of a whole run.
        minutes: From now on, compiling included; the cases that are left then are left out.

    Raises:
        ValueError: An unknown op.
        CheckFailed: An implementation of ours is wrong; rows of the others are kept.
    """
    started = time.monotonic()
    seconds = math.inf if minutes is None else 60 * minutes
    cases = gpu_cases(quick=quick, ops=ops)
    subject = "-".join(["gpu", *(ops or ())])
    console = console or wide_console()
    if not torch.cuda.is_available():
        console.print("no CUDA device: `lln bench` measures on the CPU")
        raise SystemExit(1)

    def say(text: str) -> None:
        console.print(f"{time.monotonic() - started:5.1f} s  {text}", highlight=False, markup=False)

    say(f"compiling for {len(cases)} cases")
    compile_ahead([t.case for t in cases], seconds=min(MOST_SECONDS, COMPILING * seconds))
    facts = {**machine.facts("cuda"), "configuration": configuration()}
    rows: list[Row] = []
    with Session(cases, say, left=lambda: started + seconds - time.monotonic()) as session:
        bandwidth = session.bandwidth()
        say(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s")
        facts = {"copy_tb_s": round(bandwidth / 1e12, 3), **facts}
        try:
            for row in session.rows(bandwidth):
                rows.append({**row, **facts})
                if len(rows) % 20 == 0:
                    _save(rows, folder, subject)
                if time.monotonic() - started > seconds:
                    left = len(cases) - len(rows)
                    say(f"{minutes:g} minutes are over, {left} cases are not measured")
                    break
        finally:
            _save(rows, folder, subject)
        say(f"{session.checked} implementations agree with the float64 definition")
    console.print(table(rows))
    written = [_save(rows, folder, subject)]
    written.append(files.write_text(written[0].with_suffix(".csv"), saved.as_csv(rows)))
    drawn = written[0].with_name(f"{written[0].stem}_time.svg")
    written.append(files.write_text(drawn, plot(rows)))
    for path in written:
        console.print(f"wrote {path}")
    return written


def configuration() -> str:
    """How rows were measured, with what the environment asked for."""
    asked = {name: os.environ[name] for name in sorted(os.environ) if name.startswith("LLN_DIRECT")}
    return "; ".join([CONFIGURATION, *(f"{name}={value}" for name, value in asked.items())])


def _save(rows: Sequence[Row], folder: Path, subject: str) -> Path:
    """Write rows and ratios so far, again and again: a run that is cut keeps what it measured."""
    content = {"ratios": ratios(rows), "rows": list(rows)}
    return saved.save_json(content, folder, subject=subject, device="cuda")


def table(rows: Sequence[Row]) -> Table:
    """What was measured, one line per case, a column per launch; the share is that of the graph."""
    shown = Table(title="Measurements (ms)", title_justify="left")
    keys = ("op", "impl", "pass", "B", "N", "D", "dtype")
    for name in keys:
        shown.add_column(name)
    for name in (*LAUNCHES, "of floor"):
        shown.add_column(name, justify="right")
    lines: dict[tuple[Any, ...], dict[str, Row]] = {}
    for row in rows:
        lines.setdefault(tuple(row[key] for key in keys), {})[row["launch"]] = row
    for key, found in lines.items():
        cells = [_cell(found.get(launch)) for launch in LAUNCHES]
        best = next((found[x] for x in (GRAPH, EAGER) if x in found), {})
        share = best.get("floor_share")
        shown.add_row(*map(str, key), *cells, "" if share is None else f"{share:.0%}")
    return shown


def _cell(row: Row | None) -> str:
    return "" if row is None else row["error"] or f"{row['ms_p50']:.4f}"
