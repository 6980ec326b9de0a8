"""causal_block= of the public functions: packed, in pieces, and what is refused."""

from __future__ import annotations

import functools

import pytest
import torch

import lln
from lln.ops import reference
from tests.helpers import random_qkv

SCALES = {"alpha": 1.3, "beta": 0.8}
LOCAL = [{}, {"diag_block": 4}, {"diag_block": 8, "mix": 0.3}]


@pytest.mark.parametrize("local", LOCAL)
def test_what_a_query_sees(local):
    """The matrix of attention, read off with v = identity, is zero where the rule says so."""
    q, k, _ = random_qkv(1, 2, 21)
    eye = torch.eye(21, dtype=torch.float64).expand(1, 2, 21, 21)
    p = lln.attention(q, k, eye, is_causal=True, causal_block=8, **SCALES, **local)
    torch.testing.assert_close(p.sum(-1), torch.ones_like(p[..., 0]))
    seen = reference.visible(21, 21, is_causal=True, causal_block=8)
    assert torch.equal(p > 0, seen.expand_as(p))


@pytest.mark.parametrize("local", LOCAL)
@pytest.mark.parametrize("impl", [None, "reference"])
def test_packed_is_one_by_one(local, impl):
    q, k, v = (x[0].transpose(0, 1) for x in random_qkv(1, 4, 60, 65, key_heads=2))
    cu_q, cu_k = torch.tensor([0, 20, 20, 43, 60]), torch.tensor([0, 20, 25, 50, 65])
    mask = torch.rand(65) > 0.3
    options = {"is_causal": True, "causal_block": 8, "impl": impl, **SCALES, **local}
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    out = lln.attention_varlen(*leaves, cu_q, cu_k, key_mask=mask, **options)
    d_out = torch.randn_like(out)
    packed = [out, *torch.autograd.grad(out, leaves, d_out)]
    leaves = [x.clone().requires_grad_() for x in (q, k, v)]
    single = []
    for s in range(4):
        rows, keys = slice(cu_q[s], cu_q[s + 1]), slice(cu_k[s], cu_k[s + 1])
        parts = zip(leaves, (rows, keys, keys), strict=True)
        one = (x[part].transpose(0, 1)[None] for x, part in parts)
        single.append(lln.attention(*one, key_mask=mask[None, keys], **options)[0].transpose(0, 1))
    out = torch.cat(single)
    for found, expected in zip(
        packed, [out, *torch.autograd.grad(out, leaves, d_out)], strict=True
    ):
        torch.testing.assert_close(found, expected)


@pytest.mark.parametrize("pieces", [[40], [8] * 5, [16, 8, 16]])
def test_a_stream_in_whole_blocks_is_the_stream(pieces):
    q, k, v = random_qkv(2, 4, 40, key_heads=2)
    mask = torch.rand(2, 40) > 0.3
    expected = lln.attention(q, k, v, is_causal=True, causal_block=8, key_mask=mask, **SCALES)
    found, state, start = [], None, 0
    for size in pieces:
        part = slice(start, start + size)
        tokens = (x[:, :, part] for x in (q, k, v))
        out, state = lln.prefill(
            *tokens, state, causal_block=8, key_mask=mask[:, part], **SCALES
        )  # fmt: skip
        found.append(out)
        start += size
    torch.testing.assert_close(torch.cat(found, 2), expected)


def test_the_last_block_of_a_stream_may_be_filled_up():
    """What the message says to do with a block that is not whole."""
    q, k, v = random_qkv(2, 2, 21)
    expected = lln.attention(q, k, v, is_causal=True, causal_block=8, **SCALES)
    first, state = lln.prefill(*(x[:, :, :16] for x in (q, k, v)), causal_block=8, **SCALES)
    last = [torch.nn.functional.pad(x[:, :, 16:], (0, 0, 0, 3)) for x in (q, k, v)]
    with pytest.raises(ValueError, match="a piece of 5 tokens cuts a block of causal_block=8"):
        lln.prefill(*(x[:, :, 16:] for x in (q, k, v)), state, causal_block=8, **SCALES)
    mask = (torch.arange(8) < 5).expand(2, -1)
    rest, _ = lln.prefill(*last, state, causal_block=8, key_mask=mask, **SCALES)
    torch.testing.assert_close(torch.cat([first, rest[:, :, :5]], 2), expected)


def test_a_block_may_be_computed_again_from_the_state_before_it():
    """As diffusion models denoise a block."""
    q, k, v = random_qkv(1, 2, 16)
    noisy = [x[:, :, 8:] + torch.randn(1, 2, 8, 8) for x in (q, k, v)]
    _, state = lln.prefill(*(x[:, :, :8] for x in (q, k, v)), causal_block=8, **SCALES)
    lln.prefill(*noisy, state, causal_block=8, **SCALES)
    out, _ = lln.prefill(*(x[:, :, 8:] for x in (q, k, v)), state, causal_block=8, **SCALES)
    whole = lln.attention(q, k, v, is_causal=True, causal_block=8, **SCALES)
    torch.testing.assert_close(out, whole[:, :, 8:])


def test_tokens_one_by_one_are_blocks_of_one():
    q, k, v = random_qkv(1, 2, 3)
    _, state = lln.prefill(q, k, v, **SCALES)
    one = [x[:, :, :1] for x in (q, k, v)]
    expected, _ = lln.prefill(*one, state, **SCALES)
    out, _ = lln.prefill(*one, state, causal_block=1, **SCALES)
    assert torch.equal(out, expected)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"causal_block": 8}, ValueError, "causal_block=8 is of causal attention"),
        ({"is_causal": True, "causal_block": 0}, ValueError, "causal_block=0 must be positive"),
        ({"is_causal": True, "causal_block": 2.0}, TypeError, "causal_block is a float"),
        ({"is_causal": True, "causal_block": True}, TypeError, "causal_block is a bool"),
        (
            {"is_causal": True, "causal_block": 8, "diag_block": 3},
            ValueError,
            "causal_block=8 is not a multiple of diag_block=3",
        ),
        (
            {"is_causal": True, "causal_block": 8, "diag_block": 16},
            ValueError,
            "causal_block=8 is not a multiple of diag_block=16",
        ),
        (
            {"is_causal": True, "causal_block": 8, "diag_block": 8, "diag_overlap": 2},
            ValueError,
            "causal_block=8 with diag_overlap=2, sinks=0 is not possible",
        ),
        (
            {"is_causal": True, "causal_block": 8, "diag_block": 8, "sinks": 1},
            ValueError,
            "causal_block=8 with diag_overlap=0, sinks=1 is not possible",
        ),
        (
            {"is_causal": True, "causal_block": 8, "diag_block": 8, "mix": "joint"},
            ValueError,
            "causal_block=8 with mix='joint' is not possible",
        ),
    ],
)
def test_what_is_refused(options, error, message):
    q, k, v = random_qkv(1, 1, 9)
    for call in (lln.attention, lln.which):
        scales = SCALES if call is lln.attention else {}
        with pytest.raises(error, match=message):
            call(q, k, v, **scales, **options)
    packed = (x[0].transpose(0, 1) for x in (q, k, v))
    with pytest.raises(error, match=message):
        lln.attention_varlen(*packed, torch.tensor([0, 9]), **SCALES, **options)


def test_statistics_over_the_whole_sequence_would_see_later_blocks():
    with pytest.raises(ValueError, match="is_causal=True needs alpha and beta"):
        lln.attention(*random_qkv(1, 1, 9), is_causal=True, causal_block=3)


def test_which_names_what_runs(monkeypatch):
    """On a CPU plain PyTorch; where kernels launch, they take blocks from 16 tokens on."""
    q, k, v = random_qkv(1, 1, 40, width=16, dtype=torch.float32)
    which = functools.partial(lln.which, q, k, v, is_causal=True)
    assert which(causal_block=16) == "eager"
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert which(causal_block=16) == "triton"
    assert which(causal_block=8) == "eager"
    assert which(causal_block=16, diag_block=16) == "mixed"
    assert which(causal_block=8, diag_block=8) == "eager"
    assert which(causal_block=1) == "triton"
    with pytest.raises(ValueError, match="causal_block=8; the kernels take 16 and more"):
        which(causal_block=8, impl="triton")
    packed = [x[0].transpose(0, 1) for x in (q, k, v)]
    assert lln.which(*packed, is_causal=True, causal_block=8) == "eager"


@pytest.mark.parametrize("local", LOCAL)
def test_exported_for_any_length(local):
    class Attention(torch.nn.Module):
        def forward(self, q, k, v):
            return lln.attention(q, k, v, is_causal=True, causal_block=8, **SCALES, **local)

    given = random_qkv(1, 2, 40, dtype=torch.float32)
    length = torch.export.Dim("length", min=2, max=1000)
    program = torch.export.export(
        Attention(), given, dynamic_shapes={name: {2: length} for name in "qkv"}
    )
    for tokens in (40, 17, 100):
        given = random_qkv(1, 2, tokens, dtype=torch.float32)
        torch.testing.assert_close(program.module()(*given), Attention()(*given))
