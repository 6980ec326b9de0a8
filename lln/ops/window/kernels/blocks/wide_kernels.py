# type: ignore
"""LLN+Diag for blocks of more than a tile and for windows that overlap (not causal).

    out_i = w Σ_l A_il M_l + (1 − w) Σ_j R_ij v_j,   R = softmax over the keys j of the window of i

A tile holds queries of one block. It walks the keys of their window with a running softmax, reads
the state of the linear branch, and stores the blend: q is read once for both branches. Where blocks
and windows are whole tiles (FULL) and no key is masked, nothing is compared.
"""

from __future__ import annotations

import triton.language as tl

from lln.ops.common.kernels.features import (
    FLOOR,
    LOG2E,
    as_float,
    dot,
    dot_add,
    dot_scores,
    identity,
    jit,
    load_tile,
    of_head,
    padded,
    row_of,
    store_tile,
)
from lln.ops.linear.kernels.read_kernels import store_lse, take_state
from lln.ops.window.kernels.blocks.forward_kernels import load_scales
from lln.ops.window.kernels.joint.near_kernels import window_of


@jit
def kept(MASK, col, last, cols):
    """Which of the keys col + cols < last may be attended."""
    keep = cols < last - col
    if MASK is not None:
        keep = tl.load(MASK + col + cols, mask=keep, other=0) != 0
    return keep


@jit
def attend_keys(
    q, K, V, MASK, k_row, v_row, col, last, slope, top, weight, total, cols, features, values,
    D: tl.constexpr, E: tl.constexpr, FULL: tl.constexpr,
    FLIP: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """Add the keys col … of a window to a running softmax (base 2); ``slope`` is positive.

    FIRST: nothing is in it yet.
    """
    k = load_tile(K, k_row, col, last, cols, features, D, FULL)
    v = load_tile(V, v_row, col, last, cols, values, E, FULL)
    s = dot_scores(q, tl.trans(k))
    if FLIP:
        s = -s
    if MASK is not None or not FULL:
        keep = kept(MASK, col, last, cols)
        s = tl.where(keep[None, :], s, float("-inf"))
        if MASK is not None:
            v = tl.where(keep[:, None], v, 0.0)
    new = tl.maximum(top, tl.max(s, axis=1) * slope)
    p = tl.exp2(s * slope - new[:, None])
    if FIRST:
        weight, total = tl.sum(p, axis=1), dot(p.to(v.dtype), v)
    else:
        shrink = tl.exp2(top - new)
        weight = weight * shrink + tl.sum(p, axis=1)
        total = dot_add(p.to(v.dtype), v, total * shrink[:, None])
    return new, weight, total


@jit
def wide_kernel(
    Q,
    K,
    V,
    OUT,
    LSE,
    MASK,
    ALPHA,
    MIX,
    PARTS,
    LOG_MASS,
    MEAN,
    NORM,
    strides,
    heads,
    group,
    tokens,
    block,
    overlap,
    per_block,
    tiles,
    span,
    count,
    slope,
    D: tl.constexpr,
    E: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    UNROLL: tl.constexpr,
    FULL: tl.constexpr,
    FLIP: tl.constexpr,
    SAVE: tl.constexpr,
    THROUGH: tl.constexpr,
):
    """OUT of ``span`` tiles of queries of one head; with SAVE also LSE[head] = linear, near rows.

    UNROLL: every window is this many tiles of keys, 0 if not all are or there are many. FLIP:
    scores are multiplied by −slope.
    """
    q_strides, k_strides, v_strides, out_strides, mask_batch, alpha_strides = strides
    q_row = q_strides[2]
    k_row, v_row = row_of(k_strides, q_row), row_of(v_strides, q_row)
    out_row = row_of(out_strides, q_row)
    part, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = head // heads, head % heads
    Q += of_head(q_strides, b, h)
    K += of_head(k_strides, b, h // group)
    V += of_head(v_strides, b, h // group)
    OUT += of_head(out_strides, b, h)
    rows, cols = tl.arange(0, ROWS), tl.arange(0, COLS)
    features, values = tl.arange(0, padded(D)), tl.arange(0, padded(E))
    dtype: tl.constexpr = Q.dtype.element_ty
    if MASK is not None:
        MASK += b * mask_batch
    if SAVE:
        LSE += head * tokens * 2
    alpha, share = load_scales(ALPHA, MIX, b, h, alpha_strides, True)
    alpha *= LOG2E
    log_mass, mean = take_state(
        PARTS, LOG_MASS, MEAN, NORM, head // group, count, part == 0 and head % group == 0,
        features, values, D, E, False, SAVE,
    )  # fmt: skip
    mean = mean.to(dtype)
    eye = identity(padded(D), dtype, THROUGH)

    for here in range(part * span, tl.minimum((part + 1) * span, tiles)):
        start, stop, first, last = window_of(here, block, overlap, per_block, tokens, ROWS, False)
        q = load_tile(Q, q_row, start, stop, rows, features, D, FULL)
        top = tl.full([ROWS], FLOOR, tl.float32)
        weight = tl.zeros([ROWS], tl.float32)
        total = tl.zeros([ROWS, padded(E)], tl.float32)
        if UNROLL > 0:
            for step in tl.static_range(UNROLL):
                top, weight, total = attend_keys(
                    q, K, V, MASK, k_row, v_row, first + step * COLS, last, slope, top, weight,
                    total, cols, features, values, D, E, FULL, FLIP, step == 0,
                )  # fmt: skip
        else:
            for col in range(first, last, COLS):
                top, weight, total = attend_keys(
                    q, K, V, MASK, k_row, v_row, col, last, slope, top, weight, total, cols,
                    features, values, D, E, FULL, FLIP, False,
                )  # fmt: skip
        out = total * ((1.0 - share) / tl.where(weight == 0.0, 1.0, weight))[:, None]
        if SAVE:
            store_lse(LSE + tokens, tokens, start, stop, rows, top, weight, False)
        x = as_float(q, eye) * alpha + log_mass[None, :]
        top = tl.maximum(tl.max(x, axis=1), FLOOR)
        p = tl.exp2(x - top[:, None])
        weight = tl.sum(p, axis=1)
        p *= (share / tl.where(weight == 0.0, 1.0, weight))[:, None]
        out = dot_add(p.to(dtype), mean, out)
        if SAVE:
            store_lse(LSE, tokens, start, stop, rows, top, weight, False)
        store_tile(OUT, out_row, start, stop, out, rows, values, E, FULL)
