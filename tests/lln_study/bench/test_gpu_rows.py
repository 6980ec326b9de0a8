"""What `lln bench gpu` measures and how it counts; no time is taken here."""

from __future__ import annotations

import functools
import json
import sys
import time
from contextlib import nullcontext
from dataclasses import replace
from types import ModuleType

import pytest
import torch
from typer.testing import CliRunner

from lln.cli.app import app
from lln.device.capture import captured
from lln_study.bench import cases, decoding, gpu, peers, shapes, step, sweep
from lln_study.bench.apart import compiling, measuring, session
from lln_study.bench.apart.worker import Worker
from lln_study.bench.cases import FORWARD, RUNNERS, TRAINING, Case
from lln_study.bench.check import CheckFailed, check


@pytest.mark.parametrize("quick", [False, True])
def test_every_case_has_a_runner_and_ours_a_floor(quick):
    found = shapes.gpu_cases(quick=quick)
    assert len(found) == len(set(found))
    for timed in found:
        if timed.case.op in measuring.MEASURED:
            continue
        assert (timed.case.op, timed.case.impl) in RUNNERS
        if timed.case.impl in ("triton", "mixed"):
            assert timed.case.op in shapes.FLOORS


def test_the_shapes_of_the_targets_are_measured():
    cases = shapes.gpu_cases()
    seen = {
        (t.case.op, t.case.N, t.case.D, t.case.B * t.case.N, t.case.passes, t.launch)
        for t in cases
        if t.case.impl in ("triton", "mixed") and t.case.dtype == "bfloat16"
    }
    both = (shapes.EAGER, shapes.GRAPH)
    wide = ("bidirectional", "lln_diag", "lln_diag_128", "causal", "lln_diag_causal", "recommended")
    settings = [op for op in shapes.FLOORS if op.startswith(("near_far", "lln_diag_"))]
    for passes in (FORWARD, TRAINING):
        for launch in both:
            for op in ("bidirectional", "lln_diag", "causal"):
                for n in (512, 2048, 4096, 16_384, 65_536):
                    assert (op, n, 64, shapes.TOKENS, passes, launch) in seen
            for op in wide:
                assert (op, 4096, 128, shapes.WIDE_TOKENS, passes, launch) in seen
            for op in (*settings, "recommended", "measured"):
                assert (op, 512, 64, shapes.TOKENS, passes, launch) in seen
            for n in (512, 1024, 2048, 4096):
                assert ("bidirectional", n, 64, n, passes, launch) in seen
        for op in ("measured", "bidirectional"):
            assert (op, 512, 64, shapes.TOKENS, passes, shapes.HOST) in seen
    rivals = {(t.case.N, t.case.passes, t.launch) for t in cases if t.case.impl == "cudnn"}
    assert {(512, TRAINING, shapes.EAGER), (4096, TRAINING, shapes.GRAPH)} <= rivals


@pytest.mark.parametrize("there", [False, True])
def test_another_library_is_measured_where_it_is_installed(there, monkeypatch):
    monkeypatch.setattr(peers, "installed", lambda: there)
    found = {t.case.op for t in shapes.gpu_cases() if t.case.impl == peers.IMPL}
    assert found == ({"causal"} if there else set())


def fake_fla(q, k, v, *, normalize, flaw=0.0):
    """Chunks as the library has them: [B, N, H, D], scaled by 1/√D."""
    assert not normalize and q.is_contiguous()
    q, k, v = (x.transpose(1, 2).float() for x in (q, k, v))
    out = (q @ k.transpose(-1, -2)).tril() @ v / q.shape[-1] ** 0.5
    return (out * (1 + flaw)).transpose(1, 2).to(torch.bfloat16), None


@pytest.mark.parametrize("flaw", [0.0, 0.1])
def test_another_library_is_checked_against_its_own_definition(flaw, monkeypatch):
    module = ModuleType("fla.ops.linear_attn")
    module.fused_chunk_linear_attn = functools.partial(fake_fla, flaw=flaw)
    for name in ("fla", "fla.ops"):
        monkeypatch.setitem(sys.modules, name, ModuleType(name))
    monkeypatch.setitem(sys.modules, module.__name__, module)
    case = Case("causal", "fla", 512, passes=TRAINING, dtype="bfloat16")
    request = measuring.Check(shapes.Timed(case, shapes.GRAPH))
    with pytest.raises(CheckFailed, match="causal fla") if flaw else nullcontext():
        measuring.answer(request)


@pytest.mark.parametrize("op", ["near_far", "near_far_slots", "lln_diag_causal"])
def test_new_ops_agree_with_their_definition_in_plain_pytorch(op, monkeypatch):
    monkeypatch.setitem(RUNNERS, (op, "eager"), cases._ours(op, "eager"))
    assert check([Case(op, "eager", 512, passes=TRAINING, D=16)]) == 1


def test_floor_share_is_bytes_over_time_and_bandwidth():
    case = Case("lln_diag", "triton", 100, passes=TRAINING, B=2, H=3, D=64, dtype="bfloat16")
    unit = 2 * 3 * 100 * 64 * 2
    at_the_floor = 15 * unit / 1e9 * 1e3  # ms at 1 GB/s
    assert shapes.floor_share(case, at_the_floor, 1e9) == pytest.approx(1.0)
    assert shapes.floor_share(case, 2 * at_the_floor, 1e9) == pytest.approx(0.5)


def test_ratios_compare_equal_launches_only():
    shape = {"op": "causal", "pass": FORWARD, "B": 1, "N": 8, "D": 64, "dtype": "bfloat16"}
    rows = [
        {**shape, "impl": "triton", "launch": shapes.GRAPH, "ms_p50": 2.0},
        {**shape, "impl": "triton", "launch": shapes.SERIES, "ms_p50": 1.0},
        {**shape, "impl": "cudnn", "launch": shapes.GRAPH, "ms_p50": 10.0},
        {**shape, "impl": "eager", "launch": shapes.EAGER, "ms_p50": 40.0},
    ]
    found = {row["against"]: row["times_faster"] for row in gpu.ratios(rows)}
    assert found == {"cudnn": 5.0, "eager": 20.0}


def test_the_floor_of_slots_counts_their_width():
    fwd, both = shapes.FLOORS["near_far_slots"]
    narrow = shapes.FLOORS["near_far"]  # whose far keys share q and k with the near ones
    assert fwd == 5 + 2 * 2 > narrow[0] and both == fwd + 8 + 5 * 2 > narrow[1]
    assert shapes.FLOORS["recommended"] == (10, 22)


def row(op="bidirectional", impl="triton", launch=shapes.GRAPH, ms=1.0, passes=FORWARD, **other):
    shape = {"B": 1, "N": 8, "D": 64, "dtype": "bfloat16", "floor_share": None, "error": ""}
    return {
        "op": op,
        "impl": impl,
        "pass": passes,
        "launch": launch,
        "ms_p50": ms,
        **shape,
        **other,
    }


def test_settings_are_compared_with_softmax_and_steps_with_steps():
    rows = [
        row(ms=1.0), row("recommended", ms=2.0), row(impl="cudnn", ms=8.0),
        row("lln_diag_causal", ms=2.0), row("causal", "cudnn", ms=6.0),
        row("roberta_step", "recommended", shapes.EAGER, 10.0),
        row("roberta_step", "sdpa", shapes.EAGER, 12.0),
        row("decode", ms=0.5), row("decode", "sdpa", ms=2.0), row("convolution", ms=1.0),
    ]  # fmt: skip
    found = {(r["op"], r["against"]): r["times_faster"] for r in gpu.ratios(rows)}
    assert found == {
        ("bidirectional", "cudnn"): 8.0, ("recommended", "cudnn"): 4.0,
        ("lln_diag_causal", "cudnn"): 3.0, ("roberta_step", "sdpa"): 1.2, ("decode", "sdpa"): 4.0,
    }  # fmt: skip


def test_the_table_has_a_line_per_case_and_a_column_per_launch():
    rows = [
        row(launch=shapes.EAGER, ms=1.25, floor_share=0.2), row(ms=0.25, floor_share=0.8),
        row(passes=TRAINING, ms=None, error="out of memory"),
    ]  # fmt: skip
    shown = gpu.table(rows)
    assert shown.row_count == 2
    cells = {column.header: list(column.cells) for column in shown.columns}
    assert cells["eager"] == ["1.2500", ""] and cells["graph"] == ["0.2500", "out of memory"]
    assert cells["of floor"] == ["80%", ""]


def test_a_step_of_decoding_is_checked_and_its_bytes_are_counted(monkeypatch):
    monkeypatch.setattr(measuring, "time_launch", lambda run, launch: [run().numel(), 2.0, 3.0])
    ours = Case("decode", "triton", N=40, B=2, H=3, D=16)
    theirs = replace(ours, impl="sdpa")
    timed = [shapes.Timed(case, shapes.EAGER) for case in (ours, theirs)]
    for one in timed:
        measuring.answer(measuring.Check(one))
    found = [measuring.answer(measuring.Measure(one, 1e6)) for one in timed]
    state, cache = 2 * 4 * 2 * 3 * (16 + 16 * 16), 4 * 2 * 2 * 3 * 41 * 16
    assert [r["floor_share"] for r in found] == [round(n / 2e3, 4) for n in (state, cache)]
    cases_ = decoding.decode_cases()
    assert {(c.B, c.N) for c in cases_} == {(b, n) for b in (1, 64) for n in (2048, 8192, 65_536)}


def test_a_wrong_step_of_decoding_is_not_measured(monkeypatch):
    monkeypatch.setattr(decoding, "prefill", lambda q, *rest, **scales: (2 * q, None))
    wrong = shapes.Timed(Case("decode", "triton", N=40, D=16), shapes.EAGER)
    with pytest.raises(CheckFailed, match="decode triton"):
        measuring.answer(measuring.Check(wrong))


@pytest.mark.parametrize("impl", step.COMPARED)
def test_a_step_of_training_takes_time(impl):
    small = step.Setting(layers=1, width=16, heads=2, vocabulary=50)
    case = replace(step.step_cases(device="cpu")[0], impl=impl, N=16, B=4)
    p20, p50, p80 = step.milliseconds(case, base=small, steps=1)
    assert 0 < p20 <= p50 <= p80
    assert {(c.B * c.N, c.D) for c in step.step_cases()} == {(16_384, 64)}


def test_the_targets_come_first_and_one_length_of_everything_before_the_next():
    found = shapes.gpu_cases()
    ranks = [shapes._rank(timed) for timed in found]
    assert ranks == sorted(ranks)
    first = {
        (t.case.op, t.case.impl, t.launch, t.case.B == 1, t.case.D)
        for t in found[: ranks.index((False, 1))]
    }
    graph, eager, host = shapes.GRAPH, shapes.EAGER, shapes.HOST
    diag = ("lln_diag", "lln_diag_128", "lln_diag_overlap", "lln_diag_causal", "near_far_overlap")
    assert first >= {
        *((op, "triton", graph, False, 64) for op in ("bidirectional", "causal", *diag)),
        *(("bidirectional", impl, eager, True, 64) for impl in ("triton", "cudnn")),
        *((op, "triton", graph, False, 128) for op in ("bidirectional", *diag[:2], "causal")),
        *((op, "triton", host, False, 64) for op in ("bidirectional", "measured")),
        *(("decode", impl, eager, one, 64) for impl in ("triton", "sdpa") for one in (True, False)),
        *(("roberta_step", impl, eager, False, 64) for impl in ("recommended", "sdpa")),
    }
    assert {t.case.N for t in found[: ranks.index((False, 1))]} == {4096, 8192}


def test_only_the_ops_that_are_asked_for_are_measured():
    found = {timed.case.op for timed in shapes.gpu_cases(ops=["decode", "causal"])}
    assert found == {"decode", "causal"}
    done = CliRunner().invoke(app, ["bench", "gpu", "--op", "decoding"])
    assert done.exit_code == 2 and "roberta_step" in done.output


@pytest.fixture
def device(monkeypatch):
    """A CUDA device that is not there: its workers answer without a process."""

    class Answers(Worker):
        def start(self):
            pass

        def ask(self, request, **_):
            time.sleep(0.001)
            if isinstance(request, measuring.Measure):
                return {**measuring.blank(request.timed), "ms_p50": 0.123456}
            return 4e12 if isinstance(request, measuring.Bandwidth) else None

    facts = {"device": "H200", "torch": "2", "triton": "3", "commit": "0"}
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(gpu.machine, "facts", lambda device: facts)
    monkeypatch.setattr(sweep.machine, "slug", lambda device: "h200")
    monkeypatch.setattr(session, "Worker", Answers)
    monkeypatch.setattr(gpu, "compile_ahead", lambda cases, seconds: waited.append(seconds))
    waited: list[float] = []
    return waited


def test_a_run_writes_its_rows_and_a_table_that_can_be_read(device, tmp_path, capsys):
    json_path, csv_path, *_ = gpu.run(tmp_path, ops=["convolution", "decode"])
    assert json_path.name.startswith("gpu-convolution-decode_h200_")  # not that of a whole run
    rows = json.loads(json_path.read_text())["rows"]
    assert len(rows) == 6 + 12 * 2 and len(csv_path.read_text().splitlines()) == len(rows) + 1
    assert rows[0]["device"] == "H200" and rows[0]["copy_tb_s"] == 4.0
    shown = capsys.readouterr().out
    assert "0.1235" in shown and "bfloat16" in shown and "…" not in shown
    assert "8 implementations agree" in shown


def test_minutes_count_from_the_beginning(device, tmp_path, capsys):
    gpu.run(tmp_path, minutes=0.1 / 60)
    assert device == [pytest.approx(0.1 / 3)]  # of which a third may go into compiling
    shown = capsys.readouterr().out
    (path,) = tmp_path.glob("*.json")
    rows = json.loads(path.read_text())["rows"]
    left = len(shapes.gpu_cases()) - len(rows)
    assert len(rows) > 0 and f"{left} cases are not measured" in shown.replace("\n", " ")


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_series_of_calls_runs_them_all():
    counter = torch.zeros((), device="cuda")
    replay = captured(lambda: counter.add_(1), calls=10)
    counter.zero_()
    replay()
    assert counter.item() == 10


@pytest.mark.slow
def test_compiling_ahead_survives_what_cannot_run():
    """Without a GPU no case can run; with one the cache is filled. Neither raises."""
    cases_ = [timed.case for timed in shapes.gpu_cases(quick=True)][:4]
    compiling.compile_ahead(cases_, processes=2)


def test_lines_of_the_plot_go_from_short_to_long(monkeypatch):
    """Rows come in the order of the targets."""
    drawn = []
    monkeypatch.setattr(gpu, "line_plot", lambda name, series, **_: drawn.extend(series) or "")
    rows = [
        {**row(passes=TRAINING, N=n, B=shapes.TOKENS // n), "D": 64, "floor_share": 0.5}
        for n in (4096, 512, 16_384)
    ]
    gpu.plot([{**one, "dtype": "bfloat16"} for one in rows])
    assert [list(line.x) for line in drawn] == [[512, 4096, 16_384]]
