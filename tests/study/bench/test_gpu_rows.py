"""What `lln bench gpu` measures and how it counts; no time is taken here."""

from __future__ import annotations

import pytest
import torch

from lln.study.bench import gpu
from lln.study.bench.cases import FORWARD, RUNNERS, TRAINING, Case


@pytest.mark.parametrize("quick", [False, True])
def test_every_case_has_a_runner_and_ours_a_floor(quick):
    for timed in gpu.gpu_cases(quick=quick):
        assert (timed.case.op, timed.case.impl) in RUNNERS
        if timed.case.impl == "triton":
            assert timed.case.op in gpu.FLOORS


def test_the_shapes_of_the_targets_are_measured():
    cases = gpu.gpu_cases()
    ours = {
        (t.case.op, t.case.N, t.case.D, t.case.dtype, t.case.passes)
        for t in cases
        if t.case.impl == "triton" and t.case.B * t.case.N == gpu.TOKENS and t.launch == gpu.SERIES
    }
    for op in ("bidirectional", "lln_diag", "causal"):
        for passes in (FORWARD, TRAINING):
            for n in (512, 2048, 4096, 16_384, 65_536):
                assert (op, n, 64, "bfloat16", passes) in ours
            assert (op, 4096, 128, "bfloat16", passes) in ours
            assert (op, 4096, 64, "float16", passes) in ours
    batch_one = {(t.case.N, t.case.impl, t.launch) for t in cases if t.case.B == 1}
    assert {(512, "cudnn", gpu.GRAPH), (4096, "cudnn", gpu.EAGER)} <= batch_one


def test_floor_share_is_bytes_over_time_and_bandwidth():
    case = Case("lln_diag", "triton", 100, passes=TRAINING, B=2, H=3, D=64, dtype="bfloat16")
    unit = 2 * 3 * 100 * 64 * 2
    at_the_floor = 15 * unit / 1e9 * 1e3  # ms at 1 GB/s
    assert gpu.floor_share(case, at_the_floor, 1e9) == pytest.approx(1.0)
    assert gpu.floor_share(case, 2 * at_the_floor, 1e9) == pytest.approx(0.5)


def test_ratios_compare_equal_launches_only():
    shape = {"op": "causal", "pass": FORWARD, "B": 1, "N": 8, "D": 64, "dtype": "bfloat16"}
    rows = [
        {**shape, "impl": "triton", "launch": gpu.GRAPH, "ms_p50": 2.0},
        {**shape, "impl": "triton", "launch": gpu.SERIES, "ms_p50": 1.0},
        {**shape, "impl": "cudnn", "launch": gpu.GRAPH, "ms_p50": 10.0},
        {**shape, "impl": "eager", "launch": gpu.EAGER, "ms_p50": 40.0},
    ]
    found = {row["against"]: row["times_faster"] for row in gpu.ratios(rows)}
    assert found == {"cudnn": 5.0, "eager": 20.0}


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_series_of_calls_runs_them_all():
    counter = torch.zeros((), device="cuda")
    replay = gpu.captured(lambda: counter.add_(1), calls=10)
    counter.zero_()
    replay()
    assert counter.item() == 10


@pytest.mark.slow
def test_compiling_ahead_survives_what_cannot_run():
    """Without a GPU no case can run; with one the cache is filled. Neither raises."""
    gpu.compile_ahead([timed.case for timed in gpu.gpu_cases(quick=True)][:4], processes=2)
