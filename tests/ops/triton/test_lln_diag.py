"""The fused LLN+Diag kernels and the block-diagonal branch alone."""

from __future__ import annotations

import pytest
import torch

from lln.ops import reference
from lln.ops import triton as kernels
from lln.ops.window import mixed
from tests.helpers import adversarial
from tests.ops.triton.compare import compare, inputs


def blend(q, k, v, *, alpha, beta, mix, block, scale, key_mask=None):
    """mix · LLN + (1 − mix) · Diag from the two references, rounded once."""
    wide = torch.promote_types(q.dtype, torch.float32)
    given = tuple(x.to(wide) for x in (q, k, v))
    linear = reference.bidirectional(*given, alpha=alpha, beta=beta, key_mask=key_mask)
    local = reference.block_diagonal(*given, block=block, scale=scale, key_mask=key_mask)
    share = mix[:, None, None]
    return (share * linear + (1 - share) * local).to(q.dtype)


@pytest.mark.parametrize(
    "length, block, dtype",
    [
        (1, 64, torch.float16),
        (17, 16, torch.float32),
        (100, 64, torch.float16),
        (100, 24, torch.float32),
        (200, 128, torch.float16),
    ],
)
def test_average(length, block, dtype, device):
    tensors = inputs(1, 2, length, width=32, device=device)
    compare(
        kernels.lln_diag, reference.lln_diag, tensors, dtype,
        floor=float(length == 1), block=block, scale=0.2,
    )  # fmt: skip


@pytest.mark.parametrize("is_causal", [False, True])
def test_blocks_without_a_kernel_beside_lln_with_one(is_causal, device):
    tensors = inputs(2, 2, 100, None, 32, 16, key_heads=1, device=device)
    mask = torch.rand(2, 100, device=device) > 0.3
    options = {"block": 64, "scale": 0.2, "key_mask": mask, "is_causal": is_causal}
    compare(mixed.lln_diag, reference.lln_diag, tensors, torch.float32, **options)


def test_learned_mix_of_blocks_without_a_kernel(device):
    tensors = inputs(1, 2, 70, width=16, device=device)
    tensors["mix"] = torch.rand(2, dtype=torch.float64, device=device)
    compare(mixed.lln_diag, blend, tensors, torch.float32, block=64, scale=0.2)


def test_wide_heads(device):
    """Small blocks tile by tile, as large ones."""
    tensors = inputs(1, 2, 50, None, 128, 32, key_heads=1, device=device)
    mask = torch.rand(1, 50, device=device) > 0.3
    compare(
        kernels.lln_diag, reference.lln_diag, tensors, torch.float16,
        block=16, scale=0.2, key_mask=mask,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_groups_masks_learned_mix(dtype, device):
    tensors = inputs(2, 2, 70, None, 48, 16, key_heads=1, device=device)
    tensors["mix"] = torch.rand(2, dtype=torch.float64, device=device)
    mask = torch.rand(2, 70, device=device) > 0.3
    compare(
        kernels.lln_diag, blend, tensors, dtype,
        block=32, scale=0.2, key_mask=mask,
    )  # fmt: skip


@pytest.mark.parametrize("is_causal", [False, True])
@pytest.mark.parametrize(
    "length, block, dtype", [(63, 16, torch.float32), (130, 64, torch.float16)]
)
def test_block_diagonal_alone(length, block, dtype, is_causal, device):
    tensors = inputs(1, 2, length, None, 16, 32, key_heads=1, device=device)
    tensors = {n: x for n, x in tensors.items() if n in ("q", "k", "v")}
    mask = torch.rand(1, length, device=device) > 0.3
    compare(
        kernels.block_diagonal, reference.block_diagonal, tensors, dtype,
        block=block, scale=0.3, key_mask=mask, is_causal=is_causal,
    )  # fmt: skip


@pytest.mark.parametrize("name", ["outlier_channel", "late_outlier_key", "scale_1e2"])
def test_no_input_overflows(name, device):
    q, k, v = (x.to(device) for x in adversarial(name, 70, 16, heads=1))
    two = torch.full((1, 1), 2.0, dtype=torch.float64, device=device)
    tensors = {"q": q, "k": k, "v": v, "alpha": two, "beta": two}
    options = {"block": 32, "scale": 0.25}
    compare(kernels.lln_diag, reference.lln_diag, tensors, torch.float32, floor=1.0, **options)


def test_masked_content_never_matters(device):
    tensors = inputs(2, 1, 40, width=16, device=device)
    mask = torch.rand(2, 40, device=device) > 0.5
    mask[1] = False
    given = {n: x.float() for n, x in tensors.items()}
    hidden = ~mask[:, None, :, None]
    poisoned = {
        n: x.masked_fill(hidden, torch.nan) if n in ("k", "v") else x for n, x in given.items()
    }
    results = []
    for case in (given, poisoned):
        leaves = {n: x.clone().requires_grad_() for n, x in case.items()}
        out = kernels.lln_diag(**leaves, block=16, scale=0.2, key_mask=mask)
        results.append((out, *torch.autograd.grad(out.square().sum(), list(leaves.values()))))
    for clean, other in zip(*results, strict=True):
        assert torch.equal(clean, other)
        assert clean.isfinite().all()
    assert (results[0][0][1] == 0).all()


@pytest.mark.parametrize("grad", [True, False])
def test_nothing_to_do(grad, device):
    given = {n: x.float() for n, x in inputs(1, 2, 0, device=device).items()}
    leaves = {n: x.requires_grad_() for n, x in given.items()}
    with torch.set_grad_enabled(grad):
        out = kernels.lln_diag(**leaves, block=16, scale=0.2)
    assert out.shape == leaves["v"].shape and out.requires_grad == grad
