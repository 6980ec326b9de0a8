"""How widely attention is spread, in bits: entropies, column bias, mutual information."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from lln.instruments.checks import check_stochastic


def row_entropy(p: Float[Tensor, "*rows M"]) -> Float[Tensor, "*rows"]:
    """−Σ_j P_ij log₂ P_ij of every row, eq. (20), in bits; 0 log 0 = 0. Unchecked."""
    return torch.special.entr(p).sum(-1) / math.log(2)


def entropy(p: Float[Tensor, "*batch N M"]) -> Float[Tensor, "*batch"]:
    r"""Mean entropy of the rows of an attention matrix, in bits.

    Eq. (7) of arXiv:2311.13541v4:
        H(P) = −(1/N) Σ_i Σ_j P_ij log₂ P_ij.

    Returns:
        One number per leading index, between 0 (each row on one key) and log₂ M (uniform), in
        float32 or wider.

    Example:
        >>> entropy(torch.full((4, 4), 0.25))
        tensor(2.)
    """
    return row_entropy(check_stochastic(p)).mean(-1)


def collision(p: Float[Tensor, "*rows M"]) -> Float[Tensor, "*rows"]:
    """Σ_j P_ij² of every row: the chance that two draws from it pick the same key. Unchecked."""
    return p.square().sum(-1)


def renyi2_entropy(p: Float[Tensor, "*batch N M"]) -> Float[Tensor, "*batch"]:
    r"""Mean Rényi entropy of order 2 of the rows, in bits.

    Not in the paper:
        R(P) = −(1/N) Σ_i log₂ Σ_j P_ij².
    At most the Shannon entropy, and unlike it exact in O(N D²) for LLN (:func:`measure`).

    Returns:
        One number per leading index, between 0 and log₂ M, in float32 or wider.

    Example:
        >>> renyi2_entropy(torch.full((4, 4), 0.25))
        tensor(2.)
    """
    return -collision(check_stochastic(p)).log2().mean(-1)


def effective_tokens(p: Float[Tensor, "*batch N M"]) -> Float[Tensor, "*batch"]:
    r"""Mean number of keys a query effectively attends to: the participation ratio of the rows.

    Not in the paper:
        (1/N) Σ_i 1 / Σ_j P_ij².

    Returns:
        One number per leading index, between 1 and M, in float32 or wider.

    Example:
        >>> effective_tokens(torch.eye(3))
        tensor(1.)
    """
    return collision(check_stochastic(p)).reciprocal().mean(-1)


def column_bias(p: Float[Tensor, "*batch N M"]) -> Float[Tensor, "*batch"]:
    r"""How far the average query favours some keys: divergence of the mean row from uniform, bits.

    Not in the paper, which only says that attention "biased towards a column" raises the spectral
    gap whatever the temperature; this measures that bias:
        KL(μ ‖ uniform) = log₂ M − H(μ),   μ_j = (1/N) Σ_i P_ij.

    Returns:
        One number per leading index, between 0 and log₂ M, in float32 or wider.

    Example:
        >>> column_bias(torch.eye(4))
        tensor(0.)
    """
    mean_row = check_stochastic(p).mean(-2)
    return (math.log2(p.shape[-1]) - row_entropy(mean_row)).clamp(min=0)


def mutual_information(p: Float[Tensor, "*batch N M"]) -> Float[Tensor, "*batch"]:
    r"""Bits that the attended key tells about the query, for queries drawn uniformly.

    Not in the paper:
        I = H(μ) − (1/N) Σ_i H(P_i),   μ the mean row,
    the part of concentration that depends on the query: log₂ M − entropy − column_bias. A matrix
    of rank r has I ≤ log₂ r, so LLN never exceeds log₂ D.

    Returns:
        One number per leading index, between 0 and log₂ min(N, M), in float32 or wider.

    Example:
        >>> mutual_information(torch.eye(4))
        tensor(2.)
    """
    p = check_stochastic(p)
    return (row_entropy(p.mean(-2)) - row_entropy(p).mean(-1)).clamp(min=0)
