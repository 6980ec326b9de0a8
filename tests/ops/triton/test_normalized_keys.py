"""normalize_keys by the kernels: they see features, as any others."""

from __future__ import annotations

import pytest
import torch

import lln
from lln.ops import triton as kernels
from tests.helpers import relative_error

JOINT = {"near": lln.Near(16, joint=True), "gamma": 0.5}
FORMS = {
    "bidirectional": ("triton", {}),
    "causal": ("triton", {"is_causal": True}),
    "causal blocks": ("triton", {"is_causal": True, "causal_block": 16}),
    "joint": ("triton", {**JOINT, "is_causal": True}),
    "blocks": ("mixed", {"near": 16}),
}


@pytest.mark.parametrize("form", FORMS)
def test_outputs_and_gradients_are_those_of_plain_pytorch(form, device, monkeypatch):
    monkeypatch.setattr(kernels, "refuses_device", lambda _: None)
    impl, options = FORMS[form]
    tensors = [torch.randn(1, heads, 40, 16, device=device) for heads in (2, 1, 1)]
    mask = torch.rand(1, 40, device=device) > 0.3
    found = []
    for name, dtype in ((impl, torch.float32), ("eager", torch.float64)):
        leaves = [x.to(dtype).requires_grad_() for x in tensors]
        beta = torch.tensor([1.3], device=device, dtype=dtype, requires_grad=True)
        scales = {"alpha": 1.5, "beta": beta, "normalize_keys": True, "key_mask": mask}
        out = lln.attention(*leaves, **scales, **options, impl=name)
        found.append((out, *torch.autograd.grad(out.square().sum(), [*leaves, beta])))
    for got, exact in zip(*found, strict=True):
        assert relative_error(got, exact) < 2e-5


def test_which_knows_that_blocks_are_not_fused_with_features(device, monkeypatch):
    monkeypatch.setattr(kernels, "refuses_device", lambda _: None)
    x = torch.randn(1, 1, 40, 16, device=device)
    for options, expected in (({}, "triton"), ({"near": 16}, "mixed")):
        assert lln.which(x, x, x, **options, normalize_keys=True) == expected
    assert lln.which(x, x, x, near=16) == "triton"
    with pytest.raises(ValueError, match="features of their own are not fused"):
        lln.attention(x, x, x, near=16, normalize_keys=True, impl="triton")


def test_packed_sequences(device, monkeypatch):
    monkeypatch.setattr(kernels, "refuses_device", lambda _: None)
    q, k, v = (torch.randn(50, 2, 16, device=device) for _ in range(3))
    cu = torch.tensor([0, 20, 50], device=device)
    scales = {"alpha": 1.5, "beta": torch.tensor([[1.0, 2.0], [0.5, 1.5]], device=device)}
    found = [
        lln.attention_varlen(q, k, v, cu, **scales, normalize_keys=True, impl=impl)
        for impl in ("triton", "eager")
    ]
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)
