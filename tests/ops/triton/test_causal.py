"""Causal kernels: segments, chunks, the careful path, states in, all gradients."""

from __future__ import annotations

import pytest
import torch

from lln.ops import reference
from lln.ops import triton as kernels
from lln.ops.common.kernels import tiles
from lln.ops.linear.state import State
from lln.protocols import HALF
from tests.helpers import ADVERSARIAL, adversarial, run_with_grads
from tests.ops.triton.compare import CASES, compare, inputs
from tests.ops.triton.conftest import DEVICE


@pytest.mark.parametrize("length, dtype", CASES)
def test_lengths(length, dtype, device):
    tensors = inputs(1, 1, length, width=16, device=device)
    compare(kernels.causal, reference.causal, tensors, dtype, floor=0.1)


def check_groups_and_masks(length, dtype, device):
    tensors = inputs(2, 2, length, None, 48, 16, key_heads=1, device=device)
    mask = torch.rand(2, length, device=device) > 0.3
    mask[0, :70] = False  # rows that see nothing, over more than a chunk
    compare(
        kernels.causal, reference.causal, tensors, dtype,
        floor=0.1, key_mask=mask,
    )  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_groups_masks_and_unequal_widths(dtype, device):
    check_groups_and_masks(140, dtype, device)


# What the careful path replaces may have overflown before.
@pytest.mark.filterwarnings("ignore:invalid value encountered in reduce:RuntimeWarning")
@pytest.mark.parametrize("name", ADVERSARIAL)
def test_no_input_underflows(name, device):
    q, k, v = (x.to(device) for x in adversarial(name, 80, 16, heads=1))
    two = torch.full((1, 1), 2.0, dtype=torch.float64, device=device)
    tensors = {"q": q, "k": k, "v": v, "alpha": two, "beta": two}
    compare(kernels.causal, reference.causal, tensors, torch.float32, floor=1.0)


def test_careful_path_with_masks(device):
    tensors = inputs(1, 2, 50, width=16, key_heads=1, device=device)
    tensors["k"][:, :, 30] += 90
    mask = torch.rand(1, 50, device=device) > 0.3
    mask[:, 30] = True
    compare(kernels.causal, reference.causal, tensors, torch.float32, floor=1.0, key_mask=mask)


@pytest.mark.parametrize("queries, keys", [(30, 100), (70, 30), (5, 0), (0, 5)])
def test_cross_attention_is_aligned_bottom_right(queries, keys, device):
    tensors = inputs(1, 2, queries, keys, 16, device=device)
    compare(kernels.causal, reference.causal, tensors, torch.float32, floor=0.1)


@pytest.mark.parametrize("cut", [1, 64])
def test_a_state_stands_for_earlier_keys(cut, device):
    """Gradients included: cutting the keys in two changes nothing."""
    tensors = inputs(1, 2, 80, width=16, key_heads=1, device=device)
    tensors = {n: x.float() for n, x in tensors.items()}
    d_out = torch.randn_like(tensors["q"])

    def resumed(q, k, v, alpha, beta):
        first = State(*kernels.summarize(k[:, :, :cut], v[:, :, :cut], beta=beta))
        options = {"alpha": alpha, "beta": beta}
        start = kernels.causal(q[:, :, :cut], k[:, :, :cut], v[:, :, :cut], **options)
        rest = kernels.causal(q[:, :, cut:], k[:, :, cut:], v[:, :, cut:], state=first, **options)
        return torch.cat([start, rest], dim=2)

    whole = run_with_grads(kernels.causal, tensors, d_out)
    parts = run_with_grads(resumed, tensors, d_out)
    for name in whole:
        torch.testing.assert_close(parts[name], whole[name], rtol=2e-4, atol=2e-5, msg=name)


def test_the_future_changes_nothing(device):
    tensors = {n: x.half() for n, x in inputs(1, 2, 150, device=device).items()}
    out = kernels.causal(**tensors)
    changed = {n: x.clone() for n, x in tensors.items()}
    for name in ("q", "k", "v"):
        changed[name][:, :, 100:] *= 7
    assert torch.equal(kernels.causal(**changed)[:, :, :64], out[:, :, :64])
    torch.testing.assert_close(kernels.causal(**changed)[:, :, :100], out[:, :, :100])


@pytest.mark.parametrize(
    ("dtype", "heads", "learned"),
    [
        (torch.float32, 2, False),
        (torch.float16, 2, False),
        (torch.float16, 1, False),  # key heads of two query heads
        (torch.float32, 2, True),
    ],
)
def test_causal_lln_diag(dtype, heads, learned, device):
    """The average, written in place, and a mix per head; the last block is not whole."""
    tensors = inputs(1, 2, 100, width=16, key_heads=heads, device=device)
    if learned:
        tensors["mix"] = torch.tensor([0.2, 0.9], device=device, dtype=torch.float64)
    options = {"block": 32, "scale": 0.25, "is_causal": True}
    compare(kernels.lln_diag, reference.lln_diag, tensors, dtype, floor=0.1, **options)


def test_causal_lln_diag_with_masks(device):
    tensors = inputs(2, 2, 70, width=16, values=32, key_heads=1, device=device)
    mask = torch.rand(2, 70, device=device) > 0.4
    mask[1, :40] = False
    options = {"block": 16, "scale": 0.25, "is_causal": True, "key_mask": mask}
    compare(kernels.lln_diag, reference.lln_diag, tensors, torch.float32, floor=0.1, **options)


def test_masked_content_never_matters(device):
    tensors = inputs(2, 1, 80, width=16, device=device)
    mask = torch.rand(2, 80, device=device) > 0.5
    mask[1] = False
    given = {n: x.float() for n, x in tensors.items()}
    hidden = ~mask[:, None, :, None]
    poisoned = {
        n: x.masked_fill(hidden, torch.nan) if n in ("k", "v") else x for n, x in given.items()
    }
    results = []
    for case in (given, poisoned):
        leaves = {n: x.clone().requires_grad_() for n, x in case.items()}
        out = kernels.causal(**leaves, key_mask=mask)
        results.append((out, *torch.autograd.grad(out.square().sum(), list(leaves.values()))))
    for clean, other in zip(*results, strict=True):
        assert torch.equal(clean, other)
        assert clean.isfinite().all()
    assert (results[0][0][1] == 0).all()


# The interpreter has no dot of bfloat16, and takes seconds for each of these.
CARRIED = [torch.float32, *HALF] if DEVICE == "cuda" else [torch.float32, torch.float16]


@pytest.fixture
def carried_sums(monkeypatch):
    """Causal kernels carry sums instead of means."""
    for table in (tiles.SINGLE, *(tiles.HALF[k] for k in ("causal", "causal_dq", "causal_dkdv"))):
        for width, tile in table.items():
            monkeypatch.setitem(table, width, tile._replace(sums=True))
    tiles.forget()
    yield
    monkeypatch.undo()
    tiles.forget()


@pytest.mark.parametrize("dtype", CARRIED)
def test_carried_sums_with_groups_and_masks(carried_sums, dtype, device):
    check_groups_and_masks(300, dtype, device)


@pytest.mark.filterwarnings("ignore:invalid value encountered in reduce:RuntimeWarning")
@pytest.mark.parametrize("name", ["late_outlier_key", "drifting_keys", "scale_1e2", "scale_1e3"])
def test_carried_sums_underflow_no_more_than_means(carried_sums, name, device):
    test_no_input_underflows(name, device)


def test_carried_sums_after_a_state(carried_sums, device):
    test_a_state_stands_for_earlier_keys(37, device)
