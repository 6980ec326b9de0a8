# type: ignore
"""Kernels over keys: partial states, their merge, and the gradients to keys and values.

    L_l = log Σ_j exp(β k_jl),   M_l = Σ_j exp(β k_jl − L_l) v_j

Each program walks ``span`` keys of one head with a running peak per feature, so nothing overflows
whatever the keys are. Several programs per head fill the chip when there are few heads; their
parts merge exactly. The backward pass recomputes exp(β k − peak) and needs only the gradients of
the state: with g_l = dL_l − dM_l·M_l and B_jl = exp(β k_jl − L_l),

    dv_j = Σ_l B_jl dM_l,      d(β k_jl) = B_jl (v_j·dM_l + g_l).
"""

from __future__ import annotations

import triton.language as tl

from lln.ops.common.kernels.features import (
    FLOOR,
    LN2,
    LOG2E,
    as_float,
    as_float_transposed,
    dot,
    dot_add,
    identity,
    jit,
    load_tile,
    locate,
    normalized,
    of_head,
    row_of,
    store_tile,
)


@jit
def summarize_kernel(
    K,
    V,
    BETA,
    MASK,
    PARTS,
    PLAN,
    CU,
    strides,
    heads,
    keys,
    span,
    D: tl.constexpr,
    E: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    ROWS: tl.constexpr,
    FULL: tl.constexpr,
    THROUGH: tl.constexpr,
):
    """PARTS[head, part] = (sum, peak, mass) of keys part·span … (part + 1)·span."""
    k_strides, v_strides, beta_strides, mask_batch = strides
    k_row = k_strides[2]
    v_row = row_of(v_strides, k_row)
    b, h, part, first, keys, index = locate(PLAN, CU, heads, keys)
    K += of_head(k_strides, b, h) + first * k_row
    V += of_head(v_strides, b, h) + first * v_row
    if MASK is not None:
        MASK += b * mask_batch + first
    scale = tl.load(BETA + of_head(beta_strides, b, h)).to(tl.float32) * LOG2E
    rows, features = tl.arange(0, ROWS), tl.arange(0, BD)
    values = tl.program_id(2) * BE + tl.arange(0, BE)

    eye = identity(BD, K.dtype.element_ty, THROUGH)

    peak = tl.full([BD], FLOOR, tl.float32)
    mass = tl.zeros([BD], tl.float32)
    total = tl.zeros([BD, BE], tl.float32)
    end = tl.minimum((part + 1) * span, keys)
    for start in range(part * span, end, ROWS):
        k = load_tile(K, k_row, start, end, rows, features, D, FULL)
        v = load_tile(V, v_row, start, end, rows, values, E, FULL)
        x = as_float_transposed(k, eye) * scale  # [BD, ROWS]: features attend to keys
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

    base = PARTS + index * (D * E + 2 * D)
    inside = features < D
    tl.store(
        base + features[:, None] * E + values[None, :],
        total,
        mask=inside[:, None] & (values < E)[None, :],
    )
    if tl.program_id(2) == 0:
        tl.store(base + D * E + features, peak, mask=inside)
        tl.store(base + D * E + D + features, mass, mask=inside)


@jit
def parts_of_head(PLAN, b, h, head, items, count):
    """(index of the first part, number of parts) of head h of sample b; see :func:`locate`."""
    offset = head * count
    if PLAN is not None:
        first = tl.load(PLAN + items + b)
        offset = h * items + first
        count = tl.load(PLAN + items + b + 1) - first
    return offset, count


@jit
def merge_kernel(
    PARTS,
    LOG_MASS,
    MEAN,
    NORM,
    PLAN,
    items,
    heads,
    count,
    D: tl.constexpr,
    E: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    MANY: tl.constexpr,
    NATURAL: tl.constexpr,
):
    """LOG_MASS, MEAN and NORM of BD features of one head from its parts, MANY parts at a time."""
    head = tl.program_id(0).to(tl.int64)
    offset, count = parts_of_head(PLAN, head // heads, head % heads, head, items, count)
    features = tl.program_id(1) * BD + tl.arange(0, BD)
    values = tl.program_id(2) * BE + tl.arange(0, BE)
    inside = features < D
    block = inside[:, None] & (values < E)[None, :]
    peak = tl.full([BD], FLOOR, tl.float32)
    mass = tl.zeros([BD], tl.float32)
    total = tl.zeros([BD, BE], tl.float32)
    for start in range(0, count, MANY):
        part = start + tl.arange(0, MANY)
        base = PARTS + (offset + part) * (D * E + 2 * D)
        some = (part < count)[:, None] & inside[None, :]
        vectors = base[:, None] + D * E + features[None, :]
        peaks = tl.load(vectors, mask=some, other=FLOOR)
        masses = tl.load(vectors + D, mask=some, other=0.0)
        matrices = base[:, None, None] + features[None, :, None] * E + values[None, None, :]
        sums = tl.load(matrices, mask=some[:, :, None] & (values < E)[None, None, :], other=0.0)
        top = tl.maximum(peak, tl.max(peaks, axis=0))
        old, new = tl.exp2(peak - top), tl.exp2(peaks - top[None, :])
        mass = mass * old + tl.sum(masses * new, axis=0)
        total = total * old[:, None] + tl.sum(sums * new[:, :, None], axis=0)
        peak = top
    log_mass, mean = normalized(peak, mass, total)
    tl.store(MEAN + head * D * E + features[:, None] * E + values[None, :], mean, mask=block)
    if tl.program_id(2) == 0:
        if NATURAL:
            log_mass *= LN2
        tl.store(LOG_MASS + head * D + features, log_mass, mask=inside)
        tl.store(NORM + head * 2 * D + features, peak, mask=inside)
        tl.store(NORM + head * 2 * D + D + features, mass, mask=inside)


@jit
def merge_gradients_kernel(
    PARTS,
    OUT,
    PLAN,
    items,
    heads,
    group,
    count,
    size,
    BLOCK: tl.constexpr,
    MANY: tl.constexpr,
):
    """OUT[key head] = Σ of the parts, ``size`` numbers each, of its ``group`` query heads."""
    head = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros([BLOCK], tl.float32)
    for member in range(group):
        query, h = head * group + member, head % heads * group + member
        offset, parts = parts_of_head(PLAN, head // heads, h, query, items, count)
        for start in range(0, parts, MANY):
            part = start + tl.arange(0, MANY)
            pointers = PARTS + (offset + part)[:, None] * size + column[None, :]
            some = (part < parts)[:, None] & (column < size)[None, :]
            total += tl.sum(tl.load(pointers, mask=some, other=0.0), axis=0)
    tl.store(OUT + head * size + column, total, mask=column < size)


@jit
def load_gradients(
    PARTS,
    first,
    count,
    features,
    values,
    D: tl.constexpr,
    E: tl.constexpr,
):
    """Sum of ``count`` gradient parts: dM of a block of features and values, g of the features."""
    dmean = tl.zeros([features.shape[0], values.shape[0]], tl.float32)
    g = tl.zeros(features.shape, tl.float32)
    inside = features < D
    block = inside[:, None] & (values < E)[None, :]
    for part in range(count):
        base = PARTS + (first + part) * (D * E + D)
        dmean += tl.load(base + features[:, None] * E + values[None, :], mask=block, other=0.0)
        g += tl.load(base + D * E + features, mask=inside, other=0.0)
    return dmean, g


@jit
def summarize_backward_kernel(
    K,
    V,
    BETA,
    MASK,
    NORM,
    PARTS,
    DK,
    DV,
    DBETA,
    PLAN,
    CU,
    strides,
    heads,
    keys,
    span,
    count,
    D: tl.constexpr,
    E: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    ROWS: tl.constexpr,
    FULL: tl.constexpr,
    THROUGH: tl.constexpr,
):
    """DK, DV of ``span`` keys; DBETA[head, part] if asked for. B is scaled by its largest entry.

    exp(β k − peak) ≤ 1 keeps its bits in float16 whatever the number of keys; the factor
    exp(peak − L) = 1 / mass goes into dM and g, where it is applied once per program.
    """
    k_strides, v_strides, dk_strides, dv_strides, beta_strides, mask_batch = strides
    k_row = k_strides[2]
    v_row, dk_row = row_of(v_strides, k_row), row_of(dk_strides, k_row)
    dv_row = row_of(dv_strides, k_row)
    b, h, part, first, keys, index = locate(PLAN, CU, heads, keys)
    head = b * heads + h
    K += of_head(k_strides, b, h) + first * k_row
    V += of_head(v_strides, b, h) + first * v_row
    DK += of_head(dk_strides, b, h) + first * dk_row
    DV += of_head(dv_strides, b, h) + first * dv_row
    if MASK is not None:
        MASK += b * mask_batch + first
    beta = tl.load(BETA + of_head(beta_strides, b, h)).to(tl.float32)
    rows, features = tl.arange(0, ROWS), tl.arange(0, BD)
    inside = features < D
    dtype: tl.constexpr = V.dtype.element_ty

    eye = identity(BD, K.dtype.element_ty, THROUGH)
    NORM += head * 2 * D
    peak = tl.load(NORM + features, mask=inside, other=0.0)
    mass = tl.load(NORM + D + features, mask=inside, other=0.0)
    shrink = tl.where(mass == 0.0, 0.0, 1.0 / tl.where(mass == 0.0, 1.0, mass))
    values = tl.arange(0, BE)
    dmean, g = load_gradients(PARTS, head * count, count, features, values, D, E)
    g *= shrink
    weight = (dmean * shrink[:, None]).to(dtype)

    slope = tl.zeros([ROWS, BD], tl.float32)
    end = tl.minimum((part + 1) * span, keys)
    for start in range(part * span, end, ROWS):
        k = load_tile(K, k_row, start, end, rows, features, D, FULL)
        x = as_float(k, eye) * (beta * LOG2E)
        if MASK is not None or not FULL:
            keep = rows < end - start
            if MASK is not None:
                keep = tl.load(MASK + start + rows, mask=keep, other=0) != 0
            x = tl.where(keep[:, None], x, float("-inf"))
        p = tl.exp2(x - peak[None, :])
        ph = p.to(dtype)
        gradient = tl.zeros([ROWS, BD], tl.float32) + g[None, :]
        if E <= BE:
            v = load_tile(V, v_row, start, end, rows, values, E, FULL)
            if MASK is not None:
                v = tl.where(keep[:, None], v, 0.0)
            store_tile(DV, dv_row, start, end, dot(ph, weight), rows, values, E, FULL)
            gradient = dot_add(v, tl.trans(weight), gradient)
        else:
            for column in range(0, E, BE):
                # with several value blocks the gradient parts are already merged: count == 1
                block = column + values
                dmean, _ = load_gradients(PARTS, head, 1, features, block, D, E)
                weight = (dmean * shrink[:, None]).to(dtype)
                v = load_tile(V, v_row, start, end, rows, block, E, FULL)
                if MASK is not None:
                    v = tl.where(keep[:, None], v, 0.0)
                store_tile(DV, dv_row, start, end, dot(ph, weight), rows, block, E, FULL)
                gradient = dot_add(v, tl.trans(weight), gradient)
        gradient *= p
        if DBETA is not None:
            clean = as_float(k, eye)
            if MASK is not None:
                clean = tl.where(keep[:, None], clean, 0.0)
            slope += gradient * clean
        store_tile(DK, dk_row, start, end, gradient * beta, rows, features, D, FULL)
    if DBETA is not None:
        tl.store(DBETA + index, tl.sum(slope))
