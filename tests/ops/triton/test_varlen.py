"""Packed sequences equal the same sequences one by one, whatever their lengths."""

from __future__ import annotations

import pytest
import torch

from lln.ops import reference
from lln.ops import triton as kernels
from tests.ops.triton.compare import compare


def one_by_one(q, k, v, cu_q, cu_k, *, alpha, beta, key_mask=None, normalize_keys=False):
    rows = []
    for s in range(len(cu_q) - 1):
        queries, keys = slice(cu_q[s], cu_q[s + 1]), slice(cu_k[s], cu_k[s + 1])
        sequence = (x.transpose(0, 1)[None] for x in (q[queries], k[keys], v[keys]))
        mask = None if key_mask is None else key_mask[None, keys]
        scales = {"alpha": alpha[s : s + 1], "beta": beta[s : s + 1]}
        out = reference.bidirectional(
            *sequence, **scales, key_mask=mask, normalize_keys=normalize_keys
        )
        rows.append(out[0].transpose(0, 1))
    return torch.cat(rows)


@pytest.mark.parametrize("normalize_keys, dtype", [(False, torch.float16), (True, torch.float32)])
def test_sequences_of_any_length(normalize_keys, dtype, device):
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
        one_by_one, tensors, dtype,
        cu_q=cu_q, cu_k=cu_k.int(), key_mask=mask, normalize_keys=normalize_keys,
    )  # fmt: skip
