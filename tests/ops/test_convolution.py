"""The convolution over tokens against torch's depth-wise one."""

from __future__ import annotations

import sys

import pytest
import torch
import torch.nn.functional as F

from lln.ops.common import threads
from lln.ops.taps.convolution import band, convolve_next, convolve_tokens, last_values
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


def pair(tokens, taps=9, dtype=torch.float64):
    v = torch.randn(2, 3, tokens, 8, dtype=dtype, requires_grad=True)
    return v, torch.randn(3, taps, dtype=dtype, requires_grad=True), torch.randn_like(v)


@pytest.mark.parametrize("taps", [1, 9, 33, 65])
@pytest.mark.parametrize("tokens", [63, 64, 200])
def test_chunks_of_tokens_see_their_neighbours(taps, tokens, monkeypatch):
    """On a CPU tokens go through in chunks, here of one block each."""
    monkeypatch.setattr(sys.modules["lln.ops.common.features"], "CHUNK_ELEMENTS", 1)
    v, weight, d_out = pair(tokens, taps)
    out, exact = convolve_tokens(v, weight), depthwise(v, weight)
    torch.testing.assert_close(out, exact)
    got = torch.autograd.grad(out, (v, weight), d_out)
    torch.testing.assert_close(got, torch.autograd.grad(exact, (v, weight), d_out))


def test_numbers_do_not_depend_on_threads(monkeypatch):
    monkeypatch.setattr(threads, "SHARED_ELEMENTS", 1 << 8)
    monkeypatch.setattr(threads, "LEAST_ELEMENTS", 1 << 8)
    before, found = torch.get_num_threads(), []
    v, weight, d_out = pair(100, dtype=torch.float32)
    for count in (1, 2, 3):
        threads._steps.cache_clear()
        torch.set_num_threads(count)
        out = convolve_tokens(v, weight)
        found.append((out, *torch.autograd.grad(out, (v, weight), d_out)))
    threads._steps.cache_clear()
    torch.set_num_threads(before)
    for other in found[1:]:
        assert all(torch.equal(*both) for both in zip(found[0], other, strict=True))


def test_every_sample_of_a_vmap_has_its_filters():
    v, weights = torch.randn(4, 2, 3, 50, 8), torch.randn(4, 3, 9)

    def loss(weight, v):
        return convolve_tokens(v, weight).square().sum()

    expected = [torch.func.grad(loss)(weight, x) for weight, x in zip(weights, v, strict=True)]
    got = torch.func.vmap(torch.func.grad(loss))(weights, v)
    torch.testing.assert_close(got, torch.stack(expected))


@pytest.mark.filterwarnings("ignore:.torch.jit.script. is deprecated")  # torch's own, in jvp
def test_the_definition_has_all_derivatives():
    """As the error of the quick way says."""
    v, weight, d_out = pair(40)

    def along(impl):
        return torch.func.jvp(lambda x: convolve_tokens(x, weight, impl=impl), (v,), (d_out,))[1]

    torch.testing.assert_close(along("reference"), depthwise(d_out, weight))
    with pytest.raises(NotImplementedError, match=r'forward-mode.*impl="reference"'):
        along(None)
    assert torch.autograd.gradgradcheck(
        lambda *x: convolve_tokens(*x, impl="reference"), (v[:1, :, :4], weight)
    )


def test_nothing_gives_nothing():
    assert convolve_tokens(torch.zeros(2, 3, 0, 4), torch.ones(3, 5)).shape == (2, 3, 0, 4)


def test_strided_values():
    v = torch.randn(2, 70, 3, 8).transpose(1, 2)
    weight = torch.randn(3, 9)
    torch.testing.assert_close(convolve_tokens(v, weight), depthwise(v, weight))


def test_the_band():
    (matrix,) = band(torch.tensor([[1.0, 2.0, 3.0]]), 2)
    assert matrix.tolist() == [[1.0, 2.0, 3.0, 0.0], [0.0, 1.0, 2.0, 3.0]]
