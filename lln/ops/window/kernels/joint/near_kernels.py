# type: ignore
"""Near keys exactly, far ones by LLN, under one normaliser: the forward pass.

A query sees its window (:mod:`lln.ops.window.kernels.window_kernels`) and the sinks, keys at given
positions that every query sees (causal: every one after them), with scores s_ij = scale q_i·k_j.

With far keys (FAR) the block has one more tile, the slots l of their merged state (L_b, M_b),
:mod:`lln.ops.window.kernels.joint.state_kernels`, as if they were keys with the values M_bl:

    x_il = α q_il + L_bl + γ,   n_i = log (Σ_j exp(s_ij) + Σ_l exp(x_il)),
    out_i = Σ_j exp(s_ij − n_i) v_j + Σ_l exp(x_il − n_i) M_bl

Without near keys (not NEAR) there are the slots alone.
"""

from __future__ import annotations

import triton.language as tl

from lln.ops.common.kernels.features import (
    FLOOR,
    LN2,
    LOG2E,
    as_float,
    dot_scores,
    identity,
    jit,
    load_tile,
    of_head,
    padded,
    row_of,
    store_tile,
)
from lln.ops.window.kernels.joint.state_kernels import edges, load_pair
from lln.ops.window.kernels.window_kernels import attend_keys, attend_scores, window_of


@jit
def load_sinks(
    SINK,
    X,
    row,
    first,
    last,
    keys,
    columns,
    COUNT: tl.constexpr,
    WIDTH: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """The rows of X at the positions of the sinks that lie outside of a window, and which do."""
    slot = tl.arange(0, padded(COUNT))
    position = tl.load(SINK + slot, mask=slot < COUNT, other=keys)
    outside = position < first
    if not CAUSAL:
        outside = outside | (position >= last)
    outside = outside & (position < keys)
    pointers = X + position[:, None] * row + columns[None, :]
    tile = tl.load(pointers, mask=outside[:, None] & (columns < WIDTH)[None, :], other=0.0)
    return tile, outside


@jit
def joint_kernel(
    Q,
    K,
    V,
    Q_FAR,
    MASK,
    SINK,
    LOGS,
    MEANS,
    ALPHA,
    GAMMA,
    OUT,
    LSE,
    strides,
    window,
    heads,
    group,
    D: tl.constexpr,
    E: tl.constexpr,
    S: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    SINKS: tl.constexpr,
    CAUSAL: tl.constexpr,
    NEAR: tl.constexpr,
    FULL: tl.constexpr,
    FLIP: tl.constexpr,
    THROUGH: tl.constexpr,
):
    """OUT and LSE of ROWS queries of one block.

    LSE is natural and −inf without a key, or with far keys in base 2 and +inf. The features of far
    keys are the queries themselves where Q_FAR is None.
    """
    FAR: tl.constexpr = LOGS is not None
    (
        q_strides, k_strides, v_strides, far_strides, out_strides, mask_batch, alpha_strides,
        gamma_strides,
    ) = strides  # fmt: skip
    tokens, block, overlap, scale, step, origin, rows_per_block, count = window
    q_row = q_strides[2]
    k_row, v_row = row_of(k_strides, q_row), row_of(v_strides, q_row)
    far_row, out_row = row_of(far_strides, q_row), row_of(out_strides, q_row)
    head = tl.program_id(1).to(tl.int64)
    b, h = head // heads, head % heads
    Q += of_head(q_strides, b, h)
    K += of_head(k_strides, b, h // group)
    V += of_head(v_strides, b, h // group)
    OUT += of_head(out_strides, b, h)
    if MASK is not None:
        MASK += b * mask_batch
    rows, cols = tl.arange(0, ROWS), tl.arange(0, COLS)
    features, values = tl.arange(0, padded(D)), tl.arange(0, padded(E))
    start, stop, first, last = window_of(
        tl.program_id(0), block, overlap, rows_per_block, tokens, ROWS, CAUSAL
    )
    slope = (-scale if FLIP else scale) * LOG2E
    q = load_tile(Q, q_row, start, stop, rows, features, D, FULL)
    top = tl.full([ROWS], FLOOR, tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, padded(E)], tl.float32)
    if FAR:
        slots = tl.arange(0, padded(S))
        alpha = tl.load(ALPHA + of_head(alpha_strides, b, h)).to(tl.float32) * LOG2E
        gamma = tl.load(GAMMA + of_head(gamma_strides, b, h)).to(tl.float32) * LOG2E
        before, after = edges(tl.program_id(0) // rows_per_block, block, overlap, step, origin)
        log_mass, mean, _ = load_pair(
            LOGS, MEANS, None, head // group, tl.num_programs(1) // group, count, before - 1, after,
            slots, values, S, E, not CAUSAL,
        )  # fmt: skip
        q_far = q
        if Q_FAR is not None:
            Q_FAR += of_head(far_strides, b, h)
            q_far = load_tile(Q_FAR, far_row, start, stop, rows, slots, S, FULL)
        x = (
            as_float(q_far, identity(padded(S), q_far.dtype, THROUGH)) * alpha
            + (log_mass + gamma)[None, :]
        )
        top, weight, total = attend_scores(x, 1.0, mean, top, weight, total, True)
    if NEAR:
        for col in range(first, last, COLS):
            top, weight, total = attend_keys(
                q, K, V, MASK, k_row, v_row, start, col, last, slope, top, weight, total, rows,
                cols, features, values, D, E, FULL, CAUSAL, FLIP, False,
            )  # fmt: skip
    if SINKS > 0:
        SINK += b * SINKS
        k, outside = load_sinks(SINK, K, k_row, first, last, tokens, features, SINKS, D, CAUSAL)
        v, outside = load_sinks(SINK, V, v_row, first, last, tokens, values, SINKS, E, CAUSAL)
        s = dot_scores(q, tl.trans(k))
        if FLIP:
            s = -s
        s = tl.where(outside[None, :], s, float("-inf"))
        top, weight, total = attend_scores(s, slope, v, top, weight, total, False)
    empty = weight == 0.0
    out = total / tl.where(empty, 1.0, weight)[:, None]
    store_tile(OUT, out_row, start, stop, out, rows, values, E, FULL)
    log = top + tl.log2(tl.where(empty, 1.0, weight))
    log = tl.where(empty, float("inf"), log) if FAR else tl.where(empty, float("-inf"), log * LN2)
    tl.store(LSE + head * tokens + start + rows, log, mask=rows < stop - start)
