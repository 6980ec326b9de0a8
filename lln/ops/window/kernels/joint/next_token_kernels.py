# type: ignore
"""One more token of every seat: its key joins the window, one leaves it, and its queries attend.

Positions are those of each seat; the memory is laid out as in :mod:`lln.hf.decode.memory`.
"""

from __future__ import annotations

import triton.language as tl

from lln.ops.common.kernels.features import FLOOR, LN2, LOG2E, jit


@jit
def _joined(log_mass, added):
    """Weights of two states in their merger, feature by feature, and its logarithm; −inf is none.

    Natural logarithms: a state to which nothing is added keeps its bits.
    """
    top = tl.maximum(tl.maximum(log_mass, added), FLOOR)
    old, new = tl.exp2((log_mass - top) * LOG2E), tl.exp2((added - top) * LOG2E)
    mass = old + new
    empty = mass == 0.0
    mass = tl.where(empty, 1.0, mass)
    return old / mass, new / mass, tl.where(empty, float("-inf"), top + tl.log2(mass) * LN2)


@jit
def move_kernel(
    K,
    V,
    K_FAR,
    POSITION,
    BETA,
    NEAR_K,
    NEAR_V,
    NEAR_FEATURES,
    SINK_K,
    SINK_V,
    LOG_MASS,
    MEAN,
    PENDING_LOG_MASS,
    PENDING_MEAN,
    k_batch,
    k_head,
    v_batch,
    v_head,
    far_batch,
    far_head,
    heads,
    block,
    overlap,
    sinks,
    D: tl.constexpr,
    E: tl.constexpr,
    S: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    BS: tl.constexpr,
    OVERLAP: tl.constexpr,
):
    """Write the token of one key head, and fold the key that leaves with this block.

    The first token of a block merges what was folded in the one before into the state.
    """
    head = tl.program_id(0).to(tl.int64)
    b, h = head // heads, head % heads
    position = tl.load(POSITION + b)
    width = block + overlap
    place = position % width
    begins = position % block == 0
    leaving = position - overlap
    spot = (leaving + width) % width
    coordinates, slots = tl.arange(0, BD), tl.arange(0, BS)
    real, inside = coordinates < D, slots < S
    k = tl.load(K + b * k_batch + h * k_head + coordinates, mask=real, other=0.0)
    near_k = NEAR_K + (head * width + place) * D + coordinates
    tl.store(near_k, k.to(NEAR_K.dtype.element_ty), mask=real)
    if SINK_K is not None:  # noqa: SIM102, known to the compiler
        if position < sinks:
            sink_k = SINK_K + (head * sinks + position) * D + coordinates
            tl.store(sink_k, k.to(SINK_K.dtype.element_ty), mask=real)
    feature = tl.load(K_FAR + b * far_batch + h * far_head + slots, mask=inside, other=0.0)
    if NEAR_FEATURES is not None:
        own = NEAR_FEATURES + (head * width + place) * S + slots
        tl.store(own, feature.to(NEAR_FEATURES.dtype.element_ty), mask=inside)
    if OVERLAP:
        if NEAR_FEATURES is None:  # S = D: features are keys
            leaver = NEAR_K + (head * width + spot) * D + slots
        else:
            leaver = NEAR_FEATURES + (head * width + spot) * S + slots
        feature = tl.load(leaver, mask=inside, other=0.0)
    x = tl.where(inside, feature.to(tl.float32) * tl.load(BETA + h), float("-inf"))
    x = tl.where(leaving >= sinks, x, float("-inf"))
    state, waiting = LOG_MASS + head * S + slots, PENDING_LOG_MASS + head * S + slots
    log_mass = tl.load(state, mask=inside, other=float("-inf"))
    pending = tl.load(waiting, mask=inside, other=float("-inf"))
    tl.debug_barrier()  # threads that share an element must all have read it before one writes
    kept, merged, after = _joined(log_mass, pending)
    stays, added, folded = _joined(tl.where(begins, float("-inf"), pending), x)
    tl.store(waiting, folded, mask=inside)
    tl.store(state, tl.where(begins, after, log_mass), mask=inside)
    for start in tl.static_range(0, E, BE):
        values = start + tl.arange(0, BE)
        wanted = values < E
        v = tl.load(V + b * v_batch + h * v_head + values, mask=wanted, other=0.0)
        near_v = NEAR_V + (head * width + place) * E + values
        tl.store(near_v, v.to(NEAR_V.dtype.element_ty), mask=wanted)
        if SINK_V is not None:  # noqa: SIM102
            if position < sinks:
                sink_v = SINK_V + (head * sinks + position) * E + values
                tl.store(sink_v, v.to(SINK_V.dtype.element_ty), mask=wanted)
        if OVERLAP:
            v = tl.load(NEAR_V + (head * width + spot) * E + values, mask=wanted, other=0.0)
        tile = inside[:, None] & wanted[None, :]
        matrix = head * S * E + slots[:, None] * E + values[None, :]
        pending_mean = tl.load(PENDING_MEAN + matrix, mask=tile, other=0.0)
        tl.debug_barrier()
        if begins:
            mean = tl.load(MEAN + matrix, mask=tile, other=0.0)
            tl.debug_barrier()
            mean = mean * kept[:, None] + pending_mean * merged[:, None]
            tl.store(MEAN + matrix, mean, mask=tile)
        pending_mean = pending_mean * stays[:, None] + added[:, None] * v.to(tl.float32)[None, :]
        tl.store(PENDING_MEAN + matrix, pending_mean, mask=tile)


@jit
def _seen(
    q,
    KEYS,
    VALUES,
    rows,
    seen,
    coordinates,
    values,
    peak,
    mass,
    total,
    D: tl.constexpr,
    E: tl.constexpr,
):
    """Softmax so far, as (peak, mass, total), after some more keys."""
    here = seen[:, None] & (coordinates < D)[None, :]
    keys = tl.load(KEYS + rows[:, None] * D + coordinates[None, :], mask=here, other=0.0)
    scores = tl.sum(keys.to(tl.float32) * q[None, :], axis=1)
    scores = tl.where(seen, scores, float("-inf"))
    top = tl.maximum(peak, tl.max(scores, axis=0))
    fade, weights = tl.exp2(peak - top), tl.exp2(scores - top)
    here = seen[:, None] & (values < E)[None, :]
    v = tl.load(VALUES + rows[:, None] * E + values[None, :], mask=here, other=0.0)
    total = total * fade + tl.sum(weights[:, None] * v.to(tl.float32), axis=0)
    return top, mass * fade + tl.sum(weights, axis=0), total


@jit
def attend_kernel(
    Q,
    Q_FAR,
    POSITION,
    ALPHA,
    GAMMA,
    NEAR_K,
    NEAR_V,
    SINK_K,
    SINK_V,
    LOG_MASS,
    MEAN,
    OUT,
    q_batch,
    q_head,
    far_batch,
    far_head,
    heads,
    group,
    block,
    overlap,
    sinks,
    scale,
    D: tl.constexpr,
    E: tl.constexpr,
    S: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    BS: tl.constexpr,
    ROWS: tl.constexpr,
    SINKS: tl.constexpr,
):
    """One query over window, sinks and state, after :func:`move_kernel`, under one normaliser."""
    query = tl.program_id(0).to(tl.int64)
    b, h = query // heads, query % heads
    head = b * (heads // group) + h // group
    position = tl.load(POSITION + b)
    width = block + overlap
    first = position - position % block - overlap
    coordinates, values, slots = tl.arange(0, BD), tl.arange(0, BE), tl.arange(0, BS)
    q = tl.load(Q + b * q_batch + h * q_head + coordinates, mask=coordinates < D, other=0.0)
    q = q.to(tl.float32) * (scale * LOG2E)
    peak, mass = tl.full([], FLOOR, tl.float32), tl.full([], 0.0, tl.float32)
    total = tl.zeros([BE], tl.float32)
    near_k, near_v = NEAR_K + head * width * D, NEAR_V + head * width * E
    for start in range(0, width, ROWS):
        rows = start + tl.arange(0, ROWS)
        token = position - (position + width - rows) % width
        seen = (rows < width) & (token >= 0) & (token >= first)
        peak, mass, total = _seen(
            q, near_k, near_v, rows, seen, coordinates, values, peak, mass, total, D, E
        )
    if SINKS > 0:
        rows = tl.arange(0, SINKS)
        seen = (rows < sinks) & (rows < first)
        sink_k, sink_v = SINK_K + head * sinks * D, SINK_V + head * sinks * E
        peak, mass, total = _seen(
            q, sink_k, sink_v, rows, seen, coordinates, values, peak, mass, total, D, E
        )
    near = total / mass
    if first > sinks:
        inside = slots < S
        log_mass = tl.load(LOG_MASS + head * S + slots, mask=inside, other=float("-inf"))
        x = tl.load(Q_FAR + b * far_batch + h * far_head + slots, mask=inside, other=0.0)
        x = (x.to(tl.float32) * tl.load(ALPHA + h) + log_mass) * LOG2E
        top = tl.maximum(tl.max(x, axis=0), FLOOR)
        weights = tl.exp2(x - top)
        far_mass = tl.sum(weights, axis=0)
        tile = inside[:, None] & (values < E)[None, :]
        matrix = head * S * E + slots[:, None] * E + values[None, :]
        mean = tl.load(MEAN + matrix, mask=tile, other=0.0)
        far = tl.sum(weights[:, None] * mean, axis=0) / tl.where(far_mass == 0.0, 1.0, far_mass)
        gap = top + tl.log2(far_mass) + tl.load(GAMMA + h) * LOG2E - peak - tl.log2(mass)
        share = 1.0 / (1.0 + tl.exp2(gap))
        near = share * near + (1.0 - share) * far
    out = OUT + query * E + values
    tl.store(out, near.to(OUT.dtype.element_ty), mask=values < E)
