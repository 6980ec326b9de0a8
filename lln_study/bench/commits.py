"""``lln bench commits``: the same calls by two commits, in turns, on one device.

Each commit has a process of its own that imports its own tree. Both prepare a case, a CUDA graph
where there is a GPU; then they run it one after the other, again and again, so that what disturbs
one disturbs the other.
"""

from __future__ import annotations

import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from lln.records import machine, saved
from lln.records.rows import Row
from lln_study.bench.cases import Case
from lln_study.bench.shapes import FLOORS, GRAPH, gpu_cases

TURNS, SECONDS = 9, 0.05  # of each commit, and of a turn
# What a tree must have to be compared: these names, as they are here.
_CHILD = """
import json, sys, time, torch
from lln.device.capture import captured
from lln.records import machine
from lln_study.bench.cases import Case, call, inputs
for line in sys.stdin:
    asked = json.loads(line)
    try:
        if "case" in asked:
            case = Case(**asked["case"])
            run = call(case, inputs(case))
            run()
            run = captured(run) if case.device == "cuda" else run
            reply = {}
        elif "commit" in asked:
            reply = {"commit": machine.commit()}
        else:
            count, end = 0, time.perf_counter() + asked["seconds"]
            started = time.perf_counter()
            while count == 0 or time.perf_counter() < end:
                for _ in range(10 if case.device == "cuda" else 1):
                    run()
                    count += 1
                if case.device == "cuda":
                    torch.cuda.synchronize()
            reply = {"ms": 1e3 * (time.perf_counter() - started) / count}
    except Exception as error:
        reply = {"error": f"{type(error).__name__}: {error}".splitlines()[0]}
    print(json.dumps(reply), flush=True)
"""


class Commit:
    """A process that runs the code of a tree; to be used in a ``with``."""

    def __init__(self, tree: Path) -> None:
        if not (tree / "lln_study" / "bench" / "cases.py").is_file():
            raise ValueError(f"tree={str(tree)!r} is no clone: it has no lln_study/bench/cases.py")
        outside = {**os.environ, "PYTHONPATH": str(tree.resolve())}
        self._process = subprocess.Popen(
            [sys.executable, "-c", _CHILD], cwd=tree, env=outside, text=True,
            stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        )  # fmt: skip

    def __enter__(self) -> Commit:
        return self

    def __exit__(self, *_: object) -> None:
        self._process.kill()
        self._process.communicate()

    def ask(self, **request: object) -> Row:
        """The reply to a request; a process that has died is an error of its own."""
        assert self._process.stdin is not None and self._process.stdout is not None
        with suppress(BrokenPipeError):
            self._process.stdin.write(json.dumps(request) + "\n")
            self._process.stdin.flush()
        line = self._process.stdout.readline()
        return json.loads(line) if line else {"error": f"exit code {self._process.wait()}"}


def compile_ahead(tree: Path, cases: Sequence[Case], processes: int = 6) -> None:
    """Run every case once, in several processes: Triton keeps what they compile on disk."""

    def run_all(mine: Sequence[Case]) -> None:
        with Commit(tree) as commit:
            for case in mine:
                commit.ask(case=asdict(case))

    with ThreadPoolExecutor(processes) as pool:
        list(pool.map(run_all, (cases[n::processes] for n in range(processes))))


def graphs(ops: Sequence[str] | None) -> list[Case]:
    """What ``lln bench gpu`` measures of our kernels as CUDA graphs, on the device that is here."""
    if not torch.cuda.is_available():
        raise SystemExit("lln bench commits compares CUDA graphs: there is no CUDA device")
    found = [timed.case for timed in gpu_cases(ops=ops) if timed.launch == GRAPH]
    return [case for case in found if case.impl == "triton" and case.op in FLOORS]


def compare(
    old: Commit, new: Commit, cases: Sequence[Case], minutes: float = 60.0
) -> Iterator[Row]:
    """A row per case: the median of both, and how many times as long the new commit takes."""
    end = time.monotonic() + 60 * minutes
    for case in cases:
        if time.monotonic() > end:
            return
        replies = [each.ask(case=asdict(case)) for each in (old, new)]
        taken: list[list[float]] = [[], []]
        for _ in range(0 if any(replies) else TURNS):
            for each, times in zip((old, new), taken, strict=True):
                times.append(each.ask(seconds=SECONDS)["ms"])
        if any(replies):
            yield {**case.row(), "error": "; ".join(r["error"] for r in replies if r)}
            continue
        before, after = map(statistics.median, taken)
        ratio = statistics.median(b / a for a, b in zip(*taken, strict=True))
        yield {**case.row(), "old_ms": before, "new_ms": after, "new_over_old": ratio}


def run(
    tree: Path,
    folder: Path,
    *,
    cases: Sequence[Case],
    minutes: float,
    console: Console | None = None,
) -> Path:
    """Compare the tree with this one; write the rows as they come, show them at the end."""
    console = console or Console()
    device, own = cases[0].device, Path(__file__).resolve().parents[2]
    facts, rows, written = {**machine.facts(device), "configuration": configuration()}, [], folder
    if device == "cuda":
        with ThreadPoolExecutor(2) as pool:
            list(pool.map(lambda each: compile_ahead(each, cases), (tree, own)))
    with Commit(tree) as old, Commit(own) as new:
        facts |= {"old_commit": old.ask(commit=True)["commit"]}
        for row in compare(old, new, cases, minutes):
            rows.append({**row, **facts})
            written = saved.save_json({"rows": rows}, folder, subject="commits", device=device)
            console.print(f"{row['op']} {row['pass']} N={row['N']}", highlight=False)
    console.print(table(rows))
    console.print(f"{len(cases) - len(rows)} cases are left out; wrote {written}")
    return written


def configuration() -> str:
    """How rows were measured."""
    return f"replayed in turns, median of {TURNS} turns of {SECONDS:g} s"


def table(rows: Sequence[Row]) -> Table:
    """A line per case, the slowest ratio first."""
    shown = Table(title="New commit ÷ old commit", title_justify="left")
    for name in ("op", "pass", "B", "N", "D", "old ms", "new ms", "new ÷ old"):
        shown.add_column(name)
    for row in sorted(rows, key=lambda row: -row.get("new_over_old", float("inf"))):
        cells = [str(row[key]) for key in ("op", "pass", "B", "N", "D")]
        times = [f"{row[key]:.4f}" for key in ("old_ms", "new_ms") if key in row]
        ratio = f"{row['new_over_old']:.3f}" if times else row["error"]
        shown.add_row(*cells, *(times or ("–", "–")), ratio)
    return shown
