# type: ignore
"""Kernel of causal attention, backward: dq in the order of the tokens.

With the saved ℓ_i the weights W_ijl = exp(α q_il + β k_jl − ℓ_i) ≤ 1 are known, and

    dq_il = α Σ_{j ≤ i} W_ijl (v_j·dO_i − δ_i),     δ_i = Σ_{j ≤ i, l} W_ijl v_j·dO_i.

It carries the same state of earlier keys as the forward pass. A segment that the forward pass could
not do fast (see ``causal_kernels``) is done key by key here too; this kernel finds out again and
leaves a flag for that of dk and dv.
"""

from __future__ import annotations

import triton.language as tl

from lln.ops.causal.kernels.forward_kernels import (
    LIMIT,
    carry_keys,
    carry_sums,
    first_key,
    key_factors,
    one_key,
    visible_keys,
)
from lln.ops.causal.kernels.state_kernels import state_before
from lln.ops.common.kernels.features import (
    LOG2E,
    as_float,
    dot,
    dot_factors,
    identity,
    jit,
    load_tile,
    of_head,
    row_of,
    store_tile,
)
from lln.ops.linear.kernels.read_kernels import minus_lse


@jit
def causal_dq_kernel(
    Q,
    K,
    V,
    DOUT,
    LSE,
    MASK,
    ALPHA,
    BETA,
    BEFORE,
    LOG_MASS,
    MEAN,
    DQ,
    DELTA,
    FLAGS,
    DALPHA,
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
    """DQ, DELTA and FLAGS of one segment of one head; DALPHA[head, segment] if asked for.

    The sums over the chunk's own keys are two dots with b: (mask ∘ dO vᵀ) b and mask b.
    """
    (
        q_strides, k_strides, v_strides, dout_strides, dq_strides, mask_batch, alpha_strides,
        beta_strides,
    ) = strides  # fmt: skip
    q_row = q_strides[2]
    k_row, v_row = row_of(k_strides, q_row), row_of(v_strides, q_row)
    dout_row, dq_row = row_of(dout_strides, q_row), row_of(dq_strides, q_row)
    segment, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = head // heads, head % heads
    Q += of_head(q_strides, b, h)
    K += of_head(k_strides, b, h // group)
    V += of_head(v_strides, b, h // group)
    DOUT += of_head(dout_strides, b, h)
    DQ += of_head(dq_strides, b, h)
    LSE += head * tokens * (2 if PRECISE else 1)
    DELTA += head * tokens
    if MASK is not None:
        MASK += b * mask_batch
    alpha = tl.load(ALPHA + of_head(alpha_strides, b, h)).to(tl.float32)
    beta = tl.load(BETA + of_head(beta_strides, b, h // group)).to(tl.float32) * LOG2E
    rows, features, values = tl.arange(0, ROWS), tl.arange(0, BD), tl.arange(0, BE)
    dtype: tl.constexpr = Q.dtype.element_ty
    masked: tl.constexpr = MASK is not None or not FULL
    eye = identity(BD, dtype, THROUGH)
    below = rows[:, None] >= rows[None, :]
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
    slope = 0.0
    for start in range(begin, end, ROWS):
        q = load_tile(Q, q_row, start, end, rows, features, D, FULL)
        k = load_tile(K, k_row, start, end, rows, features, D, FULL)
        v = load_tile(V, v_row, start, end, rows, values, E, FULL)
        dout = load_tile(DOUT, dout_row, start, end, rows, values, E, FULL)
        keep = visible_keys(MASK, start, end, rows)
        if MASK is not None:
            v = tl.where(keep[:, None], v, 0.0)
        factors, top = key_factors(k, eye, beta, peak, keep, features, D, masked)
        jump = tl.maximum(jump, top - peak)
        shrink = tl.exp2(peak - top)
        earlier = (mass * shrink)[None, :]
        if SUMS:
            mean *= shrink[:, None]
            before = mean.to(dtype)
            mass, mean = carry_sums(factors, v, mass, shrink, mean)
        else:
            before = mean.to(dtype)
            mass, mean = carry_keys(factors, v, mass, shrink, mean)
        sums = dot(dout, tl.trans(before))
        if not SUMS:
            sums *= earlier
        products = dot(dout, tl.trans(v))
        keys = tl.trans(factors)
        sums += dot_factors(tl.where(below, products, 0.0), keys, WIDE, TERMS)
        # a stands outside of every sum over keys: the last of the tiles that are held
        x = as_float(q, eye) * (alpha * LOG2E) + top[None, :]
        a = tl.exp2(minus_lse(x, LSE, tokens, start, end, rows, 0.0, PRECISE))
        delta = tl.sum(a * sums, axis=1)
        sums -= (dot_factors(below.to(WIDE), keys, WIDE, TERMS) + earlier) * delta[:, None]
        gradient = a * sums
        if DALPHA is not None:
            slope += tl.sum(gradient * as_float(q, eye))
        store_tile(DQ, dq_row, start, end, gradient * alpha, rows, features, D, FULL)
        tl.store(DELTA + start + rows, delta, mask=rows < end - start)
        peak = top

    careful = tl.max(jump, axis=0) > LIMIT
    tl.store(FLAGS + head * tl.num_programs(0) + segment, careful.to(tl.int32))
    if careful:
        tl.debug_barrier()  # what the loop stored is overwritten by other threads
        slope = 0.0
        peak, mass, mean = state_before(
            BEFORE, LOG_MASS, MEAN, head // group, segment, tl.num_programs(0),
            features, values, D, E,
        )  # fmt: skip
        few = tl.arange(0, 16)
        for start in range(begin, end, 16):
            q = load_tile(Q, q_row, start, end, few, features, D, False).to(tl.float32)
            k = load_tile(K, k_row, start, end, few, features, D, False)
            v = load_tile(V, v_row, start, end, few, values, E, False)
            dout = load_tile(DOUT, dout_row, start, end, few, values, E, False).to(tl.float32)
            keep = visible_keys(MASK, start, end, few)
            v = tl.where(keep[:, None], v, 0.0)
            x = minus_lse(q * (alpha * LOG2E), LSE, tokens, start, end, few, 0.0, PRECISE)
            first, weights = careful_query_sums(
                x, dout, K, V, k_row, v_row, MASK, beta, peak, mass, mean, start, end,
                few, features, values, D, E,
            )  # fmt: skip
            delta = tl.sum(first, axis=1)
            gradient = first - delta[:, None] * weights
            if DALPHA is not None:
                slope += tl.sum(gradient * q)
            store_tile(DQ, dq_row, start, end, gradient * alpha, few, features, D, False)
            tl.store(DELTA + start + few, delta, mask=few < end - start)
            y = k.to(tl.float32) * beta
            y = tl.where(keep[:, None] & (features < D)[None, :], y, float("-inf"))
            top = tl.maximum(peak, tl.max(y, axis=0))
            factors = tl.trans(tl.exp2(y - top[None, :]))
            mass, mean = carry_keys(factors, v, mass, tl.exp2(peak - top), mean)
            peak = top
    if DALPHA is not None:
        tl.store(DALPHA + head * tl.num_programs(0) + segment, slope)


@jit
def careful_query_sums(
    x,
    dout,
    K,
    V,
    k_row,
    v_row,
    MASK,
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
    """(Σ_j W v_j·dO, Σ_j W) as [16 rows, features]; x = α q − ℓ."""
    log_mass = tl.where(mass > 0.0, peak + tl.log2(mass), float("-inf"))
    weights = tl.exp2(x + log_mass[None, :])
    first = weights * dot(dout, tl.trans(mean))
    inside = (features < D)[None, :]
    for index in range(start, tl.minimum(start + 16, end)):
        keep = True
        if MASK is not None:
            keep = tl.load(MASK + index) != 0
        if keep:
            y = x + one_key(K, k_row, beta, index, features, D)
            y = tl.where(inside & (rows >= index - start)[:, None], y, float("-inf"))
            weight = tl.exp2(y)
            v = tl.load(V + tl.cast(index, tl.int64) * v_row + values, mask=values < E, other=0.0)
            product = tl.sum(dout * v.to(tl.float32)[None, :], axis=1)
            first += weight * product[:, None]
            weights += weight
    return first, weights
