"""Gaussian attention in float64 numpy, to hold the integrals and the table to."""

from __future__ import annotations

import numpy as np


def draw(rng: np.random.Generator, tokens: int, head_dim: int, sigma2: float = 2.0):
    """Queries and keys with σ_q² = σ_k² = σ̃²/2."""
    return rng.standard_normal((2, tokens, head_dim)) * np.sqrt(sigma2 / 2)


def log_scores(q, k, *, normalize_keys: bool = False):
    """ln Σ_l exp(q_il + k_jl) minus max_l q_il; ``normalize_keys``: of log_softmax_l(k_jl)."""
    top = k.max(1, keepdims=True)
    features = np.exp(k - top)
    if normalize_keys:
        features /= features.sum(1, keepdims=True)
        top = np.zeros_like(top)
    return np.log(np.exp(q - q.max(1, keepdims=True)) @ features.T) + top.T


def entropy_bits(log_score) -> float:
    """Mean entropy of the rows of softmax(log_score)."""
    shifted = log_score - log_score.max(1, keepdims=True)
    mass = np.exp(shifted).sum(1, keepdims=True)
    log_p = shifted - np.log(mass)
    return float(-(np.exp(log_p) * log_p).sum(1).mean() / np.log(2))


def row_variances(rng, head_dim, sigma2, *, blocks, normalize_keys=False, tokens=64):
    """½E[(ln S(q,k) − ln S(q,k'))²], one estimate per block of independent queries and keys."""
    return np.array(
        [
            log_scores(*draw(rng, tokens, head_dim, sigma2), normalize_keys=normalize_keys)
            .var(axis=1, ddof=1)
            .mean()
            for _ in range(blocks)
        ]
    )
