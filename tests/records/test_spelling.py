"""Names of stored rows: today's options have the digests that rows were stored with."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from lln.records.rows import read_rows
from lln.records.spelling import as_given, as_stored

RESULTS = Path(__file__).resolve().parents[2] / "results"


def test_every_stored_configuration_is_the_same_after_it_was_given_today():
    found = [row["configuration"] for path in RESULTS.rglob("*.jsonl") for row in read_rows(path)
             if "configuration" in row]  # fmt: skip
    old = [configuration for configuration in found if "diag_block" in json.dumps(configuration)]
    assert len(found) > 500 and len(old) > 100
    for configuration in found:
        stored = as_stored(as_given(configuration))
        assert as_stored(as_given(stored)) == stored
    assert all(as_stored(as_given(configuration)) == configuration for configuration in old)
    assert not [each for each in old if "diag_" in json.dumps(as_given(each))]


@pytest.mark.parametrize(
    "attention, given, stored",
    [
        ("lln_diag", {"near": 8}, {"diag_block": 8}),
        ("lln_nearfar", {"near": {"block": 8, "joint": True}}, {"diag_block": 8}),
        ("lln_diag", {"near": {"block": 8, "joint": True}}, {"diag_block": 8, "mix": "joint"}),
        (
            "lln_diag",
            {"conv": 3, "near": {"block": 8, "overlap": 4, "sinks": 2, "scale": None}},
            {"conv": 3, "diag_block": 8, "diag_overlap": 4, "sinks": 2},
        ),
        ("softmax", {"conv": 3}, {"conv": 3}),
        ("lln_diag", {"near": None}, {"near": None}),
    ],
)
def test_options_by_their_stored_names(attention, given, stored):
    run = {"attention": attention, "options": given, "steps": 3}
    wanted = {"attention": attention, "options": stored, "steps": 3}
    assert as_stored(run) == wanted
    assert as_stored({"pretrained": run}) == {"pretrained": wanted}
