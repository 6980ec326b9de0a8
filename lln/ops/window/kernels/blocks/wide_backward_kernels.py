# type: ignore
"""Gradients of LLN+Diag for blocks of more than a tile and for windows that overlap.

With A, R and w of ``wide_kernels`` and ``read_kernels``, G_il = dO_i·M_l, P_ij = dO_i·v_j, and
δ_i = Σ_l A_il G_il, the branch of near keys needs ε_i = Σ_j R_ij P_ij before it sees them all:

    (1 − w) ε_i = dO_i·out_i − w δ_i.

First the queries, which know their window, and what they give to the state:

    dq_i = α w A_i (G_i − δ_i) + scale Σ_j (1 − w) R_ij (P_ij − ε_i) k_j,
    dM_l = w Σ_i A_il dO_i,   g_l = −w Σ_i A_il δ_i.

Then the keys, from the gradients of the state as in ``summarize_kernels``, and from the queries i
whose windows hold key j:

    dv_j += Σ_i (1 − w) R_ij dO_i,   dk_j += scale Σ_i (1 − w) R_ij (P_ij − ε_i) q_i.
"""

from __future__ import annotations

import triton.language as tl

from lln.ops.common.kernels.features import (
    LOG2E,
    as_float,
    dot,
    dot_add,
    identity,
    jit,
    load_tile,
    of_head,
    padded,
    row_of,
    store_tile,
)
from lln.ops.linear.kernels.read_kernels import load_log_mass, load_mean, minus_lse
from lln.ops.window.kernels.blocks.forward_kernels import load_scales
from lln.ops.window.kernels.window_kernels import kept, pull_keys, pull_queries, window_of


@jit
def in_two(x, dtype: tl.constexpr):
    """x [rows] as a matrix [rows, 16] for a dot: rounded to ``dtype``, the rest, and zeros."""
    column = tl.arange(0, 16)[None, :]
    rounded = x.to(dtype)
    rest = (x - rounded.to(tl.float32)).to(dtype)
    return tl.where(column == 0, rounded[:, None], tl.where(column == 1, rest[:, None], 0.0))


@jit
def wide_dq_kernel(
    Q,
    K,
    V,
    OUT,
    DOUT,
    LSE,
    MASK,
    ALPHA,
    MIX,
    LOG_MASS,
    MEAN,
    DQ,
    DELTA,
    PARTS,
    DALPHA,
    DMIX,
    strides,
    heads,
    group,
    tokens,
    block,
    overlap,
    per_block,
    tiles,
    span,
    scale,
    D: tl.constexpr,
    E: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    FULL: tl.constexpr,
    THROUGH: tl.constexpr,
):
    """DQ and DELTA = ε of ``span`` tiles of queries of one head, and their part of (dM, g).

    Without PARTS the state is left to :func:`read_backward_kernel`. DALPHA[head, part] and
    DMIX[head, part] are stored if asked for.
    """
    (
        q_strides, k_strides, v_strides, out_strides, dout_strides, dq_strides, mask_batch,
        alpha_strides,
    ) = strides  # fmt: skip
    q_row = q_strides[2]
    k_row, v_row = row_of(k_strides, q_row), row_of(v_strides, q_row)
    out_row, dout_row = row_of(out_strides, q_row), row_of(dout_strides, q_row)
    dq_row = row_of(dq_strides, q_row)
    part, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = head // heads, head % heads
    index = head * tl.num_programs(0) + part
    Q += of_head(q_strides, b, h)
    K += of_head(k_strides, b, h // group)
    V += of_head(v_strides, b, h // group)
    OUT += of_head(out_strides, b, h)
    DOUT += of_head(dout_strides, b, h)
    DQ += of_head(dq_strides, b, h)
    LSE += head * tokens * 2
    DELTA += head * tokens
    if MASK is not None:
        MASK += b * mask_batch
    rows, cols = tl.arange(0, ROWS), tl.arange(0, COLS)
    features, values = tl.arange(0, padded(D)), tl.arange(0, padded(E))
    dtype: tl.constexpr = Q.dtype.element_ty
    alpha, share = load_scales(ALPHA, MIX, b, h, alpha_strides, True)
    local = 1.0 - share
    back = tl.where(local == 0.0, 0.0, 1.0 / tl.where(local == 0.0, 1.0, local))
    mean = load_mean(MEAN, head // group, features, values, D, E).to(dtype)
    eye = identity(padded(D), dtype, THROUGH)
    slope = scale * LOG2E

    dmean = tl.zeros([padded(D), padded(E)], tl.float32)
    weighted = tl.zeros([padded(D), 16], tl.float32)
    slope_alpha = tl.zeros([ROWS], tl.float32)
    slope_mix = tl.zeros([ROWS], tl.float32)
    for here in range(part * span, tl.minimum((part + 1) * span, tiles)):
        start, stop, first, last = window_of(here, block, overlap, per_block, tokens, ROWS, False)
        q = load_tile(Q, q_row, start, stop, rows, features, D, FULL)
        dout = load_tile(DOUT, dout_row, start, stop, rows, values, E, FULL)
        out = load_tile(OUT, out_row, start, stop, rows, values, E, FULL)
        both = tl.sum(dout.to(tl.float32) * out.to(tl.float32), axis=1)
        # in every step anew: a number per feature held through the loop takes 16 registers
        log_mass = load_log_mass(LOG_MASS, head // group, features, D, False)
        x = as_float(q, eye) * (alpha * LOG2E) + log_mass[None, :]
        p = tl.exp2(minus_lse(x, LSE, tokens, start, stop, rows, 0.0, False))
        g = dot(dout, tl.trans(mean))
        delta = tl.sum(p * g, axis=1)
        if PARTS is not None:
            dmean = dot_add(tl.trans(p.to(dtype)), dout, dmean)
            weighted = dot_add(tl.trans(p.to(dtype)), in_two(delta, dtype), weighted)
        dq = p * (g - delta[:, None])
        if DALPHA is not None:
            slope_alpha += tl.sum(dq * as_float(q, eye), axis=1)
        dq *= alpha * share
        inside = rows < stop - start
        rest = both - share * delta
        tl.store(DELTA + start + rows, rest * back, mask=inside)
        lse = tl.load(LSE + tokens + start + rows, mask=inside, other=float("inf"))
        epsilon = tl.zeros([ROWS], tl.float32)
        for col in range(first, last, COLS):
            dq, r, dr = pull_queries(
                q, dout, K, V, MASK, k_row, v_row, start, col, last, lse, rest * scale, slope,
                local * scale, dq, rows, cols, features, values, D, E, FULL, False,
            )  # fmt: skip
            if DMIX is not None:
                epsilon += tl.sum(r * dr, axis=1)
        if DMIX is not None:
            slope_mix += delta - epsilon
        store_tile(DQ, dq_row, start, stop, dq, rows, features, D, FULL)

    if PARTS is not None:
        PARTS += index * (D * E + D)
        seen = features < D
        pointers = PARTS + features[:, None] * E + values[None, :]
        tl.store(pointers, dmean * share, mask=seen[:, None] & (values < E)[None, :])
        tl.store(PARTS + D * E + features, -share * tl.sum(weighted, axis=1), mask=seen)
    if DALPHA is not None:
        tl.store(DALPHA + index, tl.sum(slope_alpha) * share)
    if DMIX is not None:
        tl.store(DMIX + index, tl.sum(slope_mix))


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
    strides,
    kv_heads,
    tokens,
    block,
    overlap,
    tiles,
    span,
    scale,
    D: tl.constexpr,
    E: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    GROUP: tl.constexpr,
    UNROLL: tl.constexpr,
    FULL: tl.constexpr,
    WHOLE: tl.constexpr,
    THROUGH: tl.constexpr,
):
    """DK and DV of ``span`` tiles of keys of one head, from the GROUP query heads that share it.

    GRADIENT is that of the state, (dM, g), weighted. DBETA[key head, part] is stored if asked for.
    UNROLL: every key is seen by this many tiles of queries, 0 if not all are, or by many.
    """
    (
        q_strides, k_strides, v_strides, dout_strides, dk_strides, dv_strides, mask_batch,
        beta_strides,
    ) = strides  # fmt: skip
    q_row = q_strides[2]
    k_row, v_row = row_of(k_strides, q_row), row_of(v_strides, q_row)
    dout_row, dk_row = row_of(dout_strides, q_row), row_of(dk_strides, q_row)
    dv_row = row_of(dv_strides, q_row)
    part, kv_head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, g = kv_head // kv_heads, kv_head % kv_heads
    Q += of_head(q_strides, b, g * GROUP)
    DOUT += of_head(dout_strides, b, g * GROUP)
    K += of_head(k_strides, b, g)
    V += of_head(v_strides, b, g)
    DK += of_head(dk_strides, b, g)
    DV += of_head(dv_strides, b, g)
    LSE += kv_head * GROUP * tokens * 2 + tokens
    DELTA += kv_head * GROUP * tokens
    if MASK is not None:
        MASK += b * mask_batch
    rows, cols = tl.arange(0, ROWS), tl.arange(0, COLS)
    features, values = tl.arange(0, padded(D)), tl.arange(0, padded(E))
    dtype: tl.constexpr = K.dtype.element_ty
    inside = features < D
    beta = tl.load(BETA + of_head(beta_strides, b, g)).to(tl.float32)
    eye = identity(padded(D), dtype, THROUGH)
    NORM += kv_head * 2 * D
    GRADIENT += kv_head * (D * E + D)
    pull = load_mean(GRADIENT, 0, features, values, D, E)
    pull = (pull * inverse(NORM + D, features, D)[:, None]).to(dtype)

    slopes = tl.zeros([COLS], tl.float32)
    for tile in range(part * span, tl.minimum((part + 1) * span, tiles)):
        col = tile * COLS
        k = load_tile(K, k_row, col, tokens, cols, features, D, FULL)
        v = load_tile(V, v_row, col, tokens, cols, values, E, FULL)
        # keys that are masked may be anything: what follows from them is left out row by row, since
        # tiles that are changed would be held in registers
        keep = kept(MASK, col, tokens, cols)
        x = as_float(k, eye) * (beta * LOG2E)
        # in every step anew: a number per feature held through the loop takes 16 registers
        peak = tl.load(NORM + features, mask=inside, other=0.0)
        p = tl.exp2(x - peak[None, :])
        if MASK is not None or not FULL:
            p = tl.where(keep[:, None], p, 0.0)
        level = tl.load(GRADIENT + D * E + features, mask=inside, other=0.0)
        level *= inverse(NORM + D, features, D)
        dk = p * (dot(v, tl.trans(pull)) + level[None, :])
        if MASK is not None:
            dk = tl.where(keep[:, None], dk, 0.0)
        if DBETA is not None:
            slopes += tl.where(keep, tl.sum(dk * as_float(k, eye), axis=1), 0.0)
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
                        k, v, Q + member * q_strides[1], DOUT + member * dout_strides[1],
                        LSE + member * tokens * 2, DELTA + member * tokens, q_row, dout_row,
                        begin + step * ROWS, end, col + cols, keep, block, overlap, scale, shift,
                        dk, dv, rows, features, values, D, E, FULL, WHOLE,
                        MASK is not None, False, False,
                    )  # fmt: skip
            else:
                for start in range(begin, end, ROWS):
                    dk, dv = pull_keys(
                        k, v, Q + member * q_strides[1], DOUT + member * dout_strides[1],
                        LSE + member * tokens * 2, DELTA + member * tokens, q_row, dout_row,
                        start, end, col + cols, keep, block, overlap, scale, shift,
                        dk, dv, rows, features, values, D, E, FULL, WHOLE,
                        MASK is not None, False, False,
                    )  # fmt: skip
        store_tile(DV, dv_row, col, tokens, dv, cols, values, E, FULL)
        store_tile(DK, dk_row, col, tokens, dk, cols, features, D, FULL)
    if DBETA is not None:
        tl.store(DBETA + kv_head * tl.num_programs(0) + part, tl.sum(slopes))
