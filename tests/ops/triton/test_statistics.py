"""One pass for σ_q and σ_k: masked, pooled over head groups, exact far from zero."""

from __future__ import annotations

import pytest
import torch

from lln.ops import triton as kernels
from tests.helpers import random_qkv, relative_error


def plain(x, mask):
    """Biased deviation of the visible tokens of each sample and head, float64."""
    x = x.double()
    rows = [
        [x[b, h][mask[b]].std(correction=0) for h in range(x.shape[1])] for b in range(x.shape[0])
    ]
    return torch.stack([torch.stack(row) for row in rows])


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
@pytest.mark.parametrize("queries, keys", [(1, 1), (17, 257), (300, 63)])
def test_deviations(queries, keys, dtype, device):
    q, k, _ = random_qkv(2, 4, queries, keys, 48, key_heads=2)
    q, k = (3 * q).to(device, dtype), (k + 5).to(device, dtype)
    everything = torch.ones(2, max(queries, keys), dtype=torch.bool, device=device)
    sigma_q, sigma_k = kernels.standard_deviations(q, k)
    grouped = q.unflatten(1, (2, 2)).flatten(2, 3)
    assert relative_error(sigma_q, plain(grouped, everything[:, :1].expand(2, 2 * queries))) < 1e-5
    assert relative_error(sigma_k, plain(k, everything[:, :keys])) < 1e-5


def test_masks_hide_tokens(device):
    q, k, _ = (x.float().to(device) for x in random_qkv(2, 2, 50, 80, 16))
    key_mask, query_mask = (
        torch.rand(2, 80, device=device) > 0.5,
        torch.rand(2, 50, device=device) > 0.5,
    )
    key_mask[0, :64] = False
    q = q.masked_fill(~query_mask[:, None, :, None], torch.nan)
    k = k.masked_fill(~key_mask[:, None, :, None], torch.nan)
    sigma_q, sigma_k = kernels.standard_deviations(q, k, key_mask=key_mask, query_mask=query_mask)
    assert relative_error(sigma_q, plain(q, query_mask)) < 1e-5
    assert relative_error(sigma_k, plain(k, key_mask)) < 1e-5


def test_an_offset_costs_no_digits(device):
    x = (torch.randn(1, 1, 100, 16) + 1e3).to(device)
    sigma, _ = kernels.standard_deviations(x, x)
    assert relative_error(sigma, plain(x, torch.ones(1, 100, dtype=torch.bool))) < 1e-5


def test_nothing_visible_has_deviation_zero(device):
    x = torch.randn(1, 2, 20, 16, device=device)
    none = torch.zeros(1, 20, dtype=torch.bool, device=device)
    sigma_q, sigma_k = kernels.standard_deviations(x, x, key_mask=none)
    assert (sigma_q > 0).all()
    assert (sigma_k == 0).all()
