"""``lln bench gpu``: time and share of the memory-bandwidth floor on a CUDA device, in one run.

LLN moves few bytes and computes little per byte, so its floor is memory traffic: u is the size of
one ``[B, H, N, D]`` tensor, and an op that must read and write n of them cannot be faster than
n·u / bandwidth, with the copy bandwidth of the same run.
"""

from __future__ import annotations

import contextlib
import gc
import math
import os
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from multiprocessing import TimeoutError, get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lln.device.capture import captured
from lln.records import files, machine
from lln.study.bench import sweep
from lln.study.bench.cases import ALPHA, FORWARD, TRAINING, Case, call, inputs
from lln.study.bench.check import LENGTH, check
from lln.study.plots.lines import Axis, Series, line_plot

# Tensors of [B, H, N, D] that must be read or written: (forward, forward and backward).
FLOORS = {
    "bidirectional": (4, 11),
    "lln_diag": (6, 15),
    "lln_diag_128": (6, 15),
    "causal": (4, 11),
    "measured": (6, 13),
    "convolution": (2, 6),
}
RIVALS = ("cudnn", "flash", "torch", "eager")
TOKENS = 65_536
EAGER, GRAPH, SERIES = "eager", "graph", "series"
CALLS = {GRAPH: 1, SERIES: 10}
CONTEXTS = (1, 1024, 16_384, 65_536)
QUANTILES = (0.2, 0.5, 0.8)
CONFIGURATION = f"seed=0 alpha=beta={ALPHA:g} repeat_ms=60, cache cleared before every call"
MOST_PROCESSES, MOST_SECONDS = 12, 75  # that compile at once, and how long they are waited for


@dataclass(frozen=True)
class Timed:
    """A case and how it is launched.

    From Python (``EAGER``), as a captured CUDA graph (``GRAPH``), or as one tenth of a graph of ten
    calls in a row (``SERIES``): what a call costs inside a captured step, without its launch.
    """

    case: Case
    launch: str


def gpu_cases(*, quick: bool = False) -> list[Timed]:
    """65,536 tokens in sequences of every length, other widths and dtypes, and batch 1.

    What the targets are about comes first, for runs that are cut short.
    """
    base = Case("bidirectional", "triton", 4096, H=12, D=64, dtype="bfloat16", device="cuda")
    lengths = (4096, 16_384) if quick else (512, 2048, 4096, 16_384, 65_536)

    def cases(op: str, impl: str, lengths: Sequence[int], **change: Any) -> list[Case]:
        return [
            replace(base, op=op, impl=impl, N=n, B=TOKENS // n, passes=p, **change)
            for n in lengths
            for p in (FORWARD, TRAINING)
        ]

    ops = ("bidirectional", "lln_diag", "causal")
    ours = [case for op in ops for case in cases(op, "triton", lengths)]
    changes = ({"D": 128}, {"dtype": "float16"})
    other = [c for change in changes for op in ops for c in cases(op, "triton", (4096,), **change)]
    other += cases("lln_diag_128", "triton", (4096,))
    cudnn = cases("bidirectional", "cudnn", [n for n in lengths if n != 2048])
    more = cases("measured", "triton", (4096, 16_384)) + cases("causal", "cudnn", (4096, 16_384))
    more += cases("bidirectional", "flash", (4096,)) + cases("causal", "flash", (4096,))
    more += [c for i in ("triton", "eager", "torch") for c in cases("convolution", i, (4096,))]
    single = [
        Timed(replace(base, N=n, B=1, impl=impl), launch)
        for n in (512, 4096, 16_384)
        for impl in ("triton", "cudnn", "flash")
        for launch in (EAGER, GRAPH)
    ]
    # Plain PyTorch reads sizes on the host, which a graph cannot capture.
    plain = [Timed(case, EAGER) for op in ops[:2] for case in cases(op, "eager", (4096,))]
    timed = [Timed(case, GRAPH) for case in ours + cudnn] + single
    timed += [Timed(case, SERIES) for case in other] + [Timed(case, GRAPH) for case in more]
    return timed + plain + [Timed(case, SERIES) for case in ours]


def compile_ahead(cases: Sequence[Case], processes: int) -> None:
    """Run every case once in several processes: compiling takes most of a first run.

    What they compile lies in Triton's cache. What cannot run is left to :func:`measure`, which says
    why.
    """
    ours = dict.fromkeys(case for case in cases if case.impl == "triton")
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


def time_launch(run: Callable[[], object], launch: str) -> list[float]:
    """:func:`time_gpu` of one call, launched as :class:`Timed` says."""
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
            row |= {"floor_share": floor_share(case, p50, bandwidth), "error": ""}
        except Exception as error:  # a row that says why, not a lost run
            missing = dict.fromkeys(("ms_p20", "ms_p50", "ms_p80", "peak_mb", "floor_share"))
            row |= {**missing, "error": str(error).splitlines()[0][:200]}
            torch.cuda.synchronize()
        yield {**row, "copy_tb_s": round(bandwidth / 1e12, 3), **facts}


def floor_share(case: Case, milliseconds: float, bandwidth: float) -> float | None:
    """Bytes that must move ÷ (time × copy bandwidth); 1 is the physical limit."""
    if case.op not in FLOORS or case.impl not in ("triton", "eager"):
        return None
    unit = case.B * case.H * case.N * case.D * getattr(torch, case.dtype).itemsize
    units = FLOORS[case.op][0 if case.passes == FORWARD else 1]
    return round(units * unit / (milliseconds * 1e-3 * bandwidth), 4)


def ratios(rows: Sequence[sweep.Row]) -> list[sweep.Row]:
    """How many times faster our kernel is than each rival, on equal shapes and launches."""
    keys = ("op", "pass", "B", "N", "D", "dtype", "launch")
    ours = {
        tuple(r[k] for k in keys): r["ms_p50"]
        for r in rows
        if r.get("impl") == "triton" and r.get("ms_p50")
    }
    found = []
    for row in rows:
        key = tuple(row.get(k) for k in keys)
        if row.get("impl") not in RIVALS or not row.get("ms_p50"):
            continue
        if row["impl"] == "eager":
            key = (*key[:-1], GRAPH)
        if key in ours:
            named = dict(zip(keys, key, strict=True))
            faster = round(row["ms_p50"] / ours[key], 2)
            found.append({**named, "against": row["impl"], "times_faster": faster})
    return found


def plots(rows: Sequence[sweep.Row]) -> dict[str, str]:
    """Time against N (log-log) and share of the floor against N, forward and backward."""
    chosen = [
        r for r in rows
        if r.get("ms_p50") and r["B"] * r["N"] == TOKENS and r["pass"] == TRAINING
        and r["dtype"] == "bfloat16" and r["D"] == 64 and r["launch"] == GRAPH
    ]  # fmt: skip
    left_out = ("measured", "convolution")  # at one or two lengths only
    curves = dict.fromkeys((r["op"], r["impl"]) for r in chosen if r["op"] not in left_out)

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
    checked = check(timed.case for timed in cases)
    console.print(f"{checked} implementations agree with the float64 definition")
    rows = list(_extra(bandwidth))
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
    content: dict[str, list[Any]] = {"ratios": ratios(rows), "rows": list(rows)}
    return sweep.save_json(content, folder, subject="gpu", device="cuda")


def _extra(bandwidth: float) -> Iterator[sweep.Row]:
    """The two ops that are not an attention call: the statistics, and one step of decoding."""
    facts = {"copy_tb_s": round(bandwidth / 1e12, 3), **machine.facts("cuda")}
    facts["configuration"] = CONFIGURATION
    for launch in (GRAPH, SERIES):
        yield {**_statistics_row(launch, bandwidth), **facts}
    for context in CONTEXTS:
        for launch in (GRAPH, SERIES):
            yield {**_decode_row(context, launch, bandwidth), **facts}


def _row(
    op: str, shape: tuple[int, int, int, int], moved: float, bandwidth: float,
    run: Callable[[], object], launch: str,
) -> sweep.Row:  # fmt: skip
    """A row of an op that must move ``moved`` bytes."""
    times = time_launch(run, launch)
    return {
        "op": op, "impl": "triton", "pass": FORWARD, **dict(zip("BHND", shape, strict=True)),
        "dtype": "bfloat16", "launch": launch,
        **dict(zip(("ms_p20", "ms_p50", "ms_p80"), (round(x, 5) for x in times), strict=True)),
        "peak_mb": None, "floor_share": round(moved / (times[1] * 1e-3 * bandwidth), 4),
        "error": "",
    }  # fmt: skip


def _statistics_row(launch: str, bandwidth: float) -> sweep.Row:
    from lln.moments import standard_deviations

    q, k, _ = inputs(Case("bidirectional", "triton", 4096, B=16, dtype="bfloat16", device="cuda"))
    moved = 2 * q.numel() * q.element_size()
    run = lambda: standard_deviations(q, k)  # noqa: E731
    return _row("statistics", (16, 12, 4096, 64), moved, bandwidth, run, launch)


def _decode_row(context: int, launch: str, bandwidth: float) -> sweep.Row:
    """One token for 64 streams that have already seen ``context`` keys: states read and written."""
    from lln.functional import prefill
    from lln.ops.state import summarize

    batch, heads, width = 64, 12, 64
    make = lambda n: torch.randn(batch, heads, n, width, device="cuda", dtype=torch.bfloat16)  # noqa: E731
    scale = torch.full((batch, heads), ALPHA, device="cuda")
    keys = make(context)
    state = summarize(keys, keys, beta=scale)
    q, k, v = make(1), make(1), make(1)

    def step() -> object:
        with torch.no_grad():
            return prefill(q, k, v, state, alpha=scale, beta=scale)

    moved = 2 * sum(x.numel() * x.element_size() for x in (state.log_mass, state.mean))
    return _row("decode", (batch, heads, context, width), moved, bandwidth, step, launch)


def table(rows: Sequence[sweep.Row]) -> Table:
    """What was measured, one line per row."""
    shown = Table(title="Measurements", title_justify="left")
    for name in ("op", "impl", "pass", "launch", "B", "N", "D", "dtype", "ms", "of floor"):
        shown.add_column(name)
    for row in rows:
        time = row["error"] or f"{row['ms_p50']:.4f}"
        share = "" if row["floor_share"] is None else f"{row['floor_share']:.0%}"
        cells = [str(row[key]) for key in ("op", "impl", "pass", "launch", "B", "N", "D", "dtype")]
        shown.add_row(*cells, time, share)
    return shown
