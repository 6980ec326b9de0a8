"""Temperatures: eq. (5) and (11) of the paper."""

from __future__ import annotations

import math

import pytest
import torch

from lln import moments
from lln.instruments import lln_temperature, log_variance, temperature
from lln.ops import reference
from tests.instruments.matrices import gaussian


def test_product_of_standard_deviations():
    q, k = gaussian(50, 8, heads=3)
    q = q * torch.tensor([0.5, 1.0, 2.0]).reshape(1, 3, 1, 1)
    expected = 1 / (q.std((-1, -2), correction=0) * k.std((-1, -2), correction=0))
    assert torch.allclose(temperature(q, k), expected)


def test_measured_variance_counts_what_the_product_leaves_out():
    """Equal queries and keys: q and k are correlated, C_cross is not zero."""
    q, _ = gaussian(40, 8)
    q = q + 1
    scores = q @ q.transpose(-1, -2) / math.sqrt(8)
    expected = scores.flatten().std(correction=0).reciprocal().item()
    assert temperature(q, q, target="measured").item() == pytest.approx(expected)
    assert temperature(q, q).item() != pytest.approx(expected, rel=0.05)


def test_lln_temperature_of_a_line():
    q, k = gaussian(60, 16, heads=2)
    sigma2 = (2 * q.std((-1, -2), correction=0)) ** 2 + (3 * k.std((-1, -2), correction=0)) ** 2
    got = lln_temperature(q, k, alpha=2.0, beta=3.0, fit=moments.PAPER)
    assert torch.allclose(got, 1 / (moments.PAPER.a * sigma2 + moments.PAPER.b).sqrt())


def test_lln_temperature_without_a_line_is_measured():
    q, k = gaussian(30, 8)
    scale = torch.full((1, 1), 2.0, dtype=torch.float64)
    p = reference.lln_matrix(q, k, alpha=scale, beta=scale)
    got = lln_temperature(q, k, alpha=2.0, beta=2.0)
    assert torch.allclose(got, log_variance(p).rsqrt())


def test_matched_lln_has_the_temperature_of_softmax():
    """Eq. (10) inserted into eq. (11) gives eq. (5) back."""
    q, k = gaussian(100, 64, temperature=0.7, heads=4)
    alpha, beta = moments.measure_scales(q, k)
    got = lln_temperature(q, k, alpha=alpha, beta=beta, fit=moments.PAPER)
    assert torch.allclose(got, temperature(q, k), rtol=1e-5)


def test_line_without_variance_is_infinitely_hot():
    q, k = gaussian(10, 4)
    got = lln_temperature(q, k, alpha=0.1, beta=0.1, fit=moments.PAPER)
    assert got.isinf().all()


def test_masked_tokens_do_not_count():
    q, k = gaussian(20, 8)
    mask = torch.ones(1, 20, dtype=torch.bool)
    mask[:, 15:] = False
    expected = temperature(q[:, :, :15], k[:, :, :15])
    q[:, :, 15:], k[:, :, 15:] = torch.nan, torch.nan
    for target in ("product", "measured"):
        expected = temperature(q[:, :, :15], k[:, :, :15], target=target)
        got = temperature(q, k, target=target, key_mask=mask, query_mask=mask)
        assert torch.allclose(got, expected)


def test_grouped_heads():
    q, _ = gaussian(20, 8, heads=4)
    _, k = gaussian(20, 8, heads=2)
    assert torch.allclose(temperature(q, k), temperature(q, k.repeat_interleave(2, dim=1)))


def test_bad_arguments():
    q, k = gaussian(5, 4)
    with pytest.raises(ValueError, match="target='exact' is unknown; pass 'product' or"):
        temperature(q, k, target="exact")
    with pytest.raises(ValueError, match="nothing to measure"):
        temperature(q[:, :, :0], k)
    with pytest.raises(ValueError, match="k has a value that is not finite"):
        temperature(q, k * torch.inf)
    with pytest.raises(ValueError, match="alpha=-1"):
        lln_temperature(q, k, alpha=-1.0, beta=1.0, fit=moments.PAPER)
