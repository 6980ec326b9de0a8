"""Processes that measure: what they answer, how they are lost, and that none is left."""

from __future__ import annotations

import os
import time
from dataclasses import replace
from pathlib import Path

import pytest

from lln_study.bench.apart import clock, measuring, session
from lln_study.bench.apart.compiling import worklist
from lln_study.bench.apart.groups import in_processes
from lln_study.bench.apart.worker import STARTS, Lost, Worker
from lln_study.bench.cases import FORWARD, TRAINING, Case
from lln_study.bench.check import CheckFailed, small
from lln_study.bench.shapes import EAGER, GRAPH, HOST, Timed, gpu_cases
from tests.lln_study.bench.outside import outside
from tests.lln_study.bench.requests import answer, note

BASE = Case("bidirectional", "triton", 4096, B=16, dtype="bfloat16", device="cuda")


def gone(pid: int) -> bool:
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return True
    status = Path(f"/proc/{pid}/stat").read_text()
    return status.rsplit(")", 1)[1].split()[0] == "Z"  # gone, and nobody has waited for it


def test_a_worker_answers_raises_dies_and_is_started_anew():
    with Worker(answer) as worker:
        _, value, first = worker.ask(("echo", 3))
        assert value == 3 and first != os.getpid()
        assert worker.ask(("echo", 4))[2] == first
        with pytest.raises(LookupError, match=r"^wrong$"):
            worker.ask(("raise", "wrong"))
        with pytest.raises(RuntimeError, match="1 and 2"):
            worker.ask(("odd", None))
        assert worker.ask(("echo", 5))[2] == first  # an exception is no death
        with pytest.raises(Lost, match="exit code 3"):
            worker.ask(("die", 3))
        second = worker.ask(("echo", 6))[2]
        assert second != first
        with pytest.raises(Lost, match=r"no answer within 0\.2 seconds"):
            worker.ask(("sleep", 60), seconds=0.2)
        assert gone(second)
        worker._starts = STARTS
        with pytest.raises(Lost, match="is not started again"):
            worker.ask(("echo", 7))


def test_no_library_is_loaded_where_calls_from_python_are_timed():
    """Beside torch and what torch brings: whatever else is loaded may slow the host."""
    code = (
        "import sys, torch; before = set(sys.modules); import lln_study.bench.apart.measuring;"
        "print(*sorted({n.split('.')[0] for n in set(sys.modules) - before}))"
    )
    done = outside("-c", code)
    assert done.returncode == 0, done.stderr
    loaded = set(done.stdout.split())
    unwanted = {"rich", "typer", "transformers", "matplotlib", "fla", "ray", "scipy"}
    assert "lln" in loaded and not loaded & unwanted


def test_items_are_shared_out_and_one_that_dies_stops_no_other(tmp_path):
    names = ["dies", *(f"n{i}" for i in range(6))]
    in_processes(note, [(tmp_path, name) for name in names], seconds=60, processes=2)
    assert {path.name for path in tmp_path.iterdir()} == set(names) - {"dies"}


def test_compilers_that_are_still_at_work_are_killed(tmp_path):
    seconds = 0.5
    while not (tmp_path / "child").exists():  # the process needs a while to begin
        in_processes(note, [(tmp_path, "compiler")], seconds=seconds, processes=1)
        seconds *= 2
    pid = int((tmp_path / "child").read_text())
    end = time.monotonic() + 30
    while not gone(pid):
        assert time.monotonic() < end
        time.sleep(0.02)


def test_heavy_kernels_are_compiled_first_and_each_by_one_process():
    cases = [timed.case for timed in gpu_cases()]
    found = worklist(cases)
    first = found[: len({small(c) for c in cases if c.impl in ("triton", "mixed")})]
    assert len(set(found)) == len(found) and all(case == small(case) for case in first)
    assert all("causal" in case.op or "near_far" in case.op for case in first[:6])
    assert {case.passes for case in first[:12]} == {TRAINING}
    assert first[-1].dtype == "float16"
    ours = {case for case in cases if case.impl in ("triton", "mixed")}
    assert set(found) >= {case for case in ours if case.op != "decode"}
    assert {case.N for case in found if case.op == "decode"} == {small(BASE).N}


def test_a_check_on_a_gpu_uses_the_kernels_that_are_measured():
    """Those for whole tiles; every tile divides the length, as it does those measured."""
    assert small(BASE).N % 128 == 0 and small(replace(BASE, device="cpu")).N % 2


def test_the_machine_tells_what_others_do(tmp_path):
    path = tmp_path / "stat"
    path.write_text("cpu  100 200 300 4000 50 6 7 8 0 0\ncpu0 1 2 3 4 5 6 7 8 0 0\n")
    assert clock._machine_seconds(path) == 621 / os.sysconf("SC_CLK_TCK")
    assert clock._machine_seconds(tmp_path / "none") is None
    columns = clock.Surroundings().columns()
    assert columns["loop_ms"] > 0 and columns["others_busy"] >= 0


class Fake:
    """A worker without a process: remembers what it was asked, and fails as told."""

    def __init__(self, fails=()):
        self.fails, self.asked, self.ended, self.limits = dict(fails), [], 0, []

    def __enter__(self):
        return self

    def __exit__(self, *_):
        self.end()

    def start(self):
        self.asked.append("start")

    def end(self):
        self.ended += 1

    def ask(self, request, *, seconds):
        self.asked.append(request)
        self.limits.append(seconds)
        key = type(request), getattr(request, "timed", None)
        if key in self.fails:
            raise self.fails[key]
        if isinstance(request, measuring.Measure):
            return {**measuring.blank(request.timed), "ms_p50": 1.0}
        return 2.0 if isinstance(request, measuring.Bandwidth) else None


CASES = [
    Timed(BASE, GRAPH), Timed(BASE, EAGER), Timed(BASE, HOST),
    Timed(replace(BASE, impl="cudnn"), EAGER),
    Timed(replace(BASE, op="causal", impl="fla"), EAGER),
    Timed(replace(BASE, op="roberta_step", impl="sdpa", passes=TRAINING), EAGER),
]  # fmt: skip


def run(cases, fails=()):
    said = []
    with session.Session(cases, said.append, lambda: Fake(fails)) as made:
        return made, list(made.rows(made.bandwidth())), said


def test_no_answer_is_waited_for_beyond_the_end():
    """A library that compiled for minutes made a run outlast its time."""
    left = iter([500.0, 40.0, 30.0, -5.0, -9.0])
    with session.Session(CASES[:2], print, Fake, left=lambda: next(left)) as made:
        list(made.rows(made.bandwidth()))
    limits = made.workers["graphs"].limits + made.workers["python"].limits
    assert limits == [90.0, 40.0, 30.0, session.LEAST]


def test_calls_from_python_are_alone_with_their_rivals():
    made, rows, _ = run(CASES)
    asked = {
        name: [r.timed for r in worker.asked if isinstance(r, measuring.Measure)]
        for name, worker in made.workers.items()
    }
    assert asked == {
        "graphs": CASES[:1], "python": CASES[1:4], "libraries": CASES[4:5], "training": CASES[5:]
    }  # fmt: skip
    assert len(rows) == 6 and all(row["ms_p50"] == 1.0 for row in rows)
    assert not any(isinstance(r, measuring.Check) for r in made.workers["python"].asked)
    assert made.checked == 3  # ours, once for three launches; cuDNN's; fla's
    order = [type(r).__name__ for r in made.workers["graphs"].asked if r != "start"]
    assert order == ["Bandwidth", "Check", "Measure", "Check"]  # each before it is measured
    assert all(worker.ended for worker in made.workers.values())


def test_a_case_that_kills_its_process_has_a_row_that_says_so():
    fails = {(measuring.Measure, CASES[1]): Lost("its process died (SIGSEGV)")}
    fails[measuring.Measure, CASES[0]] = measuring.DeviceLost("illegal memory access")
    made, rows, _ = run(CASES, fails)
    assert [row["error"] for row in rows[:2]] == [
        "illegal memory access",
        "its process died (SIGSEGV)",
    ]
    assert made.workers["graphs"].ended == 2  # the device was lost to it, and the end
    assert all(row["ms_p50"] == 1.0 for row in rows[2:])


def test_a_wrong_kernel_ends_the_run_and_a_wrong_library_is_left_out():
    _, rows, said = run(CASES, {(measuring.Check, CASES[4]): CheckFailed("off by 1")})
    assert [row["impl"] for row in rows] == ["triton"] * 3 + ["cudnn", "sdpa"]
    assert "fla is left out: off by 1" in said
    with pytest.raises(CheckFailed, match="off by 2"):
        run(CASES, {(measuring.Check, CASES[0]): CheckFailed("off by 2")})


def test_a_check_that_cannot_run_leaves_rows_that_say_why():
    _, rows, _ = run(CASES, {(measuring.Check, CASES[0]): RuntimeError("out of memory")})
    assert [row["error"] for row in rows[:4]] == ["its check: out of memory"] * 3 + [""]


def test_rows_have_the_same_columns_measured_or_not(monkeypatch):
    monkeypatch.setattr(measuring, "peak_megabytes", lambda run: 1.0)
    monkeypatch.setattr(measuring, "time_launch", lambda run, launch: [1.0, 2.0, 3.0])
    on_cpu = Timed(Case("bidirectional", "eager", 64, H=2, D=16), EAGER)
    found = measuring.answer(measuring.Measure(on_cpu, 1e9))
    assert found["ms_p50"] == 2.0 and found["error"] == "" and found["floor_share"] > 0
    unknown = Timed(replace(on_cpu.case, op="nothing"), EAGER)
    lost = measuring.answer(measuring.Measure(unknown, 1e9))
    assert "no runner for op='nothing'" in lost["error"] and lost["ms_p50"] is None
    assert list(lost) == list(found)
    host = measuring.answer(measuring.Measure(Timed(on_cpu.case, HOST), 1e9))
    assert host["floor_share"] is None
    assert on_cpu.case.passes == FORWARD
