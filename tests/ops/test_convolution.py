"""The convolution over tokens against torch's depth-wise one."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from lln.ops import convolution
from lln.ops.convolution import band, convolve_next, convolve_tokens, last_values
from tests.helpers import relative_error


def depthwise(v, weight, causal=False):
    before = weight.shape[1] - 1 if causal else weight.shape[1] // 2
    padded = F.pad(v, (0, 0, before, weight.shape[1] - 1 - before))
    return F.conv2d(padded, weight[:, None, :, None], groups=v.shape[1])


CENTRED = [(taps, False) for taps in (1, 3, 33, 65, 101)]
CAUSAL = [(taps, True) for taps in (1, 4, 33, 64)]


@pytest.mark.parametrize(("taps", "causal"), CENTRED + CAUSAL)
@pytest.mark.parametrize("tokens", [1, 2, 31, 32, 33, 64, 200])
def test_output_and_gradients_are_those_of_torch(taps, causal, tokens):
    v = torch.randn(2, 3, tokens, 5, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, taps, dtype=torch.float64, requires_grad=True)
    d_out = torch.randn_like(v)
    out, exact = convolve_tokens(v, weight, causal=causal), depthwise(v, weight, causal)
    torch.testing.assert_close(out, exact)
    got = torch.autograd.grad(out, (v, weight), d_out)
    torch.testing.assert_close(got, torch.autograd.grad(exact, (v, weight), d_out))


@pytest.mark.parametrize("taps", [1, 4, 33])
@pytest.mark.parametrize("pieces", [[1] * 7, [3, 1, 3], [40, 1, 2], [2, 60]])
def test_a_stream_in_pieces_is_the_same(taps, pieces):
    v, weight = torch.randn(2, 3, sum(pieces), 5, dtype=torch.float64), torch.randn(3, taps)
    past, found = v.new_zeros(2, 3, taps - 1, 5), []
    for piece in v.split(pieces, dim=2):
        found.append(convolve_next(piece, weight, past))
        past = last_values(piece, past)
    torch.testing.assert_close(torch.cat(found, 2), depthwise(v, weight.double(), causal=True))


@pytest.mark.parametrize(("dtype", "limit"), [(torch.float16, 1e-3), (torch.bfloat16, 8e-3)])
def test_half_precision(dtype, limit):
    v, weight = torch.randn(2, 3, 100, 16).to(dtype), torch.randn(3, 33).to(dtype)
    got = convolve_tokens(v, weight)
    assert got.dtype == dtype
    assert relative_error(got, depthwise(v.double(), weight.double())) < limit


@pytest.mark.parametrize("heads", [1, 2, 3])
def test_some_heads_at_a_time(heads, monkeypatch):
    v = torch.randn(2, 3, 50, 8, dtype=torch.float64, requires_grad=True)
    weight = torch.randn(3, 9, dtype=torch.float64, requires_grad=True)
    d_out, taken = torch.randn_like(v), []
    whole = convolution._by_blocks(v, weight, 4)
    expected = torch.autograd.grad(whole, (v, weight), d_out)

    def spy(v, weight, before):
        taken.append(v.shape[1])
        return by_blocks(v, weight, before)

    by_blocks = convolution._by_blocks
    monkeypatch.setattr(convolution, "_by_blocks", spy)
    monkeypatch.setattr(convolution, "MOST_BYTES", v[:, :1].numel() * 8 * 2)
    monkeypatch.setattr(convolution, "PIECE_BYTES", v[:, :1].numel() * 8 * heads)
    out = convolve_tokens(v, weight)
    assert taken == {1: [1, 1, 1], 2: [2, 1], 3: [3]}[heads]
    torch.testing.assert_close(out, whole)
    torch.testing.assert_close(torch.autograd.grad(out, (v, weight), d_out), expected)


def test_nothing_gives_nothing():
    assert convolve_tokens(torch.zeros(2, 3, 0, 4), torch.ones(3, 5)).shape == (2, 3, 0, 4)


def test_strided_values():
    v = torch.randn(2, 70, 3, 8).transpose(1, 2)
    weight = torch.randn(3, 9)
    torch.testing.assert_close(convolve_tokens(v, weight), depthwise(v, weight))


def test_the_band():
    (matrix,) = band(torch.tensor([[1.0, 2.0, 3.0]]), 2)
    assert matrix.tolist() == [[1.0, 2.0, 3.0, 0.0], [0.0, 1.0, 2.0, 3.0]]
