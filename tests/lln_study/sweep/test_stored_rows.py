"""Stored rows are found by today's options: no change of names makes a sweep run them again."""

from __future__ import annotations

import dataclasses
from collections import Counter
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from lln.records.rows import read_rows
from lln.records.spelling import as_given
from lln_study.train.config import TrainConfig

pytestmark = pytest.mark.slow

RESULTS = Path(__file__).resolve().parents[3] / "results"
FIELDS = {field.name for field in dataclasses.fields(TrainConfig)}
#: What a fine-tuning has of its own; its steps and schedule follow from the number of examples.
OF_GLUE = ("attention", "options", "batch_size", "weight_decay", "precision")


def digest(row: Mapping[str, Any]) -> str:
    """The digest that a sweep gives the run of a row, its options said as they are today."""
    given = as_given(row["configuration"])
    own = {name: given[name] for name in FIELDS & given.keys()}
    settings = {name: value for name, value in given.items() if name not in FIELDS}
    if row["subject"] == "step":
        settings |= {"compiled": own["compile"], "recorded": own["graph"]}
    if row["subject"] == "glue":
        del settings["pretrained"]
        own = {name: own[name] for name in OF_GLUE} | {"learning_rate": given["rates"][0]}
    return TrainConfig(**own).digest(settings)


def test_every_stored_row_is_found():
    rows = [(path.name, row) for path in sorted(RESULTS.rglob("*.jsonl"))
            for row in read_rows(path) if "digest" in row and "configuration" in row]  # fmt: skip
    trained = [(name, row) for name, row in rows if row["subject"] != "conversion"]
    lost = [(name, row["mechanism"], row["digest"])
            for name, row in trained if digest(row) != row["digest"]]  # fmt: skip
    print(Counter(row["subject"] for _, row in trained))
    assert len(trained) > 700
    assert not lost
