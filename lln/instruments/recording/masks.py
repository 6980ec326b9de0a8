"""What a mask says: which keys are padding, whether attention is causal, or something else.

Models hand over masks in many forms: two-dimensional, boolean, additive, or none but a flag. Most
say no more than "these keys are padding, and queries see the past", which measurements in linear
time need to know.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor


@dataclass(frozen=True)
class MaskMeaning:
    """What a mask means, in the terms of an ``AttentionCall``."""

    key_mask: Bool[Tensor, "S M"] | None = None
    is_causal: bool = False
    bias: Float[Tensor, "S Hb N M"] | None = None
    unreadable: str = ""


def read_sdpa_mask(
    mask: object, *, is_causal: bool, samples: int, queries: int, keys: int
) -> MaskMeaning:
    """Read a mask as ``scaled_dot_product_attention`` takes it.

    Args:
        mask: None, or broadcastable to ``[B, H, N, M]``: boolean with True = may be attended, or
            additive.
        is_causal: Query i sees keys j ≤ i, as well as what the mask says.
    """
    if mask is not None and not isinstance(mask, Tensor):
        return MaskMeaning(unreadable=f"its mask is a {type(mask).__name__}")
    if mask is None and (not is_causal or queries == keys):
        return MaskMeaning(is_causal=is_causal)
    visible, added = _split(mask)
    if is_causal:
        device = None if mask is None else mask.device
        triangle = torch.ones(queries, keys, dtype=torch.bool, device=device).tril()
        visible = triangle[None, None] if visible is None else visible & triangle
    assert visible is not None
    while visible.dim() < 4:
        visible, added = visible[None], None if added is None else added[None]
    visible = visible[:samples].expand(-1, -1, queries, keys)
    if added is not None:
        added = added[:samples].expand(-1, -1, queries, keys)
        return _with_samples(MaskMeaning(bias=added.masked_fill(~visible, -torch.inf)), samples)
    return _with_samples(_simplest(visible), samples)


def _split(mask: Tensor | None) -> tuple[Tensor | None, Tensor | None]:
    """Where keys are visible, and what is added there; None instead of zeros."""
    if mask is None:
        return None, None
    if mask.dtype == torch.bool:
        return mask, None
    # "minus infinity" is often the smallest finite number, or half of it after an addition
    visible = mask > torch.finfo(mask.dtype).min / 4
    added = mask.detach().float().masked_fill(~visible, 0)
    return visible, added if bool(added.any()) else None


def _simplest(visible: Bool[Tensor, "S H N M"]) -> MaskMeaning:
    """A key mask, with causality if need be, or else a bias of 0 and −inf."""
    if bool((visible == visible[:, :1]).all()):
        one = visible[:, 0]
        if bool((one == one[:, :1]).all()):
            key_mask = one[:, 0]
            return MaskMeaning(None if bool(key_mask.all()) else key_mask)
        if one.shape[-1] == one.shape[-2]:
            valid = one[:, -1]  # the last query sees every valid key
            expected = valid[:, None] & torch.ones_like(one[0]).tril()
            if bool((~valid[:, :, None] | (one == expected)).all()):
                return MaskMeaning(None if bool(valid.all()) else valid, is_causal=True)
    zeros = torch.zeros(visible.shape, device=visible.device)
    return MaskMeaning(bias=zeros.masked_fill(~visible, -torch.inf))


def _with_samples(seen: MaskMeaning, samples: int) -> MaskMeaning:
    """One mask for the whole batch serves every sample."""
    key_mask, bias = seen.key_mask, seen.bias
    if key_mask is not None and key_mask.shape[0] == 1:
        key_mask = key_mask.expand(samples, -1)
    if bias is not None and bias.shape[0] == 1:
        bias = bias.expand(samples, -1, -1, -1)
    return MaskMeaning(key_mask, seen.is_causal, bias, seen.unreadable)
