"""Launchers of the block-diagonal kernels, alone or fused with the linear branch."""

from __future__ import annotations

from torch import Tensor

from lln.ops.triton.blocks.backward_kernels import diag_backward_kernel
from lln.ops.triton.blocks.forward_kernels import diag_kernel
from lln.ops.triton.library import (
    alike,
    empty_rows,
    floats,
    mask_stride,
    on_device,
    rows_contiguous,
    strides,
)
from lln.ops.triton.linear.launch import Merged, few_parts, precise
from lln.ops.triton.tiles import DIAG_PROGRAM, block_tile, padded, split


def empty_diag_lse(q: Tensor, *, linear: bool) -> Tensor:
    """Uninitialised logsumexp of every query: [B, H, rows, N].

    Half precision keeps a row per branch; float32 two for the linear branch and none for the other,
    whose backward pass takes its softmax anew.
    """
    b, heads, tokens, _ = q.shape
    kept = (2 if precise(q) else 1) if linear else 0
    return floats(q, b, heads, kept + (0 if precise(q) else 1), tokens)


def diag(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, *, block: int, scale: float,
    is_causal: bool = False, alpha: Tensor | None = None, mix: Tensor | None = None,
    state: Merged | None = None, parts: Tensor | None = None, count: int = 0,
    linear: bool, save: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(out, lse); ``linear`` adds the LLN branch, read from ``state`` or from ``parts``."""
    (b, heads, tokens, d), (_, kv_heads, _, e) = q.shape, v.shape
    t, rows = block_tile("diag", block, d, e, q.dtype, q.device)
    pieces, span = split(tokens, b * heads, t, q.device)
    out = empty_rows(q, e)
    lse = empty_diag_lse(q, linear=linear) if save else None
    with on_device(q):
        diag_kernel[(pieces, b * heads)](
            q, k, v, out, lse, key_mask, alpha, mix, parts, *(state or (None, None, None)),
            *strides(q), *strides(k), *strides(v), *strides(out), mask_stride(key_mask),
            *((0, 0) if alpha is None else alpha.stride()),
            heads, heads // kv_heads, tokens, span, count, scale,
            D=d, E=e, BD=padded(d), BE=padded(e), ROWS=rows, STEP=t.rows, BLOCK=block,
            FULL=rows == t.rows and tokens % rows == 0, HAS_MASK=key_mask is not None,
            CAUSAL=is_causal, LINEAR=linear, PRECISE=precise(q), SAVE=save,
            ALIKE=alike(q, k, v, out), **t.options,
        )  # fmt: skip
    return out, lse


def diag_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, lse: Tensor, *,
    block: int, scale: float, is_causal: bool = False, alpha: Tensor | None = None,
    beta: Tensor | None = None, mix: Tensor | None = None, state: Merged | None = None,
    parts: Tensor | None = None, normalize_keys: bool = False, linear: bool,
    slopes: tuple[bool, bool, bool] = (False, False, False),
    add_to: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(dq, dk, dv, dalpha, dbeta, dmix); slopes that are not asked for are empty.

    ``add_to`` = dq, dk, dv of half the linear branch, to which half the other one is added.
    """
    (b, heads, tokens, d), (_, kv_heads, _, e) = q.shape, v.shape
    t, rows = block_tile("diag_backward", block, d, e, q.dtype, q.device)
    pieces, span = split(tokens, b * kv_heads, t, q.device, program=DIAG_PROGRAM)
    dout = rows_contiguous(dout)
    dq, dk, dv = add_to or (empty_rows(q, d), empty_rows(k, d), empty_rows(v, e))
    tiles = -(-tokens // t.rows)
    sums = [
        floats(q, b, h, tiles) if needed else None
        for h, needed in zip((heads, kv_heads, heads), slopes, strict=True)
    ]
    if parts is not None:
        parts = few_parts(parts, d, e)
    with on_device(q):
        diag_backward_kernel[(pieces, b * kv_heads)](
            q, k, v, dout, lse, key_mask, alpha, beta, mix, *(state or (None, None, None)), parts,
            dq, dk, dv, *sums,
            *strides(q), *strides(k), *strides(v), *strides(dout), *strides(dq), *strides(dk),
            *strides(dv), mask_stride(key_mask),
            *((0, 0) if alpha is None else alpha.stride()),
            *((0, 0) if beta is None else beta.stride()),
            lse.stride(1), kv_heads, tokens, span, 0 if parts is None else parts.shape[1],
            tiles, scale,
            D=d, E=e, BD=padded(d), BE=padded(e), ROWS=rows, STEP=t.rows, BLOCK=block,
            GROUP=heads // kv_heads, FULL=rows == t.rows and tokens % rows == 0,
            HAS_MASK=key_mask is not None, CAUSAL=is_causal, LINEAR=linear,
            NORMALIZE=normalize_keys, PRECISE=precise(q),
            AVERAGE=add_to is not None or (linear and mix is None), ADD=add_to is not None,
            ALIKE=alike(q, k, v, dout, dq, dk, dv), **t.options,
        )  # fmt: skip
    dalpha, dbeta, dmix = (x if x is None else x.sum(-1) for x in sums)
    found = dalpha, dbeta, dmix if dmix is None else dmix.sum(0)
    return dq, dk, dv, *(floats(q, 0) if x is None else x for x in found)
