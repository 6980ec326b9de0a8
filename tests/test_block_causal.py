"""causal_block= of the public functions, and what is refused."""

from __future__ import annotations

import functools

import pytest
import torch

import lln
from lln.ops import reference
from tests.helpers import random_qkv

SCALES = {"alpha": 1.3, "beta": 0.8}
LOCAL = [{}, {"near": 4}, {"near": 8, "mix": 0.3}]


@pytest.mark.parametrize("local", LOCAL)
def test_what_a_query_sees(local):
    """The matrix of attention, read off with v = identity, is zero where the rule says so."""
    q, k, _ = random_qkv(1, 2, 21)
    eye = torch.eye(21, dtype=torch.float64).expand(1, 2, 21, 21)
    p = lln.attention(q, k, eye, is_causal=True, causal_block=8, **SCALES, **local)
    torch.testing.assert_close(p.sum(-1), torch.ones_like(p[..., 0]))
    seen = reference.visible(21, 21, is_causal=True, causal_block=8)
    assert torch.equal(p > 0, seen.expand_as(p))


def test_a_stream_of_blocks_by_its_states():
    """Each block reads the state up to its own end; again from the state before, as it changes."""
    q, k, v = random_qkv(2, 4, 21, key_heads=2)
    expected = lln.attention(q, k, v, is_causal=True, causal_block=8, **SCALES)
    alpha, beta = SCALES["alpha"], SCALES["beta"]
    found, state = [], lln.State.empty(2, 2, 8, dtype=torch.float64)
    for part in (slice(0, 8), slice(8, 16), slice(16, 21)):
        noisy = state.merge(lln.summarize(k[:, :, part] + 1, v[:, :, part] - 1, beta=beta))
        lln.read(q[:, :, part], noisy, alpha=alpha)
        state = state.merge(lln.summarize(k[:, :, part], v[:, :, part], beta=beta))
        found.append(lln.read(q[:, :, part], state, alpha=alpha))
    torch.testing.assert_close(torch.cat(found, 2), expected)


@pytest.mark.parametrize(
    "options, error, message",
    [
        ({"causal_block": 8}, ValueError, "causal_block=8 is of causal attention"),
        ({"is_causal": True, "causal_block": 0}, ValueError, "causal_block=0 must be positive"),
        ({"is_causal": True, "causal_block": 2.0}, TypeError, "causal_block is a float"),
        ({"is_causal": True, "causal_block": True}, TypeError, "causal_block is a bool"),
        (
            {"is_causal": True, "causal_block": 8, "near": 3},
            ValueError,
            "causal_block=8 is not a multiple of the blocks of near, 3",
        ),
        (
            {"is_causal": True, "causal_block": 8, "near": 16},
            ValueError,
            "causal_block=8 is not a multiple of the blocks of near, 16",
        ),
        (
            {"is_causal": True, "causal_block": 8, "near": lln.Near(8, overlap=2)},
            ValueError,
            "causal_block=8 with overlap=2, sinks=0 of near is not possible",
        ),
        (
            {"is_causal": True, "causal_block": 8, "near": lln.Near(8, sinks=1)},
            ValueError,
            "causal_block=8 with overlap=0, sinks=1 of near is not possible",
        ),
        (
            {"is_causal": True, "causal_block": 8, "near": lln.Near(8, joint=True)},
            ValueError,
            "causal_block=8 with one normaliser for both branches is not possible",
        ),
    ],
)
def test_what_is_refused(options, error, message):
    q, k, v = random_qkv(1, 1, 9)
    for call in (lln.attention, lln.which):
        scales = SCALES if call is lln.attention else {}
        with pytest.raises(error, match=message):
            call(q, k, v, **scales, **options)


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
    assert which(causal_block=16, near=16) == "mixed"
    assert which(causal_block=8, near=8) == "eager"
    assert which(causal_block=1) == "triton"
    with pytest.raises(ValueError, match="causal_block=8; the kernels take 16 and more"):
        which(causal_block=8, impl="triton")


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
