"""Some rows of an attention matrix: which queries, and which keys are near them and far."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lln.ops.window.near import Near


def spaced_rows(
    tokens: int,
    rows: int,
    query_mask: Tensor | None,
    device: torch.device,
    generator: torch.Generator | None = None,
) -> Int[Tensor, "#B r"]:
    """``rows`` evenly spaced queries among those that count; some twice if there are fewer.

    With a generator, of the CPU, each is drawn from its part of the input.
    """
    inside = 0.5 if generator is None else torch.rand(rows, generator=generator).to(device)
    share = (torch.arange(rows, device=device) + inside) / rows
    if query_mask is None:
        return (share * tokens).long().clamp(max=tokens - 1)[None]
    valid = query_mask.sum(1, keepdim=True)
    last = (valid - 1).clamp(min=0)
    return counted_first(query_mask).gather(1, torch.minimum((share * valid).long(), last))


def counted_first(mask: Bool[Tensor, "B N"]) -> Int[Tensor, "B N"]:
    """The places of all tokens, those that count before the others, each in their order.

    By numbers that are all different: ONNX has no stable sort.
    """
    tokens = mask.shape[1]
    place = torch.arange(tokens, device=mask.device)
    return torch.where(mask, place, place + tokens).sort(1).indices


def take_rows(x: Float[Tensor, "B H N D"], index: Int[Tensor, "#B r"]) -> Float[Tensor, "B H r D"]:
    """The rows ``index`` of every head."""
    chosen = index[:, None, :, None].expand(x.shape[0], x.shape[1], -1, x.shape[3])
    return x.gather(2, chosen)


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
