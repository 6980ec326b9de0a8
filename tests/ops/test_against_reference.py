"""Every eager op against the O(N²) reference in float64: outputs and all gradients."""

from __future__ import annotations

import pytest
import torch

from lln import Near
from lln.ops import reference
from lln.ops.causal.causal import causal
from lln.ops.linear.bidirectional import bidirectional
from lln.ops.window import lln_diag as lln_diag_op
from lln.ops.window.block_diagonal import block_diagonal
from tests.helpers import (
    LENGTHS,
    assert_matches,
    random_qkv,
    random_scales,
    run_with_grads,
    windowed,
)

lln_diag = windowed(lln_diag_op.lln_diag)

HALF = (torch.bfloat16, torch.float16)
OPS = {
    "bidirectional": (bidirectional, reference.bidirectional),
    "causal": (causal, reference.causal),
}


def compare(op, oracle, tensors, dtype, **options) -> None:
    """`op` in `dtype` against `oracle` in float64; the plain formula sets the tolerance."""
    d_out = torch.randn_like(oracle(**tensors, **options))
    rounded = {
        name: x.to(dtype) if name in "qkv" else x.to(torch.promote_types(dtype, torch.float32))
        for name, x in tensors.items()
    }
    exact_in = {name: x.double() for name, x in rounded.items()}
    exact = run_with_grads(lambda **t: oracle(**t, **options), exact_in, d_out.to(dtype).double())
    plain = run_with_grads(lambda **t: oracle(**t, **options), rounded, d_out.to(dtype))
    got = run_with_grads(lambda **t: op(**t, **options, impl="eager"), rounded, d_out.to(dtype))
    for name in exact:
        assert_matches(name, got[name], plain[name], exact[name], factor=4)


@pytest.mark.parametrize(
    "length, dtype",
    [
        *((length, dtype) for length in LENGTHS for dtype in (torch.float64, torch.float32)),
        *((length, dtype) for length in (100, 1) for dtype in HALF),
    ],
)
@pytest.mark.parametrize("name", OPS)
def test_lln(name, length, dtype):
    op, oracle = OPS[name]
    q, k, v = random_qkv(2, 4, length, width=16, value_width=12, key_heads=2)
    alpha, beta = random_scales(2, 4, 2)
    mask = torch.rand(2, length) > 0.3
    tensors = {"q": q, "k": k, "v": v, "alpha": alpha, "beta": beta}
    compare(op, oracle, tensors, dtype, key_mask=mask)


@pytest.mark.parametrize("queries, keys", [(5, 100), (70, 100), (100, 30), (0, 9), (9, 0), (0, 0)])
@pytest.mark.parametrize("name", OPS)
def test_cross_attention_is_aligned_bottom_right(name, queries, keys):
    op, oracle = OPS[name]
    q, k, v = random_qkv(2, 2, queries, keys)
    alpha, beta = random_scales(2, 2, 2)
    tensors = {"q": q, "k": k, "v": v, "alpha": alpha, "beta": beta}
    compare(op, oracle, tensors, torch.float64, key_mask=torch.rand(2, keys) > 0.3)


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "queries, keys", [(1, 1), (100, 100), (37, 100), (100, 37), (0, 5), (5, 0)]
)
@pytest.mark.parametrize("block", [1, 16, 64, 1000])
def test_block_diagonal(block, queries, keys, is_causal):
    q, k, v = random_qkv(2, 4, queries, keys, value_width=5, key_heads=2)
    mask = torch.rand(2, keys) > 0.5
    options = {"block": block, "scale": 0.4, "key_mask": mask, "is_causal": is_causal}
    compare(
        block_diagonal, reference.block_diagonal, {"q": q, "k": k, "v": v}, torch.float64, **options
    )


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("queries, keys", [(100, 100), (37, 100), (100, 37)])
@pytest.mark.parametrize("is_causal", [False, True])
def test_lln_diag(is_causal, queries, keys, dtype):
    q, k, v = random_qkv(2, 4, queries, keys, key_heads=2)
    alpha, beta = random_scales(2, 4, 2)
    tensors = {"q": q, "k": k, "v": v, "alpha": alpha, "beta": beta}
    options = {"block": 16, "scale": 0.4, "is_causal": is_causal}
    compare(lln_diag, reference.lln_diag, tensors, dtype, **options)


@pytest.mark.parametrize("is_causal", [False, True])
def test_the_reference_masks_both_branches(is_causal):
    q, k, v = random_qkv(2, 4, 40, key_heads=2)
    alpha, beta = random_scales(2, 4, 2)
    mask = torch.rand(2, 40) > 0.5
    options = {"block": 16, "scale": 0.4, "key_mask": mask, "is_causal": is_causal}
    linear = OPS["causal" if is_causal else "bidirectional"][1]
    expected = linear(q, k, v, alpha=alpha, beta=beta, key_mask=mask)
    expected = (expected + reference.block_diagonal(q, k, v, **options)) / 2
    for op in (reference.lln_diag, lln_diag):
        torch.testing.assert_close(op(q, k, v, alpha=alpha, beta=beta, **options), expected)


def test_learned_mix_moves_between_the_branches():
    q, k, v = random_qkv(2, 3, 40)
    alpha, beta = random_scales(2, 3, 3)
    linear = bidirectional(q, k, v, alpha=alpha, beta=beta)
    local = block_diagonal(q, k, v, block=16, scale=0.4)
    mix = torch.tensor([0.0, 0.3, 1.0], dtype=torch.float64, requires_grad=True)
    out = lln_diag(q, k, v, alpha=alpha, beta=beta, near=Near(16, scale=0.4), mix=mix)
    expected = mix[:, None, None] * linear + (1 - mix[:, None, None]) * local
    torch.testing.assert_close(out, expected)
    d_out = torch.randn_like(out)
    (gradient,) = torch.autograd.grad(out, mix, d_out)
    torch.testing.assert_close(gradient, (d_out * (linear - local)).sum((0, 2, 3)))


@pytest.mark.parametrize("is_causal", [False, True])
def test_slot_dropout_drops_whole_slots_after_normalisation(is_causal):
    q, k, v = random_qkv(2, 2, 70)
    alpha, beta = random_scales(2, 2, 2)
    keep = (torch.rand(2, 2, 70, 8) > 0.4).double() / 0.6
    features = beta[..., None, None] * k
    scores = (alpha[..., None, None] * q)[:, :, :, None, :] + features[:, :, None, :, :]
    if is_causal:
        seen = torch.ones(70, 70, dtype=torch.bool).tril()[None, None, :, :, None]
        scores = scores.masked_fill(~seen, -torch.inf)
    weights = torch.softmax(scores.flatten(3), dim=-1).unflatten(3, (70, 8))
    expected = torch.einsum("bhijl,bhil,bhje->bhie", weights, keep, v)
    tensors = {"q": q, "k": k, "v": v, "alpha": alpha, "beta": beta}
    op = causal if is_causal else bidirectional
    torch.testing.assert_close(op(**tensors, slot_dropout=keep), expected)
    inputs = [x[:1, :1, :9] if x.dim() == 4 else x[:1, :1] for x in tensors.values()]
    small = [x.clone().requires_grad_() for x in inputs]
    assert torch.autograd.gradcheck(
        lambda q, k, v, a, b: op(q, k, v, alpha=a, beta=b, slot_dropout=keep[:1, :1, :9]), small
    )


def test_probability_dropout_of_the_blocks():
    q, k, v = random_qkv(1, 2, 40)
    keep = (torch.rand(1, 2, 40, 16) > 0.4).double() / 0.6
    p = reference.block_diagonal_matrix(q, k, block=16, scale=0.4)
    expected = torch.zeros_like(v)
    for start in (0, 16, 32):
        rows = slice(start, min(start + 16, 40))
        dropped = p[:, :, rows, rows] * keep[:, :, rows, : rows.stop - start]
        expected[:, :, rows] = dropped @ v[:, :, rows]
    options = {"block": 16, "scale": 0.4, "probability_dropout": keep}
    torch.testing.assert_close(block_diagonal(q, k, v, **options), expected)
    small = [x[:, :1].clone().requires_grad_() for x in (q, k, v)]
    options["probability_dropout"] = keep[:, :1]
    assert torch.autograd.gradcheck(lambda q, k, v: block_diagonal(q, k, v, **options), small)
