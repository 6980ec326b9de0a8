"""Blocks by torch's fused attention are those computed a group at a time, gradients included."""

from __future__ import annotations

import sys

import pytest
import torch

from lln.ops import eager
from lln.ops.common.arguments import exported_for_any
from lln.ops.window import fused_blocks

LENGTHS = {"equal": (48, 48), "cut": (45, 45), "more keys": (20, 53), "more queries": (53, 20)}


def inputs(queries: int, keys: int, *, group: int = 1, inside: bool = False, dtype=torch.float64):
    """Heads outside of tokens in memory, or inside as a projection leaves them."""

    def tensor(heads: int, tokens: int) -> torch.Tensor:
        shape = (2, tokens, heads, 8) if inside else (2, heads, tokens, 8)
        x = torch.randn(shape, dtype=dtype)
        return (x.transpose(1, 2) if inside else x).requires_grad_()

    torch.manual_seed(0)
    return tensor(4, queries), tensor(4 // group, keys), tensor(4 // group, keys)


def both(q, k, v, mask, block, is_causal):
    options = {"block": block, "scale": 0.3, "key_mask": mask, "is_causal": is_causal}
    fused = fused_blocks.attend_in_blocks(q, k, v, wide=True, **options)
    grouped = eager.near(q, k, v, wide=True, **options)
    upstream = torch.randn_like(fused)
    return [(out, *torch.autograd.grad(out, (q, k, v), upstream)) for out in (fused, grouped)]


@pytest.mark.parametrize("lengths", LENGTHS)
@pytest.mark.parametrize("is_causal", [False, True], ids=["full", "causal"])
@pytest.mark.parametrize("masked", [False, True], ids=["whole", "masked"])
@pytest.mark.parametrize("block", [1, 16, 64])
def test_outputs_and_gradients(lengths, is_causal, masked, block):
    queries, keys = LENGTHS[lengths]
    q, k, v = inputs(queries, keys)
    mask = None
    if masked:
        mask = torch.rand(2, keys) < 0.6
        mask[0, :17] = False  # a whole block, and causal rows that see nothing of theirs
    for fused, grouped in zip(*both(q, k, v, mask, block, is_causal), strict=True):
        torch.testing.assert_close(fused, grouped, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("inside", [False, True], ids=["heads outside", "heads inside"])
@pytest.mark.parametrize("group", [1, 2])
def test_any_memory_order_and_grouped_heads(inside, group):
    q, k, v = inputs(48, 48, group=group, inside=inside)
    for fused, grouped in zip(*both(q, k, v, None, 16, False), strict=True):
        torch.testing.assert_close(fused, grouped, rtol=1e-10, atol=1e-12)


def test_hidden_keys_never_matter():
    q, k, v = inputs(48, 48)
    mask = torch.rand(2, 48) < 0.6
    mask[:, 16:32] = False
    clean, _ = both(q, k, v, mask, 16, False)
    with torch.no_grad():
        k.masked_fill_(~mask[:, None, :, None], torch.nan)
        v.masked_fill_(~mask[:, None, :, None], torch.inf)
    dirty, _ = both(q, k, v, mask, 16, False)
    assert torch.equal(dirty[0], clean[0])
    assert all(x.isfinite().all() for x in dirty)
    assert (dirty[0][:, :, 16:32] == 0).all()


def test_half_precision_is_computed_in_float32_under_autocast_too():
    q, k, v = (x.detach().bfloat16() for x in inputs(48, 48))
    wide = fused_blocks.attend_in_blocks
    options = {"block": 16, "scale": 0.3, "key_mask": None, "is_causal": False, "wide": True}
    exact = wide(q.double(), k.double(), v.double(), **options)
    with torch.autocast("cpu", torch.bfloat16):
        found = wide(q, k, v, **options)
    assert found.dtype == torch.float32
    torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-6)


def test_what_torch_has_no_kernel_for_goes_the_other_way(monkeypatch):
    q, k, v = (x.detach() for x in inputs(48, 48))
    options = {"block": 16, "scale": 0.3}
    expected = eager.near(q, k, v, **options)
    torch.testing.assert_close(eager.block_diagonal(q, k, v, **options), expected)

    def never(*_, **__):
        raise AssertionError("not for these")

    monkeypatch.setattr(fused_blocks, "attend_in_blocks", never)
    drop = torch.ones(2, 4, 48, 16, dtype=q.dtype)
    eager.block_diagonal(q, k, v, probability_dropout=drop, **options)
    eager.block_diagonal(q, k, v[..., :5], **options)  # values of another width
    eager.block_diagonal(q[:, :, :0], k, v, **options)  # no query
    eager.block_diagonal(q.to("meta"), k.to("meta"), v.to("meta"), **options)
    with pytest.raises(AssertionError, match="not for these"):
        eager.block_diagonal(q, k, v, **options)


@pytest.mark.parametrize("queries, keys", [(48, 20), (20, 48), (48, 48)])
def test_programs_for_every_length_are_not_cut_into_blocks(queries, keys, monkeypatch):
    q, k, v = (x.detach() for x in inputs(queries, keys))
    assert fused_blocks.takes(q, k, v, None)
    monkeypatch.setattr(fused_blocks, "exported_for_any", lambda size: size == 48)
    assert not fused_blocks.takes(q, k, v, None)


def test_an_open_size_is_told_from_a_number(monkeypatch):
    size = torch.SymInt(None)
    assert not exported_for_any(size)
    monkeypatch.setattr(torch.compiler, "is_exporting", lambda: True, raising=False)
    assert exported_for_any(size) and not exported_for_any(48)


@pytest.mark.parametrize("is_causal", [False, True])
def test_groups_of_one_block_are_the_whole(is_causal, monkeypatch):
    """What is too large for one group is cut down to single blocks."""
    q, k, v = (torch.randn(2, 3, 70, 8, dtype=torch.float64) for _ in range(3))
    mask = torch.rand(2, 70) > 0.3
    options = {"block": 16, "scale": 0.3, "key_mask": mask, "is_causal": is_causal}
    whole = eager.near(q, k, v, **options)
    monkeypatch.setattr(sys.modules["lln.ops.window.eager_near"], "_GROUP_ELEMENTS", 1)
    torch.testing.assert_close(eager.near(q, k, v, **options), whole)
