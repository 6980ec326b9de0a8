# type: ignore
"""LLN+Diag for blocks of more than a tile and for windows that overlap (not causal).

    out_i = w Σ_l A_il M_l + (1 − w) Σ_j R_ij v_j,   R = softmax over the keys j of the window of i

A tile holds queries of one block. It walks the keys of their window with the running softmax of
:mod:`lln.ops.window.kernels.window_kernels`, reads the state of the linear branch, and stores the
blend: q is read once for both branches.

Each branch has its own normaliser, and one state serves all queries of a head: a program merges it
once and walks many tiles. Under one normaliser every block has a state of its own, which stands in
the same softmax (:mod:`lln.ops.window.kernels.joint.near_kernels`); that is another kernel.
"""

from __future__ import annotations

import triton.language as tl

from lln.ops.common.kernels.features import (
    FLOOR,
    LOG2E,
    as_float,
    dot_add,
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
from lln.ops.window.kernels.window_kernels import attend_keys, window_of


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
                    q, K, V, MASK, k_row, v_row, start, first + step * COLS, last, slope, top,
                    weight, total, rows, cols, features, values, D, E, FULL, False, FLIP, step == 0,
                )  # fmt: skip
        else:
            for col in range(first, last, COLS):
                top, weight, total = attend_keys(
                    q, K, V, MASK, k_row, v_row, start, col, last, slope, top, weight, total, rows,
                    cols, features, values, D, E, FULL, False, FLIP, False,
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
