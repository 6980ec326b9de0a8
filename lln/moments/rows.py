"""Some rows of an attention matrix: which queries."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor


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
