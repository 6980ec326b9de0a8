# type: ignore
"""Gradients of LLN+Diag with large blocks or overlapping windows: to keys and values.

From the gradients of the state as in ``summarize_kernels``, and from the queries i whose windows
hold key j, with R, P and ε of ``wide_dq_kernels``:

    dv_j += Σ_i (1 − w) R_ij dO_i,   dk_j += scale Σ_i (1 − w) R_ij (P_ij − ε_i) q_i.
"""

from __future__ import annotations

import triton.language as tl

from lln.ops.triton.blocks.wide_kernels import kept
from lln.ops.triton.features import (
    LOG2E,
    as_float,
    dot,
    dot_add,
    dot_scores,
    identity,
    jit,
    load_tile,
    log_softmax,
    store_tile,
)
from lln.ops.triton.linear.read_kernels import load_mean


@jit
def pull_keys(
    k,
    v,
    Q,
    DOUT,
    LSE,
    DELTA,
    q_row,
    dout_row,
    start,
    end,
    j,
    keep,
    block,
    overlap,
    scale,
    shift,
    dk,
    dv,
    rows,
    features,
    values,
    D: tl.constexpr,
    E: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    FULL: tl.constexpr,
    HAS_MASK: tl.constexpr,
):
    """Add the queries start … < end to dk and dv; ``shift`` is log2(1 − w)."""
    q = load_tile(Q, q_row, start, end, rows, features, D, BD, FULL)
    dout = load_tile(DOUT, dout_row, start, end, rows, values, E, BE, FULL)
    i = start + rows
    if FULL:
        lse, delta = tl.load(LSE + i), tl.load(DELTA + i) * scale
    else:
        lse = tl.load(LSE + i, mask=i < end, other=float("inf"))
        delta = tl.load(DELTA + i, mask=i < end, other=0.0) * scale
    r = tl.exp2(dot_scores(k, tl.trans(q)) * (scale * LOG2E) - (lse - shift)[None, :])
    if not FULL:
        edge = i // block * block
        seen = (j[:, None] >= (edge - overlap)[None, :]) & keep[:, None]
        r = tl.where(seen & (j[:, None] < (edge + block + overlap)[None, :]), r, 0.0)
    elif HAS_MASK:
        r = tl.where(keep[:, None], r, 0.0)
    dv = dot_add(r.to(dout.dtype), dout, dv)
    ds = r * (dot(v, tl.trans(dout)) * scale - delta[None, :])
    return dot_add(ds.to(q.dtype), q, dk), dv


@jit
def inverse(MASS, features, D: tl.constexpr):
    """1 / mass of the features, 0 where there is none."""
    mass = tl.load(MASS + features, mask=features < D, other=0.0)
    return tl.where(mass == 0.0, 0.0, 1.0 / tl.where(mass == 0.0, 1.0, mass))


@jit
def wide_dkdv_kernel(
    Q,
    K,
    V,
    DOUT,
    LSE,
    DELTA,
    MASK,
    BETA,
    MIX,
    NORM,
    GRADIENT,
    DK,
    DV,
    DBETA,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    dout_batch,
    dout_head,
    dout_row,
    dk_batch,
    dk_head,
    dk_row,
    dv_batch,
    dv_head,
    dv_row,
    mask_batch,
    beta_batch,
    beta_head,
    kv_heads,
    tokens,
    block,
    overlap,
    tiles,
    span,
    scale,
    D: tl.constexpr,
    E: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    GROUP: tl.constexpr,
    UNROLL: tl.constexpr,
    FULL: tl.constexpr,
    HAS_MASK: tl.constexpr,
    NORMALIZE: tl.constexpr,
    ALIKE: tl.constexpr,
    THROUGH: tl.constexpr,
):
    """DK and DV of ``span`` tiles of keys of one head, from the GROUP query heads that share it.

    GRADIENT is that of the state, (dM, g), weighted. DBETA[key head, part] is stored if asked for.
    UNROLL: every key is seen by this many tiles of queries, 0 if not all are, or by many.
    """
    if ALIKE:  # one set of addresses inside a tile serves all, which saves registers
        k_row = q_row
        v_row = q_row
        dout_row = q_row
        dk_row = q_row
        dv_row = q_row
    part, kv_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, g = kv_head // kv_heads, kv_head % kv_heads
    Q += b * q_batch + g * GROUP * q_head
    DOUT += b * dout_batch + g * GROUP * dout_head
    K += b * k_batch + g * k_head
    V += b * v_batch + g * v_head
    DK += b * dk_batch + g * dk_head
    DV += b * dv_batch + g * dv_head
    LSE += kv_head * GROUP * tokens * 2 + tokens
    DELTA += kv_head * GROUP * tokens
    if HAS_MASK:
        MASK += b * mask_batch
    rows, cols = tl.arange(0, ROWS), tl.arange(0, COLS)
    features, values = tl.arange(0, BD), tl.arange(0, BE)
    dtype: tl.constexpr = K.dtype.element_ty
    inside = features < D
    beta = tl.load(BETA + b * beta_batch + g * beta_head).to(tl.float32)
    eye = identity(BD, dtype, THROUGH)
    NORM += kv_head * 2 * D
    GRADIENT += kv_head * (D * E + D)
    pull = load_mean(GRADIENT, 0, features, values, D, E)
    pull = (pull * inverse(NORM + D, features, D)[:, None]).to(dtype)

    slopes = tl.zeros([COLS], tl.float32)
    for tile in range(part * span, tl.minimum((part + 1) * span, tiles)):
        col = tile * COLS
        k = load_tile(K, k_row, col, tokens, cols, features, D, BD, FULL)
        v = load_tile(V, v_row, col, tokens, cols, values, E, BE, FULL)
        keep = kept(MASK, col, tokens, cols, HAS_MASK)
        if HAS_MASK:
            k = tl.where(keep[:, None], k, 0.0)
            v = tl.where(keep[:, None], v, 0.0)
        x = as_float(k, eye) * (beta * LOG2E)
        if NORMALIZE:
            x = log_softmax(x, inside, 1, D % BD != 0)
        # in every step anew: a number per feature held through the loop takes 16 registers
        peak = tl.load(NORM + features, mask=inside, other=0.0)
        p = tl.exp2(x - peak[None, :])
        if HAS_MASK or not FULL:
            p = tl.where(keep[:, None], p, 0.0)
        level = tl.load(GRADIENT + D * E + features, mask=inside, other=0.0)
        level *= inverse(NORM + D, features, D)
        dk = p * (dot(v, tl.trans(pull)) + level[None, :])
        if NORMALIZE:
            dk -= tl.exp2(x) * tl.sum(dk, axis=1)[:, None]
        if DBETA is not None:
            slopes += tl.sum(dk * as_float(k, eye), axis=1)
        dk *= beta
        dv = dot(p.to(dtype), pull)
        begin = tl.maximum(col - overlap, 0) // block * block
        final = tl.minimum(col + COLS, tokens) - 1
        end = tl.minimum(((final + overlap) // block + 1) * block, tokens)
        for member in tl.static_range(GROUP):
            shift = -1.0
            if MIX is not None:
                shift = tl.log2(1.0 - tl.load(MIX + g * GROUP + member).to(tl.float32))
            if UNROLL > 0:
                for step in tl.static_range(UNROLL):
                    dk, dv = pull_keys(
                        k, v, Q + member * q_head, DOUT + member * dout_head,
                        LSE + member * tokens * 2, DELTA + member * tokens, q_row, dout_row,
                        begin + step * ROWS, end, col + cols, keep, block, overlap, scale, shift,
                        dk, dv, rows, features, values, D, E, BD, BE, FULL, HAS_MASK,
                    )  # fmt: skip
            else:
                for start in range(begin, end, ROWS):
                    dk, dv = pull_keys(
                        k, v, Q + member * q_head, DOUT + member * dout_head,
                        LSE + member * tokens * 2, DELTA + member * tokens, q_row, dout_row,
                        start, end, col + cols, keep, block, overlap, scale, shift,
                        dk, dv, rows, features, values, D, E, BD, BE, FULL, HAS_MASK,
                    )  # fmt: skip
        store_tile(DV, dv_row, col, tokens, dv, cols, values, E, BE, FULL)
        store_tile(DK, dk_row, col, tokens, dk, cols, features, D, BD, FULL)
    if DBETA is not None:
        tl.store(DBETA + kv_head * tl.num_programs(0) + part, tl.sum(slopes))
