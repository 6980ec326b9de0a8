"""Kernels of a call: grouped, ordered, and shown on the page."""

from __future__ import annotations

import pytest
import torch

from lln.records import saved
from lln_study.bench import roberta, step
from lln_study.bench.cases import RUNNERS
from lln_study.bench.kernels import profile
from lln_study.bench.shapes import TOKENS
from lln_study.paper.pages.speed import BLOCKS


def test_kernels_are_summed_over_calls():
    events = [("read_kernel", 4.0), ("add", 30.0), ("add", 10.0)] * 2
    assert profile.by_kernel(events, 2) == [
        {"kernel": "add", "us": 40.0, "launches": 2},
        {"kernel": "read_kernel", "us": 4.0, "launches": 1},
    ]


@pytest.mark.parametrize(("op", "width"), profile.PROFILED)
def test_what_is_profiled_can_be_run(op, width):
    case = profile.case_of(op, width)
    assert (case.op, case.impl) in RUNNERS and width == case.D
    assert (TOKENS if width == 64 else TOKENS // 2) == case.B * case.N


def test_a_training_step_is_profiled_beside_sdpa(monkeypatch):
    cases = []

    def made(case):
        cases.append(case)
        return roberta.Step(torch.nn.Identity(), lambda: None)

    monkeypatch.setattr(step, "step_of", made)
    found = [(name, width) for name, width, _ in profile.calls_of([step.OP])]
    names = [f"roberta_step {impl}, N = 512" for impl in ("sdpa", "recommended")]
    assert found == [(name, 64) for name in names]
    assert [(case.impl, case.B) for case in cases] == [("sdpa", 32), ("recommended", 32)]


def test_an_unknown_op_is_named(tmp_path):
    with pytest.raises(ValueError, match="op='softmax' is not known; pass one of bidirectional"):
        profile.run(tmp_path, ops=["softmax"])


def test_the_page_sums_the_kernels_of_an_op(tmp_path):
    facts = {"device": "GPU", "torch": "2.0", "commit": "abc", "configuration": "N=1"}
    kernels = [("join_kernel", 30.0, 1), ("void at::add<8>", 5.0, 2), ("void at::mul", 6.0, 1)]
    rows = [
        {"op": op, "D": width, "kernel": name, "us": us, "launches": count, **facts}
        for name, us, count in kernels
        for op, width in (("near_far", 64), ("causal", 128), ("roberta_step sdpa", 64))
    ]
    saved.save_json({"rows": rows}, tmp_path, subject=profile.SUBJECT, device="cpu")
    page = BLOCKS["gpu_profile"](tmp_path)
    assert page.splitlines()[2:4] == ["| `near_far` | 41 |", ""]
    assert "No rows" in BLOCKS["gpu_profile"](tmp_path / "empty")


@pytest.mark.gpu
def test_a_call_is_profiled(tmp_path):
    path = profile.run(tmp_path, ops=["bidirectional"])
    text = path.read_text()
    assert "summarize_kernel" in text and "read_backward_kernel" in text
