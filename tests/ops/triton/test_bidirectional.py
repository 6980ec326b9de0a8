"""Bidirectional kernels: any length, dtype, head group, mask, stride and input range."""

from __future__ import annotations

import pytest
import torch

from lln.ops import reference
from lln.ops import triton as kernels
from tests.helpers import ADVERSARIAL, adversarial, relative_error
from tests.ops.triton.compare import CASES, compare, inputs


@pytest.mark.parametrize("length, dtype", CASES)
def test_lengths(length, dtype, device):
    tensors = inputs(1, 1, length, device=device)
    # one key is all there is to attend: the gradients to q and k are 0 up to rounding
    floor = 1.0 if length == 1 else 0.0
    compare(kernels.bidirectional, reference.bidirectional, tensors, dtype, floor=floor)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_groups_masks_and_unequal_widths(dtype, device):
    tensors = inputs(2, 4, 63, 100, 48, 16, key_heads=2, device=device)
    mask = torch.rand(2, 100, device=device) > 0.3
    compare(
        kernels.bidirectional, reference.bidirectional, tensors, dtype,
        key_mask=mask,
    )  # fmt: skip


@pytest.mark.parametrize("name", ADVERSARIAL)
def test_no_input_overflows(name, device):
    q, k, v = (x.to(device) for x in adversarial(name, 100, 16, heads=1))
    two = torch.full((1, 1), 2.0, dtype=torch.float64, device=device)
    tensors = {"q": q, "k": k, "v": v, "alpha": two, "beta": two}
    compare(kernels.bidirectional, reference.bidirectional, tensors, torch.float32, floor=1.0)


def test_several_value_blocks(device):
    tensors = inputs(1, 1, 40, 33, 256, 96, device=device)
    compare(kernels.bidirectional, reference.bidirectional, tensors, torch.float16)


def test_masked_content_never_matters(device):
    tensors = inputs(2, 2, 50, 70, device=device)
    mask = torch.rand(2, 70, device=device) > 0.5
    mask[1] = False  # nothing to see: output and gradients are 0
    given = {n: x.float() for n, x in tensors.items()}
    hidden = ~mask[:, None, :, None]
    poisoned = {
        n: x.masked_fill(hidden, torch.nan) if n in ("k", "v") else x for n, x in given.items()
    }
    results = []
    for case in (given, poisoned):
        leaves = {n: x.clone().requires_grad_() for n, x in case.items()}
        out = kernels.bidirectional(**leaves, key_mask=mask)
        results.append((out, *torch.autograd.grad(out.square().sum(), list(leaves.values()))))
    for clean, other in zip(*results, strict=True):
        assert torch.equal(clean, other)
        assert clean.isfinite().all()
    assert (results[0][0][1] == 0).all()


def test_transposed_views_are_read_in_place(device):
    tensors = {n: x.float() for n, x in inputs(2, 2, 40, 40, device=device).items()}
    views = {
        n: x.transpose(1, 2).contiguous().transpose(1, 2) if x.dim() == 4 else x
        for n, x in tensors.items()
    }
    expected = kernels.bidirectional(**tensors)
    out = kernels.bidirectional(**views)
    assert torch.equal(out, expected)
    assert out.transpose(1, 2).is_contiguous()  # merging the heads copies nothing


@pytest.mark.parametrize("queries, keys", [(0, 5), (5, 0), (0, 0)])
def test_nothing_to_do(queries, keys, device):
    given = {n: x.float() for n, x in inputs(1, 2, queries, keys, device=device).items()}
    leaves = {n: x.requires_grad_() for n, x in given.items()}
    out = kernels.bidirectional(**leaves)
    assert out.shape == (1, 2, queries, 32)
    assert (out == 0).all()
    for gradient in torch.autograd.grad(out.sum(), list(leaves.values())):
        assert (gradient == 0).all()
    with torch.no_grad():
        assert kernels.bidirectional(**leaves).equal(out)


def test_inference_equals_training(device):
    tensors = {n: x.half() for n, x in inputs(1, 2, 100, device=device).items()}
    with torch.no_grad():
        out = kernels.bidirectional(**tensors)
    tensors["q"].requires_grad_()
    assert torch.equal(out, kernels.bidirectional(**tensors))


def test_scales_may_be_expanded(device):
    tensors = {n: x.float() for n, x in inputs(2, 2, 30, device=device).items()}
    one = {n: x for n, x in tensors.items() if n in ("q", "k", "v")}
    number = torch.full((1, 1), 2.0, device=device)
    out = kernels.bidirectional(**one, alpha=number.expand(2, 2), beta=number.expand(2, 2))
    full = torch.full((2, 2), 2.0, device=device)
    assert torch.equal(out, kernels.bidirectional(**one, alpha=full, beta=full))
    assert relative_error(out, reference.bidirectional(**one, alpha=full, beta=full)) < 1e-5
