# type: ignore
"""Kernels of far keys as states: of segments, merged along the sequence, as a block sees them.

The keys are cut into segments of ``step`` keys from ``origin`` ≤ 0 on, such that every window
begins and ends between two of them. A state is a base-2 logarithm and a mean per slot, −inf and 0
without a key; states merge as

    L = log Σ_s exp(L_s),   M = Σ_s exp(L_s − L) M_s.

A window of queries leaves the segments before and those after it. Backwards the same merge sums
what blocks b give to the keys that they see: with −L_b for L_s, dM_b for M_s, and one more mean,
Σ_b exp(−L_bl) (dM_bl, g_bl) = exp(L) (M, X).
"""

from __future__ import annotations

import triton.language as tl

from lln.ops.common.kernels.features import (
    FLOOR,
    LOG2E,
    as_float_transposed,
    dot_add,
    identity,
    jit,
    load_tile,
    normalized,
    of_head,
    padded,
    row_of,
)


@jit
def segments_kernel(
    K,
    V,
    BETA,
    MASK,
    LOG,
    MEAN,
    strides,
    heads,
    keys,
    step,
    origin,
    S: tl.constexpr,
    E: tl.constexpr,
    ROWS: tl.constexpr,
    FULL: tl.constexpr,
    THROUGH: tl.constexpr,
):
    """LOG and MEAN of one segment of keys."""
    k_strides, v_strides, beta_strides, mask_batch = strides
    k_row = k_strides[2]
    v_row = row_of(v_strides, k_row)
    head = tl.program_id(1).to(tl.int64)
    b, h = head // heads, head % heads
    K += of_head(k_strides, b, h)
    V += of_head(v_strides, b, h)
    if MASK is not None:
        MASK += b * mask_batch
    beta = tl.load(BETA + of_head(beta_strides, b, h)).to(tl.float32) * LOG2E
    rows, slots, values = tl.arange(0, ROWS), tl.arange(0, padded(S)), tl.arange(0, padded(E))
    eye = identity(padded(S), K.dtype.element_ty, THROUGH)
    begin = origin + tl.program_id(0) * step
    end = tl.minimum(begin + step, keys)
    peak = tl.full([padded(S)], FLOOR, tl.float32)
    mass = tl.zeros([padded(S)], tl.float32)
    total = tl.zeros([padded(S), padded(E)], tl.float32)
    for start in range(tl.maximum(begin, 0), end, ROWS):
        k = load_tile(K, k_row, start, end, rows, slots, S, FULL)
        v = load_tile(V, v_row, start, end, rows, values, E, FULL)
        x = as_float_transposed(k, eye) * beta
        if MASK is not None or not FULL:
            keep = rows < end - start
            if MASK is not None:
                keep = tl.load(MASK + start + rows, mask=keep, other=0) != 0
                v = tl.where(keep[:, None], v, 0.0)
            x = tl.where(keep[None, :], x, float("-inf"))
        top = tl.maximum(peak, tl.max(x, axis=1))
        shrink = tl.exp2(peak - top)
        p = tl.exp2(x - top[:, None])
        mass = mass * shrink + tl.sum(p, axis=1)
        total = dot_add(p.to(v.dtype), v, total * shrink[:, None])
        peak = top
    log, mean = normalized(peak, mass, total)
    at = head * tl.num_programs(0) + tl.program_id(0)
    store_state(LOG, MEAN, None, at, log, mean, mass, slots, values, S, E)


@jit
def load_state(LOG, MEAN, EXTRA, at, some, slots, values, S: tl.constexpr, E: tl.constexpr):
    """(log, mean, extra) number ``at``, or nothing unless ``some``."""
    inside = slots < tl.where(some, S, 0)
    block = inside[:, None] & (values < E)[None, :]
    log = tl.load(LOG + at * S + slots, mask=inside, other=float("-inf"))
    mean = tl.load(MEAN + (at * S + slots)[:, None] * E + values[None, :], mask=block, other=0.0)
    extra = tl.zeros_like(log)
    if EXTRA is not None:
        extra = tl.load(EXTRA + at * S + slots, mask=inside, other=0.0)
    return log, mean, extra


@jit
def store_state(
    LOG,
    MEAN,
    EXTRA,
    at,
    log,
    mean,
    extra,
    slots,
    values,
    S: tl.constexpr,
    E: tl.constexpr,
):
    """The counterpart of :func:`load_state`, in the dtype of MEAN."""
    inside = slots < S
    block = inside[:, None] & (values < E)[None, :]
    tl.store(LOG + at * S + slots, log, mask=inside)
    pointers = MEAN + (at * S + slots)[:, None] * E + values[None, :]
    tl.store(pointers, mean.to(MEAN.dtype.element_ty), mask=block)
    if EXTRA is not None:
        tl.store(EXTRA + at * S + slots, extra, mask=inside)


@jit
def scan_states_kernel(
    LOG,
    MEAN,
    EXTRA,
    LOGS,
    MEANS,
    EXTRAS,
    count,
    S: tl.constexpr,
    E: tl.constexpr,
    BS: tl.constexpr,
    BE: tl.constexpr,
    BACKWARD: tl.constexpr,
):
    """LOGS[0, head, n] … = the merge of the states up to n, LOGS[1, head, n] … of those from n on.

    The other way round if BACKWARD. Causal calls have the first direction only.
    """
    head, heads = tl.program_id(0).to(tl.int64), tl.num_programs(0)
    slots, values = tl.program_id(1) * BS + tl.arange(0, BS), tl.arange(0, BE)
    direction = tl.program_id(2)
    sign = 2 * direction - 1 if BACKWARD else 1 - 2 * direction
    at = head * count + tl.where(sign < 0, count - 1, 0)
    shift = direction * heads * count
    peak = tl.full([BS], FLOOR, tl.float32)
    mass = tl.zeros([BS], tl.float32)
    total = tl.zeros([BS, BE], tl.float32)
    extra = tl.zeros([BS], tl.float32)
    for step in range(0, count, 4):  # four states are on their way at a time
        left = count - step
        log_0, mean_0, extra_0 = load_state(LOG, MEAN, EXTRA, at, left > 0, slots, values, S, E)
        log_1, mean_1, extra_1 = load_state(
            LOG, MEAN, EXTRA, at + sign, left > 1, slots, values, S, E
        )
        log_2, mean_2, extra_2 = load_state(
            LOG, MEAN, EXTRA, at + 2 * sign, left > 2, slots, values, S, E
        )
        log_3, mean_3, extra_3 = load_state(
            LOG, MEAN, EXTRA, at + 3 * sign, left > 3, slots, values, S, E
        )
        to = shift + at
        peak, mass, total, extra = add_state(peak, mass, total, extra, log_0, mean_0, extra_0)
        store_sums(LOGS, MEANS, EXTRAS, to, peak, mass, total, extra, slots, values, S, E)
        if left > 1:
            peak, mass, total, extra = add_state(peak, mass, total, extra, log_1, mean_1, extra_1)
            to += sign
            store_sums(LOGS, MEANS, EXTRAS, to, peak, mass, total, extra, slots, values, S, E)
        if left > 2:
            peak, mass, total, extra = add_state(peak, mass, total, extra, log_2, mean_2, extra_2)
            to += sign
            store_sums(LOGS, MEANS, EXTRAS, to, peak, mass, total, extra, slots, values, S, E)
        if left > 3:
            peak, mass, total, extra = add_state(peak, mass, total, extra, log_3, mean_3, extra_3)
            to += sign
            store_sums(LOGS, MEANS, EXTRAS, to, peak, mass, total, extra, slots, values, S, E)
        at += 4 * sign


@jit
def add_state(peak, mass, total, extra, log, mean, more):
    """Sums relative to 2^peak with one more state; FLOOR is finite, so that no NaN arises."""
    top = tl.maximum(peak, log)
    old, new = tl.exp2(peak - top), tl.exp2(log - top)
    mass = mass * old + new
    total = total * old[:, None] + mean.to(tl.float32) * new[:, None]
    extra = extra * old + more * new
    return top, mass, total, extra


@jit
def store_sums(
    LOG,
    MEAN,
    EXTRA,
    at,
    peak,
    mass,
    total,
    extra,
    slots,
    values,
    S: tl.constexpr,
    E: tl.constexpr,
):
    """Write sums as a state."""
    empty = mass == 0.0
    log = tl.where(empty, float("-inf"), peak + tl.log2(tl.where(empty, 1.0, mass)))
    shrink = 1.0 / tl.where(empty, 1.0, mass)
    store_state(
        LOG, MEAN, EXTRA, at, log, total * shrink[:, None], extra * shrink, slots, values, S, E
    )


@jit
def load_pair(
    LOGS,
    MEANS,
    EXTRAS,
    head,
    heads,
    count,
    first,
    second,
    slots,
    values,
    S: tl.constexpr,
    E: tl.constexpr,
    BOTH: tl.constexpr,
):
    """State ``first`` of the first direction, merged with ``second`` of the other one if BOTH.

    Nothing where a number is outside of 0 … count − 1.
    """
    some = (first >= 0) & (first < count)
    log, mean, extra = load_state(
        LOGS, MEANS, EXTRAS, head * count + first, some, slots, values, S, E
    )
    if BOTH:
        some = (second >= 0) & (second < count)
        at = (heads + head) * count + second
        log_2, mean_2, extra_2 = load_state(LOGS, MEANS, EXTRAS, at, some, slots, values, S, E)
        top = tl.maximum(log, log_2)
        top = tl.where(top == float("-inf"), 0.0, top)
        one, other = tl.exp2(log - top), tl.exp2(log_2 - top)
        mass = one + other
        empty = mass == 0.0
        shrink = 1.0 / tl.where(empty, 1.0, mass)
        one, other = one * shrink, other * shrink
        merged = mean.to(tl.float32) * one[:, None] + mean_2.to(tl.float32) * other[:, None]
        mean = merged.to(MEANS.dtype.element_ty)
        extra = extra * one + extra_2 * other
        log = tl.where(empty, float("-inf"), top + tl.log2(tl.where(empty, 1.0, mass)))
    return log, mean, extra


@jit
def edges(number, block, overlap, step, origin):
    """(segments before the window of a block, the first one after it)."""
    first = number * block - overlap
    before = tl.where(first > 0, (first - origin) // step, 0)
    return before, ((number + 1) * block + overlap - origin) // step
