"""Block-diagonal softmax attention: one launch forward, one backward.

Blocks of more than a tile are windows that do not overlap.
"""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from lln.ops.common.gradients import register_with_gradient
from lln.ops.common.kernels.library import empty_rows, rows_like
from lln.ops.common.kernels.tiles import LARGEST_BLOCK
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
    return _block_diagonal(q, k, v, key_mask, block, scale, is_causal)


def _forward(q, k, v, key_mask, block, scale, is_causal) -> tuple[Tensor, Tensor]:
    q, k, v, key_mask = prepared(q, k, v, key_mask)
    out, lse = diag(q, k, v, key_mask, block=block, scale=scale, is_causal=is_causal, save=True)
    assert lse is not None
    return out, lse


def _shapes(q, k, v, key_mask, block, scale, is_causal) -> tuple[Tensor, Tensor]:
    return empty_rows(q, v.shape[-1]), empty_diag_lse(q, linear=False)


def _backward(
    dout, q, k, v, key_mask, lse, block, scale, is_causal
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, key_mask = prepared(q, k, v, key_mask)
    dq, dk, dv, *_ = diag_backward(
        dout, q, k, v, key_mask, lse, block=block, scale=scale, is_causal=is_causal
    )
    return dq, dk, dv


_block_diagonal, _ = register_with_gradient(
    "block_diagonal(Tensor q, Tensor k, Tensor v, Tensor? key_mask, int block, float scale, "
    "bool is_causal) -> (Tensor out, Tensor lse)",
    forward=_forward,
    shapes=_shapes,
    backward=_backward,
    like=rows_like,
)
