"""match_features: the factor of log-features at which a wanted entropy is met."""

from __future__ import annotations

import pytest
import torch

import lln
from lln.moments import match_features, softmax_entropy
from lln.ops import reference
from tests.helpers import random_qkv


def entropy(p: torch.Tensor) -> torch.Tensor:
    return -(p * p.clamp(min=1e-300).log2()).sum(-1)


def test_softmax_entropy_is_that_of_the_rows():
    q, k, _ = random_qkv(2, 4, 30, 40, key_heads=2)
    mask = torch.rand(2, 40) > 0.3
    scores = reference.softmax_scores(q, k, scale=8**-0.5)
    p = reference.normalize_rows(scores, mask[:, None, None])
    torch.testing.assert_close(softmax_entropy(q, k, key_mask=mask), entropy(p).mean(-1))


@pytest.mark.parametrize("temperature", [0.5, 1.0, 2.0])
def test_the_wanted_entropy_is_met(temperature):
    q, k, _ = (x * temperature**-0.5 for x in random_qkv(2, 4, 64, 200, width=16, key_heads=2))
    rotation = torch.linalg.qr(torch.randn(16, 16, dtype=torch.float64)).Q
    maps = torch.cat([torch.eye(16, dtype=torch.float64), -rotation], 1)
    mask, real = torch.rand(2, 200) > 0.2, torch.rand(2, 64) > 0.2
    wanted = softmax_entropy(q, k, key_mask=mask, query_mask=real)
    factor = match_features(q @ maps, k @ maps, wanted, key_mask=mask, query_mask=real)
    keys = (k @ maps).repeat_interleave(2, 1) * factor[..., None, None]
    ones = torch.ones(2, 4, dtype=torch.float64)
    p = reference.lln_matrix(q @ maps, keys, alpha=factor, beta=ones, key_mask=mask)
    found = (entropy(p) * real[:, None]).sum(-1) / real.sum(-1)[:, None]
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)


@pytest.mark.slow
def test_it_agrees_with_the_curve_of_the_identity():
    """On Gaussians the exact curve of "entropy" and the measurement find the same scale."""
    q, k = torch.randn(1, 4, 256, 64), torch.randn(1, 4, 4096, 64)
    factor = match_features(q, k, softmax_entropy(q, k, rows=256), rows=256).mean()
    alpha, _ = lln.match_moments(1.0, 1.0, 64, method="entropy")
    assert abs(factor / alpha - 1) < 0.02


def test_an_entropy_out_of_reach_gives_an_end_of_the_range():
    q, k, _ = random_qkv(1, 1, 10)
    assert match_features(q, k, 99.0) < 1e-3
    assert match_features(q, k, 0.0) > 1e2


def test_wrong_features_are_named():
    q, k, _ = random_qkv(1, 1, 10)
    with pytest.raises(ValueError, match=r"q_features has shape \[10, 8\]"):
        match_features(q[0, 0], k, 1.0)
    with pytest.raises(TypeError, match="k_features"):
        match_features(q, k.float(), 1.0)


def test_masked_queries_are_skipped_not_sampled():
    """Leaving them out chooses the same rows, however few are left and wherever they stand."""
    q, k, _ = random_qkv(1, 2, 500)
    for real in (torch.arange(500) >= 493, torch.arange(500) % 3 == 1):
        masks = {"query_mask": real[None], "key_mask": real[None]}
        wanted = softmax_entropy(q[:, :, real], k[:, :, real])
        torch.testing.assert_close(softmax_entropy(q, k, **masks), wanted)
        found = match_features(2 * q, k, wanted, **masks)
        torch.testing.assert_close(found, match_features(2 * q[:, :, real], k[:, :, real], wanted))
