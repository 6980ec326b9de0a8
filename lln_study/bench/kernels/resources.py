"""``lln bench resources``: what the kernels occupy on a multiprocessor; needs no GPU.

Every kernel is compiled as its op launches it, forward and backward, at two lengths: a short one,
whose readers merge the parts of a state for themselves, and one long enough for kernels that merge.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table
from rich.text import Text

from lln.records import machine, saved
from lln.records.rows import Row
from lln.report.progress import counting
from lln_study.bench.kernels.offline import (
    ARCHITECTURES,
    CannotCompile,
    check_toolchain,
    compiling,
    usage,
)
from lln_study.bench.kernels.resource_cases import (
    CONFIGURATION,
    OPS,
    ResourceCase,
    resource_cases,
)

FORWARD, BACKWARD = "fwd", "bwd"

# The numbers of what does not compile.
NOTHING: Row = {
    "kernel": "", "warps": None, "stages": None, "registers": None, "spilled_bytes": None,
    "shared_bytes": None, "programs": 0, "fits": False,
}  # fmt: skip


def compile_case(case: ResourceCase, arch: int) -> list[Row]:
    """A row per kernel of a case; what does not compile gives a row that says why."""
    rows: list[Row] = []
    seen: list[Any] = []
    named = {"op": case.op, "D": case.D, "dtype": case.dtype, "masked": case.masked}
    named["arch"] = f"sm_{arch}"
    for length in case.lengths:
        launched, forward, error = _launch(case, length, arch)
        for index, kernel in enumerate(launched):
            if any(kernel is known for known in seen):  # Triton keeps what it has compiled
                continue
            seen.append(kernel)
            passes = FORWARD if forward is None or index < forward else BACKWARD
            rows.append({**named, "N": length, "pass": passes, **_numbers(kernel, arch)})
        if error:
            passes = FORWARD if forward is None else BACKWARD
            rows.append({**named, "N": length, "pass": passes, **NOTHING, "error": error})
    return rows


def _launch(case: ResourceCase, length: int, arch: int) -> tuple[list[Any], int | None, str]:
    """The kernels in the order of launch, how many of them are the forward pass, and an error."""
    launched: list[Any] = []
    forward = None
    try:
        with compiling(arch) as launched:
            outputs, inputs = OPS[case.op](case, length)
            forward = len(launched)
            if inputs:
                torch.autograd.grad(outputs, inputs, [torch.empty_like(x) for x in outputs])
    except CannotCompile:
        raise
    except Exception as error:  # a row that says why, not a lost run
        return launched, forward, (str(error).strip() or type(error).__name__).splitlines()[0]
    return launched, forward, ""


def _numbers(kernel: Any, arch: int) -> Row:
    used = usage(kernel)
    return {
        "kernel": kernel.metadata.name, "warps": used.warps, "stages": kernel.metadata.num_stages,
        "registers": used.registers, "spilled_bytes": used.stack, "shared_bytes": used.shared,
        "programs": used.programs(arch), "fits": used.fits(arch), "error": "",
    }  # fmt: skip


def compile_all(
    cases: Sequence[ResourceCase], arch: int, *, jobs: int, watch: Callable[[str], None]
) -> list[Row]:
    """The rows of all cases, in their order; ``watch`` is told what is finished."""
    found: dict[ResourceCase, list[Row]] = {}
    if jobs <= 1:
        for case in cases:
            found[case] = compile_case(case, arch)
            watch(case.name)
    else:
        for case, rows in _in_processes(cases, arch, min(jobs, len(cases))):
            found[case] = rows
            watch(case.name)
    return [row for case in cases for row in found[case]]


def _in_processes(
    cases: Sequence[ResourceCase], arch: int, jobs: int
) -> Iterator[tuple[ResourceCase, list[Row]]]:
    """Every case with its rows, as they are finished."""
    with ProcessPoolExecutor(jobs, get_context("spawn"), torch.set_num_threads, (1,)) as pool:
        asked = {pool.submit(compile_case, case, arch): case for case in cases}
        try:
            for done in as_completed(asked):
                yield asked[done], done.result()
        except BrokenProcessPool:
            raise CannotCompile("a process that compiled has died; take fewer --jobs") from None
        finally:
            pool.shutdown(wait=False, cancel_futures=True)


def run(
    *,
    arch: int = 90,
    ops: Sequence[str] | None = None,
    widths: Sequence[int] | None = None,
    dtypes: Sequence[str] | None = None,
    masked: bool = False,
    folder: Path | None = None,
    jobs: int | None = None,
    console: Console | None = None,
) -> list[Row]:
    """Compile, print, and write ``resources-smARCH_hardware_date.json`` if a folder is given.

    Ends with status 1 if a kernel does not compile or does not fit the architecture.
    """
    console = console or Console()
    if not console.is_terminal:
        console.width = 200  # a file or a pipe has no edge to wrap at
    check_toolchain(arch)
    cases = resource_cases(arch, ops=ops, widths=widths, dtypes=dtypes, masked=masked)
    with counting(console) as bars:
        task = bars.add_task("compiling", total=len(cases))
        watch = lambda name: bars.update(task, description=name, advance=1)  # noqa: E731
        rows = compile_all(cases, arch, jobs=jobs or os.cpu_count() or 1, watch=watch)
    console.print(table(rows, arch))
    spilling, bad = [r for r in rows if r["spilled_bytes"]], [r for r in rows if not r["fits"]]
    console.print(f"{len(rows)} kernels: {len(spilling)} spill registers, {len(bad)} do not fit")
    if folder is not None:
        facts = {**machine.facts(), "configuration": CONFIGURATION}
        content = {"rows": [{**row, **facts} for row in rows]}
        console.print(f"wrote {saved.save_json(content, folder, subject=f'resources-sm{arch}')}")
    if bad:
        raise SystemExit(1)
    return rows


def table(rows: Sequence[Row], arch: int) -> Table:
    """What was compiled, one line per kernel; what spills or does not fit says so."""
    name = ARCHITECTURES[arch].name
    shown = Table(title=f"Kernels on sm_{arch} ({name})", title_justify="left")
    for column in ("op", "D", "dtype", "kernel", "pass"):
        shown.add_column(column, no_wrap=True)
    for column in ("warps", "stages", "registers", "spilled B", "shared KiB", "programs"):
        shown.add_column(column, justify="right")
    shown.add_column("")
    for row in rows:
        cells = [row["op"], str(row["D"]), row["dtype"]]
        if row["error"]:
            missing = ["", row["pass"], *[""] * 6]
            shown.add_row(*cells, *missing, Text(row["error"]), style="bold red")
            continue
        numbers = [str(row[key]) for key in ("warps", "stages", "registers", "spilled_bytes")]
        numbers += [f"{row['shared_bytes'] / 1024:.1f}", str(row["programs"])]
        verdict, style = ("spills", "yellow") if row["spilled_bytes"] else ("", None)
        if not row["fits"]:
            verdict, style = "does not fit", "bold red"
        shown.add_row(*cells, row["kernel"], row["pass"], *numbers, verdict, style=style)
    return shown
