# type: ignore
"""Gradients of the keys and values of windows, of far keys and of sinks; see ``dq_kernels``.

    dv_j = Σ_i p_ij dO_i + Σ_bl w_jlb dM_bl,        dk_j = scale Σ_i ds_ij q_i,
    d(β k_jl) = Σ_b w_jlb (v_j·dM_bl + g_bl),       w_jlb = exp(β k_jl − L_bl) ≤ 1

over the queries i whose windows hold key j and the blocks b that see its segment from afar. The
sums over b are one state of the segment (L, M, X): w_jl = exp(β k_jl + L_l) with M_l and X_l.
"""

from __future__ import annotations

import triton.language as tl

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
from lln.ops.triton.joint.state_kernels import load_pair


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
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    far_batch,
    far_head,
    far_row,
    dout_batch,
    dout_head,
    dout_row,
    dk_batch,
    dk_head,
    dk_row,
    dfar_batch,
    dfar_head,
    dfar_row,
    dv_batch,
    dv_head,
    dv_row,
    mask_batch,
    far_mask_batch,
    beta_batch,
    beta_head,
    kv_heads,
    group,
    tokens,
    block,
    overlap,
    scale,
    step,
    origin,
    tiles,
    blocks,
    D: tl.constexpr,
    E: tl.constexpr,
    S: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    BS: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    SINKS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
    NEAR: tl.constexpr,
    FAR: tl.constexpr,
    NORMALIZE: tl.constexpr,
    FULL: tl.constexpr,
    ALIKE: tl.constexpr,
    THROUGH: tl.constexpr,
):
    """DK and DV of COLS keys of a segment, one of its ``tiles``; DBETA[head, tile] if asked for."""
    if ALIKE:  # one set of addresses inside a tile serves all, which saves registers
        k_row = q_row
        v_row = q_row
        far_row = q_row
        dout_row = q_row
        dk_row = q_row
        dfar_row = q_row
        dv_row = q_row
    kv_head = tl.program_id(1).to(tl.int64)
    b, g = kv_head // kv_heads, kv_head % kv_heads
    rows, cols = tl.arange(0, ROWS), tl.arange(0, COLS)
    features, values, slots = tl.arange(0, BD), tl.arange(0, BE), tl.arange(0, BS)
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
    k = load_tile(K + b * k_batch + g * k_head, k_row, col, stop, cols, features, D, BD, FULL)
    v = load_tile(V + b * v_batch + g * v_head, v_row, col, stop, cols, values, E, BE, FULL)
    if HAS_MASK:
        keep = tl.load(MASK + b * mask_batch + j, mask=keep, other=0) != 0
        k = tl.where(keep[:, None], k, 0.0)
        v = tl.where(keep[:, None], v, 0.0)
    dk = tl.zeros([COLS, BD], tl.float32)
    dv = tl.zeros([COLS, BE], tl.float32)
    if FAR:
        beta = tl.load(BETA + b * beta_batch + g * beta_head).to(tl.float32)
        later = (edge + step + overlap + block - 1) // block
        earlier = tl.where(edge >= overlap + block, (edge - overlap) // block - 1, -1)
        log, mean, level = load_pair(
            LOGS, MEANS, LEVELS, kv_head, tl.num_programs(1), blocks, later, earlier, slots, values,
            S, E, not CAUSAL,
        )  # fmt: skip
        k_far = k
        if K_FAR is not None:
            k_far = load_tile(
                K_FAR + b * far_batch + g * far_head, far_row, col, stop, cols, slots, S, BS, FULL
            )
        kept = keep
        wide = as_float(k_far, identity(BS, k_far.dtype, THROUGH))
        if FAR_MASK is not None:
            kept = tl.load(FAR_MASK + b * far_mask_batch + j, mask=j < stop, other=0) != 0
            wide = tl.where(kept[:, None], wide, 0.0)
        x = wide * (beta * LOG2E)
        if NORMALIZE:
            x = log_softmax(x, slots < S, 1, S % BS != 0)
        w = x + log[None, :]
        if FAR_MASK is not None or not FULL:
            w = tl.where(kept[:, None], w, float("-inf"))
        w = tl.exp2(w)
        gradient = w * (dot(v, tl.trans(mean)) + level[None, :])
        if NORMALIZE:
            gradient -= tl.exp2(x) * tl.sum(gradient, axis=1)[:, None]
        dv = dot_add(w.to(mean.dtype), mean, dv)
        if DBETA is not None:
            at = kv_head * tl.num_programs(0) + tl.program_id(0)
            tl.store(DBETA + at, tl.sum(gradient * wide))
        if K_FAR is None:
            dk = gradient * (beta / scale)
        else:
            store_tile(
                DK_FAR + b * dfar_batch + g * dfar_head,
                dfar_row, col, stop, gradient * beta, cols, slots, S, BS, FULL,
            )  # fmt: skip
    if NEAR:
        last = tl.minimum(col + COLS, stop) - 1
        end = tl.minimum(((last + overlap) // block + 1) * block, tokens)
        begin = col
        if not CAUSAL:
            begin = tl.maximum(col - overlap, 0) // block * block
        slope = scale * LOG2E
        for member in range(group):
            h = g * group + member
            head = kv_head * group + member
            for start in range(begin, end, ROWS):
                q = load_tile(
                    Q + b * q_batch + h * q_head, q_row, start, end, rows, features, D, BD, FULL
                )
                dout = load_tile(
                    DOUT + b * dout_batch + h * dout_head,
                    dout_row, start, end, rows, values, E, BE, FULL,
                )  # fmt: skip
                i = start + rows
                inside = i < end
                if FAR:
                    lse = tl.load(LSE + head * tokens + i, mask=inside, other=float("inf"))
                else:
                    lse = tl.load(LSE + head * tokens + i, mask=inside, other=float("-inf"))
                    lse = tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
                delta = tl.load(DELTA + head * tokens + i, mask=inside, other=0.0)
                s = dot_scores(k, tl.trans(q)) * slope - lse[None, :]
                if not FULL:
                    first = i // block * block
                    seen = keep[:, None] & inside[None, :]
                    seen = seen & (j[:, None] >= (first - overlap)[None, :])
                    if not CAUSAL:
                        seen = seen & (j[:, None] < (first + block + overlap)[None, :])
                    s = tl.where(seen, s, float("-inf"))
                if CAUSAL:
                    s = tl.where(j[:, None] <= i[None, :], s, float("-inf"))
                p = tl.exp2(s)
                ds = p * (dot(v, tl.trans(dout)) - delta[None, :])
                dv = dot_add(p.to(dout.dtype), dout, dv)
                dk = dot_add(ds.to(q.dtype), q, dk)
    dk *= scale
    for sink in tl.static_range(SINKS):
        mine = (j == tl.load(SINK + b * SINKS + sink))[:, None]
        base = kv_head * SINKS + sink
        more = tl.load(DSINK_K + base * D + features, mask=features < D, other=0.0)
        dk += tl.where(mine, more[None, :], 0.0)
        more = tl.load(DSINK_V + base * E + values, mask=values < E, other=0.0)
        dv += tl.where(mine, more[None, :], 0.0)
    store_tile(DK + b * dk_batch + g * dk_head, dk_row, col, stop, dk, cols, features, D, BD, FULL)
    store_tile(DV + b * dv_batch + g * dv_head, dv_row, col, stop, dv, cols, values, E, BE, FULL)
