# type: ignore
"""Gradients of windows, sinks and far keys; see ``near_kernels`` and ``window_kernels``.

With δ_i = dO_i·out_i − dn_i, p_ij = exp(s_ij − n_i), p_il = exp(x_il − n_i):

    ds_ij = p_ij (dO_i·v_j − δ_i),     dq_i = scale Σ_j ds_ij k_j,
    ds_il = p_il (dO_i·M_bl − δ_i),    dq_il = α ds_il,
    dM_bl = Σ_i p_il dO_i,             g_bl = dL_bl − dM_bl·M_bl = −Σ_i p_il δ_i

and dα = Σ_il (ds_il − e_i p_il) q_il, dγ = Σ_il (ds_il − e_i p_il). The sum of a row,
e_i = Σ_j ds_ij + Σ_l ds_il, would be 0 if δ_i did not know out_i as it was rounded.

The state that block b gives to its far keys is (−L_b, dM_b, g_b). A key gets, over the queries i
whose windows hold it and the blocks b that see its segment from afar,

    dv_j = Σ_i p_ij dO_i + Σ_bl w_jlb dM_bl,        dk_j = scale Σ_i ds_ij q_i,
    d(β k_jl) = Σ_b w_jlb (v_j·dM_bl + g_bl),       w_jlb = exp(β k_jl − L_bl) ≤ 1

where the sums over b are one state of the segment (L, M, X): w_jl = exp(β k_jl + L_l), M_l and X_l.
Sinks are seen by all rows: each tile of queries writes its part of their gradients, and the sums of
these are added by the program whose keys they are.
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
from lln.ops.window.kernels.joint.near_kernels import load_sinks
from lln.ops.window.kernels.joint.state_kernels import edges, load_pair, store_state
from lln.ops.window.kernels.window_kernels import from_natural, pull_keys, pull_queries, window_of


@jit
def joint_dq_kernel(
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
    DOUT,
    DLSE,
    DQ,
    DQ_FAR,
    DELTA,
    DSINK_K,
    DSINK_V,
    LOG,
    DMEAN,
    LEVEL,
    DALPHA,
    DGAMMA,
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
    THROUGH: tl.constexpr,
):
    """DQ, DELTA and the parts of the sinks of ROWS queries.

    With far keys a program has a block of queries of all heads that share a key head, and writes
    the state that they give to these keys: LOG, DMEAN and LEVEL.
    """
    FAR: tl.constexpr = LOGS is not None
    (
        q_strides, k_strides, v_strides, far_strides, out_strides, dout_strides, dq_strides,
        dfar_strides, mask_batch, alpha_strides, gamma_strides,
    ) = strides  # fmt: skip
    tokens, block, overlap, scale, step, origin, rows_per_block, count = window
    q_row = q_strides[2]
    k_row, v_row = row_of(k_strides, q_row), row_of(v_strides, q_row)
    far_row, out_row = row_of(far_strides, q_row), row_of(out_strides, q_row)
    dout_row, dq_row = row_of(dout_strides, q_row), row_of(dq_strides, q_row)
    dfar_row = row_of(dfar_strides, q_row)
    number = tl.program_id(0)
    members, tiles = 1, 1
    if FAR:
        members, tiles = group, rows_per_block
    all_tiles = tl.num_programs(0) * tiles
    first_head = tl.program_id(1).to(tl.int64) * members
    kv_head, kv_heads = first_head // group, heads // group
    b = kv_head // kv_heads
    K += of_head(k_strides, b, kv_head % kv_heads)
    V += of_head(v_strides, b, kv_head % kv_heads)
    if MASK is not None:
        MASK += b * mask_batch
    if SINKS > 0:
        SINK += b * SINKS
    rows, cols = tl.arange(0, ROWS), tl.arange(0, COLS)
    features, values = tl.arange(0, padded(D)), tl.arange(0, padded(E))
    slots = tl.arange(0, padded(S))
    slope = scale * LOG2E
    if FAR:
        before, after = edges(number, block, overlap, step, origin)
        eye = identity(padded(S), MEANS.dtype.element_ty, THROUGH)
        dmean = tl.zeros([padded(S), padded(E)], tl.float32)
        level = tl.zeros([padded(S)], tl.float32)
    for turn in range(members * tiles):
        tile = number * tiles + turn % tiles
        head = first_head + turn // tiles
        h = head % heads
        start, stop, first, last = window_of(
            tile, block, overlap, rows_per_block, tokens, ROWS, CAUSAL
        )
        q = load_tile(Q + of_head(q_strides, b, h), q_row, start, stop, rows, features, D, FULL)
        dout = load_tile(
            DOUT + of_head(dout_strides, b, h),
            dout_row, start, stop, rows, values, E, FULL,
        )  # fmt: skip
        out = load_tile(
            OUT + of_head(out_strides, b, h), out_row, start, stop, rows, values, E, FULL
        )
        inside = rows < stop - start
        at = head * tokens + start + rows
        if FAR:
            lse = tl.load(LSE + at, mask=inside, other=float("inf"))
        else:
            lse = from_natural(tl.load(LSE + at, mask=inside, other=float("-inf")))
        delta = tl.sum(dout.to(tl.float32) * out.to(tl.float32), axis=1)
        if DLSE is not None:
            delta -= tl.load(DLSE + at, mask=inside, other=0.0)
        tl.store(DELTA + at, delta, mask=inside)
        dq = tl.zeros([ROWS, padded(D)], tl.float32)
        wrong = tl.zeros([ROWS], tl.float32)
        if FAR:
            alpha = tl.load(ALPHA + of_head(alpha_strides, b, h)).to(tl.float32)
            gamma = tl.load(GAMMA + of_head(gamma_strides, b, h)).to(tl.float32)
            log_mass, mean, _ = load_pair(
                LOGS, MEANS, None, kv_head, tl.num_programs(1), count, before - 1, after, slots,
                values, S, E, not CAUSAL,
            )  # fmt: skip
            q_far = q
            if Q_FAR is not None:
                q_far = load_tile(
                    Q_FAR + of_head(far_strides, b, h),
                    far_row, start, stop, rows, slots, S, FULL,
                )  # fmt: skip
            wide = as_float(q_far, eye)
            x = wide * (alpha * LOG2E) + (log_mass + gamma * LOG2E)[None, :]
            far = tl.exp2(x - lse[:, None])
            dmean = dot_add(tl.trans(far.to(dout.dtype)), dout, dmean)
            level -= tl.sum(far * delta[:, None], axis=0)
            dfar = far * (dot(dout, tl.trans(mean)) - delta[:, None])
            if DALPHA is not None:
                share, tilt = tl.sum(far, axis=1), tl.sum(far * wide, axis=1)
                shift, slope_far = tl.sum(dfar, axis=1), tl.sum(dfar * wide, axis=1)
            if Q_FAR is None:
                dq = dfar * alpha
            else:
                store_tile(
                    DQ_FAR + of_head(dfar_strides, b, h),
                    dfar_row, start, stop, dfar * alpha, rows, slots, S, FULL,
                )  # fmt: skip
        if NEAR:
            for col in range(first, last, COLS):
                dq, r, dr = pull_queries(
                    q, dout, K, V, MASK, k_row, v_row, start, col, last, lse, delta * scale, slope,
                    scale, dq, rows, cols, features, values, D, E, FULL, CAUSAL,
                )  # fmt: skip
                if DALPHA is not None:
                    wrong += tl.sum(r * (dr - delta[:, None]), axis=1)
        if SINKS > 0:
            k, outside = load_sinks(SINK, K, k_row, first, last, tokens, features, SINKS, D, CAUSAL)
            v, outside = load_sinks(SINK, V, v_row, first, last, tokens, values, SINKS, E, CAUSAL)
            r = tl.exp2(dot_scores(q, tl.trans(k)) * slope - lse[:, None])
            r = tl.where(outside[None, :], r, 0.0)
            ds = r * (dot(dout, tl.trans(v)) - delta[:, None])
            if DALPHA is not None:
                wrong += tl.sum(ds, axis=1)
            ds = (ds * scale).to(q.dtype)
            dq = dot_add(ds, k, dq)
            slot = tl.arange(0, padded(SINKS))
            base = (head * all_tiles + tile) * SINKS + slot
            some = (slot < SINKS)[:, None]
            dk = dot(tl.trans(ds), q)
            dv = dot(tl.trans(r.to(dout.dtype)), dout)
            pointers = DSINK_K + base[:, None] * D + features[None, :]
            tl.store(pointers, dk, mask=some & (features < D)[None, :])
            pointers = DSINK_V + base[:, None] * E + values[None, :]
            tl.store(pointers, dv, mask=some & (values < E)[None, :])
        if DALPHA is not None:
            wrong += shift
            tl.store(DALPHA + head * all_tiles + tile, tl.sum(slope_far - wrong * tilt))
            tl.store(DGAMMA + head * all_tiles + tile, tl.sum(shift - wrong * share))
        store_tile(DQ + of_head(dq_strides, b, h), dq_row, start, stop, dq, rows, features, D, FULL)
    if FAR:
        log_mass, _, _ = load_pair(
            LOGS, MEANS, None, kv_head, tl.num_programs(1), count, before - 1, after, slots, values,
            S, E, not CAUSAL,
        )  # fmt: skip
        log = tl.where(log_mass == float("-inf"), float("-inf"), -log_mass)
        state = kv_head * tl.num_programs(0) + number
        store_state(LOG, DMEAN, LEVEL, state, log, dmean, level, slots, values, S, E)


@jit
def joint_dkdv_kernel(
    Q,
    K,
    V,
    K_FAR,
    MASK,
    FAR_MASK,
    SINK,
    LOGS,
    MEANS,
    LEVELS,
    BETA,
    LSE,
    DELTA,
    DOUT,
    DSINK_K,
    DSINK_V,
    DK,
    DK_FAR,
    DV,
    DBETA,
    strides,
    window,
    tiles,
    blocks,
    kv_heads,
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
    THROUGH: tl.constexpr,
):
    """DK and DV of COLS keys of a segment, one of its ``tiles``; DBETA[head, tile] if asked for."""
    FAR: tl.constexpr = LOGS is not None
    (
        q_strides, k_strides, v_strides, far_strides, dout_strides, dk_strides, dfar_strides,
        dv_strides, mask_batch, far_mask_batch, beta_strides,
    ) = strides  # fmt: skip
    tokens, block, overlap, scale, step, origin = window
    q_row = q_strides[2]
    k_row, v_row = row_of(k_strides, q_row), row_of(v_strides, q_row)
    far_row, dout_row = row_of(far_strides, q_row), row_of(dout_strides, q_row)
    dk_row, dfar_row = row_of(dk_strides, q_row), row_of(dfar_strides, q_row)
    dv_row = row_of(dv_strides, q_row)
    kv_head = tl.program_id(1).to(tl.int64)
    b, g = kv_head // kv_heads, kv_head % kv_heads
    rows, cols = tl.arange(0, ROWS), tl.arange(0, COLS)
    features, values = tl.arange(0, padded(D)), tl.arange(0, padded(E))
    slots = tl.arange(0, padded(S))
    segment = tl.program_id(0) // tiles
    edge = origin + segment * step
    col = tl.maximum(edge, 0) + tl.program_id(0) % tiles * COLS
    stop = tl.minimum(edge + step, tokens)
    if col >= stop:  # the first and the last segment may be shorter
        if DBETA is not None:
            tl.store(DBETA + kv_head * tl.num_programs(0) + tl.program_id(0), 0.0)
        return
    j = col + cols
    keep = j < stop
    k = load_tile(K + of_head(k_strides, b, g), k_row, col, stop, cols, features, D, FULL)
    v = load_tile(V + of_head(v_strides, b, g), v_row, col, stop, cols, values, E, FULL)
    if MASK is not None:
        keep = tl.load(MASK + b * mask_batch + j, mask=keep, other=0) != 0
        k = tl.where(keep[:, None], k, 0.0)
        v = tl.where(keep[:, None], v, 0.0)
    dk = tl.zeros([COLS, padded(D)], tl.float32)
    dv = tl.zeros([COLS, padded(E)], tl.float32)
    if FAR:
        beta = tl.load(BETA + of_head(beta_strides, b, g)).to(tl.float32)
        later = (edge + step + overlap + block - 1) // block
        earlier = tl.where(edge >= overlap + block, (edge - overlap) // block - 1, -1)
        log, mean, level = load_pair(
            LOGS, MEANS, LEVELS, kv_head, tl.num_programs(1), blocks, later, earlier, slots, values,
            S, E, not CAUSAL,
        )  # fmt: skip
        k_far = k
        if K_FAR is not None:
            k_far = load_tile(
                K_FAR + of_head(far_strides, b, g), far_row, col, stop, cols, slots, S, FULL
            )
        kept = keep
        wide = as_float(k_far, identity(padded(S), k_far.dtype, THROUGH))
        if FAR_MASK is not None:
            kept = tl.load(FAR_MASK + b * far_mask_batch + j, mask=j < stop, other=0) != 0
            wide = tl.where(kept[:, None], wide, 0.0)
        x = wide * (beta * LOG2E)
        w = x + log[None, :]
        if FAR_MASK is not None or not FULL:
            w = tl.where(kept[:, None], w, float("-inf"))
        w = tl.exp2(w)
        gradient = w * (dot(v, tl.trans(mean)) + level[None, :])
        dv = dot_add(w.to(mean.dtype), mean, dv)
        if DBETA is not None:
            at = kv_head * tl.num_programs(0) + tl.program_id(0)
            tl.store(DBETA + at, tl.sum(gradient * wide))
        if K_FAR is None:
            dk = gradient * beta
        else:
            store_tile(
                DK_FAR + of_head(dfar_strides, b, g),
                dfar_row, col, stop, gradient * beta, cols, slots, S, FULL,
            )  # fmt: skip
    if NEAR:
        last = tl.minimum(col + COLS, stop) - 1
        end = tl.minimum(((last + overlap) // block + 1) * block, tokens)
        begin = col
        if not CAUSAL:
            begin = tl.maximum(col - overlap, 0) // block * block
        for member in range(group):
            h, head = g * group + member, kv_head * group + member
            for start in range(begin, end, ROWS):
                dk, dv = pull_keys(
                    k, v, Q + of_head(q_strides, b, h), DOUT + of_head(dout_strides, b, h),
                    LSE + head * tokens, DELTA + head * tokens, q_row, dout_row, start, end, j,
                    keep, block, overlap, scale, 0.0, dk, dv, rows, features, values, D, E, FULL,
                    FULL, MASK is not None, CAUSAL, not FAR,
                )  # fmt: skip
    for sink in tl.static_range(SINKS):
        mine = (j == tl.load(SINK + b * SINKS + sink))[:, None]
        base = kv_head * SINKS + sink
        more = tl.load(DSINK_K + base * D + features, mask=features < D, other=0.0)
        dk += tl.where(mine, more[None, :], 0.0)
        more = tl.load(DSINK_V + base * E + values, mask=values < E, other=0.0)
        dv += tl.where(mine, more[None, :], 0.0)
    store_tile(DK + of_head(dk_strides, b, g), dk_row, col, stop, dk, cols, features, D, FULL)
    store_tile(DV + of_head(dv_strides, b, g), dv_row, col, stop, dv, cols, values, E, FULL)
