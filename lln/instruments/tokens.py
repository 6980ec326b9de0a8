"""Which queries and keys take part in a measurement, and the checks of q and k."""

from __future__ import annotations

import torch
from jaxtyping import Bool
from torch import Tensor

from lln.ops.arguments import check_mask, check_qkv


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
