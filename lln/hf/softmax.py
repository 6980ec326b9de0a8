"""Softmax attention in the place of linear attention: of whole layers, and of single heads."""

from __future__ import annotations

import inspect
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lln.hf.rotation import Rotation


@dataclass(frozen=True)
class SoftmaxCall:
    """Queries, keys and values of one call of a layer, and what softmax answered.

    Attributes:
        key_mask, query_mask: True at real tokens.
        scale: Of q·k in softmax.
        rotation: For feature maps that see q and k before it.
    """

    q: Float[Tensor, "B H N D"]
    k: Float[Tensor, "B Hkv M D"]
    v: Float[Tensor, "B Hkv M E"]
    wanted: Float[Tensor, "B H N E"]
    key_mask: Bool[Tensor, "B M"] | None
    query_mask: Bool[Tensor, "B N"] | None
    is_causal: bool
    scale: float
    rotation: Rotation | None = None


def softmax_attention(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv M D"],
    v: Float[Tensor, "B Hkv M E"],
    *,
    key_mask: Bool[Tensor, "B M"] | None,
    is_causal: bool,
    scale: float,
    dropout: float = 0.0,
) -> Float[Tensor, "B H N E"]:
    """The attention that LLN stands in for."""
    group = q.shape[1] // k.shape[1]
    k, v = (x.repeat_interleave(group, dim=1) for x in (k, v))
    mask = pair_mask(q, k, key_mask, is_causal=is_causal)
    top_left = is_causal and mask is None
    return nn.functional.scaled_dot_product_attention(
        q,
        k,
        v,
        attn_mask=mask,
        is_causal=top_left and q.shape[2] > 1,
        scale=scale,
        dropout_p=dropout,
    )


def pair_mask(q: Tensor, k: Tensor, key_mask: Tensor | None, *, is_causal: bool) -> Tensor | None:
    """bool ``[B or 1, 1, N, M]``, or None where torch's ``is_causal`` says it all.

    A query that sees nothing sees everything instead: it is padding, and must only stay finite.
    """
    queries, keys = q.shape[2], k.shape[2]
    seen = None if key_mask is None else key_mask[:, None, None, :].expand(-1, 1, queries, -1)
    if is_causal and queries > 1 and (seen is not None or queries != keys):
        triangle = torch.ones(queries, keys, dtype=torch.bool, device=q.device)
        triangle = triangle.tril(keys - queries)[None, None]
        seen = triangle if seen is None else seen & triangle
    return None if seen is None else seen | ~seen.any(-1, keepdim=True)


def softmax_heads_of(core: object) -> tuple[int, ...]:
    """The heads of a core that keep softmax, in rising order."""
    return getattr(core, "softmax_heads", ())


def kept_keys(
    x: Float[Tensor, "B Hkv M D"], heads: Sequence[int], num_heads: int
) -> Float[Tensor, "B h M D"]:
    """The keys or values that these query heads see."""
    return pick(x, _key_heads(heads, num_heads // x.shape[1]))


def put_softmax(
    out: Float[Tensor, "B H N E"],
    heads: Sequence[int],
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B h M D"],
    v: Float[Tensor, "B h M E"],
    *,
    group: int,
    key_mask: Bool[Tensor, "B M"] | None,
    is_causal: bool,
    dropout: float = 0.0,
) -> Float[Tensor, "B H N E"]:
    """``out`` with the answers of softmax in some heads.

    Args:
        heads: In rising order.
        k, v: Of :func:`kept_keys`.
        group: Query heads that share a key head.
    """
    key_heads = _key_heads(heads, group)
    own = [key_heads.index(head // group) for head in heads]
    options = {"key_mask": key_mask, "is_causal": is_causal, "dropout": dropout}
    exact = softmax_attention(
        pick(q, heads), pick(k, own), pick(v, own), **options, scale=q.shape[-1] ** -0.5
    )
    answers = dict(zip(heads, exact.to(out.dtype).unbind(1), strict=True))
    return torch.stack([answers.get(head, x) for head, x in enumerate(out.unbind(1))], 1)


def _key_heads(heads: Sequence[int], group: int) -> list[int]:
    return sorted({head // group for head in heads})


def pick(x: Tensor, heads: Sequence[int]) -> Tensor:
    """Chosen heads; by slices, as an index would be copied to the device in every call."""
    return torch.stack([x[:, head] for head in heads], 1)


def eager_of(module: nn.Module) -> Any:
    """The eager attention of a module's family, which every one of them writes itself."""
    forward = inspect.unwrap(type(module).forward)
    return getattr(forward, "__globals__", {}).get("eager_attention_forward")


def added_mask(
    mask: Tensor | None, query: Tensor, key: Tensor, *, is_causal: bool
) -> Tensor | None:
    """A mask as eager attention adds it to its scores, from a bool one or from none."""
    if mask is None and is_causal and query.shape[2] > 1:
        mask = torch.ones(query.shape[2], key.shape[2], dtype=torch.bool, device=query.device)
        mask = mask.tril(key.shape[2] - query.shape[2])[None, None]
    if mask is None or mask.dtype != torch.bool:
        return mask
    return torch.zeros_like(mask, dtype=query.dtype).masked_fill_(
        ~mask, torch.finfo(query.dtype).min
    )
