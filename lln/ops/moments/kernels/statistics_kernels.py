# type: ignore
"""Kernels of the statistics: count, mean and squared deviation of parts, and their merge.

Each program keeps Σ (x − c) and Σ (x − c)² around c, the mean of its first tile, so that a large
common offset costs no digits; the parts merge by their counts, means and squared deviations.
"""

from __future__ import annotations

import triton.language as tl

from lln.ops.common.kernels.features import jit, load_tile, of_head, row_of


@jit
def moments_kernel(
    Q,
    K,
    QUERY_MASK,
    KEY_MASK,
    PARTS,
    strides,
    samples,
    heads,
    kv_heads,
    queries,
    keys,
    q_span,
    k_span,
    D: tl.constexpr,
    BD: tl.constexpr,
    ROWS: tl.constexpr,
    FULL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """PARTS[head, part] = (count, mean, squared deviation): query heads first, then key heads."""
    q_strides, k_strides, query_mask_batch, key_mask_batch = strides
    q_row = q_strides[2]
    k_row = row_of(k_strides, q_row)
    part, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    index = head * tl.num_programs(0) + part
    if head < samples * heads:
        b, h = head // heads, head % heads
        _moments(
            Q + of_head(q_strides, b, h), q_row, QUERY_MASK, b * query_mask_batch,
            PARTS + index * 3, part * q_span, tl.minimum((part + 1) * q_span, queries),
            D, BD, ROWS, FULL, STAGES,
        )  # fmt: skip
    else:
        head -= samples * heads
        b, h = head // kv_heads, head % kv_heads
        _moments(
            K + of_head(k_strides, b, h), k_row, KEY_MASK, b * key_mask_batch,
            PARTS + index * 3, part * k_span, tl.minimum((part + 1) * k_span, keys),
            D, BD, ROWS, FULL, STAGES,
        )  # fmt: skip


@jit
def _moments(
    X,
    x_row,
    MASK,
    mask_offset,
    PART,
    begin,
    end,
    D: tl.constexpr,
    BD: tl.constexpr,
    ROWS: tl.constexpr,
    FULL: tl.constexpr,
    STAGES: tl.constexpr,
):
    """Count, mean and squared deviation of rows begin … end of one head."""
    rows, columns = tl.arange(0, ROWS), tl.arange(0, BD)
    x, keep = _tile(X, x_row, MASK, mask_offset, begin, end, rows, columns, D, FULL)
    center = tl.sum(x) / tl.maximum(tl.sum(keep.to(tl.float32)) * D, 1.0)
    count = tl.zeros([ROWS], tl.float32)
    first = tl.zeros([ROWS, BD], tl.float32)
    second = tl.zeros([ROWS, BD], tl.float32)
    for start in tl.range(begin, end, ROWS, num_stages=STAGES):
        x, keep = _tile(X, x_row, MASK, mask_offset, start, end, rows, columns, D, FULL)
        x -= center
        if not FULL or MASK is not None:
            x = tl.where(keep[:, None], x, 0.0)
        if D % BD != 0:
            x = tl.where((columns < D)[None, :], x, 0.0)
        count += keep.to(tl.float32)
        first += x
        second += x * x
    n = tl.sum(count) * D
    shift = tl.sum(first) / tl.maximum(n, 1.0)
    tl.store(PART, n)
    tl.store(PART + 1, center + shift)
    tl.store(PART + 2, tl.sum(second) - n * shift * shift)


@jit
def _tile(
    X,
    x_row,
    MASK,
    mask_offset,
    start,
    end,
    rows,
    columns,
    D: tl.constexpr,
    FULL: tl.constexpr,
):
    """A tile in float32, zero where masked, and which of its rows count."""
    x = load_tile(X, x_row, start, end, rows, columns, D, FULL).to(tl.float32)
    keep = rows < end - start
    if MASK is not None:
        keep = tl.load(MASK + mask_offset + start + rows, mask=keep, other=0) != 0
        x = tl.where(keep[:, None], x, 0.0)
    return x, keep


@jit
def deviation_kernel(
    PARTS,
    SIGMA_Q,
    SIGMA_K,
    samples,
    heads,
    q_count,
    k_count,
    BLOCK: tl.constexpr,
):
    """Merge the parts of one key head and of the query heads that share it."""
    head = tl.program_id(0).to(tl.int64)
    keys = PARTS + (head + samples * heads) * k_count * 3
    tl.store(SIGMA_Q + head, deviation(PARTS + head * q_count * 3, q_count, BLOCK))
    tl.store(SIGMA_K + head, deviation(keys, k_count, BLOCK))


@jit
def deviation(PARTS, count, BLOCK: tl.constexpr):
    """The deviation of everything in ``count`` consecutive parts."""
    index = tl.arange(0, BLOCK)
    inside = index < count
    n = tl.load(PARTS + index * 3, mask=inside, other=0.0)
    mean = tl.load(PARTS + index * 3 + 1, mask=inside, other=0.0)
    square = tl.load(PARTS + index * 3 + 2, mask=inside, other=0.0)
    total = tl.maximum(tl.sum(n), 1.0)
    shift = mean - tl.sum(n * mean) / total
    variance = tl.sum(square + n * shift * shift) / total
    return tl.sqrt(tl.maximum(variance, 0.0))
