# type: ignore
"""Kernels of near and far attention: the far keys as states, joined with what near keys gave.

The keys are cut into segments of ``step`` keys, such that every window begins and ends between two
of them. ``BEFORE[s]`` is the merged state of the segments up to s, ``AFTER[s]`` of those from s on,
each as (sums, peaks, masses). Block b of C queries reads the two at its window's edges:

    A_il = softmax_l(α q_il + L_bl),   far_i = Σ_l A_il M_bl,   f_i = log Σ_l exp(α q_il + L_bl),
    u_i = sigmoid(n_i − γ − f_i),      out_i = u_i near_i + (1 − u_i) far_i,

n_i the logarithm of the near keys' sum. Backwards, with e_i = dO_i·(near_i − far_i) u_i (1 − u_i),
G_il = (1 − u_i) dO_i·M_bl and c_i = Σ_l A_il G_il + e_i:

    dn_i = e_i,   dγ = −Σ_i e_i,   dq_il = α A_il (G_il − c_i),
    dM_bl = Σ_i A_il (1 − u_i) dO_i,   g_bl = −Σ_i A_il c_i

and a key that the blocks b see gets, with w_jlb = exp(β k_jl − L_bl) ≤ 1,

    dv_j = Σ_bl w_jlb dM_bl,   d(β k_jl) = Σ_b w_jlb (v_j·dM_bl + g_bl).

The sums over b are scans of (dM_b, g_b) with the exponents −L_b, as those of the states.
"""

from __future__ import annotations

import triton.language as tl

from lln.ops.triton.features import (
    FLOOR,
    LN2,
    LOG2E,
    as_float,
    dot,
    dot_add,
    identity,
    jit,
    load_tile,
    log_softmax,
    normalized,
    store_tile,
)
from lln.ops.triton.triangle.state_kernels import load_part


@jit
def merged_pair(
    LEFT,
    RIGHT,
    head,
    left,
    right,
    count,
    features,
    values,
    D: tl.constexpr,
    E: tl.constexpr,
    VECTORS: tl.constexpr,
):
    """(peak, mass, sum, extra) of LEFT[head, left] and RIGHT[head, right] together.

    Nothing where an index is outside of 0 … count − 1; RIGHT may be None.
    """
    size: tl.constexpr = D * E + VECTORS * D
    first = (head * count + tl.maximum(tl.minimum(left, count - 1), 0)) * size
    width = tl.where((left >= 0) & (left < count), D, 0)
    peak, mass, total, extra = load_part(LEFT + first, features, values, width, D, E, VECTORS)
    if RIGHT is not None:
        second = (head * count + tl.maximum(tl.minimum(right, count - 1), 0)) * size
        width = tl.where((right >= 0) & (right < count), D, 0)
        peak_2, mass_2, total_2, extra_2 = load_part(
            RIGHT + second, features, values, width, D, E, VECTORS
        )
        top = tl.maximum(peak, peak_2)
        old, new = tl.exp2(peak - top), tl.exp2(peak_2 - top)
        mass = mass * old + mass_2 * new
        total = total * old[:, None] + total_2 * new[:, None]
        extra = extra * old + extra_2 * new
        peak = top
    return peak, mass, total, extra


@jit
def near_weight(near_log, far_log, gamma):
    """u = sigmoid(n − γ − f): 1 where no key is far (f = +inf here), 0 where none is near."""
    gap = near_log - gamma - far_log * LN2
    share = 1.0 / (1.0 + tl.exp2(-gap * LOG2E))
    share = tl.where(near_log == float("-inf"), 0.0, share)
    return tl.where(far_log == float("inf"), tl.where(near_log == float("-inf"), 0.0, 1.0), share)


@jit
def join_kernel(
    Q,
    NEAR,
    NEAR_LOG,
    OUT,
    LSE,
    BEFORE,
    AFTER,
    ALPHA,
    GAMMA,
    q_batch,
    q_head,
    q_row,
    near_batch,
    near_head,
    near_row,
    log_batch,
    log_head,
    out_batch,
    out_head,
    out_row,
    alpha_batch,
    alpha_head,
    gamma_batch,
    gamma_head,
    heads,
    group,
    queries,
    count,
    block,
    overlap,
    step,
    D: tl.constexpr,
    E: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    ROWS: tl.constexpr,
    FULL: tl.constexpr,
    THROUGH: tl.constexpr,
):
    """OUT and LSE (base 2, +inf without a far key) of one block of queries."""
    b, h = tl.program_id(1) // heads, tl.program_id(1) % heads
    b, h = b.to(tl.int64), h.to(tl.int64)
    kv_head = (b * heads + h) // group
    here = tl.program_id(0)
    Q += b * q_batch + h * q_head
    NEAR += b * near_batch + h * near_head
    NEAR_LOG += b * log_batch + h * log_head
    OUT += b * out_batch + h * out_head
    LSE += (b * heads + h) * queries
    alpha = tl.load(ALPHA + b * alpha_batch + h * alpha_head).to(tl.float32) * LOG2E
    gamma = tl.load(GAMMA + b * gamma_batch + h * gamma_head).to(tl.float32)
    rows, features, values = tl.arange(0, ROWS), tl.arange(0, BD), tl.arange(0, BE)
    left = (here * block - overlap) // step - 1
    right = ((here + 1) * block + overlap) // step
    left = tl.where(here * block - overlap > 0, left, -1)
    peak, mass, total, _ = merged_pair(
        BEFORE, AFTER, kv_head, left, right, count, features, values, D, E, 2
    )
    log_mass, mean = normalized(peak, mass, total)
    log_mass = tl.where(features < D, log_mass, float("-inf"))
    mean = mean.to(Q.dtype.element_ty)
    some = tl.max(log_mass, axis=0) > float("-inf")
    eye = identity(BD, Q.dtype.element_ty, THROUGH)
    end = tl.minimum((here + 1) * block, queries)
    for start in range(here * block, end, ROWS):
        q = load_tile(Q, q_row, start, end, rows, features, D, BD, FULL)
        near = load_tile(NEAR, near_row, start, end, rows, values, E, BE, FULL)
        inside = rows < end - start
        near_log = tl.load(NEAR_LOG + start + rows, mask=inside, other=float("-inf"))
        x = as_float(q, eye) * alpha + log_mass[None, :]
        top = tl.max(x, axis=1)
        p = tl.exp2(x - tl.where(some, top, 0.0)[:, None])
        weight = tl.sum(p, axis=1)
        lse = tl.where(some, top + tl.log2(tl.where(some, weight, 1.0)), float("inf"))
        far = dot(p.to(mean.dtype), mean) / tl.where(some, weight, 1.0)[:, None]
        share = near_weight(near_log, lse, gamma)[:, None]
        out = share * near.to(tl.float32) + (1.0 - share) * far
        store_tile(OUT, out_row, start, end, out, rows, values, E, BE, FULL)
        tl.store(LSE + start + rows, lse, mask=inside)


@jit
def join_backward_kernel(
    DOUT,
    Q,
    NEAR,
    NEAR_LOG,
    LSE,
    BEFORE,
    AFTER,
    ALPHA,
    GAMMA,
    DQ,
    DNEAR,
    DNEAR_LOG,
    PARTS,
    DALPHA,
    DGAMMA,
    dout_batch,
    dout_head,
    dout_row,
    q_batch,
    q_head,
    q_row,
    near_batch,
    near_head,
    near_row,
    log_batch,
    log_head,
    dq_batch,
    dq_head,
    dq_row,
    dnear_batch,
    dnear_head,
    dnear_row,
    alpha_batch,
    alpha_head,
    gamma_batch,
    gamma_head,
    kv_heads,
    group,
    queries,
    count,
    block,
    overlap,
    step,
    D: tl.constexpr,
    E: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    ROWS: tl.constexpr,
    FULL: tl.constexpr,
    THROUGH: tl.constexpr,
):
    """Gradients of a block of queries of all heads that share a key head, and (dM, −L, 1, g)."""
    here, blocks = tl.program_id(0), tl.num_programs(0)
    kv_head = tl.program_id(1).to(tl.int64)
    b = kv_head // kv_heads
    rows, features, values = tl.arange(0, ROWS), tl.arange(0, BD), tl.arange(0, BE)
    left = (here * block - overlap) // step - 1
    right = ((here + 1) * block + overlap) // step
    left = tl.where(here * block - overlap > 0, left, -1)
    peak, mass, total, _ = merged_pair(
        BEFORE, AFTER, kv_head, left, right, count, features, values, D, E, 2
    )
    log_mass, mean = normalized(peak, mass, total)
    inside_d = features < D
    log_mass = tl.where(inside_d, log_mass, float("-inf"))
    mean = mean.to(Q.dtype.element_ty)
    eye = identity(BD, Q.dtype.element_ty, THROUGH)
    dmean = tl.zeros([BD, BE], tl.float32)
    level = tl.zeros([BD], tl.float32)
    end = tl.minimum((here + 1) * block, queries)
    for member in range(group):
        h = kv_head % kv_heads * group + member
        head = kv_head * group + member
        alpha = tl.load(ALPHA + b * alpha_batch + h * alpha_head).to(tl.float32)
        gamma = tl.load(GAMMA + b * gamma_batch + h * gamma_head).to(tl.float32)
        slope = tl.zeros([ROWS], tl.float32)
        shift = tl.zeros([ROWS], tl.float32)
        for start in range(here * block, end, ROWS):
            q = load_tile(
                Q + b * q_batch + h * q_head, q_row, start, end, rows, features, D, BD, FULL
            )
            near = load_tile(
                NEAR + b * near_batch + h * near_head,
                near_row, start, end, rows, values, E, BE, FULL,
            )  # fmt: skip
            dout = load_tile(
                DOUT + b * dout_batch + h * dout_head,
                dout_row, start, end, rows, values, E, BE, FULL,
            )  # fmt: skip
            inside = rows < end - start
            log_at = NEAR_LOG + b * log_batch + h * log_head + start + rows
            near_log = tl.load(log_at, mask=inside, other=float("-inf"))
            lse = tl.load(LSE + head * queries + start + rows, mask=inside, other=float("inf"))
            wide = as_float(q, eye)
            p = tl.exp2(wide * (alpha * LOG2E) + log_mass[None, :] - lse[:, None])
            far = dot(p.to(mean.dtype), mean)
            share = near_weight(near_log, lse, gamma)
            given = dout.to(tl.float32)
            gap = tl.sum(given * (near.to(tl.float32) - far), axis=1) * share * (1.0 - share)
            asked = given * (1.0 - share)[:, None]
            asked_half = asked.to(mean.dtype)
            g = dot(asked_half, tl.trans(mean))
            c = tl.sum(p * g, axis=1) + gap
            gradient = p * (g - c[:, None])
            level -= tl.sum(p * c[:, None], axis=0)
            dmean = dot_add(tl.trans(p.to(mean.dtype)), asked_half, dmean)
            slope += tl.sum(gradient * wide, axis=1)
            shift -= gap
            store_tile(
                DQ + b * dq_batch + h * dq_head,
                dq_row, start, end, gradient * alpha, rows, features, D, BD, FULL,
            )  # fmt: skip
            store_tile(
                DNEAR + b * dnear_batch + h * dnear_head,
                dnear_row, start, end, given * share[:, None], rows, values, E, BE, FULL,
            )  # fmt: skip
            tl.store(DNEAR_LOG + head * queries + start + rows, gap, mask=inside)
        tl.store(DALPHA + head * blocks + here, tl.sum(slope))
        tl.store(DGAMMA + head * blocks + here, tl.sum(shift))
    base = PARTS + (kv_head * blocks + here) * (D * E + 3 * D)
    block_mask = inside_d[:, None] & (values < E)[None, :]
    empty = log_mass == float("-inf")
    tl.store(base + features[:, None] * E + values[None, :], dmean, mask=block_mask)
    tl.store(base + D * E + features, tl.where(empty, FLOOR, -log_mass), mask=inside_d)
    tl.store(base + D * E + D + features, tl.where(empty, 0.0, 1.0), mask=inside_d)
    tl.store(base + D * E + 2 * D + features, level, mask=inside_d)


@jit
def far_keys_kernel(
    K,
    V,
    MASK,
    BETA,
    LATER,
    EARLIER,
    DK,
    DV,
    DBETA,
    k_batch,
    k_head,
    k_row,
    v_batch,
    v_head,
    v_row,
    dk_batch,
    dk_head,
    dk_row,
    dv_batch,
    dv_head,
    dv_row,
    mask_batch,
    beta_batch,
    beta_head,
    heads,
    keys,
    blocks,
    block,
    overlap,
    step,
    D: tl.constexpr,
    E: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    ROWS: tl.constexpr,
    FULL: tl.constexpr,
    HAS_MASK: tl.constexpr,
    NORMALIZE: tl.constexpr,
    THROUGH: tl.constexpr,
):
    """DK, DV and DBETA of one segment of keys, from LATER[b] of the first block that sees it."""
    here, segments = tl.program_id(0), tl.num_programs(0)
    head = tl.program_id(1).to(tl.int64)
    b, h = head // heads, head % heads
    K += b * k_batch + h * k_head
    V += b * v_batch + h * v_head
    DK += b * dk_batch + h * dk_head
    DV += b * dv_batch + h * dv_head
    if HAS_MASK:
        MASK += b * mask_batch
    beta = tl.load(BETA + b * beta_batch + h * beta_head).to(tl.float32)
    rows, features, values = tl.arange(0, ROWS), tl.arange(0, BD), tl.arange(0, BE)
    inside_d = features < D
    first = ((here + 1) * step + overlap + block - 1) // block
    last = tl.where(here * step >= overlap + block, (here * step - overlap) // block - 1, -1)
    peak, _, total, extra = merged_pair(
        LATER, EARLIER, head, first, last, blocks, features, values, D, E, 3
    )
    seen = peak > FLOOR
    peak = tl.where(seen, peak, 0.0)
    extra = tl.where(seen, extra, 0.0)
    weight = tl.where(seen[:, None], total, 0.0).to(V.dtype.element_ty)
    any_seen = tl.max(seen.to(tl.int32), axis=0) > 0
    eye = identity(BD, K.dtype.element_ty, THROUGH)
    slope = tl.zeros([ROWS], tl.float32)
    end = tl.minimum((here + 1) * step, keys)
    for start in range(here * step, end, ROWS):
        k = load_tile(K, k_row, start, end, rows, features, D, BD, FULL)
        v = load_tile(V, v_row, start, end, rows, values, E, BE, FULL)
        keep = rows < end - start
        if HAS_MASK:
            keep = tl.load(MASK + start + rows, mask=keep, other=0) != 0
            v = tl.where(keep[:, None], v, 0.0)
        wide = as_float(k, eye)
        if HAS_MASK:
            wide = tl.where(keep[:, None], wide, 0.0)
        x = wide * (beta * LOG2E)
        if NORMALIZE:
            x = log_softmax(x, inside_d, 1, D % BD != 0)
        chosen = keep[:, None] & seen[None, :]
        p = tl.exp2(tl.where(chosen, x + peak[None, :], float("-inf")))
        gradient = p * (dot(v, tl.trans(weight)) + extra[None, :])
        if NORMALIZE:
            gradient -= tl.where(chosen, tl.exp2(x), 0.0) * tl.sum(gradient, axis=1)[:, None]
        dv = dot(p.to(weight.dtype), weight)
        slope += tl.sum(gradient * wide, axis=1)
        store_tile(DV, dv_row, start, end, dv, rows, values, E, BE, FULL)
        store_tile(DK, dk_row, start, end, gradient * beta, rows, features, D, BD, FULL)
    tl.store(DBETA + head * segments + here, tl.where(any_seen, tl.sum(slope), 0.0))
