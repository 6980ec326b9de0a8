"""What must hold for near and far keys under one normaliser, whatever the windows.

`make fuzz` runs the same properties with thousands of cases each (HYPOTHESIS_PROFILE=fuzz).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import lln
from tests import properties
from tests.properties import SIZES, check_definition, check_masks_and_batches, check_packed, close


@dataclass(frozen=True)
class Case(properties.Case):
    """Windows, and features of the far keys."""

    slots: int | None
    is_causal: bool
    block: int
    overlap: int
    sinks: int
    mix: Any

    @property
    def options(self) -> dict[str, Any]:
        given = {
            "alpha": 1.3,
            "beta": 0.8,
            "is_causal": self.is_causal,
            "near": self.near,
            "normalize_keys": self.normalize_keys,
        }
        return given | ({"gamma": -0.7} if self.mix == "joint" else {"mix": self.mix})

    @property
    def near(self) -> lln.Near:
        joint = self.mix == "joint"
        return lln.Near(self.block, overlap=self.overlap, sinks=self.sinks, joint=joint)

    def features(self, q: Tensor, k: Tensor) -> dict[str, Any]:
        if self.slots is None:
            return {}
        generator = torch.Generator().manual_seed(self.seed + 1)
        maps = torch.randn(4, self.slots, generator=generator, dtype=torch.float64)
        return {"features": (q @ maps, k @ maps)}


cases = st.builds(
    Case,
    **SIZES,
    slots=st.sampled_from([None, 1, 7]),
    is_causal=st.booleans(),
    block=st.sampled_from([1, 3, 8, 64]),
    overlap=st.sampled_from([0, 1, 5, 20]),
    sinks=st.sampled_from([0, 1, 4]),
    mix=st.sampled_from(["joint", "joint", "average", 0.3]),
)


@given(cases)
def test_linear_time_is_the_definition(case):
    check_definition(case)


@given(cases)
def test_masked_content_and_other_samples_change_nothing(case):
    check_masks_and_batches(case)


@given(cases)
def test_the_future_changes_nothing(case):
    q, k, v, mask = case.tensors()
    options = {**case.options, "is_causal": True}
    cut = min(case.queries, case.keys) // 2
    later = slice(case.keys - cut, None)
    other_k, other_v = k.clone(), v.clone()
    other_k[:, :, later], other_v[:, :, later] = -3.0, 5.0
    seen = case.queries - cut
    out = lln.attention(q, k, v, key_mask=mask, **options)[:, :, :seen]
    close(lln.attention(q, other_k, other_v, key_mask=mask, **options)[:, :, :seen], out)


@given(cases, st.integers(1, 3))
def test_packed_is_one_by_one(case, sequences):
    check_packed(case, sequences)


@given(cases)
def test_measured_levels_are_finite_and_their_rows_sum_to_one(case):
    q, k, _, mask = case.tensors()
    ones = k.new_ones((*k.shape[:3], 1))
    near = lln.Near(case.block, overlap=case.overlap, sinks=case.sinks, joint=True)
    rows = lln.attention(q, k, ones, key_mask=mask, method="entropy", near=near)
    assert ((rows - 1).abs().minimum(rows.abs()) < 1e-9).all()
