# type: ignore
"""Kernels of causal attention, backward: dk and dv against the order of the tokens.

With the weights W and δ of ``causal_dq_kernels``,

    dk_jl = β Σ_{i ≥ j} W_ijl (v_j·dO_i − δ_i),     dv_j = Σ_{i ≥ j, l} W_ijl dO_i.

They carry a state of later queries: peak Q_l of α q_il − ℓ_i, mass y_l = Σ exp(α q_il − ℓ_i − Q_l),
and the weighted means of dO_i and δ_i.
"""

from __future__ import annotations

import triton.language as tl

from lln.ops.causal.kernels.forward_kernels import carry_sums, visible_keys
from lln.ops.causal.kernels.state_kernels import inverse, store_part
from lln.ops.common.kernels.features import (
    FLOOR,
    LOG2E,
    as_float,
    as_float_transposed,
    divides,
    dot,
    dot_add,
    dot_factors,
    identity,
    jit,
    load_tile,
    of_head,
    row_of,
    store_tile,
)


@jit
def query_factors(q, eye, alpha, lse, peak, features, D: tl.constexpr):
    """(aᵀ = exp(α q − ℓ − Q) as [features, queries], Q): Q is the running peak with these."""
    x = as_float_transposed(q, eye) * alpha - lse[None, :]
    if not divides(features.shape[0], D):
        x = tl.where((features < D)[:, None], x, float("-inf"))
    top = tl.maximum(peak, tl.max(x, axis=1))
    return tl.exp2(x - top[:, None]), top


@jit
def load_lse(LSE, tokens, start, end, rows, PRECISE: tl.constexpr):
    """ℓ of queries; +inf beyond the end, where weights are then 0."""
    lse = tl.load(LSE + start + rows, mask=rows < end - start, other=float("inf"))
    if PRECISE:
        lse += tl.load(LSE + tokens + start + rows, mask=rows < end - start, other=0.0)
    return lse


@jit
def carry_queries(factors, dout, delta, mass, shrink, mean, mean_delta):
    """(mass, mean dO, mean δ) after the queries with these factors."""
    kept = mass * shrink
    mass = kept + tl.sum(factors, axis=1)
    norm = inverse(mass)
    mean = dot_add((factors * norm[:, None]).to(dout.dtype), dout, mean * (kept * norm)[:, None])
    mean_delta = (mean_delta * kept + tl.sum(factors * delta[None, :], axis=1)) * norm
    return mass, mean, mean_delta


@jit
def summarize_queries_kernel(
    Q,
    DOUT,
    LSE,
    DELTA,
    ALPHA,
    PARTS,
    strides,
    heads,
    tokens,
    span,
    first,
    D: tl.constexpr,
    E: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    ROWS: tl.constexpr,
    FULL: tl.constexpr,
    PRECISE: tl.constexpr,
    THROUGH: tl.constexpr,
):
    """PARTS[head, ·] = (Σ a dO, Q, Σ a, Σ a δ) of the queries of each segment from ``first`` on."""
    q_strides, dout_strides, alpha_strides = strides
    q_row = q_strides[2]
    dout_row = row_of(dout_strides, q_row)
    segment, head = tl.program_id(0) + first, tl.program_id(1).to(tl.int64)
    b, h = head // heads, head % heads
    Q += of_head(q_strides, b, h)
    DOUT += of_head(dout_strides, b, h)
    LSE += head * tokens * (2 if PRECISE else 1)
    DELTA += head * tokens
    alpha = tl.load(ALPHA + of_head(alpha_strides, b, h)).to(tl.float32) * LOG2E
    rows, features = tl.arange(0, ROWS), tl.arange(0, BD)
    values = tl.program_id(2) * BE + tl.arange(0, BE)
    eye = identity(BD, Q.dtype.element_ty, THROUGH)
    peak = tl.full([BD], FLOOR, tl.float32)
    mass = tl.zeros([BD], tl.float32)
    extra = tl.zeros([BD], tl.float32)
    total = tl.zeros([BD, BE], tl.float32)
    end = tl.minimum((segment + 1) * span, tokens)
    for start in range(segment * span, end, ROWS):
        q = load_tile(Q, q_row, start, end, rows, features, D, FULL)
        dout = load_tile(DOUT, dout_row, start, end, rows, values, E, FULL)
        lse = load_lse(LSE, tokens, start, end, rows, PRECISE)
        delta = tl.load(DELTA + start + rows, mask=rows < end - start, other=0.0)
        factors, top = query_factors(q, eye, alpha, lse, peak, features, D)
        shrink = tl.exp2(peak - top)
        mass = mass * shrink + tl.sum(factors, axis=1)
        extra = extra * shrink + tl.sum(factors * delta[None, :], axis=1)
        total = dot_add(factors.to(dout.dtype), dout, total * shrink[:, None])
        peak = top
    base = PARTS + (head * tl.num_programs(0) + tl.program_id(0)) * (D * E + 3 * D)
    store_part(base, peak, mass, total, extra, features, values, D, E, 3)


@jit
def causal_dkdv_kernel(
    Q,
    K,
    V,
    DOUT,
    LSE,
    DELTA,
    MASK,
    ALPHA,
    BETA,
    AFTER,
    FLAGS,
    DK,
    DV,
    DBETA,
    strides,
    heads,
    group,
    tokens,
    span,
    first,
    D: tl.constexpr,
    E: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    ROWS: tl.constexpr,
    FULL: tl.constexpr,
    PRECISE: tl.constexpr,
    WIDE: tl.constexpr,
    TERMS: tl.constexpr,
    SUMS: tl.constexpr,
    THROUGH: tl.constexpr,
):
    """DK, DV of one segment from one query head; DBETA[head, segment] if asked for."""
    (
        q_strides, k_strides, v_strides, dout_strides, dk_strides, dv_strides, mask_batch,
        alpha_strides, beta_strides,
    ) = strides  # fmt: skip
    q_row = q_strides[2]
    k_row, v_row = row_of(k_strides, q_row), row_of(v_strides, q_row)
    dout_row, dk_row = row_of(dout_strides, q_row), row_of(dk_strides, q_row)
    dv_row = row_of(dv_strides, q_row)
    segment, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = head // heads, head % heads
    Q += of_head(q_strides, b, h)
    K += of_head(k_strides, b, h // group)
    V += of_head(v_strides, b, h // group)
    DOUT += of_head(dout_strides, b, h)
    DK += of_head(dk_strides, b, h)
    DV += of_head(dv_strides, b, h)
    LSE += head * tokens * (2 if PRECISE else 1)
    DELTA += head * tokens
    if MASK is not None:
        MASK += b * mask_batch
    alpha = tl.load(ALPHA + of_head(alpha_strides, b, h)).to(tl.float32) * LOG2E
    beta = tl.load(BETA + of_head(beta_strides, b, h // group)).to(tl.float32)
    rows, features, values = tl.arange(0, ROWS), tl.arange(0, BD), tl.arange(0, BE)
    dtype: tl.constexpr = Q.dtype.element_ty
    masked: tl.constexpr = MASK is not None or not FULL
    inside = features < D
    eye = identity(BD, dtype, THROUGH)
    begin = segment * span
    end = tl.minimum(begin + span, tokens)
    index = head * tl.num_programs(0) + segment
    careful = tl.load(FLAGS + index) != 0

    peak, mass, mean, mean_delta = state_after(
        AFTER, head, segment, tl.num_programs(0), first, features, values, D, E
    )
    slope = 0.0
    chunks = tl.cdiv(end - begin, ROWS)
    if careful:
        chunks = 0
    elif SUMS:
        mean *= mass[:, None]
        mean_delta *= mass
    for step in range(chunks):
        start = begin + (tl.cdiv(end - begin, ROWS) - 1 - step) * ROWS
        q = load_tile(Q, q_row, start, end, rows, features, D, FULL)
        k = load_tile(K, k_row, start, end, rows, features, D, FULL)
        v = load_tile(V, v_row, start, end, rows, values, E, FULL)
        dout = load_tile(DOUT, dout_row, start, end, rows, values, E, FULL)
        lse = load_lse(LSE, tokens, start, end, rows, PRECISE)
        delta = tl.load(DELTA + start + rows, mask=rows < end - start, other=0.0)
        keep = visible_keys(MASK, start, end, rows)
        if MASK is not None:
            v = tl.where(keep[:, None], v, 0.0)
        factors, top = query_factors(q, eye, alpha, lse, peak, features, D)
        shrink = tl.exp2(peak - top)
        x = as_float(k, eye) * (beta * LOG2E)
        c = tl.exp2(x + top[None, :])
        if masked:
            c = tl.where(keep[:, None], c, 0.0)
        above = rows[:, None] <= rows[None, :]  # key row, query column
        earlier = (mass * shrink)[None, :]
        scores = tl.where(above, dot_factors(c, factors, WIDE, TERMS), 0.0)
        dv = dot(scores.to(dtype), dout)
        if SUMS:
            mean *= shrink[:, None]
            mean_delta *= shrink
            dv = dot_add(c.to(dtype), mean.to(dtype), dv)
        else:
            dv = dot_add((c * earlier).to(dtype), mean.to(dtype), dv)
        store_tile(DV, dv_row, start, end, dv, rows, values, E, FULL)
        # c stands outside of every sum over queries, and the order saves registers
        sums = dot(v, tl.trans(mean.to(dtype))) - mean_delta[None, :]
        if not SUMS:
            sums *= earlier
        products = tl.where(above, dot(v, tl.trans(dout)) - delta[None, :], 0.0)
        gradient = c * (sums + dot_factors(products, tl.trans(factors), WIDE, TERMS))
        if DBETA is not None:
            clean = as_float(k, eye)
            if MASK is not None:
                clean = tl.where(keep[:, None], clean, 0.0)
            slope += tl.sum(gradient * clean)
        store_tile(DK, dk_row, start, end, gradient * beta, rows, features, D, FULL)
        if SUMS:
            mean_delta += tl.sum(factors * delta[None, :], axis=1)
            mass, mean = carry_sums(factors, dout, mass, shrink, mean)
        else:
            mass, mean, mean_delta = carry_queries(
                factors, dout, delta, mass, shrink, mean, mean_delta
            )
        peak = top

    if careful:
        few = tl.arange(0, 16)
        for step in range(tl.cdiv(end - begin, 16)):
            start = begin + (tl.cdiv(end - begin, 16) - 1 - step) * 16
            q = load_tile(Q, q_row, start, end, few, features, D, False)
            k = load_tile(K, k_row, start, end, few, features, D, False)
            v = load_tile(V, v_row, start, end, few, values, E, False)
            dout = load_tile(DOUT, dout_row, start, end, few, values, E, False)
            lse = load_lse(LSE, tokens, start, end, few, PRECISE)
            delta = tl.load(DELTA + start + few, mask=few < end - start, other=0.0)
            keep = visible_keys(MASK, start, end, few)
            v = tl.where(keep[:, None], v, 0.0)
            x = k.to(tl.float32) * (beta * LOG2E)
            x = tl.where(keep[:, None] & inside[None, :], x, float("-inf"))
            gradient, dv = careful_key_sums(
                x, v.to(tl.float32), Q, DOUT, LSE, DELTA, q_row, dout_row, alpha, peak, mass,
                mean, mean_delta, tokens, start, end, few, features, values,
                D, E, PRECISE,
            )  # fmt: skip
            store_tile(DV, dv_row, start, end, dv, few, values, E, False)
            if DBETA is not None:
                clean = tl.where(keep[:, None], k.to(tl.float32), 0.0)
                slope += tl.sum(gradient * clean)
            store_tile(DK, dk_row, start, end, gradient * beta, few, features, D, False)
            y = tl.trans(q.to(tl.float32) * alpha - lse[:, None])
            y = tl.where(inside[:, None], y, float("-inf"))
            top = tl.maximum(peak, tl.max(y, axis=1))
            factors = tl.exp2(y - top[:, None])
            mass, mean, mean_delta = carry_queries(
                factors, dout, delta, mass, tl.exp2(peak - top), mean, mean_delta
            )
            peak = top
    if DBETA is not None:
        tl.store(DBETA + index, slope)


@jit
def state_after(
    AFTER,
    head,
    segment,
    segments,
    first,
    features,
    values,
    D: tl.constexpr,
    E: tl.constexpr,
):
    """(peak, mass, mean dO, mean δ) of the queries after a segment; AFTER starts at ``first``."""
    peak = tl.full(features.shape, FLOOR, tl.float32)
    mass = tl.zeros(features.shape, tl.float32)
    mean = tl.zeros([features.shape[0], values.shape[0]], tl.float32)
    mean_delta = tl.zeros(features.shape, tl.float32)
    if segment + 1 < segments:
        index = head * (segments - first) + segment + 1 - first
        base = AFTER + index * (D * E + 3 * D)
        inside = features < D
        block = inside[:, None] & (values < E)[None, :]
        peak = tl.load(base + D * E + features, mask=inside, other=FLOOR)
        mass = tl.load(base + D * E + D + features, mask=inside, other=0.0)
        total = tl.load(base + features[:, None] * E + values[None, :], mask=block, other=0.0)
        extra = tl.load(base + D * E + 2 * D + features, mask=inside, other=0.0)
        norm = inverse(mass)
        mean, mean_delta = total * norm[:, None], extra * norm
    return peak, mass, mean, mean_delta


@jit
def careful_key_sums(
    x,
    v,
    Q,
    DOUT,
    LSE,
    DELTA,
    q_row,
    dout_row,
    alpha,
    peak,
    mass,
    mean,
    mean_delta,
    tokens,
    start,
    end,
    rows,
    features,
    values,
    D: tl.constexpr,
    E: tl.constexpr,
    PRECISE: tl.constexpr,
):
    """(Σ_i W (v·dO_i − δ_i), Σ_i,l W dO_i) of 16 keys: later queries, then each of the tile."""
    log_mass = tl.where(mass > 0.0, peak + tl.log2(mass), float("-inf"))
    weights = tl.exp2(x + log_mass[None, :])
    dv = dot(weights, mean)
    gradient = weights * (dot(v, tl.trans(mean)) - mean_delta[None, :])
    for index in range(start, tl.minimum(start + 16, end)):
        row = tl.cast(index, tl.int64)
        q = tl.load(Q + row * q_row + features, mask=features < D, other=0.0).to(tl.float32)
        dout = tl.load(DOUT + row * dout_row + values, mask=values < E, other=0.0).to(tl.float32)
        lse = tl.load(LSE + index)
        y = x + (q * alpha - lse)[None, :]
        if PRECISE:
            y -= tl.load(LSE + tokens + index)
        y = tl.where((rows <= index - start)[:, None], y, float("-inf"))
        weight = tl.exp2(y)
        product = tl.sum(v * dout[None, :], axis=1) - tl.load(DELTA + index)
        gradient += weight * product[:, None]
        dv += tl.sum(weight, axis=1)[:, None] * dout[None, :]
    return gradient, dv
