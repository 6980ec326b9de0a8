"""Time and memory of a context that is read once: rows of a sweep."""

from __future__ import annotations

import pytest

from lln.records.rows import read_rows
from lln_study.paper.figures import sets as figure
from lln_study.paper.tables import sets
from lln_study.sweep import job as jobs
from lln_study.sweep.plan import plan
from lln_study.tasks import table_cost

SIZES = {"layers": 2, "width": 32, "heads": 2, "feed_forward": 64}


@pytest.mark.parametrize("attention", ["lln", "softmax"])
def test_the_cost_of_a_context_is_a_row(tmp_path, attention):
    spec = {"run": "table_cost", "attention": attention, "rows": [50, 10_000], **SIZES}
    (job,) = plan([spec], data=None, out=tmp_path, scratch=tmp_path / "scratch")
    assert len(job.keys) == 2 and not job.has_rows()
    for _ in range(2):  # what has its row is not measured again
        jobs.run(job.kind, job.spec, job.place)
    rows = read_rows(tmp_path / "table_cost.jsonl")
    assert [row["configuration"]["rows"] for row in rows] == [50, 10_000] and job.has_rows()
    assert all(row["remember_seconds"] > 0 and row["answer_ms"] > 0 for row in rows)
    grown = rows[1]["memory_mb"] / rows[0]["memory_mb"]
    assert grown == pytest.approx(1 if attention == "lln" else 200)
    (shown,) = sets.tables([*rows, {**rows[1], "out_of_memory": True}])
    assert shown.columns == ["", "50 rows", "10,000 rows"] and shown.lines[0][2] == "out of memory"
    drawn = figure.panels(rows)
    assert [list(panel.curves[0].x) for panel in drawn] == [[50, 10_000]] * 2
    assert drawn[1].curves[0].y == [row["memory_mb"] for row in rows]


def test_memory_that_ran_out_is_a_row_too(monkeypatch):
    def too_much(config, device):
        import torch

        raise torch.OutOfMemoryError

    monkeypatch.setattr(table_cost, "_measured", too_much)
    row = table_cost.run(table_cost.configure(attention="softmax", rows=10**6))
    assert row["out_of_memory"] and row["remember_seconds"] is None
    assert row["digest"] == table_cost.key(table_cost.configure(attention="softmax", rows=10**6))[0]


def test_wrong_settings_are_named():
    with pytest.raises(ValueError, match="rows=0"):
        table_cost.configure(rows=0)
    with pytest.raises(ValueError, match="'lln_diag' cannot"):
        table_cost.configure(attention="lln_diag")
