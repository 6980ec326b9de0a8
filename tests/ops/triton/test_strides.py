"""Memory order never changes a bit: rows of all tensors equally far apart, of some, of none."""

from __future__ import annotations

import pytest
import torch

from lln.ops import triton as kernels
from lln.ops.common.kernels.launching import row_strides

OPS = {
    "bidirectional": {},
    "causal": {},
    "lln_diag": {"block": 16, "scale": 0.3},
}
B, H, N, D = 1, 2, 70, 16


def alike(*tensors):
    """Whether the kernels are told of one row stride for all."""
    _, *others = row_strides(*(x.stride() for x in tensors))
    return all(row is None for _, _, row in others)


def projected(device, parts):
    """Views [B, H, N, D] of ``parts`` tensors in one projection [B, N, parts, H, D]."""
    return torch.randn(B, N, parts, H, D, device=device).permute(2, 0, 3, 1, 4).unbind(0)


def laid_out(order, device):
    if order == "separate":
        return [projected(device, 1)[0] for _ in range(3)]
    if order == "fused":
        return list(projected(device, 3))
    q, k = projected(device, 2)
    return [q, k, projected(device, 1)[0]]


def gradients(op, tensors, d_out, device):
    leaves = [x.detach().requires_grad_() for x in tensors]
    assert [x.stride() for x in leaves] == [x.stride() for x in tensors]
    scale = torch.full((B, H), 1.5, device=device)
    out = getattr(kernels, op)(*leaves, alpha=scale, beta=scale, **OPS[op])
    return out.detach(), *torch.autograd.grad(out, leaves, d_out)


@pytest.mark.parametrize("order", ["separate", "fused", "values apart"])
@pytest.mark.parametrize("op", OPS)
def test_views_give_the_bits_of_copies(op, order, device):
    tensors = laid_out(order, device)
    d_out = torch.randn(B, H, N, D, device=device)
    assert alike(*tensors) == (order != "values apart")
    assert not alike(*tensors, d_out)
    expected = gradients(op, [x.contiguous() for x in tensors], d_out, device)
    for got, exact in zip(gradients(op, tensors, d_out, device), expected, strict=True):
        assert torch.equal(got, exact)


@pytest.mark.parametrize("op", OPS)
def test_all_rows_alike_give_the_bits_of_copies(op, device):
    *tensors, d_out = (projected(device, 1)[0] for _ in range(4))
    assert alike(*tensors, d_out)
    copies = [x.contiguous() for x in tensors]
    expected = gradients(op, copies, d_out.contiguous(), device)
    for got, exact in zip(gradients(op, tensors, d_out, device), expected, strict=True):
        assert torch.equal(got, exact)
