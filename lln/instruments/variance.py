"""How unequal the entries of an attention matrix are: variance of P and of ln P."""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from lln.instruments.checks import check_stochastic


def row_variance(p: Float[Tensor, "*batch N M"]) -> Float[Tensor, "*batch"]:
    r"""Mean variance of the entries of a row around 1/M.

    Eq. (21) of arXiv:2311.13541v4, averaged over the rows:
        σ_p² = (1/M) Σ_j (P_ij − 1/M)².
    Decreases with temperature (Theorem 3.4).

    Example:
        >>> row_variance(torch.eye(2))
        tensor(0.2500)
    """
    p = check_stochastic(p)
    return (p - 1 / p.shape[-1]).square().mean((-1, -2))


def log_variance(
    p: Float[Tensor, "*batch N M"], *, within_rows: bool = True
) -> Float[Tensor, "*batch"]:
    r"""Variance of ln P_ij, the quantity that moment matching equates (A.7).

    Args:
        within_rows: Average the variances of the rows, so that differences between the
            normalisers of rows do not count; this is what shapes attention, and it does not depend
            on M. False pools all entries, as the paper does.

    Returns:
        One number per leading index in float32 or wider. Entries that are exactly zero are pairs
        that cannot see each other; they are left out. A row with one entry contributes 0.

    Example:
        >>> log_variance(torch.full((4, 4), 0.25))
        tensor(0.)
    """
    p = check_stochastic(p)
    if within_rows:
        return log_variance_of_rows(p).mean(-1)
    return log_variance_of_rows(p.flatten(-2)[..., None, :]).squeeze(-1)


def log_variance_of_rows(p: Float[Tensor, "*rows M"]) -> Float[Tensor, "*rows"]:
    """Population variance of ln P_ij over the positive entries of every row. Unchecked."""
    seen = p > 0
    logs = torch.where(seen, p.log(), 0)
    count = seen.sum(-1, keepdim=True)
    mean = logs.sum(-1, keepdim=True) / count
    return torch.where(seen, logs - mean, 0).square().sum(-1) / count.squeeze(-1)
