"""Block-diagonal softmax attention: one launch forward, one backward.

Blocks of more than a tile are windows that do not overlap.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lln.ops.common.kernels.library import empty_rows
from lln.ops.common.kernels.tiles import LARGEST_BLOCK
from lln.ops.common.registration import register
from lln.ops.linear.kernels.launch import prepared
from lln.ops.window.kernels.blocks.launch import diag, diag_backward, empty_diag_lse
from lln.ops.window.kernels.joint.near_far import near


def block_diagonal(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv N D"],
    v: Float[Tensor, "B Hkv N E"],
    *,
    block: int,
    scale: float,
    key_mask: Bool[Tensor, "B N"] | None = None,
    is_causal: bool = False,
    probability_dropout: None = None,
) -> Float[Tensor, "B H N E"]:
    """Softmax attention among the positions of one block (Fig. 3, right branch)."""
    if probability_dropout is not None:
        raise ValueError("probability_dropout is not supported by impl='triton'; use impl='eager'")
    if block > LARGEST_BLOCK:
        return near(q, k, v, block=block, scale=scale, key_mask=key_mask, is_causal=is_causal)
    return _forward(q, k, v, key_mask, block, scale, is_causal)[0]


def _forward_impl(q, k, v, key_mask, block, scale, is_causal) -> tuple[Tensor, Tensor]:
    if q.numel() == 0 or v.numel() == 0:
        out, lse = _forward_fake(q, k, v, key_mask, block, scale, is_causal)
        return out.zero_(), lse.zero_()
    q, k, v, key_mask = prepared(q, k, v, key_mask)
    out, lse = diag(
        q, k, v, key_mask, block=block, scale=scale, is_causal=is_causal, linear=False, save=True
    )
    assert lse is not None
    return out, lse


def _forward_fake(q, k, v, key_mask, block, scale, is_causal) -> tuple[Tensor, Tensor]:
    return empty_rows(q, v.shape[-1]), empty_diag_lse(q, linear=False)


def _backward_impl(
    dout, q, k, v, key_mask, lse, block, scale, is_causal
) -> tuple[Tensor, Tensor, Tensor]:
    if q.numel() == 0 or v.numel() == 0:
        return torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    q, k, v, key_mask = prepared(q, k, v, key_mask)
    dq, dk, dv, *_ = diag_backward(
        dout, q, k, v, key_mask, lse, block=block, scale=scale, is_causal=is_causal, linear=False
    )
    return dq, dk, dv


def _backward_fake(
    dout, q, k, v, key_mask, lse, block, scale, is_causal
) -> tuple[Tensor, Tensor, Tensor]:
    return empty_rows(q, q.shape[-1]), empty_rows(k, k.shape[-1]), empty_rows(v, v.shape[-1])


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    tensors, ctx.options = inputs[:4], inputs[4:]
    ctx.save_for_backward(*tensors, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if dout is None:
        return (None,) * 7
    return (*_backward(dout, *ctx.saved_tensors, *ctx.options), None, None, None, None)


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor? key_mask"
_OPTIONS = "int block, float scale, bool is_causal"
_forward = register(
    f"block_diagonal({_INPUTS}, {_OPTIONS}) -> (Tensor out, Tensor lse)",
    _forward_impl,
    _forward_fake,
    save=_save,
    differentiate=_differentiate,
)
_backward = register(
    f"block_diagonal_backward(Tensor dout, {_INPUTS}, Tensor lse, {_OPTIONS}) "
    "-> (Tensor, Tensor, Tensor)",
    _backward_impl,
    _backward_fake,
)
