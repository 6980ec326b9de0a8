"""What all queries share and what tells them apart: column bias and mutual information."""

from __future__ import annotations

import math

from jaxtyping import Float
from torch import Tensor

from lln.instruments.entropy import row_entropy
from lln.instruments.stochastic import check_stochastic


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
