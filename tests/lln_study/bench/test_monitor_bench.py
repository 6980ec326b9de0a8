"""`lln bench monitor`: complete rows; how long it takes is no test."""

from __future__ import annotations

import json

import pytest

from lln_study.bench import monitor


def test_rows_hold_both_kinds_of_step(tmp_path, monkeypatch):
    small = monitor.Setting(layers=1, width=16, heads=2, batch=2, tokens=16, vocabulary=50)
    monkeypatch.setattr(monitor, "Setting", lambda: small)
    path = monitor.run(tmp_path, steps=3)
    rows = json.loads(path.read_text())["rows"]
    assert [row["mechanism"] for row in rows] == ["softmax", "lln_diag"]
    for row in rows:
        assert row["commit"] and row["device"] and "1 layers of 16" in row["configuration"]
        added = (row["watched_ms"] - row["step_ms"]) / (100 * row["step_ms"])
        assert row["share"] == pytest.approx(added, abs=1e-4)
