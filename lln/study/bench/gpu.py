"""``lln bench gpu``: time and share of the memory-bandwidth floor on a CUDA device, in one run.

What is measured stands in :mod:`lln.study.bench.shapes`; floors are taken with the copy bandwidth
of the same run.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from multiprocessing import TimeoutError, get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lln.device.capture import captured
from lln.records import files, machine
from lln.study.bench import decoding, peers, step, sweep
from lln.study.bench.cases import ALPHA, OPTIONS, TRAINING, Case, call, inputs
from lln.study.bench.check import LENGTH, check
from lln.study.bench.shapes import (
    BASE,
    EAGER,
    GRAPH,
    HOST,
    LAUNCHES,
    SERIES,
    TOKENS,
    Timed,
    floor_share,
    gpu_cases,
)
from lln.study.bench.timing import quantiles
from lln.study.plots.lines import Axis, Series, line_plot

MINE = ("triton", "mixed", "recommended")  # the last in a step of training
RIVALS = ("cudnn", "flash", "sdpa", "torch", "eager", *peers.OPS)
CALLS = {GRAPH: 1, SERIES: 10}
HOST_CALLS = 100  # that the time of the host is taken from
QUANTILES = (0.2, 0.5, 0.8)
CONFIGURATION = f"seed=0 alpha=beta={ALPHA:g} repeat_ms=60, cache cleared before every call"
MOST_PROCESSES, MOST_SECONDS = 12, 75  # that compile at once, and how long they are waited for


def compile_ahead(cases: Sequence[Case], processes: int) -> None:
    """Run every case once in several processes: compiling takes most of a first run.

    What they compile lies in Triton's cache. What cannot run is left to :func:`measure`, which says
    why.
    """
    ours = dict.fromkeys(case for case in cases if case.impl in ("triton", "mixed"))
    small = dict.fromkeys(replace(case, N=LENGTH, H=2, B=2) for case in ours)
    in_processes(_run_once, [*small, *ours], processes, MOST_SECONDS)


def in_processes(
    work: Callable[[Sequence[Any]], None], items: Sequence[Any], processes: int, seconds: float
) -> None:
    """Call ``work`` on equal shares of ``items``, for as long as ``seconds``."""
    groups = [group for i in range(processes) if (group := items[i::processes])]
    with get_context("spawn").Pool(max(1, len(groups))) as pool, contextlib.suppress(TimeoutError):
        pool.map_async(work, groups).get(seconds)  # a process that dies never answers


def _run_once(cases: Sequence[Case]) -> None:
    for case in cases:
        with contextlib.suppress(Exception):
            call(case, inputs(case))()


def copy_bandwidth(gigabytes: float = 2.0) -> float:
    """Bytes read and written per second by a device-to-device copy."""
    source = torch.empty(int(gigabytes * 2**30), dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    milliseconds = time_gpu(lambda: target.copy_(source))[1]
    return 2 * source.numel() / (milliseconds * 1e-3)


def time_gpu(run: Callable[[], object], *, budget_ms: int = 60) -> list[float]:
    """Milliseconds at 20, 50 and 80 %, by CUDA events, the cache cleared before every call."""
    from triton.testing import do_bench

    times = do_bench(run, warmup=15, rep=budget_ms, quantiles=list(QUANTILES))
    assert isinstance(times, list)
    return times


def time_host(run: Callable[[], object]) -> list[float]:
    """Milliseconds that Python takes to launch a call, the device idle before each."""
    seconds = []
    for _ in range(HOST_CALLS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    torch.cuda.synchronize()
    found = quantiles(seconds)
    return [found.ms_p20, found.ms_p50, found.ms_p80]


def time_launch(run: Callable[[], object], launch: str) -> list[float]:
    """:func:`time_gpu` of one call, launched as :class:`lln.study.bench.shapes.Timed` says."""
    if launch == HOST:
        return time_host(run)
    if launch == EAGER:
        return time_gpu(run)
    return [ms / CALLS[launch] for ms in time_gpu(captured(run, CALLS[launch]))]


def peak_megabytes(run: Callable[[], object]) -> float:
    """Memory allocated at the peak of a call beyond what was there before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


def measure(
    cases: Sequence[Timed], bandwidth: float, watch: Callable[[str], None]
) -> Iterator[sweep.Row]:
    """A finished row per case; what cannot run gives a row that says why."""
    facts = {**machine.facts("cuda"), "configuration": CONFIGURATION}
    for timed in cases:
        case = timed.case
        watch(f"{case.name} B={case.B} {timed.launch}")
        row: sweep.Row = {**case.row(), "launch": timed.launch}
        try:
            tensors = inputs(case)
            run = call(case, tensors)
            peak = peak_megabytes(run)
            times = time_launch(run, timed.launch)
            p20, p50, p80 = (round(value, 5) for value in times)
            row |= {"ms_p20": p20, "ms_p50": p50, "ms_p80": p80, "peak_mb": round(peak, 1)}
            share = None if timed.launch == HOST else floor_share(case, p50, bandwidth)
            row |= {"floor_share": share, "error": ""}
        except Exception as error:  # a row that says why, not a lost run
            missing = dict.fromkeys(("ms_p20", "ms_p50", "ms_p80", "peak_mb", "floor_share"))
            row |= {**missing, "error": str(error).splitlines()[0][:200]}
            torch.cuda.synchronize()
        yield {**row, "copy_tb_s": round(bandwidth / 1e12, 3), **facts}


def ratios(rows: Sequence[sweep.Row]) -> list[sweep.Row]:
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


def added_by_measuring(rows: Sequence[sweep.Row]) -> list[sweep.Row]:
    """Milliseconds that measuring α and β adds to LLN, by pass, length and launch."""
    keys = ("pass", "B", "N", "D", "dtype", "launch")
    times = {
        (row["op"], *(row[k] for k in keys)): row["ms_p50"]
        for row in rows
        if row.get("impl") == "triton" and row.get("ms_p50")
    }
    return [
        {**dict(zip(keys, key[1:], strict=True)), "added_ms": round(ms - given, 5)}
        for key, ms in times.items()
        if key[0] == "measured" and (given := times.get(("bidirectional", *key[1:])))
    ]


def plots(rows: Sequence[sweep.Row]) -> dict[str, str]:
    """Time against N (log-log) and share of the floor against N, forward and backward."""
    chosen = [
        r for r in rows
        if r.get("ms_p50") and r["B"] * r["N"] == TOKENS and r["pass"] == TRAINING
        and r["dtype"] == "bfloat16" and r["D"] == 64 and r["launch"] == GRAPH
    ]  # fmt: skip
    drawn_ops = ("bidirectional", "lln_diag", "causal")  # at every length
    curves = dict.fromkeys((r["op"], r["impl"]) for r in chosen if r["op"] in drawn_ops)

    def series(key: str) -> list[Series]:
        drawn = []
        for op, impl in curves:
            mine = [r for r in chosen if (r["op"], r["impl"]) == (op, impl) and r[key]]
            if mine:
                label = f"{op}, {impl}"
                drawn.append(Series(label, [r["N"] for r in mine], [r[key] for r in mine]))
        return drawn

    lengths = sorted({r["N"] for r in chosen})
    x = Axis("tokens per sequence (65,536 in all)", log=True, ticks=lengths)
    return {
        "time": line_plot("gpu-time", series("ms_p50"), title="Forward and backward (ms)", x=x,
                          y=Axis("milliseconds", log=True)),
        "share": line_plot("gpu-share", series("floor_share"), title="Share of the floor", x=x,
                           y=Axis("bytes ÷ (time × copy bandwidth)", limits=(0, 1))),
    }  # fmt: skip


def run(
    folder: Path,
    *,
    quick: bool = False,
    minutes: float | None = None,
    console: Console | None = None,
) -> list[Path]:
    """Check, measure, and write ``gpu_hardware_date`` as .json, .csv and two .svg.

    After ``minutes`` the cases that are left are named and left out.
    """
    end = math.inf if minutes is None else time.monotonic() + 60 * minutes
    console = console or Console()
    if not torch.cuda.is_available():
        console.print("no CUDA device: `lln bench` measures on the CPU")
        raise SystemExit(1)
    gc.freeze()  # every capture collects garbage: what is here by now is none
    cases = gpu_cases(quick=quick)
    console.print("compiling")
    compile_ahead([timed.case for timed in cases], min(MOST_PROCESSES, os.cpu_count() or 1))
    bandwidth = copy_bandwidth()
    console.print(f"copy bandwidth {bandwidth / 1e12:.2f} TB/s")
    cases = _agreeing(cases, console)
    rows = list(_extra(bandwidth, lambda name: console.print(name, highlight=False), quick=quick))
    few = len(rows)
    for row in measure(cases, bandwidth, lambda name: console.print(name, highlight=False)):
        rows.append(row)
        if len(rows) % 20 == 0:
            _save(rows, folder)
        if time.monotonic() > end:
            left = cases[len(rows) - few :]
            console.print(f"{minutes:g} minutes are over, {len(left)} cases are not measured")
            break
    console.print(table(rows))
    written = [_save(rows, folder)]
    written.append(files.write_text(written[0].with_suffix(".csv"), sweep.as_csv(rows)))
    for name, svg in plots(rows).items():
        path = written[0].with_name(f"{written[0].stem}_{name}.svg")
        written.append(files.write_text(path, svg))
    for path in written:
        console.print(f"wrote {path}")
    return written


def _save(rows: Sequence[sweep.Row], folder: Path) -> Path:
    """Write rows and ratios so far, again and again: a run that is cut keeps what it measured."""
    content: dict[str, list[Any]] = {"ratios": ratios(rows)}
    content |= {"measuring": added_by_measuring(rows), "rows": list(rows)}
    return sweep.save_json(content, folder, subject="gpu", device="cuda")


def _agreeing(cases: Sequence[Timed], console: Console) -> list[Timed]:
    """The cases, checked: one of ours that is off ends the run, another library is left out."""
    checked = check(timed.case for timed in cases if timed.case.impl not in peers.OPS)
    console.print(f"{checked} implementations agree with the float64 definition")
    left = list(cases)
    for impl in dict.fromkeys(t.case.impl for t in cases if t.case.impl in peers.OPS):
        try:
            check(timed.case for timed in cases if timed.case.impl == impl)
        except Exception as error:  # it is not ours to fix
            console.print(f"{impl} is left out: {error}", markup=False)
            left = [timed for timed in left if timed.case.impl != impl]
    return left


def _extra(bandwidth: float, watch: Callable[[str], None], *, quick: bool) -> Iterator[sweep.Row]:
    """What is not an attention call: the statistics, steps of decoding, a step of training."""
    facts = {"copy_tb_s": round(bandwidth / 1e12, 3), **machine.facts("cuda")}
    facts["configuration"] = CONFIGURATION
    for launch in (GRAPH, SERIES):
        yield {**_statistics_row(launch, bandwidth), **facts}
    timers: dict[str, Callable[..., list[float]]] = {
        launch: functools.partial(time_launch, launch=launch) for launch in (GRAPH, EAGER, SERIES)
    }
    for row in decoding.rows(decoding.decode_cases(), timers, bandwidth, watch):
        yield {**row, **facts}
    for row in step.rows(watch, lengths=step.LENGTHS[-1:] if quick else step.LENGTHS):
        yield {**row, **facts}


def _statistics_row(launch: str, bandwidth: float) -> sweep.Row:
    from lln.moments import standard_deviations

    case = replace(BASE, op="statistics", B=16)
    q, k, _ = inputs(case)
    times = time_launch(lambda: standard_deviations(q, k), launch)
    moved = 2 * q.numel() * q.element_size()
    share = round(moved / (times[1] * 1e-3 * bandwidth), 4)
    return {**case.row(), "launch": launch, **timed_columns(times), "floor_share": share}


def timed_columns(times: Sequence[float]) -> sweep.Row:
    """The columns of a row that was measured and has no peak."""
    p20, p50, p80 = (round(ms, 5) for ms in times)
    return {"ms_p20": p20, "ms_p50": p50, "ms_p80": p80, "peak_mb": None, "error": ""}


def table(rows: Sequence[sweep.Row]) -> Table:
    """What was measured, one line per case, a column per launch; the share is that of the graph."""
    shown = Table(title="Measurements (ms)", title_justify="left")
    keys = ("op", "impl", "pass", "B", "N", "D", "dtype")
    for name in keys:
        shown.add_column(name)
    for name in (*LAUNCHES, "of floor"):
        shown.add_column(name, justify="right")
    lines: dict[tuple[Any, ...], dict[str, sweep.Row]] = {}
    for row in rows:
        lines.setdefault(tuple(row[key] for key in keys), {})[row["launch"]] = row
    for key, found in lines.items():
        cells = [_cell(found.get(launch)) for launch in LAUNCHES]
        best = next((found[x] for x in (GRAPH, SERIES, EAGER) if x in found), {})
        share = best.get("floor_share")
        shown.add_row(*map(str, key), *cells, "" if share is None else f"{share:.0%}")
    return shown


def _cell(row: sweep.Row | None) -> str:
    return "" if row is None else row["error"] or f"{row['ms_p50']:.4f}"
