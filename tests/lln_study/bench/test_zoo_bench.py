"""Rows, refusals, tables and plot of ``lln bench zoo``; timing itself is never a test."""

from __future__ import annotations

import csv
import json

import pytest
import torch

import lln
from lln_study.bench import layers, zoo
from lln_study.bench.apart import clock
from lln_study.bench.cases import FORWARD, TRAINING, Case, powers
from lln_study.bench.check import CheckFailed


def fake_rows(mechanism: str, impl: str, power: float) -> list[dict]:
    return [
        {
            **Case(mechanism, impl, N, passes=passes).row(),
            "ms_p50": N**power / 1e3,
            "peak_mb": float(N),
            "error": "",
        }
        for passes in (FORWARD, TRAINING)
        for N in powers(512, 4096)
    ]


def test_every_mechanism_is_measured_both_ways_on_both_devices():
    for device in ("cpu", "cuda"):
        if device == "cuda" and not torch.cuda.is_available():
            continue
        cases = layers.layer_cases(device=device)
        assert {case.op for case in cases} == set(lln.list_mechanisms())
        assert {case.impl for case in cases if case.op == "softmax"} == {"sdpa", "matrix"}
        for name in lln.list_mechanisms():
            passes = {case.passes for case in cases if case.op == name}
            assert passes == {FORWARD, TRAINING}
        longest = dict.fromkeys(lln.list_mechanisms(), 0)
        for case in cases:
            longest[case.op] = max(longest[case.op], case.N)
        assert longest["lln"] == longest["softmax"] > longest["relu"]


def test_a_layer_has_the_weights_of_the_seed():
    first, second = (layers.build(Case("performer", "eager", 64, H=2)) for _ in range(2))
    for a, b in zip(first.state_dict().values(), second.state_dict().values(), strict=True):
        assert torch.equal(a, b)


@pytest.mark.parametrize("name", lln.list_mechanisms())
def test_every_mechanism_passes_the_check(name):
    cases = layers.layer_cases(quick=True, names=[name])
    assert layers.check(cases[:1]) == 1


def test_a_wrong_mechanism_stops_everything(tmp_path, monkeypatch, capsys):
    built = layers.build

    def wrong(case):
        """1 % off in float32, right in float64."""
        layer = built(case)
        layer.register_forward_hook(
            lambda module, args, out: out * (1.01 if out.dtype == torch.float32 else 1)
        )
        return layer

    monkeypatch.setattr(layers, "build", wrong)
    with pytest.raises(CheckFailed, match=r"elu eager .*relative error 1\.0e-02"):
        layers.check(layers.layer_cases(quick=True, names=["elu"]))
    with pytest.raises(SystemExit) as end:
        zoo.run(tmp_path, quick=True, names=["elu"])
    assert end.value.code == 1
    assert "not measured" in capsys.readouterr().out
    assert not list(tmp_path.iterdir())


def test_one_wrong_mechanism_does_not_stop_the_others(monkeypatch):
    def check(cases):
        if cases[0].op == "elu":
            raise CheckFailed("elu is off")

    monkeypatch.setattr(zoo, "check", check)
    cases, failures = zoo.checked(layers.layer_cases(quick=True, names=["elu", "relu"]))
    assert {case.op for case in cases} == {"relu"} and failures == ["elu is off"]


def test_run_writes_rows_growth_and_a_plot(tmp_path, monkeypatch, capsys):
    small = [
        Case(name, impl, N, passes=passes, H=1, D=8)
        for name, impl in (("elu", "eager"), ("softmax", "sdpa"))
        for passes in (FORWARD, TRAINING)
        for N in (64, 128, 256)
    ]
    monkeypatch.setattr(zoo, "layer_cases", lambda **_: small)
    monkeypatch.setattr(zoo, "peaks", lambda cases, server: (float(case.N) for case in cases))
    as_json, as_csv, svg = zoo.run(tmp_path, quick=True, min_seconds=0.001)
    content = json.loads(as_json.read_text())
    assert as_json.name.startswith("zoo-quick_") and len(content["rows"]) == 12
    row = content["rows"][0]
    assert row["mechanism"] == "elu" and row["seeds"] == [0] and row["error"] == ""
    assert row["commit"] and row["device"] and row["configuration"] and row["torch"]
    assert 0 < row["ms_p20"] <= row["ms_p50"] <= row["ms_p80"]
    assert [fit["memory"] for fit in content["growth"]] == pytest.approx([1.0] * 4)
    with as_csv.open() as stream:
        assert len(list(csv.DictReader(stream))) == 12
    assert svg.read_text().startswith("<svg ") and "softmax (sdpa)" in svg.read_text()
    assert "time ∝ N^" in capsys.readouterr().out


def test_what_does_not_fit_says_so(monkeypatch):
    def too_much(case):
        raise torch.OutOfMemoryError("CUDA out of memory")

    monkeypatch.setattr(zoo, "call", too_much)
    monkeypatch.setattr(zoo, "peaks", lambda cases, server: iter([1.0]))
    (row,) = zoo.measure([Case("elu", "eager", 64)])
    assert row["error"] == "out of memory" and row["ms_p50"] is None


@pytest.mark.parametrize("records", [True, False])
def test_calls_that_cannot_be_recorded_are_launched(monkeypatch, records):
    def captured(run):
        if not records:
            raise RuntimeError("operation not permitted when stream is capturing")
        return run

    monkeypatch.setattr(zoo, "captured", captured)
    monkeypatch.setattr(zoo, "free_generator", lambda: None)
    monkeypatch.setattr(clock, "peak_megabytes", lambda run: 1.0)
    monkeypatch.setattr(clock, "time_gpu", lambda run, budget_ms: [1.0, 2.0, 3.0])
    row = zoo._measure_gpu(Case("elu", "eager", 64, H=1, D=8))
    assert row["launch"] == ("graph" if records else "eager") and row["ms_p50"] == 2.0


def test_the_table_shows_fitted_powers():
    rows = fake_rows("softmax", "matrix", 2.0) + fake_rows("lln", "eager", 1.0)
    growth = zoo.sweep.growth(rows)
    forward, training = zoo.tables(rows, growth)
    assert forward.row_count == training.row_count == 2
    assert list(forward.columns[-2].cells) == ["2.00", "1.00"]
    assert list(forward.columns[0].cells) == ["softmax (matrix)", "lln (eager)"]


@pytest.mark.slow
def test_peak_memory_of_a_layer_sees_the_matrix():
    from lln.device.memory import RESET_PEAK, peaks

    if not RESET_PEAK.exists():
        pytest.skip("peak memory is read on Linux only")
    cases = [Case(name, "eager", 2048, H=2, D=8) for name in ("relu", "relu_linear")]
    matrix, linear = peaks(cases, server="lln_study.bench.zoo")
    assert matrix is not None and linear is not None
    assert matrix > 2 * 2048 * 2048 * 4 / 2**20 > 4 * linear


def test_a_missing_device_is_refused(tmp_path, capsys):
    if torch.cuda.is_available():
        pytest.skip("there is one")
    with pytest.raises(SystemExit):
        zoo.run(tmp_path, device="cuda")
    assert "device='cuda' is not there" in capsys.readouterr().out


def test_our_layers_are_checked_in_the_dtype_that_is_measured(monkeypatch):
    built = []

    def build(case):
        built.append((case.op, case.dtype))
        return original(case)

    original = layers.build
    monkeypatch.setattr(layers, "build", build)
    cases = [Case(name, "eager", 256, dtype="bfloat16") for name in ("lln", "elu")]
    assert layers.check(cases) == 2
    assert set(built) == {("lln", "bfloat16"), ("elu", "float32")}
