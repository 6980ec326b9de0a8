"""The kernels of the convolution against torch's, and as an op."""

from __future__ import annotations

import pytest
import torch

from lln.ops import triton as kernels
from lln.ops.common.arguments import hide
from lln.ops.taps.convolution import convolve_by_blocks, convolve_tokens
from lln.ops.taps.kernels import convolution as operator
from tests.helpers import relative_error
from tests.ops.test_convolution import depthwise


def made(tokens, taps, width=16, dtype=torch.float32, *, device):
    v = torch.randn(2, 3, tokens, width, device=device).to(dtype).requires_grad_()
    weight = torch.randn(3, taps, device=device).requires_grad_()
    return v, weight, torch.randn(2, 3, tokens, width, device=device).to(dtype)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize(
    ("tokens", "taps", "causal"),
    [
        *((1, 3, False), (2, 33, False), (40, 33, False), (100, 5, False), (200, 65, False)),
        *((1, 3, True), (100, 4, True), (100, 33, True), (200, 64, True)),
    ],
)
def test_output_and_gradients(tokens, taps, causal, dtype, device):
    v, weight, d_out = made(tokens, taps, dtype=dtype, device=device)
    got = kernels.convolution(v, weight, causal=causal)
    rounded = weight.to(dtype).double() if dtype != torch.float32 else weight.double()
    exact_v, exact_w = v.detach().double().requires_grad_(), rounded.detach().requires_grad_()
    exact = depthwise(exact_v, exact_w, causal)
    limit = 2e-6 if dtype == torch.float32 else 1e-3
    assert got.dtype == dtype and relative_error(got, exact) < limit
    grads = torch.autograd.grad(got, (v, weight), d_out)
    expected = torch.autograd.grad(exact, (exact_v, exact_w), d_out.double())
    for x, y in zip(grads, expected, strict=True):
        assert x.shape == y.shape and relative_error(x, y) < limit
    assert grads[1].dtype == torch.float32


@pytest.mark.parametrize("width", [5, 48, 80])
def test_widths(width, device):
    v, weight, _ = made(70, 9, width, device=device)
    torch.testing.assert_close(kernels.convolution(v, weight), depthwise(v, weight))


def test_strided_values_and_gradients(device):
    v, weight, d_out = made(70, 9, device=device)
    turned = v.detach().transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    upstream = d_out.transpose(1, 2).contiguous().transpose(1, 2)
    out = kernels.convolution(turned, weight)
    assert out.equal(kernels.convolution(v, weight)) and out.stride() == turned.stride()
    for x, y in zip(
        torch.autograd.grad(out, (turned, weight), upstream),
        torch.autograd.grad(kernels.convolution(v, weight), (v, weight), d_out),
        strict=True,
    ):
        assert x.equal(y)


def test_only_what_is_asked_for(device):
    v, weight, d_out = made(20, 3, device=device)
    (only,) = torch.autograd.grad(kernels.convolution(v.detach(), weight), weight, d_out)
    (other,) = torch.autograd.grad(kernels.convolution(v, weight.detach()), v, d_out)
    both = torch.autograd.grad(kernels.convolution(v, weight), (v, weight), d_out)
    assert both[0].equal(other) and both[1].equal(only)
    assert kernels.convolution(v[:, :, :0], weight).shape == (2, 3, 0, 16)


@pytest.mark.parametrize(("group", "masked", "causal"), [(1, False, True), (3, True, False)])
def test_it_is_added_to_what_it_is_given(group, masked, causal, device):
    """Without what masked tokens hold, for all heads of a group, rounded once."""
    taps = 4 if causal else 5
    v, weight, _ = made(90, taps, dtype=torch.float16, device=device)
    onto = torch.randn(2, 90, 3 * group, 16, device=device).to(v.dtype).transpose(1, 2)
    onto, d_out = onto.requires_grad_(), torch.randn_like(onto)
    mask = torch.arange(90, device=device) < torch.tensor([[90], [50]], device=device)
    mask = mask if masked else None
    wild = v if mask is None else v.masked_fill(~mask[:, None, :, None], torch.nan)
    given = wild.detach().requires_grad_(), weight, onto
    out = kernels.convolution(*given[:2], causal=causal, onto=onto, key_mask=mask)
    assert out.dtype == v.dtype and out.stride() == onto.stride()
    exact = [x.detach().double().requires_grad_() for x in (v, weight.half(), onto)]
    near = depthwise(hide(exact[0], mask), exact[1], causal).repeat_interleave(group, dim=1)
    expected = exact[2] + near
    assert relative_error(out, expected) < 1e-3
    grads = torch.autograd.grad(out, given, d_out)
    for x, y in zip(grads, torch.autograd.grad(expected, exact, d_out.double()), strict=True):
        assert x.shape == y.shape and relative_error(x, y) < 1e-3
    assert grads[2].equal(d_out)
    if mask is not None:
        assert not hide(grads[0], ~mask).any()


def test_onto_alone_needs_no_launch(device, monkeypatch):
    v, weight, d_out = made(20, 3, device=device)
    onto = torch.randn_like(d_out).requires_grad_()
    out = kernels.convolution(v.detach(), weight.detach(), onto=onto)
    monkeypatch.setattr(operator, "_backward", None)
    assert torch.autograd.grad(out, onto, d_out)[0].equal(d_out)


@pytest.mark.parametrize("all_arguments", [False, True])
def test_opcheck(all_arguments, device):
    v, weight, onto = made(20, 3, device=device)
    mask = torch.arange(20, device=device).expand(2, -1) < 15
    more = (onto.requires_grad_(), mask) if all_arguments else ()
    torch.library.opcheck(torch.ops.lln.convolution.default, (v, weight, 2, *more))


@pytest.mark.parametrize(
    ("taps", "width", "dtype"),
    [
        (33, 64, torch.float32),
        (33, 5, torch.float32),
        (67, 16, torch.float32),
        (33, 16, torch.float64),
    ],
)
def test_modules_take_the_kernel_where_it_fits(taps, width, dtype, device, monkeypatch):
    if device == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    v, weight, _ = made(100, taps, width, dtype, device=device)
    taken = []

    def kernel(v, weight, **options):
        taken.append(v.shape)
        return operator.convolution(v, weight, **options)

    monkeypatch.setattr(kernels, "convolution", kernel)
    got = convolve_tokens(v, weight)
    assert bool(taken) == (taps == 33 and width == 64)
    assert relative_error(got, convolve_by_blocks(v, weight)) < 1e-5
    causal = convolve_tokens(v, weight, causal=True)
    assert relative_error(causal, convolve_by_blocks(v, weight, causal=True)) < 1e-5


@pytest.mark.gpu
@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # of torch itself
def test_compiled_it_is_one_op(device):
    v, weight, d_out = made(300, 33, 64, torch.bfloat16, device=device)
    compiled = torch.compile(convolve_tokens, fullgraph=True)
    expected = torch.autograd.grad(convolve_by_blocks(v, weight), (v, weight), d_out)
    for x, y in zip(
        torch.autograd.grad(compiled(v, weight), (v, weight), d_out), expected, strict=True
    ):
        assert relative_error(x, y) < 1e-2
