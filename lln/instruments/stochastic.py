"""What every measure expects of a matrix: rows that are probability distributions.

Shared by all measures, so that a wrong matrix is refused in one place and in the same words.
"""

from __future__ import annotations

import torch
from jaxtyping import Float
from torch import Tensor

from lln.protocols import FLOATING, HALF, compute_dtype

ROW_SUM_TOLERANCE = {torch.float64: 1e-6, torch.float32: 1e-4}
HALF_ROW_SUM_TOLERANCE = 2e-2


def check_stochastic(p: Tensor, *, square: bool = False) -> Float[Tensor, "*batch N M"]:
    """Return ``p`` in its compute dtype if its rows are distributions, else explain.

    Args:
        square: Also require as many keys as queries, which eigenvalues need.
    """
    if not isinstance(p, Tensor) or p.dtype not in FLOATING:
        kind = p.dtype if isinstance(p, Tensor) else type(p).__name__
        raise TypeError(f"p is {kind}; pass a floating-point tensor [..., N, M]")
    if p.ndim < 2 or p.numel() == 0:
        raise ValueError(
            f"p has shape {tuple(p.shape)}; pass a non-empty attention matrix [..., N, M]"
        )
    if square and p.shape[-1] != p.shape[-2]:
        raise ValueError(
            f"p has shape {tuple(p.shape)}; eigenvalues need as many keys as queries, "
            "so pass the matrix of self-attention, or use centred_singular_value(p)"
        )
    check_rows(p)
    return p.detach().to(compute_dtype(p))


def check_rows(p: Tensor) -> None:
    """Rows must be finite, non-negative and sum to one, within the rounding of the dtype."""
    if not torch.isfinite(p).all():
        where = tuple(torch.nonzero(~torch.isfinite(p))[0].tolist())
        raise ValueError(
            f"p[{', '.join(map(str, where))}] = {p[where].item()}; every entry must be finite, "
            "look for an overflow or a fully masked row upstream"
        )
    if (p < 0).any():
        raise ValueError(
            f"p has a negative entry ({p.min().item():.3g}); pass probabilities, "
            "for example scores.softmax(-1)"
        )
    half = p.dtype in HALF
    tolerance = HALF_ROW_SUM_TOLERANCE if half else ROW_SUM_TOLERANCE[p.dtype]
    sums = p.sum(-1, dtype=compute_dtype(p))
    worst = sums.flatten()[(sums - 1).abs().argmax()].item()
    if abs(worst - 1) > tolerance:
        raise ValueError(
            f"a row of p sums to {worst:.6g}, not 1 (tolerance {tolerance:g}); divide each row by "
            "its sum, and leave out rows that see no key"
        )
