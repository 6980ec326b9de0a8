"""Near keys exactly, far keys by LLN, under one normaliser, in linear time."""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Int
from torch import Tensor

from lln.ops.common.arguments import hide
from lln.ops.linear.eager_state import summarize_op
from lln.ops.window.eager_far import far_op
from lln.ops.window.eager_near import near_backward, near_op

NOWHERE = 1 << 40  # the position of a sink that is not there


@dataclass(frozen=True)
class Sinks:
    """Keys that are near every query: the first valid ones of a sample, or of its stream.

    ``position`` counts in keys of the call: negative for keys before them, ``NOWHERE`` (or any
    beyond the last) where a sample has fewer sinks.
    """

    k: Tensor  # [B, Hkv, n, D]
    v: Tensor  # [B, Hkv, n, E]
    position: Tensor  # [B, n]

    @staticmethod
    def among(k: Tensor, v: Tensor, count: int, key_mask: Tensor | None) -> Sinks:
        """The first ``count`` valid keys."""
        keys, position = k.shape[2], sink_positions(k, count, key_mask)
        if count == 0 or keys == 0:
            none_k, none_v = (x.new_zeros((*x.shape[:2], count, x.shape[3])) for x in (k, v))
            return Sinks(none_k, none_v, torch.full_like(position, NOWHERE))
        index = position.clamp(max=keys - 1)[:, None, :, None]
        sink_k, sink_v = (
            hide(x.gather(2, index.expand(-1, x.shape[1], -1, x.shape[3])), position < keys)
            for x in (k, v)
        )
        return Sinks(sink_k, sink_v, position)

    def without(self, keys: int, key_mask: Tensor | None) -> Tensor | None:
        """``key_mask`` with these keys left out; None where nothing is masked."""
        return without_positions(self.position, keys, key_mask)


def sink_positions(k: Tensor, count: int, key_mask: Tensor | None) -> Int[Tensor, "B n"]:
    """Positions of the first ``count`` valid keys, those of the call or beyond if there are fewer.

    Without a mask they are the first positions, of which a short call may have fewer.
    """
    if key_mask is None:
        return torch.arange(count, device=k.device).expand(k.shape[0], -1)
    every = torch.arange(k.shape[2], device=k.device).masked_fill(~key_mask, NOWHERE)
    return F.pad(every, (0, count), value=NOWHERE).sort(1).values[:, :count]


def without_positions(
    positions: Int[Tensor, "B n"], keys: int, key_mask: Tensor | None
) -> Bool[Tensor, "B M"] | None:
    """``key_mask`` with these keys left out; None where nothing is masked."""
    if positions.shape[1] == 0:
        return key_mask
    place = torch.arange(keys, device=positions.device)
    chosen = (positions[:, :, None] == place).any(1)
    return ~chosen if key_mask is None else key_mask & ~chosen


def far_mask(
    k: Tensor, sinks: Int[Tensor, "B n"] | None, key_mask: Tensor | None
) -> Bool[Tensor, "B M"] | None:
    """Which keys may be far: the valid ones that are no sinks; None for all."""
    if sinks is None or sinks.shape[1] == 0:
        return key_mask
    if key_mask is None:  # the first keys of every sample
        return (torch.arange(k.shape[2], device=k.device) >= sinks.shape[1]).expand(len(k), -1)
    return without_positions(sinks, k.shape[2], key_mask)


def near(
    q, k, v, *, block, scale, overlap=0, sinks=0, key_mask=None, is_causal=False,
    probability_dropout=None, wide=False,
) -> Tensor:  # fmt: skip
    """Softmax attention over windows of blocks and sinks."""
    always = Sinks.among(k, v, sinks, key_mask)
    tensors = q, k, v, always.k, always.v, always.position, key_mask, probability_dropout
    out, _ = near_op(*tensors, block, overlap, scale, 0, is_causal)
    return out if wide else out.to(q.dtype)


def blocks_backward(
    d_out: Tensor, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, block: int,
    scale: float, is_causal: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """Gradients of q, k and v of :func:`near` without overlap and sinks."""
    none = Sinks.among(k, v, 0, key_mask)
    tensors = q, k, v, none.k, none.v, none.position, key_mask, None
    no_level = d_out.new_zeros(d_out.shape[:3])
    d_q, d_k, d_v, *_ = near_backward(
        d_out, no_level, *tensors, block, 0, scale, 0, is_causal
    )  # fmt: skip
    return d_q, d_k, d_v


def near_far(
    q, k, v, *, q_far, k_far, alpha, beta, gamma, block, scale, overlap=0, sinks=0,
    key_mask=None, is_causal=False, slot_dropout=None, probability_dropout=None, local=None,
) -> Tensor:  # fmt: skip
    """u · near + (1 − u) · far, u = sigmoid(ℓ_near − γ − ℓ_far).

    ``local``: the near branch, output and logarithm, if it was computed elsewhere.
    """
    always = Sinks.among(k, v, sinks, key_mask)
    if local is None:
        tensors = q, k, v, always.k, always.v, always.position, key_mask, probability_dropout
        local = near_op(*tensors, block, overlap, scale, 0, is_causal)
    options = {"alpha": alpha, "beta": beta}
    window = {"block": block, "overlap": overlap, "is_causal": is_causal}
    linear = _far(q_far, k_far, v, always, key_mask, slot_dropout, **options, **window)
    return combine(local, linear, gamma).to(q.dtype)


def near_share_of(
    q, k, v, *, q_far, k_far, alpha, beta, gamma, block, scale, overlap=0, sinks=0,
    key_mask=None, is_causal=False,
) -> Tensor:  # fmt: skip
    """The weight u_i of the near keys, ``[B, H, N]``; values matter only by their number."""
    always = Sinks.among(k, v, sinks, key_mask)
    tensors = q, k, v, always.k, always.v, always.position, key_mask, None
    _, near = near_op(*tensors, block, overlap, scale, 0, is_causal)
    options = {"alpha": alpha, "beta": beta}
    window = {"block": block, "overlap": overlap, "is_causal": is_causal}
    _, linear = _far(q_far, k_far, v, always, key_mask, None, **options, **window)
    return near_share(near, linear, gamma)


def _far(
    q, k, v, always: Sinks, key_mask, slot_dropout, *, alpha, beta, block, overlap, is_causal
) -> tuple[Tensor, Tensor]:
    """LLN over the far keys, with its normaliser."""
    left = always.without(k.shape[2], key_mask)
    none = summarize_op(k[:, :, :0], v[:, :, :0], beta, None)
    return far_op(
        *(q, k, v, alpha, beta, *none, left, slot_dropout),
        *(block, overlap, 0, is_causal),
    )


def combine(near: tuple[Tensor, Tensor], far: tuple[Tensor, Tensor], gamma: Tensor) -> Tensor:
    """Put two attentions, outputs and logarithms of their sums, under one normaliser."""
    share = near_share(near[1], far[1], gamma)[..., None]
    return share * near[0] + (1 - share) * far[0]


def near_share(near: Tensor, far: Tensor, gamma: Tensor) -> Tensor:
    """The weight u_i of the near keys, ``[B, H, N]``, from the logarithms of the two sums.

    −inf stands for no key: u = 0 without near keys, 1 without far ones.
    """
    nothing_near, nothing_far = near == -torch.inf, far == -torch.inf
    gap = near.masked_fill(nothing_near, 0) - far.masked_fill(nothing_far, 0) - gamma[..., None]
    share = torch.sigmoid(gap).masked_fill(nothing_far, 1)
    return share.masked_fill(nothing_near, 0)
