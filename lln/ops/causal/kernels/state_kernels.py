# type: ignore
"""The state that causal attention carries: from the parts of segments, by an exclusive scan."""

from __future__ import annotations

import triton.language as tl

from lln.ops.common.kernels.features import FLOOR, LOG2E, jit, load_parts


@jit
def load_state(
    LOG_MASS,
    MEAN,
    head,
    features,
    values,
    D: tl.constexpr,
    E: tl.constexpr,
):
    """(peak, mass, mean) of a state given by its natural log mass and mean; empty if None."""
    peak = tl.full(features.shape, FLOOR, tl.float32)
    mass = tl.zeros(features.shape, tl.float32)
    mean = tl.zeros([features.shape[0], values.shape[0]], tl.float32)
    if LOG_MASS is not None:
        inside = features < D
        block = inside[:, None] & (values < E)[None, :]
        log_mass = tl.load(LOG_MASS + head * D + features, mask=inside, other=float("-inf"))
        pointers = MEAN + (head * D + features)[:, None] * E + values[None, :]
        mean = tl.load(pointers, mask=block, other=0.0)
        empty = log_mass == float("-inf")
        peak = tl.where(empty, FLOOR, log_mass * LOG2E)
        mass = tl.where(empty, 0.0, 1.0)
    return peak, mass, mean


@jit
def scan_kernel(
    PARTS,
    MERGED,
    LOG_MASS,
    MEAN,
    count,
    D: tl.constexpr,
    E: tl.constexpr,
    BD: tl.constexpr,
    BE: tl.constexpr,
    VECTORS: tl.constexpr,
    REVERSE: tl.constexpr,
):
    """MERGED[head, part] = the merge of the parts up to it (from it on if REVERSE).

    A part is D·E sums, D peaks, D masses and, with VECTORS = 3, D more sums. The scan starts from
    the state LOG_MASS (natural), MEAN if given.
    """
    head = tl.program_id(0).to(tl.int64)
    features = tl.program_id(1) * BD + tl.arange(0, BD)
    values = tl.program_id(2) * BE + tl.arange(0, BE)
    size: tl.constexpr = D * E + VECTORS * D
    peak, mass, total = load_state(LOG_MASS, MEAN, head, features, values, D, E)
    total *= mass[:, None]
    extra = tl.zeros([BD], tl.float32)
    base = PARTS + (head * count + (count - 1 if REVERSE else 0)) * size
    part_peak, part_mass, part_sum, part_extra = load_part(base, features, values, D, D, E, VECTORS)
    for step in range(count):
        index = (head * count + (count - 1 - step if REVERSE else step)) * size
        base = PARTS + index + (-size if REVERSE else size)
        # the next part is on its way while this one is merged
        width = tl.minimum(count - 1 - step, 1) * D
        next_peak, next_mass, next_sum, next_extra = load_part(
            base, features, values, width, D, E, VECTORS
        )
        top = tl.maximum(peak, part_peak)
        old, new = tl.exp2(peak - top), tl.exp2(part_peak - top)
        mass = mass * old + part_mass * new
        total = total * old[:, None] + part_sum * new[:, None]
        extra = extra * old + part_extra * new
        peak = top
        store_part(MERGED + index, peak, mass, total, extra, features, values, D, E, VECTORS)
        part_peak, part_mass, part_sum, part_extra = next_peak, next_mass, next_sum, next_extra


@jit
def load_part(
    base,
    features,
    values,
    width,
    D: tl.constexpr,
    E: tl.constexpr,
    VECTORS: tl.constexpr,
):
    """(peak, mass, sum, extra) of a block of a part: ``width`` is D, or 0 if there is none."""
    inside = features < width
    block = inside[:, None] & (values < E)[None, :]
    peak = tl.load(base + D * E + features, mask=inside, other=FLOOR)
    mass = tl.load(base + D * E + D + features, mask=inside, other=0.0)
    total = tl.load(base + features[:, None] * E + values[None, :], mask=block, other=0.0)
    extra = mass
    if VECTORS == 3:
        extra = tl.load(base + D * E + 2 * D + features, mask=inside, other=0.0)
    return peak, mass, total, extra


@jit
def store_part(
    base,
    peak,
    mass,
    total,
    extra,
    features,
    values,
    D: tl.constexpr,
    E: tl.constexpr,
    VECTORS: tl.constexpr,
):
    """Write a block of a part; the first value block writes the vectors."""
    inside = features < D
    block = inside[:, None] & (values < E)[None, :]
    tl.store(base + features[:, None] * E + values[None, :], total, mask=block)
    if tl.program_id(2) == 0:
        tl.store(base + D * E + features, peak, mask=inside)
        tl.store(base + D * E + D + features, mass, mask=inside)
        if VECTORS == 3:
            tl.store(base + D * E + 2 * D + features, extra, mask=inside)


@jit
def state_before(
    BEFORE,
    LOG_MASS,
    MEAN,
    kv_head,
    segment,
    segments,
    features,
    values,
    D: tl.constexpr,
    E: tl.constexpr,
):
    """(peak, mass, mean) before a segment: the given state, or what the scan has merged."""
    peak, mass, mean = load_state(LOG_MASS, MEAN, kv_head, features, values, D, E)
    if segment > 0:
        index = kv_head * (segments - 1) + segment - 1
        peak, mass, total = load_parts(BEFORE, index, 1, features, values, D, E)
        mean = total * inverse(mass)[:, None]
    return peak, mass, mean


@jit
def inverse(x):
    """1 / x, and 0 for 0."""
    return tl.where(x == 0.0, 0.0, 1.0 / tl.where(x == 0.0, 1.0, x))
