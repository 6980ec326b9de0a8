"""The demonstration: the numbers it shows are the known ones, and the report is complete."""

from __future__ import annotations

import csv

import pytest
from rich.console import Console

from lln.texts import bundled
from lln_study.demo import concentration, cost, training
from lln_study.demo.run import run

SETTING = concentration.Setting(tokens=256, temperatures=(0.5, 1.0), draws=2)


@pytest.fixture(scope="module")
def rows():
    return {(row["kernel"], row["temperature"]): row for row in concentration.measure(SETTING)}


def test_concentration_orders_the_kernels_as_theory_says(rows):
    def bits(kernel):
        return rows[kernel, 0.5]["entropy"]

    # At low temperature variance matching is too sharp, no calibration is nearly uniform.
    assert bits("LLN variance") < bits("softmax") < bits("LLN α = β = 1")
    assert bits("LLN paper") < bits("softmax")
    assert bits("LLN α = β = 1") > 7.5  # log2 of 256 is 8
    assert abs(bits("LLN entropy") - bits("softmax")) < abs(bits("LLN paper") - bits("softmax"))


def test_entropy_rises_with_temperature(rows):
    for kernel in concentration.KERNELS:
        assert rows[kernel, 0.5]["entropy"] < rows[kernel, 1.0]["entropy"]


def test_gap_is_between_zero_and_one(rows):
    assert all(0 < row["spectral_gap"] <= 1 for row in rows.values())


def test_softmax_retrieves_and_lln_does_not():
    rows = {row["kernel"]: row for row in concentration.retrieval(SETTING)}
    assert rows["softmax"]["found"] > 0.99 and rows["softmax"]["weight"] > 0.5
    assert 1 / SETTING.tokens < rows["LLN paper"]["found"] < 0.5
    assert all(row["weight"] < 0.2 for name, row in rows.items() if name != "softmax")


SIZES = {"layers": 1, "width": 32, "heads": 2, "feed_forward": 64, "vocabulary": 300, "length": 64}


@pytest.fixture
def small(tmp_path, monkeypatch):
    """Runs of four updates of a smaller model on a part of the text, and short calls."""
    configure, text = training.mlm.configure, bundled.text()
    counts = {"steps": 4, "eval_every": 2, "log_every": 1, "batch_size": 4}
    monkeypatch.setenv("LLN_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(bundled, "text", lambda: text[:30_000])
    monkeypatch.setattr(
        training.mlm, "configure", lambda *a, **given: configure(*a, **given | SIZES | counts)
    )
    cases = cost.cases(quick=True)
    monkeypatch.setattr(cost, "cases", lambda **_: [case for case in cases if case.N <= 1024])


def test_what_is_quick_is_as_the_rest_but_for_its_updates():
    quick, whole = (training.configuration("lln_diag", quick=each) for each in (True, False))
    assert (quick.train.steps, whole.train.steps) == (training.QUICK_STEPS, training.STEPS)
    assert (quick.layers, quick.length) == (whole.layers, whole.length)


def test_report_tables_and_files(tmp_path, small):
    console = Console(record=True, width=160, force_terminal=False)
    report = run(tmp_path / "demo", quick=True, console=console)
    html = report.read_text(encoding="utf-8")
    assert html.count("<svg") == 6 and html.count("<table") == 5
    printed = console.export_text()
    for kernel in concentration.KERNELS:
        assert kernel in printed and kernel in html
    assert "LLN+Diag" in printed and "ms/update" in printed
    assert "SDPA" in printed and str(report) in printed.replace("\n", "")
    with (report.parent / "cost.csv").open() as stream:
        impls = {row["impl"] for row in csv.DictReader(stream)}
    assert impls == {"matrix", "sdpa", "eager"}


@pytest.mark.slow
def test_a_run_beside_another_is_what_it_is_alone(tmp_path, monkeypatch):
    monkeypatch.setenv("LLN_CACHE", str(tmp_path / "cache"))
    labels, seen = ("softmax", "LLN+Diag"), []
    places = {label: tmp_path / label for label in labels}
    rows = dict(training._trained(places, True, 2, lambda *each: seen.append(each)))
    assert tuple(rows) == labels
    assert dict(seen) == dict.fromkeys(labels, training.QUICK_STEPS)
    alone = training._run("LLN+Diag", tmp_path / "alone", True)
    assert alone["loss"] == rows["LLN+Diag"]["loss"] != rows["softmax"]["loss"]
