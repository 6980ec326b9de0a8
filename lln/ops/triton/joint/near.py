"""Softmax attention over windows and sinks, with the logarithm of its normaliser."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lln.ops.registration import register
from lln.ops.triton.joint.launch import Near, Window, forward
from lln.ops.triton.joint.launch_backward import backward
from lln.ops.triton.library import empty_rows, floats


def near_with_log(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv N D"],
    v: Float[Tensor, "B Hkv N E"],
    *,
    sinks: Int[Tensor, "B n"] | None = None,
    key_mask: Bool[Tensor, "B N"] | None = None,
    block: int,
    overlap: int,
    scale: float,
    is_causal: bool,
) -> tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]:
    """Output and natural logarithm of the sum of near keys; −inf and 0 where there is none.

    ``sinks`` are positions of keys that every query sees; N or more where there is none.
    """
    return _near(q, k, v, sinks, key_mask, block, overlap, scale, is_causal)


def _near_impl(q, k, v, sinks, key_mask, block, overlap, scale, causal) -> tuple[Tensor, Tensor]:
    if q.numel() == 0 or v.numel() == 0:
        out, log = _near_fake(q, k, v, sinks, key_mask, block, overlap, scale, causal)
        return out.zero_(), log.fill_(-torch.inf)
    window = Window(block, overlap, scale, causal, q.shape[2])
    return forward(Near.prepared(q, k, v, sinks, key_mask), None, window)[:2]


def _near_fake(q, k, v, sinks, key_mask, block, overlap, scale, causal) -> tuple[Tensor, Tensor]:
    return empty_rows(q, v.shape[-1]), floats(q, *q.shape[:3])


def _backward_impl(
    dout, dlog, q, k, v, sinks, key_mask, out, log, block, overlap, scale, causal
) -> tuple[Tensor, Tensor, Tensor]:
    if q.numel() == 0 or v.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    window = Window(block, overlap, scale, causal, q.shape[2])
    near = Near.prepared(q, k, v, sinks, key_mask)
    return backward(dout, dlog.contiguous(), near, None, out, log, None, window)[:3]


def _backward_fake(dout, dlog, q, k, v, *others: Any) -> tuple[Tensor, Tensor, Tensor]:
    return tuple(empty_rows(x, x.shape[-1]) for x in (q, k, v))  # pyright: ignore


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:5], *output)
    ctx.options = inputs[5:]


def _differentiate(ctx: Any, dout: Tensor, dlog: Tensor) -> tuple[Tensor | None, ...]:
    return *_backward(dout, dlog, *ctx.saved_tensors, *ctx.options), *([None] * 6)


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? key_mask"
_WINDOW = "int block, int overlap, float scale, bool causal"
_near = register(
    f"near({_INPUTS}, {_WINDOW}) -> (Tensor out, Tensor log)",
    _near_impl,
    _near_fake,
    save=_save,
    differentiate=_differentiate,
)
_backward = register(
    f"near_backward(Tensor dout, Tensor dlog, {_INPUTS}, Tensor out, Tensor log, {_WINDOW})"
    " -> (Tensor, Tensor, Tensor)",
    _backward_impl,
    _backward_fake,
)
