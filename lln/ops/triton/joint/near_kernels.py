# type: ignore
"""Kernels of softmax attention over windows and sinks, with the logarithm of its normaliser.

Query i of block b sees the keys C·b − o … C·(b+1) + right − 1, right = o or, if causal, up to i;
and the sinks, keys at given positions that every query sees (causal: every one after them).

    s_ij = scale q_i·k_j,   n_i = log Σ_j exp(s_ij),   out_i = Σ_j exp(s_ij − n_i) v_j

Backwards, with δ_i = dO_i·out_i − dn_i:

    dv_j = Σ_i p_ij dO_i,   ds_ij = p_ij (dO_i·v_j − δ_i),   dq_i = scale Σ_j ds_ij k_j, …

Sinks are seen by all rows: each program of queries writes its part of their gradients, and the
sums of these are added by the program whose keys they are.
"""

from __future__ import annotations

import triton.language as tl

from lln.ops.triton.features import (
    LN2,
    LOG2E,
    dot,
    dot_add,
    dot_scores,
    jit,
    load_tile,
    store_tile,
)


@jit
def window_of(here, block, overlap, rows_per_block, keys, ROWS: tl.constexpr, CAUSAL: tl.constexpr):
    """(first row, end of the block, start and end of the keys) of a program of queries."""
    number = here // rows_per_block
    start = number * block + here % rows_per_block * ROWS
    stop = tl.minimum((number + 1) * block, keys)
    first = tl.maximum(number * block - overlap, 0)
    last = stop
    if CAUSAL:
        last = tl.minimum(stop, start + ROWS)
    else:
        last = tl.minimum((number + 1) * block + overlap, keys)
    return start, stop, first, last


@jit
def visible(
    start, first, last, col, rows, cols, MASK, HAS_MASK: tl.constexpr, CAUSAL: tl.constexpr
):
    """Which keys col + cols of a window a query start + rows sees."""
    j = col + cols
    keep = j < last
    if HAS_MASK:
        keep = tl.load(MASK + j, mask=keep, other=0) != 0
    seen = tl.broadcast_to(keep[None, :], [rows.shape[0], cols.shape[0]])
    if CAUSAL:
        seen = seen & (j[None, :] <= (start + rows)[:, None])
    return seen, keep


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
    BS: tl.constexpr,
    WIDTH: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """The rows of X at the positions of the sinks that lie outside of a window, and which do."""
    slot = tl.arange(0, BS)
    position = tl.load(SINK + slot, mask=slot < COUNT, other=keys)
    outside = position < first
    if not CAUSAL:
        outside = outside | (position >= last)
    outside = outside & (position < keys)
    pointers = X + position[:, None] * row + columns[None, :]
    tile = tl.load(pointers, mask=outside[:, None] & (columns < WIDTH)[None, :], other=0.0)
    return tile, outside


@jit
def attend_tile(q, k, v, seen, top, weight, total, scale):
    """Add a tile of keys to a running softmax (base 2)."""
    s = tl.where(seen, dot_scores(q, tl.trans(k)) * scale, float("-inf"))
    new = tl.maximum(top, tl.max(s, axis=1))
    safe = tl.where(new == float("-inf"), 0.0, new)
    p = tl.exp2(s - safe[:, None])
    shrink = tl.exp2(top - safe)
    weight = weight * shrink + tl.sum(p, axis=1)
    total = dot_add(p.to(v.dtype), v, total * shrink[:, None])
    return new, weight, total


@jit
def near_kernel(
    Q,
    K,
    V,
    MASK,
    SINK,
    OUT,
    LOG,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    out_batch,
    out_head,
    out_row,
    mask_batch,
    heads,
    group,
    tokens,
    block,
    overlap,
    rows_per_block,
    scale,
    D: tl.constexpr,
    E: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    SINKS: tl.constexpr,
    BS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """OUT and LOG (natural, −inf without a key) of ROWS queries of one block."""
    head = tl.program_id(1).to(tl.int64)
    b, h = head // heads, head % heads
    Q += b * q_batch + h * q_head
    K += b * k_batch + h // group * k_head
    V += b * v_batch + h // group * v_head
    OUT += b * out_batch + h * out_head
    if HAS_MASK:
        MASK += b * mask_batch
    rows, cols = tl.arange(0, ROWS), tl.arange(0, COLS)
    features, values = tl.arange(0, BD), tl.arange(0, BE)
    start, stop, first, last = window_of(
        tl.program_id(0), block, overlap, rows_per_block, tokens, ROWS, CAUSAL
    )
    slope = scale * LOG2E
    q = load_tile(Q, q_row, start, stop, rows, features, D, BD, False)
    top = tl.full([ROWS], float("-inf"), tl.float32)
    weight = tl.zeros([ROWS], tl.float32)
    total = tl.zeros([ROWS, BE], tl.float32)
    for col in range(first, last, COLS):
        k = load_tile(K, k_row, col, last, cols, features, D, BD, False)
        v = load_tile(V, v_row, col, last, cols, values, E, BE, False)
        seen, keep = visible(start, first, last, col, rows, cols, MASK, HAS_MASK, CAUSAL)
        if HAS_MASK:
            v = tl.where(keep[:, None], v, 0.0)
        top, weight, total = attend_tile(q, k, v, seen, top, weight, total, slope)
    if SINKS > 0:
        SINK += b * SINKS
        k, outside = load_sinks(SINK, K, k_row, first, last, tokens, features, SINKS, BS, D, CAUSAL)
        v, _ = load_sinks(SINK, V, v_row, first, last, tokens, values, SINKS, BS, E, CAUSAL)
        seen = tl.broadcast_to(outside[None, :], [ROWS, BS])
        top, weight, total = attend_tile(q, k, v, seen, top, weight, total, slope)
    empty = weight == 0.0
    out = total / tl.where(empty, 1.0, weight)[:, None]
    store_tile(OUT, out_row, start, stop, out, rows, values, E, BE, False)
    log = tl.where(empty, float("-inf"), (top + tl.log2(tl.where(empty, 1.0, weight))) * LN2)
    tl.store(LOG + head * tokens + start + rows, log, mask=rows < stop - start)


@jit
def score_gradients(q, k, v, dout, log, delta, seen, slope):
    """(p, ds) of a tile of queries and keys."""
    s = dot_scores(q, tl.trans(k)) * slope - log[:, None]
    p = tl.exp2(tl.where(seen, s, float("-inf")))
    return p, p * (dot(dout, tl.trans(v)) - delta[:, None])


@jit
def near_dq_kernel(
    Q,
    K,
    V,
    MASK,
    SINK,
    OUT,
    LOG,
    DOUT,
    DLOG,
    DQ,
    DELTA,
    DSINK_K,
    DSINK_V,
    q_batch,
    q_head,
    q_row,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    out_batch,
    out_head,
    out_row,
    dout_batch,
    dout_head,
    dout_row,
    dq_batch,
    dq_head,
    dq_row,
    mask_batch,
    heads,
    group,
    tokens,
    block,
    overlap,
    rows_per_block,
    scale,
    D: tl.constexpr,
    E: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    SINKS: tl.constexpr,
    BS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """DQ and DELTA of ROWS queries, and their part of the gradients of the sinks."""
    head = tl.program_id(1).to(tl.int64)
    here, programs = tl.program_id(0), tl.num_programs(0)
    b, h = head // heads, head % heads
    Q += b * q_batch + h * q_head
    K += b * k_batch + h // group * k_head
    V += b * v_batch + h // group * v_head
    OUT += b * out_batch + h * out_head
    DOUT += b * dout_batch + h * dout_head
    DQ += b * dq_batch + h * dq_head
    if HAS_MASK:
        MASK += b * mask_batch
    rows, cols = tl.arange(0, ROWS), tl.arange(0, COLS)
    features, values = tl.arange(0, BD), tl.arange(0, BE)
    start, stop, first, last = window_of(here, block, overlap, rows_per_block, tokens, ROWS, CAUSAL)
    slope = scale * LOG2E
    q = load_tile(Q, q_row, start, stop, rows, features, D, BD, False)
    dout = load_tile(DOUT, dout_row, start, stop, rows, values, E, BE, False)
    out = load_tile(OUT, out_row, start, stop, rows, values, E, BE, False)
    inside = rows < stop - start
    at = head * tokens + start + rows
    log = tl.load(LOG + at, mask=inside, other=float("-inf"))
    log = tl.where(log == float("-inf"), float("inf"), log * LOG2E)
    delta = tl.sum(dout.to(tl.float32) * out.to(tl.float32), axis=1)
    delta -= tl.load(DLOG + at, mask=inside, other=0.0)
    tl.store(DELTA + at, delta, mask=inside)
    dq = tl.zeros([ROWS, BD], tl.float32)
    for col in range(first, last, COLS):
        k = load_tile(K, k_row, col, last, cols, features, D, BD, False)
        v = load_tile(V, v_row, col, last, cols, values, E, BE, False)
        seen, keep = visible(start, first, last, col, rows, cols, MASK, HAS_MASK, CAUSAL)
        if HAS_MASK:
            k = tl.where(keep[:, None], k, 0.0)
            v = tl.where(keep[:, None], v, 0.0)
        _, ds = score_gradients(q, k, v, dout, log, delta, seen, slope)
        dq = dot_add(ds.to(k.dtype), k, dq)
    if SINKS > 0:
        SINK += b * SINKS
        k, outside = load_sinks(SINK, K, k_row, first, last, tokens, features, SINKS, BS, D, CAUSAL)
        v, _ = load_sinks(SINK, V, v_row, first, last, tokens, values, SINKS, BS, E, CAUSAL)
        seen = tl.broadcast_to(outside[None, :], [ROWS, BS]) & inside[:, None]
        p, ds = score_gradients(q, k, v, dout, log, delta, seen, slope)
        dq = dot_add(ds.to(k.dtype), k, dq)
        slot = tl.arange(0, BS)
        base = (head * programs + here) * SINKS + slot
        some = slot < SINKS
        dk = dot(tl.trans(ds.to(q.dtype)), q) * scale
        dv = dot(tl.trans(p.to(dout.dtype)), dout)
        tl.store(
            DSINK_K + base[:, None] * D + features[None, :], dk,
            mask=some[:, None] & (features < D)[None, :],
        )  # fmt: skip
        tl.store(
            DSINK_V + base[:, None] * E + values[None, :], dv,
            mask=some[:, None] & (values < E)[None, :],
        )  # fmt: skip
    store_tile(DQ, dq_row, start, stop, dq * scale, rows, features, D, BD, False)


@jit
def near_dkdv_kernel(
    Q,
    K,
    V,
    MASK,
    SINK,
    LOG,
    DELTA,
    DOUT,
    DSINK_K,
    DSINK_V,
    DK,
    DV,
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
    kv_heads,
    group,
    tokens,
    block,
    overlap,
    scale,
    D: tl.constexpr,
    E: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    SINKS: tl.constexpr,
    HAS_MASK: tl.constexpr,
    CAUSAL: tl.constexpr,
):
    """DK and DV of COLS keys, from all queries whose windows hold them, and as sinks."""
    kv_head = tl.program_id(1).to(tl.int64)
    b, g = kv_head // kv_heads, kv_head % kv_heads
    rows, cols = tl.arange(0, ROWS), tl.arange(0, COLS)
    features, values = tl.arange(0, BD), tl.arange(0, BE)
    col = tl.program_id(0) * COLS
    j = col + cols
    keep = j < tokens
    k = load_tile(K + b * k_batch + g * k_head, k_row, col, tokens, cols, features, D, BD, False)
    v = load_tile(V + b * v_batch + g * v_head, v_row, col, tokens, cols, values, E, BE, False)
    if HAS_MASK:
        keep = tl.load(MASK + b * mask_batch + j, mask=keep, other=0) != 0
        k = tl.where(keep[:, None], k, 0.0)
        v = tl.where(keep[:, None], v, 0.0)
    dk = tl.zeros([COLS, BD], tl.float32)
    dv = tl.zeros([COLS, BE], tl.float32)
    end = tl.minimum(((tl.minimum(col + COLS, tokens) - 1 + overlap) // block + 1) * block, tokens)
    begin = col
    right = 0
    if not CAUSAL:
        begin = tl.maximum(col - overlap, 0) // block * block
        right = overlap
    slope = scale * LOG2E
    for member in range(group):
        h = g * group + member
        head = kv_head * group + member
        for start in range(begin, end, ROWS):
            q = load_tile(
                Q + b * q_batch + h * q_head, q_row, start, end, rows, features, D, BD, False
            )
            dout = load_tile(
                DOUT + b * dout_batch + h * dout_head,
                dout_row, start, end, rows, values, E, BE, False,
            )  # fmt: skip
            i = start + rows
            inside = i < end
            log = tl.load(LOG + head * tokens + i, mask=inside, other=float("-inf"))
            log = tl.where(log == float("-inf"), float("inf"), log * LOG2E)
            delta = tl.load(DELTA + head * tokens + i, mask=inside, other=0.0)
            edge = i // block * block
            seen = keep[:, None] & inside[None, :]
            seen = seen & (j[:, None] >= (edge - overlap)[None, :])
            if CAUSAL:
                seen = seen & (j[:, None] <= i[None, :])
            else:
                seen = seen & (j[:, None] < (edge + block + right)[None, :])
            s = dot_scores(k, tl.trans(q)) * slope - log[None, :]
            p = tl.exp2(tl.where(seen, s, float("-inf")))
            ds = p * (dot(v, tl.trans(dout)) - delta[None, :])
            dv = dot_add(p.to(dout.dtype), dout, dv)
            dk = dot_add(ds.to(q.dtype), q, dk)
    dk *= scale
    for slot in tl.static_range(SINKS):
        position = tl.load(SINK + b * SINKS + slot)
        mine = (j == position)[:, None]
        base = kv_head * SINKS + slot
        dk += tl.where(
            mine, tl.load(DSINK_K + base * D + features, mask=features < D, other=0.0)[None, :], 0.0
        )
        dv += tl.where(
            mine, tl.load(DSINK_V + base * E + values, mask=values < E, other=0.0)[None, :], 0.0
        )
    store_tile(
        DK + b * dk_batch + g * dk_head, dk_row, col, tokens, dk, cols, features, D, BD, False
    )
    store_tile(DV + b * dv_batch + g * dv_head, dv_row, col, tokens, dv, cols, values, E, BE, False)
