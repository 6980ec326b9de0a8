# type: ignore
"""Kernels over queries: reading a state, and the gradients to queries and to the state.

    A_il = softmax_l(α q_il + L_l),   out_i = Σ_l A_il M_l

The forward pass keeps ℓ_i = log Σ_l exp(α q_il + L_l), so that the backward pass needs no maximum
and no sum to rebuild A. For float32 (PRECISE) it is kept as the maximum and the rest: one number
would round the weights by 2⁻²⁴ ℓ. With G_il = dO_i·M_l and δ_i = Σ_l A_il G_il,

    dq_il = α A_il (G_il − δ_i),   dM_l = Σ_i A_il dO_i,   dL_l = dM_l·M_l − Σ_i A_il δ_i.

The parts of the state gradient hold dM_l and g_l = −Σ_i A_il δ_i, which is what the keys need.
"""

from __future__ import annotations

import triton.language as tl

from lln.ops.common.kernels.features import (
    FLOOR,
    LOG2E,
    as_float,
    dot,
    dot_add,
    identity,
    jit,
    load_parts,
    load_tile,
    locate,
    normalized,
    of_head,
    row_of,
    store_tile,
)


@jit
def load_mean(MEAN, head, features, values, D: tl.constexpr, E: tl.constexpr):
    """Mean of a block of features and values, 0 outside."""
    block = (features < D)[:, None] & (values < E)[None, :]
    pointers = MEAN + head * D * E + features[:, None] * E + values[None, :]
    return tl.load(pointers, mask=block, other=0.0)


@jit
def load_log_mass(LOG_MASS, head, features, D: tl.constexpr, NATURAL: tl.constexpr):
    """log2 mass of the features, −inf outside; states that users hold are natural logarithms."""
    log_mass = tl.load(LOG_MASS + head * D + features, mask=features < D, other=float("-inf"))
    if NATURAL:
        log_mass *= LOG2E
    return log_mass


@jit
def take_state(
    PARTS,
    LOG_MASS,
    MEAN,
    NORM,
    kv_head,
    count,
    first_reader,
    features,
    values,
    D: tl.constexpr,
    E: tl.constexpr,
    NATURAL: tl.constexpr,
    SAVE: tl.constexpr,
):
    """log2 mass and mean of a key head: merged ones are loaded, ``count`` parts are merged.

    With SAVE the first reader of a key head stores what it has merged.
    """
    if PARTS is None:
        log_mass = load_log_mass(LOG_MASS, kv_head, features, D, NATURAL)
        mean = load_mean(MEAN, kv_head, features, values, D, E)
    else:
        first = kv_head * count
        peak, mass, total = load_parts(PARTS, first, count, features, values, D, E)
        log_mass, mean = normalized(peak, mass, total)
        if SAVE and first_reader:
            inside = features < D
            base = kv_head * D + features
            block = inside[:, None] & (values < E)[None, :]
            tl.store(MEAN + base[:, None] * E + values[None, :], mean, mask=block)
            tl.store(LOG_MASS + base, log_mass, mask=inside)
            tl.store(NORM + base + kv_head * D, peak, mask=inside)
            tl.store(NORM + base + kv_head * D + D, mass, mask=inside)
    return log_mass, mean


@jit
def store_lse(LSE, queries, start, end, rows, top, weight, PRECISE: tl.constexpr):
    """Keep log2 of the sum: top + log2(weight), or both terms. A row that sees nothing keeps +inf,
    which makes its weights exactly 0 in the backward pass."""
    rest = tl.where(weight == 0.0, float("inf"), tl.log2(weight))
    inside = rows < end - start
    if PRECISE:
        tl.store(LSE + start + rows, top, mask=inside)
        tl.store(LSE + queries + start + rows, rest, mask=inside)
    else:
        tl.store(LSE + start + rows, top + rest, mask=inside)


@jit
def minus_lse(x, LSE, queries, start, end, rows, extra, PRECISE: tl.constexpr):
    """x [rows, ·] minus what :func:`store_lse` kept and ``extra``; −inf beyond the end."""
    inside = rows < end - start
    x -= (tl.load(LSE + start + rows, mask=inside, other=float("inf")) + extra)[:, None]
    if PRECISE:
        x -= tl.load(LSE + queries + start + rows, mask=inside, other=0.0)[:, None]
    return x


@jit
def read_kernel(
    Q,
    OUT,
    LSE,
    ALPHA,
    PARTS,
    LOG_MASS,
    MEAN,
    NORM,
    PLAN,
    CU,
    strides,
    heads,
    group,
    queries,
    span,
    count,
    D: tl.constexpr,
    E: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    ROWS: tl.constexpr,
    FULL: tl.constexpr,
    NATURAL: tl.constexpr,
    PRECISE: tl.constexpr,
    SAVE: tl.constexpr,
    THROUGH: tl.constexpr,
):
    """OUT of ``span`` queries of one head.

    The state comes merged (PARTS is None: LOG_MASS, MEAN) or as ``count`` parts, which every
    program merges for itself; then the first program of each key head stores the merged state.
    SAVE asks for LSE, which the backward pass needs.
    """
    q_strides, out_strides, lse_strides, alpha_strides = strides
    q_row = q_strides[2]
    out_row = row_of(out_strides, q_row)
    total = queries
    b, h, part, first, queries, _ = locate(PLAN, CU, heads, queries)
    kv_head = (b * heads + h) // group
    Q += of_head(q_strides, b, h) + first * q_row
    OUT += of_head(out_strides, b, h) + first * out_row
    scale = tl.load(ALPHA + of_head(alpha_strides, b, h)).to(tl.float32) * LOG2E
    rows, features = tl.arange(0, ROWS), tl.arange(0, BD)
    values = tl.program_id(2) * BE + tl.arange(0, BE)
    if SAVE:
        LSE += of_head(lse_strides, b, h) + first
    log_mass, mean = take_state(
        PARTS, LOG_MASS, MEAN, NORM, kv_head, count, part == 0 and h % group == 0,
        features, values, D, E, NATURAL, SAVE,
    )  # fmt: skip
    mean = mean.to(Q.dtype.element_ty)
    eye = identity(BD, Q.dtype.element_ty, THROUGH)

    end = tl.minimum((part + 1) * span, queries)
    for start in range(part * span, end, ROWS):
        q = load_tile(Q, q_row, start, end, rows, features, D, FULL)
        x = as_float(q, eye) * scale + log_mass[None, :]
        top = tl.maximum(tl.max(x, axis=1), FLOOR)
        p = tl.exp2(x - top[:, None])
        weight = tl.sum(p, axis=1)
        out = dot(p.to(mean.dtype), mean) * (1.0 / tl.where(weight == 0.0, 1.0, weight))[:, None]
        store_tile(OUT, out_row, start, end, out, rows, values, E, FULL)
        if SAVE and tl.program_id(2) == 0:
            store_lse(LSE, total, start, end, rows, top, weight, PRECISE)


@jit
def read_backward_kernel(
    Q,
    DOUT,
    LSE,
    ALPHA,
    MIX,
    LOG_MASS,
    MEAN,
    DQ,
    PARTS,
    DALPHA,
    PLAN,
    CU,
    strides,
    heads,
    group,
    queries,
    span,
    share,
    D: tl.constexpr,
    E: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    ROWS: tl.constexpr,
    FULL: tl.constexpr,
    NATURAL: tl.constexpr,
    PRECISE: tl.constexpr,
    THROUGH: tl.constexpr,
):
    """DQ of ``span`` queries and their part of (dM, g); DALPHA[head, part] if asked for.

    Without DQ only the parts: LLN+Diag writes dq elsewhere. All is weighed by ``share``, or by MIX
    per head.
    """
    q_strides, dout_strides, dq_strides, lse_strides, alpha_strides = strides
    q_row = q_strides[2]
    dout_row, dq_row = row_of(dout_strides, q_row), row_of(dq_strides, q_row)
    tokens = queries
    b, h, part, first, queries, index = locate(PLAN, CU, heads, queries)
    kv_head = (b * heads + h) // group
    Q += of_head(q_strides, b, h) + first * q_row
    DOUT += of_head(dout_strides, b, h) + first * dout_row
    if DQ is not None:
        DQ += of_head(dq_strides, b, h) + first * dq_row
    LSE += of_head(lse_strides, b, h) + first
    alpha = tl.load(ALPHA + of_head(alpha_strides, b, h)).to(tl.float32)
    if MIX is not None:
        share = tl.load(MIX + h).to(tl.float32)
    rows, features = tl.arange(0, ROWS), tl.arange(0, BD)
    mine = tl.program_id(2) * BE + tl.arange(0, BE)  # the value block whose dM this program sums
    log_mass = load_log_mass(LOG_MASS, kv_head, features, D, NATURAL)
    mean = load_mean(MEAN, kv_head, features, mine, D, E).to(Q.dtype.element_ty)
    eye = identity(BD, Q.dtype.element_ty, THROUGH)

    slope_q = alpha * share
    dmean = tl.zeros([BD, BE], tl.float32)
    weighted = tl.zeros([ROWS, BD], tl.float32)
    slope = tl.zeros([ROWS, BD], tl.float32)
    end = tl.minimum((part + 1) * span, queries)
    for start in range(part * span, end, ROWS):
        q = load_tile(Q, q_row, start, end, rows, features, D, FULL)
        dout = load_tile(DOUT, dout_row, start, end, rows, mine, E, FULL)
        x = as_float(q, eye) * (alpha * LOG2E) + log_mass[None, :]
        p = tl.exp2(minus_lse(x, LSE, tokens, start, end, rows, 0.0, PRECISE))
        if E <= BE:
            g = dot(dout, tl.trans(mean))
        else:
            g = tl.zeros([ROWS, BD], tl.float32)
            for block in range(0, E, BE):
                values = block + tl.arange(0, BE)
                other_mean = load_mean(MEAN, kv_head, features, values, D, E)
                other_dout = load_tile(DOUT, dout_row, start, end, rows, values, E, FULL)
                g = dot_add(other_dout, tl.trans(other_mean.to(mean.dtype)), g)
        delta = tl.sum(p * g, axis=1)
        weighted += p * delta[:, None]
        if DQ is not None:
            gradient = p * (g - delta[:, None])
            if DALPHA is not None:
                slope += gradient * as_float(q, eye)
            if tl.program_id(2) == 0:
                store_tile(DQ, dq_row, start, end, gradient * slope_q, rows, features, D, FULL)
        dmean = dot_add(tl.trans(p.to(dout.dtype)), dout, dmean)

    base = PARTS + index * (D * E + D)
    inside = features < D
    block = inside[:, None] & (mine < E)[None, :]
    tl.store(base + features[:, None] * E + mine[None, :], dmean * share, mask=block)
    if tl.program_id(2) == 0:
        tl.store(base + D * E + features, -share * tl.sum(weighted, axis=0), mask=inside)
        if DALPHA is not None:
            tl.store(DALPHA + index, tl.sum(slope) * share)
