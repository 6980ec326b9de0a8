"""Kernels of causal blocks: lengths off every tile, masks, groups, widths, all gradients."""

from __future__ import annotations

import pytest
import torch

from lln.ops import reference
from lln.ops import triton as kernels
from lln.ops.window import mixed
from lln.protocols import Call
from tests.helpers import ADVERSARIAL, adversarial
from tests.ops.triton.compare import compare, inputs


def check(tensors, dtype, **options) -> None:
    compare(kernels.block_causal, reference.block_causal, tensors, dtype, floor=0.1, **options)


@pytest.mark.parametrize(
    "tokens, block, dtype",
    [
        (1, 16, torch.float32),
        (96, 48, torch.float16),  # whole tiles
        (100, 16, torch.float32),
        (100, 48, torch.float16),
        (100, 200, torch.float32),
    ],
)
def test_lengths(tokens, block, dtype, device):
    tensors = inputs(1, 1, tokens, width=16, device=device)
    check(tensors, dtype, causal_block=block)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_masks_groups_and_unequal_widths(dtype, device):
    mask = torch.rand(2, 90, device=device) > 0.3
    mask[0, :50] = False  # blocks that see nothing
    tensors = inputs(heads=2, queries=90, width=48, values=32, key_heads=1, device=device)
    check(tensors, dtype, causal_block=16, key_mask=mask)


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_no_input_overflows(name, device):
    q, k, v = (x.to(device) for x in adversarial(name, 80, 16, heads=1))
    two = torch.full((1, 1), 2.0, dtype=torch.float64, device=device)
    tensors = {"q": q, "k": k, "v": v, "alpha": two, "beta": two}
    compare(
        kernels.block_causal, reference.block_causal, tensors, torch.float32, floor=1.0,
        causal_block=16,
    )  # fmt: skip


def test_both_branches(device):
    tensors = inputs(queries=70, width=16, device=device)
    options = {"block": 16, "causal_block": 32, "is_causal": True, "scale": 0.25}
    compare(mixed.lln_diag, reference.lln_diag, tensors, torch.float32, floor=0.1, **options)


@pytest.mark.parametrize(
    "change, reason",
    [
        ({}, None),
        ({"causal_block": 15}, "causal_block=15"),
        ({"needs": frozenset({"dropout"})}, "dropout"),
        ({"k": torch.zeros(1, 1, 5, 64, dtype=torch.float16)}, "4 queries of 5 keys"),
        ({"op": "lln_diag", "block": 16}, "causal blocks are not fused"),
    ],
)
def test_refusals(change, reason, monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    q, k, v = torch.zeros(3, 1, 1, 4, 64, dtype=torch.float16)
    call = Call("block_causal", q, k, v, is_causal=True, causal_block=16)
    found = kernels.refuses(call._replace(**change))
    assert found is None if reason is None else reason in found
