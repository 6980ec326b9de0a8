"""summarize and read as ops: their composition is attention, their gradients are its gradients."""

from __future__ import annotations

import pytest
import torch

from lln.ops import eager, reference
from lln.ops import triton as kernels
from tests.helpers import random_qkv, relative_error
from tests.ops.triton.compare import compare, inputs


def composed(q, k, v, *, alpha, beta, **options):
    return kernels.read(q, *kernels.summarize(k, v, beta=beta, **options), alpha=alpha)


@pytest.mark.parametrize(
    "length, dtype", [(1, torch.float16), (17, torch.float32), (257, torch.float16)]
)
def test_read_of_summary_is_attention(length, dtype, device):
    tensors = inputs(1, 4, 33, length, 32, 16, key_heads=2, device=device)
    # one key: its gradient is 0, up to the rounding of a sum over 33 queries
    compare(composed, reference.bidirectional, tensors, dtype, floor=4.0 * (length == 1))


def test_state_and_its_gradients(device):
    _, k, v = (x.float().to(device) for x in random_qkv(2, 2, 100, width=16))
    beta = torch.tensor([[1.0, 2.0], [3.0, 0.5]], device=device)
    mask = torch.rand(2, 100, device=device) > 0.3
    weights = torch.randn(2, 2, 16, device=device), torch.randn(2, 2, 16, 16, device=device)
    results = []
    for op, dtype in ((kernels.summarize, torch.float32), (eager.summarize, torch.float64)):
        leaves = [x.to(dtype).clone().requires_grad_() for x in (k, v, beta)]
        state = op(*leaves[:2], beta=leaves[2], key_mask=mask)
        loss = sum((x * w).sum() for x, w in zip(state, weights, strict=True))
        results.append((*state, *torch.autograd.grad(loss, leaves)))
    for got, exact in zip(*results, strict=True):
        assert relative_error(got, exact) < 5e-6


def test_empty_state(device):
    k = torch.randn(1, 2, 5, 16, device=device)
    mask = torch.zeros(1, 5, dtype=torch.bool, device=device)
    one = torch.ones(1, 2, device=device)
    for keys, hidden in ((k, mask), (k[:, :, :0], mask[:, :0])):
        log_mass, mean = kernels.summarize(keys, keys, beta=one, key_mask=hidden)
        assert (log_mass == -torch.inf).all()
        assert (mean == 0).all()
        assert (kernels.read(k, log_mass, mean, alpha=one) == 0).all()
