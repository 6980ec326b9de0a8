"""``lln bench host``: what a call costs that is launched from Python, with few tokens.

The host sets the time there, not the kernels. Autograd runs the backward pass of CUDA tensors in a
thread of its own; ``torch.autograd.set_multithreading_enabled(False)`` keeps it in the caller's.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import torch
from rich.console import Console

from lln.device.timing import quantiles
from lln.records import machine, saved
from lln.records.rows import Row
from lln_study.bench.cases import FORWARD, TRAINING, Case, call, inputs
from lln_study.bench.step import seconds_of

SUBJECT = "host"
LENGTHS = (512, 4096)
# The op and its implementation on a GPU; softmax first.
CALLS = (
    ("bidirectional", "cudnn"),
    ("bidirectional", "triton"),
    ("measured", "triton"),
    ("lln_diag", "triton"),
    ("lln_diag_128", "triton"),
    ("causal", "triton"),
)
CALLED, WARMING = 200, 20
CONFIGURATION = "batch 1, alpha=beta=2, median of calls, each until the device has ended"


def cases(lengths: Sequence[int] = LENGTHS) -> list[Case]:
    """One sequence of 12 heads of 64 in bfloat16, a case per length and call."""
    base = Case("", "", 0, dtype="bfloat16", device="cuda")
    return [replace(base, op=op, impl=impl, N=n) for n in lengths for op, impl in CALLS]


def run(folder: Path, *, console: Console | None = None) -> Path:
    """Time every case in this process; show each and write ``host_hardware_date.json``."""
    if not torch.cuda.is_available():
        raise SystemExit("lln bench host measures calls on a GPU: there is no CUDA device")
    console = console or Console()
    rows, facts = [], {**machine.facts("cuda"), "configuration": CONFIGURATION}
    for case in cases():
        row = measure(case)
        rows.append({**row, **facts})
        times = ", ".join(f"{name} {row[name]:.3f}" for name in row if name.endswith("_ms"))
        console.print(f"{row['op']} {row['impl']} N={row['N']}: {times}", highlight=False)
    path = saved.save_json({"rows": rows}, folder, subject=SUBJECT, device="cuda")
    console.print(f"wrote {path}")
    return path


def measure(case: Case, calls: int = CALLED) -> Row:
    """Milliseconds of a forward pass, of both passes, and of both in one thread."""
    forward, training = replace(case, passes=FORWARD), replace(case, passes=TRAINING)
    row = {key: value for key, value in case.row().items() if key != "pass"}
    row["fwd_ms"] = _milliseconds(call(forward, inputs(forward)), case, calls)
    both = call(training, inputs(training))
    for name, threads in (("both_ms", True), ("one_thread_ms", False)):
        with torch.autograd.set_multithreading_enabled(threads):
            row[name] = _milliseconds(both, case, calls)
    return row


def _milliseconds(run: Callable[[], object], case: Case, calls: int) -> float:
    seconds = [seconds_of(run, case.device) for _ in range(WARMING + calls)]
    return round(quantiles(seconds[WARMING:]).ms_p50, 5)
