# type: ignore
"""Gradients of the block-diagonal softmax, alone or fused with the linear branch (LLN+Diag).

One pass over q, k, v, dO writes dq, dk, dv of both branches, once the gradients of the state are
known. With R and w of ``forward_kernels``, P = dO vᵀ and ε_i = Σ_j R_ij P_ij,

    dS = scale (1 − w) R (P − ε),   dq += dS k,   dk += dSᵀ q,   dv += (1 − w) Rᵀ dO.
"""

from __future__ import annotations

import triton.language as tl

from lln.ops.common.kernels.features import (
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
from lln.ops.linear.kernels.read_kernels import load_log_mass, load_mean, minus_lse
from lln.ops.linear.kernels.summarize_kernels import load_gradients
from lln.ops.window.kernels.blocks.forward_kernels import (
    load_scales,
    softmax_rows,
    visible_in_blocks,
)


@jit
def query_gradients(
    Q,
    DOUT,
    DQ,
    LSE,
    q_row,
    dout_row,
    dq_row,
    k,
    v,
    seen,
    log_mass,
    mean,
    eye,
    alpha,
    share,
    local,
    scale,
    start,
    end,
    tokens,
    rows,
    features,
    values,
    DALPHA,
    DMIX,
    D: tl.constexpr,
    E: tl.constexpr,
    FULL: tl.constexpr,
    MASKED: tl.constexpr,
    LINEAR: tl.constexpr,
    AVERAGE: tl.constexpr,
    PRECISE: tl.constexpr,
    ADD: tl.constexpr,
):
    """Store dq of a tile of one query head and its slopes; return q, dO, weighted R and dS."""
    q = load_tile(Q, q_row, start, end, rows, features, D, FULL)
    dout = load_tile(DOUT, dout_row, start, end, rows, values, E, FULL)
    # the average weighs both branches by ½, which is exact as one less in the exponent of a row
    extra: tl.constexpr = 1.0 if AVERAGE else 0.0
    twice: tl.constexpr = 2.0 if AVERAGE else 1.0
    s = dot_scores(q, tl.trans(k)) * (scale * LOG2E)
    if PRECISE:
        # anew: scores of 1e4 computed twice may differ by 1e-3, and then R would not add up to one
        if MASKED:
            s = tl.where(seen, s, float("-inf"))
        r = softmax_rows(s)
        if AVERAGE:
            r *= 0.5
    else:
        lse = LSE + (tokens if LINEAR else 0)
        r = tl.exp2(minus_lse(s, lse, tokens, start, end, rows, extra, False))
        if MASKED:
            r = tl.where(seen, r, 0.0)
    dr = dot(dout, tl.trans(v))
    epsilon = tl.sum(r * dr, axis=1) * twice
    if not AVERAGE:
        r *= local
    ds = (r * (dr * scale - (epsilon * scale)[:, None])).to(q.dtype)
    r = r.to(dout.dtype)
    # the linear branch last: its tiles and those of the scores would not fit the registers together
    dq = tl.zeros([rows.shape[0], features.shape[0]], tl.float32)
    if LINEAR:
        x = as_float(q, eye) * (alpha * LOG2E) + log_mass[None, :]
        p = tl.exp2(minus_lse(x, LSE, tokens, start, end, rows, extra, PRECISE))
        g = dot(dout, tl.trans(mean))
        delta = tl.sum(p * g, axis=1) * twice
        weight = 1.0 if AVERAGE else share
        if DALPHA is not None:
            slope = tl.sum(p * (g - delta[:, None]) * as_float(q, eye)) * weight
            tl.store(DALPHA, slope)
        # factors go where they are multiply-adds: this kernel is bound by its instructions
        dq = p * (g * (alpha * weight) - (delta * alpha * weight)[:, None])
    dq = dot_add(ds, k, dq)
    if ADD:
        dq += 0.5 * load_tile(DQ, dq_row, start, end, rows, features, D, FULL).to(tl.float32)
    store_tile(DQ, dq_row, start, end, dq, rows, features, D, FULL)
    if DMIX is not None:
        tl.store(DMIX, tl.sum(delta - epsilon))
    return q, dout, r, ds


@jit
def diag_backward_kernel(
    Q,
    K,
    V,
    DOUT,
    LSE,
    MASK,
    ALPHA,
    BETA,
    MIX,
    LOG_MASS,
    MEAN,
    NORM,
    PARTS,
    DQ,
    DK,
    DV,
    DALPHA,
    DBETA,
    DMIX,
    strides,
    heads,
    tokens,
    span,
    count,
    tiles,
    scale,
    D: tl.constexpr,
    E: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
    BLOCK: tl.constexpr,
    GROUP: tl.constexpr,
    FULL: tl.constexpr,
    CAUSAL: tl.constexpr,
    PRECISE: tl.constexpr,
    AVERAGE: tl.constexpr,
    ADD: tl.constexpr,
    THROUGH: tl.constexpr,
):
    """DQ, DK, DV of ``span`` tokens of one key head and the GROUP query heads that share it.

    AVERAGE: each branch counts one half. ADD: to half of what DQ, DK, DV hold, those of the linear
    branch. PARTS are
    the gradients of the state, already weighted by MIX. The slopes DALPHA[query head, tile],
    DBETA[key head, tile] and DMIX[query head, tile] are stored if asked for.
    """
    LINEAR: tl.constexpr = ALPHA is not None
    (
        q_strides, k_strides, v_strides, dout_strides, dq_strides, dk_strides, dv_strides,
        mask_batch, alpha_strides, beta_strides, lse_head,
    ) = strides  # fmt: skip
    q_row = q_strides[2]
    k_row, v_row = row_of(k_strides, q_row), row_of(v_strides, q_row)
    dout_row, dq_row = row_of(dout_strides, q_row), row_of(dq_strides, q_row)
    dk_row, dv_row = row_of(dk_strides, q_row), row_of(dv_strides, q_row)
    part, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = head // heads, head % heads
    K += of_head(k_strides, b, h)
    V += of_head(v_strides, b, h)
    DK += of_head(dk_strides, b, h)
    DV += of_head(dv_strides, b, h)
    Q += of_head(q_strides, b, h * GROUP)
    DQ += of_head(dq_strides, b, h * GROUP)
    DOUT += of_head(dout_strides, b, h * GROUP)
    LSE += head * GROUP * lse_head
    rows, features, values = tl.arange(0, ROWS), tl.arange(0, padded(D)), tl.arange(0, padded(E))
    dtype: tl.constexpr = K.dtype.element_ty
    masked: tl.constexpr = MASK is not None or CAUSAL or not FULL or BLOCK < STEP
    inside = features < D
    if MASK is not None:
        MASK += b * mask_batch
    eye = identity(padded(D), dtype, THROUGH)
    log_mass, mean = 0.0, 0.0
    if LINEAR:
        beta = tl.load(BETA + of_head(beta_strides, b, h)).to(tl.float32)
        log_mass = load_log_mass(LOG_MASS, head, features, D, False)
        mean = load_mean(MEAN, head, features, values, D, E).to(dtype)
        peak = tl.load(NORM + head * 2 * D + features, mask=inside, other=0.0)
        mass = tl.load(NORM + head * 2 * D + D + features, mask=inside, other=0.0)
        shrink = tl.where(mass == 0.0, 0.0, 1.0 / tl.where(mass == 0.0, 1.0, mass))
        dmean, g = load_gradients(PARTS, head * count, count, features, values, D, E)
        g *= shrink
        weight = (dmean * shrink[:, None]).to(dtype)

    alpha, share = load_scales(ALPHA, MIX, b, h * GROUP, alpha_strides, LINEAR)
    last = tl.minimum((part + 1) * span, tokens)
    for start in range(part * span, last, STEP):
        end = tl.minimum(start + STEP, last)
        k = load_tile(K, k_row, start, end, rows, features, D, FULL)
        v = load_tile(V, v_row, start, end, rows, values, E, FULL)
        keep = rows < end - start
        if MASK is not None:
            keep = tl.load(MASK + start + rows, mask=keep, other=0) != 0
            k = tl.where(keep[:, None], k, 0.0)
            v = tl.where(keep[:, None], v, 0.0)
        seen = keep
        if masked:
            seen = visible_in_blocks(MASK, start, end, rows, BLOCK, STEP, CAUSAL)
        # one accumulator at a time where a single query head allows it: dq, then dv, then dk
        dk = tl.zeros([ROWS, padded(D)], tl.float32)
        dv = tl.zeros([ROWS, padded(E)], tl.float32)
        for member in tl.static_range(GROUP):
            query_head = head * GROUP + member
            if GROUP > 1:
                alpha, share = load_scales(ALPHA, MIX, b, h * GROUP + member, alpha_strides, LINEAR)
            slope_alpha, slope_mix = DALPHA, DMIX
            if DALPHA is not None:
                slope_alpha += query_head * tiles + start // STEP
            if DMIX is not None:
                slope_mix += query_head * tiles + start // STEP
            q, dout, r, ds = query_gradients(
                Q + member * q_strides[1], DOUT + member * dout_strides[1],
                DQ + member * dq_strides[1], LSE + member * lse_head, q_row, dout_row, dq_row,
                k, v, seen, log_mass, mean, eye, alpha, share, 1.0 - share, scale, start, end,
                tokens, rows, features, values, slope_alpha, slope_mix,
                D, E, FULL, masked, LINEAR, AVERAGE, PRECISE, ADD,
            )  # fmt: skip
            dv = dot_add(tl.trans(r), dout, dv)
            if GROUP > 1:
                dk = dot_add(tl.trans(ds), q, dk)
        if LINEAR:
            x = as_float(k, eye) * (beta * LOG2E)
            p = tl.exp2(x - peak[None, :])
            if MASK is not None or not FULL:
                p = tl.where(keep[:, None], p, 0.0)
            dv = dot_add(p.to(dtype), weight, dv)
        if ADD:
            dv += 0.5 * load_tile(DV, dv_row, start, end, rows, values, E, FULL).to(tl.float32)
        store_tile(DV, dv_row, start, end, dv, rows, values, E, FULL)
        if LINEAR:
            pull = dot(v, tl.trans(weight))
            if DBETA is not None:
                gradient = p * (pull + g[None, :])
                slope = tl.sum(gradient * as_float(k, eye))
                tl.store(DBETA + head * tiles + start // STEP, slope)
                dk += gradient * beta
            else:
                dk += p * (pull * beta + (g * beta)[None, :])
        if GROUP == 1:
            dk = dot_add(tl.trans(ds), q, dk)
        if ADD:
            dk += 0.5 * load_tile(DK, dk_row, start, end, rows, features, D, FULL).to(tl.float32)
        store_tile(DK, dk_row, start, end, dk, rows, features, D, FULL)
