"""``lln bench first``: how long the first call of an op takes, with nothing compiled before.

On a CUDA device the call is made; without one its kernels are compiled for ``sm_90`` and not run,
which is most of it. Every op has a process of its own, an empty cache, and the machine for itself.
"""

from __future__ import annotations

import contextlib
import os
import tempfile
import time
from collections.abc import Iterator, Sequence
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from rich.console import Console
from rich.table import Table

from lln.records import machine, saved
from lln.records.rows import Row
from lln_study.bench.kernels.offline import check_toolchain, compiling
from lln_study.bench.kernels.resources import BACKWARD, FORWARD, OPS, ResourceCase

ARCH = 90
LENGTH = 4096
WIDTHS = (64, 128)
DTYPE = "bfloat16"
CALLED = ("bidirectional", "lln_diag", "causal", "varlen", "decode")
CONFIGURATION = f"N={LENGTH} B=1, fresh process, empty cache, CUDA started before"


def first_call(case: ResourceCase) -> list[Row]:
    """Seconds of the first forward and backward pass in this process, and the kernels of each."""
    on_gpu = torch.cuda.is_available()
    with contextlib.ExitStack() as inside:
        cache = inside.enter_context(tempfile.TemporaryDirectory())
        os.environ["TRITON_CACHE_DIR"] = cache
        if on_gpu:
            inside.enter_context(torch.device("cuda"))
            torch.empty(1)  # starts CUDA
        launched = _launches(inside) if on_gpu else inside.enter_context(compiling(ARCH))
        start = time.perf_counter()
        outputs, inputs = OPS[case.op](case, LENGTH)
        _wait()
        forward, counted = time.perf_counter() - start, len(launched)
        passes = [(FORWARD, forward, counted)]
        if inputs:
            start = time.perf_counter()
            torch.autograd.grad(outputs, inputs, [torch.ones_like(x) for x in outputs])
            _wait()
            passes.append((BACKWARD, time.perf_counter() - start, len(launched) - counted))
    named = {"op": case.op, "D": case.D, "dtype": case.dtype}
    ran = {"arch": "" if on_gpu else f"sm_{ARCH}", "called": on_gpu}
    return [
        {**named, "pass": name, "seconds": round(seconds, 2), "kernels": kernels, **ran}
        for name, seconds, kernels in passes
    ]


def _wait() -> None:
    if torch.cuda.is_available():
        torch.cuda.synchronize()


def _launches(inside: contextlib.ExitStack) -> list[Any]:
    """A list that grows by one with every kernel that is launched."""
    from triton.runtime.jit import JITFunction

    launched: list[Any] = []
    run = JITFunction.run

    def counting(self: Any, *args: Any, **options: Any) -> Any:
        launched.append(self)
        return run(self, *args, **options)

    inside.enter_context(patch.object(JITFunction, "run", counting))
    return launched


def first_calls(cases: Sequence[ResourceCase]) -> Iterator[list[Row]]:
    """The rows of every case, each from a process of its own."""
    with get_context("spawn").Pool(1, torch.set_num_threads, (1,), maxtasksperchild=1) as pool:
        yield from pool.imap(first_call, cases, chunksize=1)


def run(
    folder: Path | None = None,
    *,
    ops: Sequence[str] | None = None,
    widths: Sequence[int] | None = None,
    console: Console | None = None,
) -> list[Row]:
    """Measure, print, and write ``first-call_hardware_date.json`` if a folder is given.

    Raises:
        ValueError: An op or a width that is not measured.
        CannotCompile: There is no CUDA device, and kernels cannot be compiled here either.
    """
    console = console or Console()
    for name, given, known in (("op", ops, CALLED), ("width", widths, WIDTHS)):
        if unknown := [value for value in given or () if value not in known]:
            choice = ", ".join(map(str, known))
            raise ValueError(f"{name}={unknown[0]!r} is not known; pass one of {choice}")
    device = "cuda" if torch.cuda.is_available() else "cpu"
    if device == "cpu":
        check_toolchain(ARCH)
    cases = [ResourceCase(op, width, DTYPE) for op in ops or CALLED for width in widths or WIDTHS]
    facts = {**machine.facts(device), "configuration": CONFIGURATION}
    rows: list[Row] = []
    for case, found in zip(cases, first_calls(cases), strict=True):
        console.print(case.name, highlight=False)
        rows += [{**row, **facts} for row in found]
    console.print(table(rows))
    if folder is not None:
        written = saved.save_json({"rows": rows}, folder, subject="first-call", device=device)
        console.print(f"wrote {written}")
    return rows


def table(rows: Sequence[Row]) -> Table:
    """One line per pass."""
    called = bool(rows) and rows[0]["called"]
    title = "First call" if called else f"Compiled for sm_{ARCH}, not run"
    shown = Table(title=title, title_justify="left")
    for name in ("op", "D", "pass"):
        shown.add_column(name)
    for name in ("kernels", "seconds"):
        shown.add_column(name, justify="right")
    for row in rows:
        cells = [str(row[key]) for key in ("op", "D", "pass", "kernels")]
        shown.add_row(*cells, f"{row['seconds']:.2f}")
    return shown
