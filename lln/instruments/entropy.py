"""How widely attention is spread: Shannon and Rényi entropies of its rows."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from lln.instruments.stochastic import check_stochastic


def row_entropy(p: Float[Tensor, "*batch N M"]) -> Float[Tensor, "*batch N"]:
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
