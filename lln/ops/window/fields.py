"""Which keys are near some queries, and which are far from them."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Int
from torch import Tensor

from lln.ops.window.near import Near


def fields_of_rows(
    index: Int[Tensor, "#B r"],
    queries: int,
    keys: int,
    near: Near,
    key_mask: Tensor | None,
    is_causal: bool,
) -> tuple[Bool[Tensor, "#B 1 r M"], Bool[Tensor, "#B 1 r M"]]:
    """Which keys are near the queries ``index``, and which are far from them."""
    i = index[:, None, :, None] + keys - queries
    j = torch.arange(keys, device=index.device)
    start = i.div(near.block, rounding_mode="floor") * near.block
    left, right = j < start - near.overlap, j >= start + near.block + near.overlap
    outside = left | (right & (not is_causal))
    valid = (j >= 0)[None] if key_mask is None else key_mask
    is_sink = (valid & (valid.cumsum(1) <= near.sinks))[:, None, None]
    seen = valid[:, None, None] & ((j <= i) if is_causal else torch.ones_like(outside))
    far = outside & ~is_sink & seen
    return seen & ~far, far
