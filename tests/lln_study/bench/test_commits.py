"""Two trees beside each other, here twice the same one."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch

from lln_study.bench import commits
from lln_study.bench.cases import Case
from lln_study.bench.shapes import FLOORS

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[3]


def test_both_run_every_case_and_an_error_is_told(tmp_path, monkeypatch):
    monkeypatch.setattr(commits, "SECONDS", 0.001)
    cases = [Case("bidirectional", "eager", 64), Case("causal", "triton", 64)]
    written = commits.run(ROOT, tmp_path, cases=cases, minutes=5.0)
    right, wrong = json.loads(written.read_text(encoding="utf-8"))["rows"]
    assert right["old_ms"] > 0 and right["new_ms"] > 0 and right["new_over_old"] > 0
    assert right["commit"] == right["old_commit"] and "turns of 0.001 s" in right["configuration"]
    assert "the tensors are on cpu" in wrong["error"]
    assert commits.table([right, wrong]).row_count == 2


def test_a_process_that_died_is_an_error():
    with commits.Commit(ROOT) as commit:
        commit._process.kill()
        commit._process.wait()
        assert "exit code -9" in commit.ask(case={})["error"]


def test_what_is_no_clone_is_refused(tmp_path):
    with pytest.raises(ValueError, match="is no clone"):
        commits.Commit(tmp_path)


def test_graphs_are_those_of_our_kernels(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit, match="there is no CUDA device"):
        commits.graphs(None)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    found = commits.graphs(["causal"])
    assert found and {case.op for case in found} == {"causal"}
    assert {case.op for case in commits.graphs(None)} <= {*FLOORS}
