"""Packed sequences equal the same sequences one by one, whatever their lengths."""

from __future__ import annotations

import pytest
import torch

from lln.ops import reference
from lln.ops import triton as kernels
from tests.ops.triton.compare import compare


@pytest.mark.parametrize("dtype", [torch.float16, torch.float32])
def test_sequences_of_any_length(dtype, device):
    queries, keys = [5, 0, 70, 1], [40, 7, 90, 0]
    cu_q, cu_k = (torch.tensor([0, *x], device=device).cumsum(0) for x in (queries, keys))
    make = {"dtype": torch.float64, "device": device}
    tensors = {
        "q": torch.randn(sum(queries), 2, 16, **make),
        "k": torch.randn(sum(keys), 1, 16, **make),
        "v": torch.randn(sum(keys), 1, 32, **make),
        "alpha": 1 + torch.rand(4, 2, **make),
        "beta": 1 + torch.rand(4, 1, **make),
    }
    mask = torch.rand(sum(keys), device=device) > 0.3
    compare(
        lambda **t: kernels.varlen(**t),
        reference.varlen, tensors, dtype,
        cu_q=cu_q, cu_k=cu_k.int(), key_mask=mask,
    )  # fmt: skip
