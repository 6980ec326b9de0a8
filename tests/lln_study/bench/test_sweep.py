"""Rows, ratios, growth and files of the benchmark; timing itself is never a test."""

from __future__ import annotations

import csv
import io
import json

import pytest
import torch

from lln.device import timing
from lln.device.memory import MB, RESET_PEAK
from lln_study.bench import cases, check, memory, sweep
from lln_study.bench.cases import TRAINING, Case

COLUMNS = [
    "op",
    "impl",
    "pass",
    "B",
    "H",
    "N",
    "D",
    "dtype",
    "ms_p20",
    "ms_p50",
    "ms_p80",
    "samples",
    "peak_mb",
    "device",
    "torch",
    "triton",
    "commit",
    "configuration",
]


ON_CPU = sorted(key for key in cases.RUNNERS if key[1] in ("eager", "sdpa", "matrix"))


def rows_of(op: str, impl: str, power: float, *, scale: float = 1.0) -> list[dict]:
    return [
        {
            "op": op,
            "impl": impl,
            "pass": "fwd",
            "N": N,
            "ms_p50": scale * N**power,
            "peak_mb": float(N),
        }
        for N in cases.powers(1024, 16_384)
    ]


def test_a_measured_row_has_every_column():
    case = Case("bidirectional", "eager", 64, H=2, D=8)
    (row,) = sweep.measure([case], min_seconds=0.01)
    assert list(row) == COLUMNS
    assert 0 < row["ms_p20"] <= row["ms_p50"] <= row["ms_p80"]
    assert row["commit"] and row["device"] and row["configuration"]


def test_quantiles_of_known_durations():
    measured = timing.quantiles([0.001 * n for n in (5, 1, 4, 2, 3)])
    assert (measured.ms_p20, measured.ms_p50, measured.ms_p80, measured.samples) == pytest.approx(
        (1.8, 3.0, 4.2, 5)
    )


def test_ratio_is_theirs_over_ours_at_equal_length():
    rows = rows_of("bidirectional", "sdpa", 2) + rows_of("bidirectional", "eager", 1, scale=4)
    found = {r["N"]: r["ratio"] for r in sweep.ratios(rows)}
    assert found == {N: N / 4 for N in cases.powers(1024, 16_384)}


def test_the_rival_of_what_is_recommended_is_softmax():
    rows = rows_of("bidirectional", "sdpa", 2) + rows_of("recommended", "eager", 1, scale=4)
    found = sweep.ratios(rows)
    assert {(r["op"], r["N"]): r["ratio"] for r in found} == {
        ("recommended", N): N / 4 for N in cases.powers(1024, 16_384)
    }


def test_training_is_measured_beside_softmax_and_nothing_twice():
    swept = cases.cpu_cases()
    trained = {(c.op, c.impl, c.N) for c in swept if c.passes == TRAINING}
    assert {("recommended", "eager", 128), ("bidirectional", "sdpa", 128)} <= trained
    assert len(set(swept)) == len(swept)


def test_growth_recovers_the_exponent_and_skips_short_lengths():
    rows = rows_of("bidirectional", "sdpa", 2.0)
    rows.append({**rows[0], "N": 512, "ms_p50": 1e9})  # below the fitted range
    (fit,) = sweep.growth(rows)
    assert (fit["from"], fit["to"]) == (1024, 16_384)
    assert fit["time"] == pytest.approx(2.0) and fit["memory"] == pytest.approx(1.0)


@pytest.mark.parametrize("peak", [None, 0.0, -0.2])
def test_memory_that_was_not_seen_has_no_exponent(peak):
    rows = rows_of("bidirectional", "sdpa", 2.0)
    rows[-1]["peak_mb"] = peak
    (fit,) = sweep.growth(rows)
    assert fit["memory"] is None and fit["time"] == pytest.approx(2.0)


def test_saved_files_hold_the_rows(tmp_path):
    rows = rows_of("bidirectional", "eager", 1.0)
    as_json, as_csv = sweep.save(rows, tmp_path, subject="attention")
    assert as_json.stem == as_csv.stem and as_json.name.startswith("attention_")
    content = json.loads(as_json.read_text())
    assert content["rows"] == rows and content["growth"][0]["time"] == 1.0
    read = list(csv.DictReader(io.StringIO(as_csv.read_text())))
    assert [int(row["N"]) for row in read] == [row["N"] for row in rows]


@pytest.mark.parametrize("passes", ["fwd", TRAINING])
@pytest.mark.parametrize("key", ON_CPU, ids="/".join)
def test_every_runner_passes_the_check(key, passes):
    assert check.check([Case(*key, N=512, D=16, passes=passes)]) == 1


def test_a_wrong_implementation_stops_everything(monkeypatch):
    def slightly_wrong(q, k, v):
        return torch.nn.functional.scaled_dot_product_attention(q, k, v) * 1.001

    monkeypatch.setitem(cases.RUNNERS, ("bidirectional", "sdpa"), slightly_wrong)
    case = Case("bidirectional", "sdpa", 64, D=16)
    with pytest.raises(check.CheckFailed, match=r"bidirectional sdpa .*relative error 1\.0e-03"):
        next(sweep.measure([case]))


def test_an_unknown_runner_is_named():
    case = Case("bidirectional", "magic", 64)
    with pytest.raises(ValueError, match=r"impl='magic'; there are .*bidirectional/sdpa"):
        cases.call(case, cases.inputs(case))


@pytest.mark.skipif(not RESET_PEAK.exists(), reason="peak memory is read on Linux only")
def test_peak_memory_sees_the_matrix():
    sdpa, matrix = memory.peaks([Case("bidirectional", impl, 2048) for impl in ("sdpa", "matrix")])
    assert sdpa is not None and matrix is not None
    scores = 12 * 2048 * 2048 * 4 / MB  # 192 MB, twice while the softmax is taken
    assert 1.95 * scores <= matrix <= 2.5 * scores  # the kernel counts pages a little late
    assert 6 <= sdpa <= scores  # at least its own output


@pytest.mark.skipif(not RESET_PEAK.exists(), reason="peak memory is read on Linux only")
def test_memory_that_an_earlier_call_has_freed_is_seen_again():
    """The output alone takes 24 MB; what an allocator keeps for later would hide it."""
    found = list(memory.peaks([Case("measured", "eager", 8192)] * 3))
    assert all(peak is not None and peak > 20 for peak in found), found
