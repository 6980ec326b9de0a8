"""``lln bench zoo``: time, memory and their growth with N for every mechanism, in one run.

A layer is measured as :func:`lln.create` makes it, with the defaults of its method. On a GPU calls
are replayed from CUDA graphs where they can be recorded (``launch``), and everything but SDPA and
our kernels computes its attention in float32 (TF32 products allowed), as it would in training; the
projections run in bfloat16.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lln.device.capture import captured, free_generator
from lln.device.memory import peaks, resident_peak, serve
from lln.device.precision import tf32_products
from lln.device.timing import time_call
from lln.records import files, machine, saved
from lln.records.rows import Row
from lln.report.lines import Series
from lln.report.many_lines import many_lines_plot
from lln.report.progress import counting
from lln_study.bench import sweep
from lln_study.bench.cases import FORWARD, TRAINING, Case
from lln_study.bench.check import CheckFailed
from lln_study.bench.layers import OURS, SEED, call, check, layer_cases

SUBJECT = "zoo"
GPU_MILLISECONDS = 60  # of repeated calls per case


def run(
    folder: Path,
    *,
    device: str = "cpu",
    quick: bool = False,
    names: Sequence[str] | None = None,
    min_seconds: float = 0.3,
    console: Console | None = None,
) -> list[Path]:
    """Check, measure, and write ``zoo_hardware_date`` as .json, .csv and .svg.

    A mechanism that fails its check is named and left out; the command then ends with status 1.
    """
    console = console or Console()
    if device.startswith("cuda") and not torch.cuda.is_available():
        console.print(f"device={device!r} is not there; --device cpu measures on this processor")
        raise SystemExit(1)
    cases = layer_cases(device=device, quick=quick, names=names)
    bars = counting(console)
    rows: list[Row] = []
    with bars:
        task = bars.add_task("correctness check", total=len(cases))
        watch = lambda name: bars.update(task, description=name, advance=1)  # noqa: E731
        cases, failures = checked(cases)
        for failure in failures:
            console.print(f"[bold red]not measured:[/] {failure}")
        bars.update(task, total=len(cases))
        with tf32_products(device.startswith("cuda")):  # as in training; not while checking
            rows.extend(measure(cases, min_seconds=min_seconds, watch=watch))

    if not rows:
        raise SystemExit(1)
    done = [row for row in rows if not row["error"]]
    growth = sweep.growth(done)
    for table in tables(done, growth):
        console.print(table)
    content: dict[str, list[Any]] = {"growth": growth, "rows": rows}
    subject = f"{SUBJECT}-quick" if quick else SUBJECT
    written = [saved.save_json(content, folder, subject=subject, device=device)]
    written.append(files.write_text(written[0].with_suffix(".csv"), saved.as_csv(rows)))
    written.append(files.write_text(written[0].with_suffix(".svg"), plot(done)))
    for path in written:
        console.print(f"wrote {path}")
    if failures:
        raise SystemExit(1)
    return written


def checked(cases: Sequence[Case]) -> tuple[list[Case], list[str]]:
    """The cases of the mechanisms that compute what they should, and what is wrong with others."""
    right, failures = [], []
    for name in dict.fromkeys(case.op for case in cases):
        mine = [case for case in cases if case.op == name]
        try:
            check(mine)
            right += mine
        except CheckFailed as failure:
            failures.append(str(failure))
    return right, failures


def measure(
    cases: Sequence[Case],
    *,
    min_seconds: float = 0.3,
    watch: Callable[[str], None] | None = None,
) -> Iterator[Row]:
    """A finished row per case; what does not fit into memory gives a row that says so."""
    device = cases[0].device if cases else "cpu"
    facts = machine.facts(device)
    on_gpu = device.startswith("cuda")
    settings = f"min_seconds={min_seconds:g} {machine.conditions()}"
    if on_gpu:
        settings = f"tf32 repeat_ms={GPU_MILLISECONDS}"
    memory = iter(()) if on_gpu else peaks(cases, server="lln_study.bench.zoo")
    for case in cases:
        (watch or (lambda _: None))(case.name)
        error = ""
        numbers: Row = {"launch": "eager"}
        numbers |= dict.fromkeys(("ms_p20", "ms_p50", "ms_p80", "samples", "peak_mb"))
        try:
            if on_gpu:
                numbers |= _measure_gpu(case)
            else:
                peak = next(memory)
                numbers |= dataclasses.asdict(time_call(call(case), min_seconds=min_seconds))
                numbers["peak_mb"] = peak
        except torch.OutOfMemoryError:
            torch.cuda.empty_cache()
            error = "out of memory"
        numbers = {key: _rounded(value) for key, value in numbers.items()}
        configuration = f"defaults of the method, max_length=N, {settings}"
        origin = {"seeds": [SEED], **facts, "configuration": configuration, "error": error}
        yield {"mechanism": case.op, **case.row(), **numbers, **origin}


def _rounded(value: float | str | None) -> float | str | None:
    return round(value, 4) if isinstance(value, float) else value


def _measure_gpu(case: Case) -> Row:
    from lln_study.bench.apart.clock import peak_megabytes, time_gpu
    from lln_study.bench.shapes import EAGER, GRAPH

    timed = call(case)
    timed()  # compiles and tunes, before memory is looked at
    peak = peak_megabytes(timed)
    launch = GRAPH
    try:
        timed = captured(timed)
    except torch.OutOfMemoryError:
        raise
    except RuntimeError:  # it waits for the device
        free_generator()
        launch = EAGER
    p20, p50, p80 = time_gpu(timed, budget_ms=GPU_MILLISECONDS)
    return {"launch": launch, "ms_p20": p20, "ms_p50": p50, "ms_p80": p80, "peak_mb": peak}


def tables(rows: Sequence[Row], growth: Sequence[Row]) -> Iterator[Table]:
    """One table per pass: time and memory at every length, fitted exponents."""
    lengths = sorted({row["N"] for row in rows})
    exponents = {(fit["op"], fit["impl"], fit["pass"]): fit for fit in growth}
    for passes in (FORWARD, TRAINING):
        table = Table(title=f"{passes}: milliseconds (peak MiB)", title_justify="left")
        table.add_column("mechanism", no_wrap=True)
        for N in lengths:
            table.add_column(f"{N:,}", justify="right")
        table.add_column("time ∝ N^", justify="right")
        table.add_column("memory ∝ N^", justify="right")
        found = {(r["op"], r["impl"], r["N"]): r for r in rows if r["pass"] == passes}
        for op, impl in dict.fromkeys(key[:2] for key in found):
            cells = [_cell(found.get((op, impl, N))) for N in lengths]
            fit = exponents.get((op, impl, passes), {})
            powers = ["" if fit.get(k) is None else f"{fit[k]:.2f}" for k in ("time", "memory")]
            table.add_row(label(op, impl), *cells, *powers)
        yield table


def _cell(row: Row | None) -> str:
    if row is None:
        return ""
    peak = "" if row["peak_mb"] is None else f" ({row['peak_mb']:.0f})"
    return f"{row['ms_p50']:.3g}{peak}"


def label(op: str, impl: str) -> str:
    """The mechanism, with its implementation where there are several."""
    return f"{op} ({impl})" if op in ("softmax", *OURS) else op


def plot(rows: Sequence[Row], *, passes: str = TRAINING) -> str:
    """Draw time against N over logarithmic axes, LLN and softmax highlighted."""
    chosen = [row for row in rows if row["pass"] == passes]
    curves, highlighted = [], []
    for op, impl in dict.fromkeys((row["op"], row["impl"]) for row in chosen):
        mine = [row for row in chosen if (row["op"], row["impl"]) == (op, impl)]
        xs, ys = [row["N"] for row in mine], [row["ms_p50"] for row in mine]
        curves.append(Series(label(op, impl), xs, ys))
        if op in ("softmax", *OURS):
            highlighted.append(label(op, impl))
    title = "Forward and backward pass of a layer (ms)"
    return many_lines_plot("zoo", curves, title=title, x="tokens N", highlighted=highlighted)


def _peak(fields: dict[str, Any]) -> float:
    case = Case(**fields)
    call(dataclasses.replace(case, N=128))()  # loads code and starts threads
    return resident_peak(call(case))


if __name__ == "__main__":
    serve(_peak)
