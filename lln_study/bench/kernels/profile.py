"""``lln bench profile``: which kernels a call consists of on the CUDA device, and what each takes.

Forward and backward, at the shapes of ``lln bench gpu``: where the time is of an op that is slower
than its bytes say. Kernels of PyTorch are those between ours: sums of gradients, conversions. Of a
training step of RoBERTa-base, which is called from Python, their sum is what the device works: the
rest of the step it waits for the host.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

from lln.records import machine, saved
from lln.records.rows import Row
from lln_study.bench import step
from lln_study.bench.cases import TRAINING, Case, call, inputs
from lln_study.bench.shapes import BASE, TOKENS, WIDE_TOKENS
from lln_study.bench.terminal import wide_console

SUBJECT = "profile"
LENGTH, CALLS, WARM = 4096, 5, 3
# The implementation of every op and width.
PROFILED: dict[tuple[str, int], str] = {
    **dict.fromkeys(
        [
            (op, 64)
            for op in (
                *("bidirectional", "measured", "lln_diag", "lln_diag_128", "lln_diag_256"),
                *("lln_diag_overlap", "recommended"),
                *("causal", "lln_diag_causal", "near_far", "near_far_overlap", "near_far_causal"),
            )
        ],
        "triton",
    ),
    **{(op, 128): "triton" for op in ("bidirectional", "lln_diag", "lln_diag_128", "causal")},
}
STEP_LENGTH = 512  # where the host weighs most
OPS = (*dict.fromkeys(op for op, _ in PROFILED), step.OP)


def case_of(op: str, width: int) -> Case:
    """The case of an op: 65,536 tokens of heads of 64, half as many of 128."""
    tokens = TOKENS if width == 64 else WIDE_TOKENS
    shape = {"D": width, "N": LENGTH, "B": tokens // LENGTH}
    return replace(BASE, op=op, impl=PROFILED[op, width], passes=TRAINING, **shape)


def calls_of(ops: Sequence[str]) -> Iterator[tuple[str, int, Callable[[], object]]]:
    """Name, head size and call of everything that is profiled of these ops."""
    for op, width in PROFILED:
        if op in ops:
            case = case_of(op, width)
            yield op, width, call(case, inputs(case))
    if step.OP in ops:
        for case in step.step_cases((STEP_LENGTH,)):
            yield f"{step.OP} {case.impl}, N = {case.N}", case.D, step.step_of(case).update


def by_kernel(events: Iterable[tuple[str, float]], calls: int) -> list[Row]:
    """Microseconds and launches of a call, by kernel, the longest first."""
    total: dict[str, float] = {}
    count: dict[str, int] = {}
    for name, microseconds in events:
        total[name] = total.get(name, 0.0) + microseconds
        count[name] = count.get(name, 0) + 1
    return [
        {"kernel": name, "us": round(total[name] / calls, 1), "launches": count[name] // calls}
        for name in sorted(total, key=lambda name: -total[name])
    ]


def events_of(run: Callable[[], object]) -> Iterator[tuple[str, float]]:
    """Name and microseconds of every kernel of several calls."""
    from torch._C._autograd import DeviceType
    from torch.profiler import ProfilerActivity, profile

    for _ in range(WARM):
        run()
    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA], acc_events=True) as seen:
        for _ in range(CALLS):
            run()
        torch.cuda.synchronize()
    for event in seen.events() or ():
        if event.device_type == DeviceType.CUDA:
            yield event.name[:70], event.device_time_total


def run(folder: Path, *, ops: Sequence[str] | None = None, console: Console | None = None) -> Path:
    """Profile, and write ``profile_hardware_date.json``.

    Raises:
        ValueError: An unknown op.
    """
    if unknown := [op for op in ops or () if op not in OPS]:
        raise ValueError(f"op={unknown[0]!r} is not known; pass one of {', '.join(OPS)}")
    console = console or wide_console()
    if not torch.cuda.is_available():
        console.print("no CUDA device: `lln bench profile` needs one")
        raise SystemExit(1)
    facts: dict[str, Any] = machine.facts("cuda")
    facts["configuration"] = f"N={LENGTH} bfloat16, 12 heads, fwd+bwd, mean of {CALLS} calls"
    rows: list[Row] = []
    path = folder
    for name, width, run_once in calls_of(ops or OPS):
        found = by_kernel(events_of(run_once), CALLS)
        rows += [{"op": name, "D": width, **row, **facts} for row in found]
        console.print(f"{name}, heads of {width}: {sum(row['us'] for row in found):.0f} us")
        path = saved.save_json({"rows": rows}, folder, subject=SUBJECT, device="cuda")
    console.print(table(rows))
    console.print(f"wrote {path}")
    return path


def table(rows: Sequence[Row]) -> Table:
    """Every kernel of every op."""
    shown = Table(title="Kernels of a forward and backward pass", title_justify="left")
    for name in ("op", "D", "kernel", "launches", "us"):
        shown.add_column(name, justify="left" if name in ("op", "kernel") else "right")
    for row in rows:
        shown.add_row(*(str(row[name]) for name in ("op", "D", "kernel", "launches", "us")))
    return shown
