# type: ignore
"""Kernels of causal attention, forward: segments in parallel, chunks of a segment in order.

The state before each segment comes from the parts of :func:`summarize_kernel` by an exclusive
scan. Inside a segment a program carries (peak m, mass z, mean M) from chunk to chunk. In a chunk,
with R_l the running peak including the chunk's own keys,

    b_jl = exp(β k_jl − R_l) ≤ 1,   a_il = exp(α q_il + R_l − r_i) ≤ 1   (r_i: the row's maximum)
    out_i ∝ Σ_{j ≤ i} (a_i·b_j) v_j + Σ_l a_il z_l M_l,

two exponentials per token and feature. This loses rows only if a key of the chunk exceeds every
earlier key by 2^LIMIT in some feature: R counts it although earlier rows do not see it. Then, and
only then, the program repeats its segment with :func:`careful_rows`, 16 rows at a time and key by
key inside them, which is right for any input.
"""

from __future__ import annotations

import triton.language as tl

from lln.ops.causal.kernels.state_kernels import inverse, state_before
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
from lln.ops.linear.kernels.read_kernels import store_lse

# Factors stay above 2^(−LIMIT − 24), far from the smallest float32 and bfloat16, 2^−126.
LIMIT = tl.constexpr(80.0)


@jit
def first_key(
    K,
    k_row,
    MASK,
    scale,
    begin,
    end,
    rows,
    features,
    D: tl.constexpr,
    ROWS: tl.constexpr,
):
    """Exponents of the first visible key of begin … end: a peak that all later rows can see."""
    index = begin
    width = D
    if MASK is not None:
        index = end
        for start in range(begin, end, ROWS):
            keep = tl.load(MASK + start + rows, mask=rows < end - start, other=0) != 0
            index = tl.minimum(index, tl.min(tl.where(keep, start + rows, end), axis=0))
        width = tl.where(index < end, D, 0)
    pointers = K + tl.cast(index, tl.int64) * k_row + features
    x = tl.load(pointers, mask=features < width, other=0.0).to(tl.float32) * scale
    return tl.where(features < D, x, FLOOR)


@jit
def visible_keys(MASK, start, end, rows):
    """Which keys start + rows exist and may be attended."""
    keep = rows < end - start
    if MASK is not None:
        keep = tl.load(MASK + start + rows, mask=keep, other=0) != 0
    return keep


@jit
def key_factors(
    k,
    eye,
    scale,
    peak,
    keep,
    features,
    D: tl.constexpr,
    MASKED: tl.constexpr,
):
    """(bᵀ = exp(β k − R) as [features, keys], R): R is the running peak with these keys."""
    x = as_float_transposed(k, eye) * scale
    if not divides(features.shape[0], D):
        x = tl.where((features < D)[:, None], x, float("-inf"))
    if MASKED:
        x = tl.where(keep[None, :], x, float("-inf"))
    top = tl.maximum(peak, tl.max(x, axis=1))
    return tl.exp2(x - top[:, None]), top


@jit
def carry_keys(factors, v, mass, shrink, mean):
    """(mass, mean) after the keys with these factors; ``shrink`` rescales the mass before them."""
    kept = mass * shrink
    mass = kept + tl.sum(factors, axis=1)
    norm = inverse(mass)
    mean = dot_add((factors * norm[:, None]).to(v.dtype), v, mean * (kept * norm)[:, None])
    return mass, mean


@jit
def carry_sums(factors, v, mass, shrink, total):
    """:func:`carry_keys` of a sum that ``shrink`` has rescaled already, but not the mass."""
    return mass * shrink + tl.sum(factors, axis=1), dot_add(factors.to(v.dtype), v, total)


@jit
def causal_kernel(
    Q,
    K,
    V,
    OUT,
    LSE,
    MASK,
    ALPHA,
    BETA,
    BEFORE,
    LOG_MASS,
    MEAN,
    strides,
    heads,
    group,
    tokens,
    span,
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
    """OUT and LSE of one segment of ``span`` tokens of one head.

    WIDE is the dtype of the factors a and b: it must have the exponents of float32. SUMS: what is
    carried are sums instead of means, for dtypes with these exponents: fewer instructions.
    """
    q_strides, k_strides, v_strides, out_strides, mask_batch, alpha_strides, beta_strides = strides
    q_row = q_strides[2]
    k_row, v_row = row_of(k_strides, q_row), row_of(v_strides, q_row)
    out_row = row_of(out_strides, q_row)
    segment, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = head // heads, head % heads
    Q += of_head(q_strides, b, h)
    K += of_head(k_strides, b, h // group)
    V += of_head(v_strides, b, h // group)
    OUT += of_head(out_strides, b, h)
    LSE += head * tokens * (2 if PRECISE else 1)
    if MASK is not None:
        MASK += b * mask_batch
    alpha = tl.load(ALPHA + of_head(alpha_strides, b, h)).to(tl.float32) * LOG2E
    beta = tl.load(BETA + of_head(beta_strides, b, h // group)).to(tl.float32) * LOG2E
    rows, features, values = tl.arange(0, ROWS), tl.arange(0, BD), tl.arange(0, BE)
    dtype: tl.constexpr = Q.dtype.element_ty
    masked: tl.constexpr = MASK is not None or not FULL
    eye = identity(BD, dtype, THROUGH)
    begin = segment * span
    end = tl.minimum(begin + span, tokens)

    peak, mass, mean = state_before(
        BEFORE, LOG_MASS, MEAN, head // group, segment, tl.num_programs(0),
        features, values, D, E,
    )  # fmt: skip
    start_key = first_key(K, k_row, MASK, beta, begin, end, rows, features, D, ROWS)
    peak = tl.where(mass == 0.0, start_key, peak)
    if SUMS:
        mean *= mass[:, None]
    jump = tl.zeros([BD], tl.float32)
    for start in range(begin, end, ROWS):
        q = load_tile(Q, q_row, start, end, rows, features, D, FULL)
        k = load_tile(K, k_row, start, end, rows, features, D, FULL)
        v = load_tile(V, v_row, start, end, rows, values, E, FULL)
        keep = visible_keys(MASK, start, end, rows)
        if MASK is not None:
            v = tl.where(keep[:, None], v, 0.0)
        factors, top = key_factors(k, eye, beta, peak, keep, features, D, masked)
        jump = tl.maximum(jump, top - peak)
        shrink = tl.exp2(peak - top)
        earlier = (mass * shrink)[None, :]
        # carried on before the queries come, whose tiles then have the registers of these factors
        if SUMS:
            mean *= shrink[:, None]
            before = mean.to(dtype)
            mass, mean = carry_sums(factors, v, mass, shrink, mean)
        else:
            before = mean.to(dtype)
            mass, mean = carry_keys(factors, v, mass, shrink, mean)
        x = as_float(q, eye) * alpha + top[None, :]
        highest = tl.max(x, axis=1)
        a = tl.exp2(x - highest[:, None])
        scores = dot_factors(a, factors, WIDE, TERMS)
        scores = tl.where(rows[:, None] >= rows[None, :], scores, 0.0)
        carried = a * earlier
        weight = tl.sum(scores, axis=1) + tl.sum(carried, axis=1)
        norm = inverse(weight)[:, None]
        if SUMS:
            out = dot_add(scores.to(dtype), v, dot(a.to(dtype), before)) * norm
        else:
            out = dot((scores * norm).to(dtype), v)
            out = dot_add((carried * norm).to(dtype), before, out)
        store_tile(OUT, out_row, start, end, out, rows, values, E, FULL)
        store_lse(LSE, tokens, start, end, rows, highest, weight, PRECISE)
        peak = top

    if tl.max(jump, axis=0) > LIMIT:
        tl.debug_barrier()  # what the loop stored is overwritten by other threads
        peak, mass, mean = state_before(
            BEFORE, LOG_MASS, MEAN, head // group, segment, tl.num_programs(0),
            features, values, D, E,
        )  # fmt: skip
        few = tl.arange(0, 16)
        for start in range(begin, end, 16):
            q = load_tile(Q, q_row, start, end, few, features, D, False)
            k = load_tile(K, k_row, start, end, few, features, D, False)
            v = load_tile(V, v_row, start, end, few, values, E, False)
            keep = visible_keys(MASK, start, end, few)
            v = tl.where(keep[:, None], v, 0.0)
            highest, weight, out = careful_rows(
                q, K, V, k_row, v_row, MASK, alpha, beta, peak, mass, mean, start, end,
                few, features, values, D, E,
            )  # fmt: skip
            out *= inverse(weight)[:, None]
            store_tile(OUT, out_row, start, end, out, few, values, E, False)
            store_lse(LSE, tokens, start, end, few, highest, weight, PRECISE)
            x = k.to(tl.float32) * beta
            x = tl.where(keep[:, None] & (features < D)[None, :], x, float("-inf"))
            top = tl.maximum(peak, tl.max(x, axis=0))
            factors = tl.trans(tl.exp2(x - top[None, :]))
            mass, mean = carry_keys(factors, v, mass, tl.exp2(peak - top), mean)
            peak = top


@jit
def one_key(K, k_row, scale, index, features, D: tl.constexpr):
    """Exponents [1, features] of one key."""
    pointers = K + tl.cast(index, tl.int64) * k_row + features[None, :]
    return tl.load(pointers, mask=(features < D)[None, :], other=0.0).to(tl.float32) * scale


@jit
def careful_rows(
    q,
    K,
    V,
    k_row,
    v_row,
    MASK,
    alpha,
    beta,
    peak,
    mass,
    mean,
    start,
    end,
    rows,
    features,
    values,
    D: tl.constexpr,
    E: tl.constexpr,
):
    """(top, weight, sum) of 16 rows: the carried state, then each key of the tile by itself."""
    x = q.to(tl.float32) * alpha
    scores = x + peak[None, :]
    scores = tl.where((mass > 0.0)[None, :], scores, float("-inf"))
    top = tl.maximum(tl.max(scores, axis=1), FLOOR)
    carried = tl.exp2(scores - top[:, None]) * mass[None, :]
    weight = tl.sum(carried, axis=1)
    total = dot(carried, mean)
    inside = (features < D)[None, :]
    for index in range(start, tl.minimum(start + 16, end)):
        keep = True
        if MASK is not None:
            keep = tl.load(MASK + index) != 0
        if keep:
            y = x + one_key(K, k_row, beta, index, features, D)
            y = tl.where(inside & (rows >= index - start)[:, None], y, float("-inf"))
            highest = tl.maximum(tl.max(y, axis=1), FLOOR)
            score = tl.sum(tl.exp2(y - highest[:, None]), axis=1)
            v = tl.load(V + tl.cast(index, tl.int64) * v_row + values, mask=values < E, other=0.0)
            higher = tl.maximum(top, highest)
            old, new = tl.exp2(top - higher), tl.exp2(highest - higher) * score
            weight = weight * old + new
            total = total * old[:, None] + new[:, None] * v.to(tl.float32)[None, :]
            top = higher
    return top, weight, total
