"""What must hold for causal attention across blocks, whatever the blocks.

`make fuzz` runs the same properties with thousands of cases each (HYPOTHESIS_PROFILE=fuzz).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from hypothesis import given
from hypothesis import strategies as st

import lln
from tests import properties
from tests.properties import SIZES, check_definition, check_masks_and_batches, close


@dataclass(frozen=True)
class Case(properties.Case):
    """Blocks, and whether there are blocks of softmax in them."""

    near: int | None
    multiple: int
    mix: Any

    @property
    def block(self) -> int:
        return (self.near or 1) * self.multiple

    @property
    def linear(self) -> dict[str, Any]:
        return {"alpha": 1.3, "beta": 0.8, "normalize_keys": self.normalize_keys}

    @property
    def options(self) -> dict[str, Any]:
        given = {**self.linear, "is_causal": True, "causal_block": self.block}
        if self.near is not None:
            given |= {"near": self.near, "mix": self.mix}
        return given


cases = st.builds(
    Case,
    **SIZES,
    near=st.sampled_from([None, 2, 3, 8]),
    multiple=st.sampled_from([1, 2, 3, 64]),
    mix=st.sampled_from(["average", 0.3]),
)


@given(cases)
def test_linear_time_is_the_definition(case):
    check_definition(case)


@given(cases)
def test_each_block_is_bidirectional_attention_over_the_keys_up_to_its_end(case):
    q, k, v, mask = case.tensors()
    options = {**case.options, "near": None, "mix": "average"}
    out = lln.attention(q, k, v, key_mask=mask, **options)
    position = torch.arange(case.queries) + case.keys - case.queries
    for block in position.div(case.block, rounding_mode="floor").unique().tolist():
        rows = position.div(case.block, rounding_mode="floor") == block
        end = min(max((block + 1) * case.block, 0), case.keys)
        part = k[:, :, :end], v[:, :, :end]
        close(
            out[:, :, rows],
            lln.attention(q[:, :, rows], *part, key_mask=mask[:, :end], **case.linear),
        )


@given(cases)
def test_masked_content_and_other_samples_change_nothing(case):
    check_masks_and_batches(case)


@given(cases, st.integers(0, 5))
def test_later_blocks_change_nothing(case, first):
    q, k, v, mask = case.tensors()
    later = slice(min(first * case.block, case.keys), None)
    others = [x.clone() for x in (q, k, v)]
    seen = min(max(first * case.block - case.keys + case.queries, 0), case.queries)
    for x, part in zip(others, (slice(seen, None), later, later), strict=True):
        x[:, :, part] = 7.0
    out = lln.attention(q, k, v, key_mask=mask, **case.options)[:, :, :seen]
    close(lln.attention(*others, key_mask=mask, **case.options)[:, :, :seen], out)
