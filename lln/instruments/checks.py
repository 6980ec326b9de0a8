"""What every measure expects: a matrix whose rows are distributions, or finite queries and keys.

Shared by all measures, so that wrong inputs are refused in one place and in the same words.
"""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lln.ops.common.arguments import check_mask, check_qkv
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


def tokens_taking_part(
    q: Tensor, k: Tensor, key_mask: Tensor | None, query_mask: Tensor | None
) -> tuple[Bool[Tensor, "B N"], Bool[Tensor, "B M"]]:
    """Masks of the queries and keys that count; q and k must be finite there.

    In self-attention (M = N) a padded key is also a padded query, unless ``query_mask`` says more.
    """
    check_qkv(q, k, k)
    check_mask("key_mask", key_mask, k.shape[0], k.shape[2], k)
    check_mask("query_mask", query_mask, q.shape[0], q.shape[2], q)
    if q.numel() == 0 or k.numel() == 0:
        raise ValueError(
            f"q has shape {list(q.shape)} and k {list(k.shape)}; there is nothing to measure, "
            "pass at least one token"
        )
    keys = k.new_ones(k.shape[0], k.shape[2], dtype=torch.bool) if key_mask is None else key_mask
    if query_mask is not None:
        queries = query_mask
    elif q.shape[2] == k.shape[2]:
        queries = keys
    else:
        queries = q.new_ones(q.shape[0], q.shape[2], dtype=torch.bool)
    for name, x, mask in (("q", q, queries), ("k", k, keys)):
        if not (torch.isfinite(x).all((1, 3)) | ~mask).all():
            raise ValueError(
                f"{name} has a value that is not finite among its visible tokens; mask padded "
                "tokens with key_mask, or look for the overflow upstream"
            )
    return queries, keys
