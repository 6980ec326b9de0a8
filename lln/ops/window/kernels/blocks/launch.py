"""Launchers of the block-diagonal kernels, alone or fused with the linear branch."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lln.ops.common.kernels.launching import (
    Launch,
    Layout,
    layout,
    planned,
    row_strides,
    rows_of,
    steps,
)
from lln.ops.common.kernels.library import floats, mask_stride, rows_contiguous
from lln.ops.common.kernels.tiles import DIAG_PROGRAM, block_tile, split
from lln.ops.linear.kernels.launch import Merged, few_parts, precise
from lln.ops.window.kernels.blocks.backward_kernels import diag_backward_kernel
from lln.ops.window.kernels.blocks.forward_kernels import diag_kernel

NO_SCALE = (0, 0)  # strides of what is not there


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
    save: bool, add_to: Tensor | None = None,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(out, lse); ``alpha`` adds the LLN branch, read from ``state`` or from ``parts``.

    ``add_to`` is its output, which becomes the average of both branches in place.
    """
    given = None if add_to is None else add_to.stride()
    rows, launch = _diag_plan(
        layout(q), layout(k), layout(v), given, mask_stride(key_mask),
        NO_SCALE if alpha is None else alpha.stride(), count, block, scale, is_causal, save,
    )  # fmt: skip
    out = q.new_empty_strided(*rows) if add_to is None else add_to
    lse = empty_diag_lse(q, linear=alpha is not None) if save else None
    launch(q, k, v, out, lse, key_mask, alpha, mix, parts, *(state or (None, None, None)))
    return out, lse


@planned
def _diag_plan(
    q: Layout, k: Layout, v: Layout, given: tuple[int, ...] | None, mask: int | None,
    alpha: tuple[int, ...], count: int, block: int, scale: float, is_causal: bool, save: bool,
) -> tuple[Any, Launch]:  # fmt: skip
    (b, heads, tokens, d), q_strides, dtype, device = q
    (_, kv_heads, _, e), k_strides, v_strides = v[0], k[1], v[1]
    t, rows = block_tile("diag", block, d, e, dtype, device)
    pieces, span = split(tokens, b * heads, t, device)
    out = rows_of(q, e)
    every = q_strides, k_strides, v_strides, given or out[1]
    return out, Launch(
        diag_kernel, (pieces, b * heads),
        ((*row_strides(*every), mask or 0, alpha),
         heads, heads // kv_heads, tokens, span, count, scale),
        D=d, E=e, ROWS=rows, STEP=t.rows, BLOCK=block,
        FULL=rows == t.rows and tokens % rows == 0,
        CAUSAL=is_causal, PRECISE=dtype == torch.float32, SAVE=save,
        ADD=given is not None, **t.options,
    )  # fmt: skip


def diag_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, lse: Tensor, *,
    block: int, scale: float, is_causal: bool = False, alpha: Tensor | None = None,
    beta: Tensor | None = None, mix: Tensor | None = None, state: Merged | None = None,
    parts: Tensor | None = None,
    slopes: tuple[bool, bool, bool] = (False, False, False),
    add_to: tuple[Tensor, Tensor, Tensor] | None = None,
) -> tuple[Any, ...]:  # fmt: skip
    """(dq, dk, dv, dalpha, dbeta, dmix); slopes that are not asked for are None.

    ``add_to`` = dq, dk, dv of the linear branch: they become the mean of both.
    """
    dout = rows_contiguous(dout)
    if parts is not None:
        parts = few_parts(parts, q.shape[-1], v.shape[-1])
    given = None if add_to is None else tuple(x.stride() for x in add_to)
    *rows, sums_shapes, launch = _diag_backward_plan(
        layout(q), layout(k), layout(v), dout.stride(), given, mask_stride(key_mask),
        NO_SCALE if alpha is None else alpha.stride(), NO_SCALE if beta is None else beta.stride(),
        lse.stride(1), 0 if parts is None else parts.shape[1], block, scale, is_causal,
        alpha is not None and mix is None,
    )  # fmt: skip
    dq, dk, dv = add_to or (
        x.new_empty_strided(*like) for x, like in zip((q, k, v), rows, strict=True)
    )
    sums = [
        floats(q, *shape) if needed else None
        for shape, needed in zip(sums_shapes, slopes, strict=True)
    ]
    launch(
        q, k, v, dout, lse, key_mask, alpha, beta, mix, *(state or (None, None, None)), parts,
        dq, dk, dv, *sums,
    )  # fmt: skip
    dalpha, dbeta, dmix = (
        x if x is None else x.sum(over) for x, over in zip(sums, (-1, -1, (0, -1)), strict=True)
    )
    return dq, dk, dv, dalpha, dbeta, dmix


@planned
def _diag_backward_plan(
    q: Layout, k: Layout, v: Layout, dout: tuple[int, ...], given: tuple[Any, ...] | None,
    mask: int | None, alpha: tuple[int, ...], beta: tuple[int, ...], lse: int, count: int,
    block: int, scale: float, is_causal: bool, average: bool,
) -> tuple[Any, ...]:  # fmt: skip
    (b, heads, tokens, d), _, dtype, device = q
    _, kv_heads, _, e = v[0]
    t, rows = block_tile("diag_backward", block, d, e, dtype, device)
    pieces, span = split(tokens, b * kv_heads, t, device, program=DIAG_PROGRAM)
    tiles = steps(tokens, t.rows)
    found = rows_of(q, d), rows_of(k, d), rows_of(v, e)
    every = q[1], k[1], v[1], dout, *(given or (x[1] for x in found))
    launch = Launch(
        diag_backward_kernel, (pieces, b * kv_heads),
        ((*row_strides(*every), mask or 0, alpha, beta, lse),
         kv_heads, tokens, span, count, tiles, scale),
        D=d, E=e, ROWS=rows, STEP=t.rows, BLOCK=block,
        GROUP=heads // kv_heads, FULL=rows == t.rows and tokens % rows == 0,
        CAUSAL=is_causal, PRECISE=dtype == torch.float32,
        AVERAGE=given is not None or average, ADD=given is not None, **t.options,
    )  # fmt: skip
    sums = (b, heads, tiles), (b, kv_heads, tiles), (b, heads, tiles)
    return *found, sums, launch
