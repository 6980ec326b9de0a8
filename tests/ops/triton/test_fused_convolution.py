"""LLN+Diag that adds a convolution of its values: the two ops one after the other, to the bit."""

from __future__ import annotations

import pytest
import torch

from lln.nn import LLNAttention
from lln.ops import triton as kernels
from lln.ops.window import lln_diag as dispatch
from tests.helpers import windowed

lln_diag = windowed(dispatch.lln_diag)

HALF = torch.float16
# dtype, block, overlap, heads of keys, tokens, whether masked; in float32 no windows are fused
CASES = [
    (HALF, 256, 0, 2, 100, False),
    (HALF, 128, 0, 2, 257, True),
    (HALF, 32, 16, 1, 70, True),
    (HALF, 32, 0, 1, 70, False),
    (torch.float32, 16, 0, 1, 63, True),
    (torch.float32, 16, 0, 2, 17, False),
]


def made(dtype, key_heads, tokens, masked, device, taps=33):
    """q, k, v with tokens before heads in memory, as projections have them, and the rest."""
    q, k, v = (
        torch.randn(2, tokens, h, 16, device=device).to(dtype).transpose(1, 2).requires_grad_()
        for h in (2, key_heads, key_heads)
    )
    weight = torch.randn(key_heads, taps, device=device).requires_grad_()
    mix = torch.rand(2, device=device).requires_grad_()
    scales = {"alpha": torch.rand(2, 2, device=device), "beta": torch.rand(2, key_heads).to(device)}
    mask = torch.arange(tokens, device=device) < torch.tensor([[tokens], [tokens // 2]]).to(device)
    return q, k, v, mix, weight, {**scales, "key_mask": mask if masked else None}


@pytest.mark.parametrize(("dtype", "block", "overlap", "key_heads", "tokens", "masked"), CASES)
def test_as_two_ops(dtype, block, overlap, key_heads, tokens, masked, device):
    q, k, v, mix, weight, given = made(dtype, key_heads, tokens, masked, device)
    options = {**given, "block": block, "overlap": overlap, "scale": 0.25}
    together = kernels.lln_diag(q, k, v, mix=mix, conv=weight, **options)
    onto = kernels.lln_diag(q, k, v, mix=mix, **options)
    apart = kernels.convolution(v, weight, onto=onto, key_mask=given["key_mask"])
    assert together.equal(apart) and together.stride() == apart.stride()
    d_out, leaves = torch.randn_like(apart), (q, k, v, mix, weight)
    found, expected = (torch.autograd.grad(x, leaves, d_out) for x in (together, apart))
    for one, other in zip(found, expected, strict=True):
        assert one.equal(other) and one.dtype == other.dtype
    with torch.no_grad():
        assert kernels.lln_diag(q, k, v, mix=mix, conv=weight, **options).equal(apart)


@pytest.mark.parametrize("block", [16, 128])
def test_only_what_is_asked_for(block, device):
    q, k, v, mix, weight, given = made(HALF, 1, 40, False, device, taps=5)
    options = {**given, "block": block, "scale": 0.25}
    out = kernels.lln_diag(q, k, v, mix=mix, conv=weight, **options)
    d_out = torch.randn_like(out)
    *_, d_weight = torch.autograd.grad(out, (q, k, v, mix, weight), d_out)
    frozen = (x.detach() for x in (q, k, v))
    out = kernels.lln_diag(*frozen, mix=mix.detach(), conv=weight, **options)
    assert torch.autograd.grad(out, weight, d_out)[0].equal(d_weight)
    out = kernels.lln_diag(q, k, v, mix=mix, conv=weight.detach(), **options)
    assert not torch.autograd.grad(out, v, d_out)[0].isnan().any()


@pytest.mark.parametrize("block", [16, 128])
def test_the_operator_keeps_its_promises(block, device):
    q, k, v, mix, weight, given = made(HALF, 1, 40, True, device, taps=5)
    scales = given["alpha"], given["beta"]
    arguments = q, k, v, *scales, mix, given["key_mask"], block, 0, 0.2, weight
    utilities = ("test_schema", "test_autograd_registration", "test_faketensor")
    kernels.lln_diag  # noqa: B018  # registers the operator
    operator = torch.ops.lln.lln_diag_train.default
    torch.library.opcheck(operator, arguments, test_utils=utilities)
    out, found = kernels.lln_diag(
        q, k, v, mix=mix, conv=weight, block=block, scale=0.2, **given
    ), operator(*arguments)  # fmt: skip
    assert found[0].equal(out)
    d_out = torch.randn_like(out)
    grads = (torch.autograd.grad(x, (q, k, v, mix, weight), d_out) for x in (found[0], out))
    for one, other in zip(*grads, strict=True):
        assert one.equal(other)


@pytest.mark.parametrize("block", [16, 128])
def test_compile_keeps_the_op_whole(block, device):
    q, k, v, mix, weight, given = made(HALF, 1, 40, True, device, taps=5)

    def attend(q, k, v, mix, weight):
        return kernels.lln_diag(
            q, k, v, mix=mix, conv=weight, block=block, scale=0.2, **given
        ).tanh()

    leaves = q, k, v, mix, weight
    compiled = torch.compile(attend, fullgraph=True, backend="aot_eager")
    found = [f(*leaves) for f in (attend, compiled)]
    torch.testing.assert_close(*found)
    gradients = [torch.autograd.grad(x.float().sum(), leaves) for x in found]
    torch.testing.assert_close(*gradients)


@pytest.mark.parametrize("taps", [5, 67])  # of which the kernel takes up to 65
@pytest.mark.parametrize("is_causal", [False, True])
def test_without_the_kernel_it_is_added_afterwards(taps, is_causal, device, monkeypatch):
    if device == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    q, k, v, mix, weight, given = made(torch.float32, 1, 40, True, device, taps=taps)
    options = {**given, "mix": mix, "block": 16, "scale": 0.2, "is_causal": is_causal}
    alone = []

    def convolve(*args, **how):
        alone.append(args)
        return dispatch_convolve(*args, **how)

    dispatch_convolve = dispatch.convolve_tokens
    monkeypatch.setattr(dispatch, "convolve_tokens", convolve)
    by_kernels = lln_diag(q, k, v, conv=weight, **options)
    assert bool(alone) == (is_causal or taps > 65)
    eager = lln_diag(q, k, v, conv=weight, **options, impl="eager")
    torch.testing.assert_close(by_kernels, eager, rtol=1e-4, atol=1e-4)
    if is_causal:
        with pytest.raises(ValueError, match="causal"):
            kernels.lln_diag(q, k, v, conv=weight, **options)


def test_a_module_has_one_node(device, monkeypatch):
    if device == "cpu":
        monkeypatch.setenv("TRITON_INTERPRET", "1")
    core = LLNAttention(2, 16, near=16, mix="learned", conv=5, impl="triton").to(device)
    q, k, v = made(torch.float32, 2, 40, False, device)[:3]
    out = core(q, k, v)
    assert out.grad_fn.name() == "lln_diag_trainBackward"
    core.impl = "eager"
    torch.testing.assert_close(out, core(q, k, v), rtol=1e-4, atol=1e-4)
