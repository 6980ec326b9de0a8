"""Left padding: blocks, landmarks and positions count from the first real token of each sample."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor


def leading(key_mask: Bool[Tensor, "B M"]) -> Int[Tensor, " B"]:
    """Masked tokens before the first real one; M if there is none."""
    first = key_mask.to(torch.uint8).argmax(-1)
    return torch.where(key_mask.any(-1), first, key_mask.shape[1])


def from_the_first(key_mask: Bool[Tensor, "B M"]) -> Int[Tensor, "B M"]:
    """An index per sample that turns its tokens: its first real one comes first, padding last."""
    tokens = key_mask.shape[1]  # no len(): it would fix the length of a trace
    turned = torch.arange(tokens, device=key_mask.device) + leading(key_mask)[:, None]
    return torch.where(turned >= tokens, turned - tokens, turned)  # modulo, as ONNX can say it


def take(x: Float[Tensor, "B H T D"], index: Int[Tensor, "B N"]) -> Float[Tensor, "B H N D"]:
    """Tokens by an index per sample."""
    return x.gather(2, index[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3]))


def from_first_token(
    attend: Callable[[Tensor, Tensor, Tensor, Tensor], Tensor],
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv M D"],
    v: Float[Tensor, "B Hkv M E"],
    key_mask: Bool[Tensor, "B M"],
) -> Float[Tensor, "B H N E"]:
    """``attend(q, k, v, key_mask)`` on samples turned so that each starts at its first real token.

    Queries are the last N positions. The padding goes to the end, where it is masked as before.
    """
    queries, keys = q.shape[2], k.shape[2]
    place = torch.arange(keys, device=k.device)
    turned = from_the_first(key_mask)
    back = place - leading(key_mask)[:, None]
    back = torch.where(back < 0, back + keys, back)
    q = take(F.pad(q, (0, 0, keys - queries, 0)), turned)
    out = attend(q, take(k, turned), take(v, turned), key_mask.gather(1, turned))
    return take(out, back)[:, :, keys - queries :]
