# type: ignore
"""Kernels of the block-diagonal softmax, alone or fused with the linear branch (LLN+Diag).

    out_i = w Σ_l A_il M_l + (1 − w) Σ_j R_ij v_j,   R = softmax over the keys j of the block of i

A tile holds whole blocks: one of 64 tokens, or several smaller ones, told apart by a mask.
The fused kernel reads q once for both branches.

No window is walked here. Softmax needs no running maximum, and the queries that see a key are those
of its tile: the backward pass reads q, k, v and dO once for dq, dk and dv. The kernels of larger
windows (``wide_kernels``) read them twice, in a kernel for dq and one for dk and dv.
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


@jit
def visible_in_blocks(
    MASK,
    start,
    end,
    rows,
    BLOCK: tl.constexpr,
    STEP: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """Which key of the tile (columns) a query of the tile (rows) may see."""
    columns = rows
    keep = columns < tl.minimum(end - start, STEP)
    if MASK is not None:
        keep = tl.load(MASK + start + columns, mask=keep, other=0) != 0
    seen = (rows[:, None] >= 0) & keep[None, :]
    if BLOCK < STEP:
        seen = seen & (rows[:, None] // BLOCK == columns[None, :] // BLOCK)
    if CAUSAL:
        seen = seen & (rows[:, None] >= columns[None, :])
    return seen


@jit
def softmax_rows(s):
    """Base-2 softmax over the columns; a row that sees nothing is 0."""
    r = tl.exp2(s - tl.maximum(tl.max(s, axis=1), FLOOR)[:, None])
    weight = tl.sum(r, axis=1)
    return r / tl.where(weight == 0.0, 1.0, weight)[:, None]


@jit
def load_scales(ALPHA, MIX, b, h, alpha_strides, LINEAR: tl.constexpr):
    """(alpha, weight of the linear branch): one half, or a number per head; 0 if not LINEAR."""
    alpha, share = 0.0, 0.0
    if LINEAR:
        alpha = tl.load(ALPHA + of_head(alpha_strides, b, h)).to(tl.float32)
        share = 0.5
        if MIX is not None:
            share = tl.load(MIX + h).to(tl.float32)
    return alpha, share


@jit
def diag_kernel(
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
    span,
    count,
    scale,
    D: tl.constexpr,
    E: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    FULL: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISE: tl.constexpr,
    SAVE: tl.constexpr,
    ADD: tl.constexpr,
    THROUGH: tl.constexpr,
):
    """OUT of ``span`` tokens of one head: both branches, or (not LINEAR) the block-diagonal one.

    ADD: half of it, to half of what OUT holds, the linear branch.

    The state of the linear branch comes as in :func:`read_kernel`. SAVE keeps the logsumexp of each
    branch: LSE[head] = linear rows, then block-diagonal rows, the latter not for float32.
    """
    LINEAR: tl.constexpr = ALPHA is not None
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
    rows, features, values = tl.arange(0, ROWS), tl.arange(0, padded(D)), tl.arange(0, padded(E))
    dtype: tl.constexpr = Q.dtype.element_ty
    kept: tl.constexpr = 2 if PRECISE else 1
    local = 0.5 if ADD else 1.0
    if MASK is not None:
        MASK += b * mask_batch
    if SAVE:
        LSE += head * tokens * ((kept if LINEAR else 0) + (0 if PRECISE else 1))
    if LINEAR:
        alpha, share = load_scales(ALPHA, MIX, b, h, alpha_strides, LINEAR)
        alpha *= LOG2E
        local = 1.0 - share
        log_mass, mean = take_state(
            PARTS, LOG_MASS, MEAN, NORM, head // group, count, part == 0 and head % group == 0,
            features, values, D, E, False, SAVE,
        )  # fmt: skip
        mean = mean.to(dtype)
        eye = identity(padded(D), dtype, THROUGH)

    last = tl.minimum((part + 1) * span, tokens)
    for start in range(part * span, last, STEP):
        end = tl.minimum(start + STEP, last)
        q = load_tile(Q, q_row, start, end, rows, features, D, FULL)
        k = load_tile(K, k_row, start, end, rows, features, D, FULL)
        v = load_tile(V, v_row, start, end, rows, values, E, FULL)
        if MASK is not None:
            keep = tl.load(MASK + start + rows, mask=rows < end - start, other=0) != 0
            k = tl.where(keep[:, None], k, 0.0)
            v = tl.where(keep[:, None], v, 0.0)
        s = dot_scores(q, tl.trans(k)) * (scale * LOG2E)
        if MASK is not None or CAUSAL or not FULL or BLOCK < STEP:
            seen = visible_in_blocks(MASK, start, end, rows, BLOCK, STEP, CAUSAL)
            s = tl.where(seen, s, float("-inf"))
        top = tl.maximum(tl.max(s, axis=1), FLOOR)
        r = tl.exp2(s - top[:, None])
        weight = tl.sum(r, axis=1)
        r *= (local / tl.where(weight == 0.0, 1.0, weight))[:, None]
        out = dot(r.to(dtype), v)
        if SAVE and not PRECISE:
            lse = LSE + (tokens if LINEAR else 0)
            store_lse(lse, tokens, start, end, rows, top, weight, False)
        if LINEAR:
            x = as_float(q, eye) * alpha + log_mass[None, :]
            top = tl.maximum(tl.max(x, axis=1), FLOOR)
            p = tl.exp2(x - top[:, None])
            weight = tl.sum(p, axis=1)
            p *= (share / tl.where(weight == 0.0, 1.0, weight))[:, None]
            out = dot_add(p.to(dtype), mean, out)
            if SAVE:
                store_lse(LSE, tokens, start, end, rows, top, weight, PRECISE)
        if ADD:
            held = load_tile(OUT, out_row, start, end, rows, values, E, FULL)
            out += held.to(tl.float32) * 0.5
        store_tile(OUT, out_row, start, end, out, rows, values, E, FULL)
