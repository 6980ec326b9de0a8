"""The integrals against cases with known answers, and against simulation."""

from __future__ import annotations

import math

import numpy as np
import pytest

from lln.moments.quadrature import row_divergence, row_variance
from tests.moments.simulation import draw, log_scores, row_variances


@pytest.mark.parametrize("sigma2", [1e-3, 0.1, 1.0, 10.0, 100.0])
def test_one_feature_is_log_normal(sigma2):
    """D = 1: ln S = sq + sk, so within a row ln P is exactly N(·, s²)."""
    assert row_variance(sigma2, 1) == pytest.approx(sigma2 / 2, rel=1e-7)
    assert row_divergence(sigma2, 1) == pytest.approx(sigma2 / 4, rel=1e-7)


@pytest.mark.parametrize("head_dim", [2, 16, 100])
def test_narrow_limit(head_dim):
    """σ̃² → 0: ln S is the mean of its exponents; with normalised keys their covariance with q."""
    sigma2, d = 1e-3, head_dim
    assert row_variance(sigma2, d) == pytest.approx(sigma2 / (2 * d), rel=2e-3)
    assert row_divergence(sigma2, d) == pytest.approx(sigma2 / (4 * d), rel=2e-3)
    sigma2 = 1e-2
    covariance = (sigma2 / 2) ** 2 * (d - 1) / d**2
    assert row_variance(sigma2, d, normalize_keys=True) == pytest.approx(covariance, rel=3e-2)
    divergence = row_divergence(sigma2, d, normalize_keys=True)
    assert divergence == pytest.approx(covariance / 2, rel=3e-2)


def test_two_features_against_a_direct_integral():
    """D = 2, normalised keys: the key enters through one logistic weight, so 3 dimensions do."""
    sigma2 = 3.0
    step = 0.15
    z = step * np.arange(-50, 51)
    weight = np.exp(-z * z / 2) / np.exp(-z * z / 2).sum()
    # √(σ̃²/2) (k_1 − k_2) has variance σ̃²
    share = 1 / (1 + np.exp(-math.sqrt(sigma2) * z))  # of feature 1 in the key
    # sum and difference of s·q_1, s·q_2; the sum shifts ln S alone and cancels within a row
    half = math.sqrt(sigma2) * z[:, None] / 2
    score = share * np.exp(half) + (1 - share) * np.exp(-half)  # [query, key]
    mean = score @ weight
    log_score = np.log(score)
    variance = (log_score**2 @ weight - (log_score @ weight) ** 2) @ weight
    divergence = ((score * log_score) @ weight / mean - np.log(mean)) @ weight
    assert row_variance(sigma2, 2, normalize_keys=True) == pytest.approx(variance, rel=1e-8)
    assert row_divergence(sigma2, 2, normalize_keys=True) == pytest.approx(divergence, rel=1e-8)


@pytest.mark.parametrize("normalize_keys", [False, True])
@pytest.mark.parametrize(("head_dim", "sigma2"), [(4, 12.0), (64, 9.0)])
def test_variance_against_simulation(head_dim, sigma2, normalize_keys):
    rng = np.random.default_rng(head_dim)
    blocks = row_variances(rng, head_dim, sigma2, blocks=600, normalize_keys=normalize_keys)
    error = blocks.std() / math.sqrt(len(blocks))
    exact = row_variance(sigma2, head_dim, normalize_keys=normalize_keys)
    assert error < 0.01 * exact
    assert abs(blocks.mean() - exact) < 4 * error


@pytest.mark.parametrize("normalize_keys", [False, True])
@pytest.mark.parametrize(("head_dim", "sigma2"), [(4, 3.0), (64, 5.0)])
def test_divergence_against_simulation(head_dim, sigma2, normalize_keys):
    """KL of S/E_k[S], with E_k[S] known: e^{s²/2} Σ_l e^{sq_l}, or Σ_l e^{sq_l}/D."""
    rng = np.random.default_rng(head_dim)
    estimates = []
    for _ in range(60):
        q, k = draw(rng, 512, head_dim, sigma2)
        log_mean = np.log(np.exp(q).sum(1, keepdims=True))
        log_mean += -math.log(head_dim) if normalize_keys else sigma2 / 4
        ratio = log_scores(q, k, normalize_keys=normalize_keys) + q.max(1, keepdims=True) - log_mean
        # E[r ln r − r + 1] equals E[r ln r] and has far less variance
        estimates.append((np.exp(ratio) * (ratio - 1) + 1).mean())
    error = np.std(estimates) / math.sqrt(len(estimates))
    exact = row_divergence(sigma2, head_dim, normalize_keys=normalize_keys)
    assert error < 0.03 * exact
    assert abs(np.mean(estimates) - exact) < 4 * error


def test_divergence_with_normalized_keys_is_bounded():
    """A row's largest weight is at most D times the mean one."""
    narrow, wide = (row_divergence(sigma2, 8, normalize_keys=True) for sigma2 in (4.0, 100.0))
    assert narrow < 0.1 * math.log(8)
    assert 0.6 * math.log(8) < wide < math.log(8)
