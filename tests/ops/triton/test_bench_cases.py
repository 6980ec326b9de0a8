"""The cases of `lln bench gpu` that kernels take, at a small size: what is measured is right."""

from __future__ import annotations

import pytest
import torch

from lln_study.bench import check
from lln_study.bench.cases import Case


@pytest.mark.slow
@pytest.mark.parametrize(
    "op, impl, dtype",
    [
        ("near_far_slots", "triton", "float32"),
        ("lln_diag_causal", "triton", "float16"),  # whose blocks do not fit in float32
    ],
)
def test_a_case_agrees_with_its_definition(op, impl, dtype, device, monkeypatch):
    if not torch.cuda.is_available():
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setattr(check, "LENGTH", 140)  # two blocks of 128, the second cut short
    assert check.check([Case(op, impl, 512, D=16, dtype=dtype, device=device)]) == 1
