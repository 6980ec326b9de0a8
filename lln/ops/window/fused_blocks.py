"""Softmax attention inside blocks by torch's own fused attention: the quick way on a CPU.

All blocks of all heads are one batch of short sequences. Where torch has no fused kernel for them,
:mod:`lln.ops.window.eager_near` computes the same, a group of blocks at a time.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from lln.ops.common.arguments import exported_for_any, hide, no_autocast, transforms_active
from lln.ops.common.parts import early_and_blind
from lln.protocols import compute_dtype


def takes(q: Tensor, k: Tensor, v: Tensor, dropout: Tensor | None) -> bool:
    """Whether torch has a fused kernel for them.

    A GPU is not asked: what it takes there for float32 may round to fewer digits. Nor is it used in
    programs for every length, whose number of blocks is open, and under torch.func, whose vmap
    would call it once per sample.
    """
    if exported_for_any(q.shape[2]) or exported_for_any(k.shape[2]) or transforms_active():
        return False
    something = q.numel() > 0 and k.numel() > 0
    return q.device.type == "cpu" and q.shape[-1] == v.shape[-1] and dropout is None and something


def attend_in_blocks(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block: int,
    scale: float,
    key_mask: Tensor | None,
    is_causal: bool,
    wide: bool,
) -> Tensor:
    """Softmax attention inside blocks, differentiated by torch.

    Positions are those of the keys; query i stands at i + M − N.
    """
    given, dtype = q.dtype, compute_dtype(q, k, v)
    queries, keys = q.shape[2], k.shape[2]
    first, blind = early_and_blind(q, k)  # first: position of the first query that has a block
    start = first // block * block
    before, after = first - start, -(keys - start) % block
    q = _padded(q[:, :, blind:].to(dtype), before, after)
    k, v = k[:, :, start:].to(dtype), v[:, :, start:].to(dtype)
    seen = None if key_mask is None else key_mask[:, start:]
    if seen is not None:
        k, v = hide(k, seen), hide(v, seen)
    elif after:
        seen = k.new_ones(k.shape[0], keys - start, dtype=torch.bool)
    if seen is not None:
        seen = F.pad(seen, (0, after)).unflatten(1, (-1, block))[:, None, :, None, :]
    k, v = _padded(k, 0, after), _padded(v, 0, after)
    if (group := q.shape[1] // k.shape[1]) > 1:
        k, v = k.repeat_interleave(group, dim=1), v.repeat_interleave(group, dim=1)
    out = _softmax(q, k, v, seen, block, scale, is_causal)
    out = _padded(out[:, :, before : before + queries - blind], blind, 0)
    return out if wide else out.to(given)


def _padded(x: Tensor, before: int, after: int) -> Tensor:
    """x with zeros before and after its tokens; x itself if there are none."""
    return F.pad(x, (0, 0, before, after)) if before or after else x


def _softmax(
    q: Tensor, k: Tensor, v: Tensor, seen: Tensor | None, block: int, scale: float, is_causal: bool
) -> Tensor:
    """Attend in blocks of ``[B, H, T · block, D]``; ``seen`` is ``[B, 1, T, 1, block]``.

    Values are 0 where ``seen`` is False.
    """
    batch, heads = q.shape[:2]
    # Four dimensions by a view, whichever of heads and tokens lies outside of the other.
    inside = q.stride(1) < q.stride(2) and batch > 1

    def as_batch(x: Tensor) -> Tensor:
        return (x.transpose(1, 2) if inside else x).flatten(0, 1)

    if seen is not None:
        past = seen.new_ones(block, block).tril() if is_causal else seen.new_ones(1, block)
        seen = seen & past
        # A row that sees nothing is shown hidden keys: their values are 0, and so is their mean.
        seen = seen | (~seen.any(-1, keepdim=True) & past)
        seen = as_batch(seen.expand(-1, heads, -1, -1, -1))
    blocks = [as_batch(x.unflatten(2, (-1, block))) for x in (q, k, v)]
    cut = is_causal and seen is None  # else by the mask
    with no_autocast(q):
        out = F.scaled_dot_product_attention(*blocks, attn_mask=seen, scale=scale, is_causal=cut)
    out = out.unflatten(0, (batch, -1))
    return (out.transpose(1, 2) if inside else out).flatten(2, 3)
