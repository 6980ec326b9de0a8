# type: ignore
"""Kernels of the convolution over tokens: its output, the gradients of values and filters.

    out_n = onto_n + Σ_t w_t v_{n + t − before}
    dv_m = Σ_s w_{K−1−s} dO_{m + s − after},   dw_{K−1−s} = Σ_m v_m · dO_{m + s − after}

with after = K − 1 − before: the values' gradient is a convolution as well, and the tiles of dO that
it reads are those that the filters' gradient needs.

A tile of ROWS outputs needs ROWS + K − 1 values, which are two tiles: one of ROWS that starts
``before`` rows above the outputs, and the next HALO ≥ K − 1. Their band matrices stay in registers.
"""

from __future__ import annotations

import triton.language as tl

from lln.ops.common.kernels.features import (
    divides,
    dot,
    dot_add,
    jit,
    load_tile,
    of_head,
    row_of,
    store_tile,
)


@jit
def band_tile(W, rows, columns, shift, TAPS: tl.constexpr, FLIP: tl.constexpr):
    """[rows, columns] = w[columns + shift − rows], zero outside the filter; FLIP: w backwards."""
    place = columns[None, :] + shift - rows[:, None]
    inside = (place >= 0) & (place < TAPS)
    if FLIP:
        place = TAPS - 1 - place
    return tl.load(W + place, mask=inside, other=0.0)


@jit
def seen(MASK, index, inside):
    """Which of these tokens are inside the sequence and, with a MASK, valid."""
    if MASK is not None:
        inside = tl.load(MASK + index, mask=inside, other=0) != 0
    return inside


@jit
def load_around(pointer, stride, MASK, first, tokens, rows, columns, WIDTH: tl.constexpr):
    """Rows first + rows of a matrix [tokens, WIDTH]; zero where no valid token is."""
    index = first + rows
    inside = seen(MASK, index, (index >= 0) & (index < tokens))[:, None]
    if not divides(columns.shape[0], WIDTH):
        inside = inside & (columns < WIDTH)[None, :]
    pointers = pointer + tl.cast(index, tl.int64)[:, None] * stride + columns[None, :]
    return tl.load(pointers, mask=inside, other=0.0)


@jit
def convolve_kernel(
    V,
    W,
    ONTO,
    MASK,
    OUT,
    strides,
    heads,
    group,
    tokens,
    span,
    E: tl.constexpr,
    BE: tl.constexpr,
    TAPS: tl.constexpr,
    BEFORE: tl.constexpr,
    ROWS: tl.constexpr,
    HALO: tl.constexpr,
):
    """OUT of ``span`` tokens of one of ``heads``; ``group`` of them share a head of V and W."""
    v_strides, onto_strides, out_strides, w_head, mask_batch = strides
    v_row = v_strides[2]
    onto_row, out_row = row_of(onto_strides, v_row), row_of(out_strides, v_row)
    part, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = head // heads, head % heads
    V += of_head(v_strides, b, h // group)
    W += h // group * w_head
    OUT += of_head(out_strides, b, h)
    if ONTO is not None:
        ONTO += of_head(onto_strides, b, h)
    if MASK is not None:
        MASK += b * mask_batch
    rows, halo, values = tl.arange(0, ROWS), tl.arange(0, HALO), tl.arange(0, BE)
    dtype: tl.constexpr = V.dtype.element_ty
    own = band_tile(W, rows, rows, 0, TAPS, False).to(dtype)
    after = band_tile(W, rows, halo, ROWS, TAPS, False).to(dtype)
    end = tl.minimum((part + 1) * span, tokens)
    for start in range(part * span, end, ROWS):
        first = start - BEFORE
        near = load_around(V, v_row, MASK, first, tokens, rows, values, E)
        far = load_around(V, v_row, MASK, first + ROWS, tokens, halo, values, E)
        out = dot_add(after, far, dot(own, near))
        if ONTO is not None:
            out += load_tile(ONTO, onto_row, start, end, rows, values, E, False).to(tl.float32)
        store_tile(OUT, out_row, start, end, out, rows, values, E, False)


@jit
def convolve_backward_kernel(
    DOUT,
    V,
    W,
    MASK,
    DV,
    PARTS,
    strides,
    heads,
    tokens,
    span,
    E: tl.constexpr,
    BE: tl.constexpr,
    TAPS: tl.constexpr,
    AFTER: tl.constexpr,
    GROUP: tl.constexpr,
    ROWS: tl.constexpr,
    HALO: tl.constexpr,
    ADD: tl.constexpr,
):
    """DV of ``span`` tokens of one of ``heads``, and PARTS[head, part] [ROWS, ROWS + HALO].

    The latter is Σ over tiles of v dOᵀ, in which dw_{K−1−s} stands on the s-th diagonal. GROUP
    heads of DOUT share one of V. What is None is not computed. ADD: to what DV holds, rounded
    before and after as two tensors are that torch adds.
    """
    dout_strides, v_strides, dv_strides, w_head, mask_batch = strides
    dout_row = dout_strides[2]
    v_row, dv_row = row_of(v_strides, dout_row), row_of(dv_strides, dout_row)
    part, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = head // heads, head % heads
    DOUT += of_head(dout_strides, b, h * GROUP)
    V += of_head(v_strides, b, h)
    W += h * w_head
    if MASK is not None:
        MASK += b * mask_batch
    if DV is not None:
        DV += of_head(dv_strides, b, h)
    rows, halo, values = tl.arange(0, ROWS), tl.arange(0, HALO), tl.arange(0, BE)
    dtype: tl.constexpr = DOUT.dtype.element_ty
    own = band_tile(W, rows, rows, 0, TAPS, True).to(dtype)
    after = band_tile(W, rows, halo, ROWS, TAPS, True).to(dtype)
    own_products = tl.zeros([ROWS, ROWS], tl.float32)
    after_products = tl.zeros([ROWS, HALO], tl.float32)
    end = tl.minimum((part + 1) * span, tokens)
    for start in range(part * span, end, ROWS):
        first = start - AFTER
        gradient = tl.zeros([ROWS, BE], tl.float32)
        if PARTS is not None:
            v = load_around(V, v_row, MASK, start, end, rows, values, E)
        for member in tl.static_range(GROUP):
            dout = DOUT + member * dout_strides[1]
            near = load_around(dout, dout_row, None, first, tokens, rows, values, E)
            far = load_around(dout, dout_row, None, first + ROWS, tokens, halo, values, E)
            if DV is not None:
                gradient = dot_add(after, far, dot_add(own, near, gradient))
            if PARTS is not None:
                own_products = dot_add(v, tl.trans(near), own_products)
                after_products = dot_add(v, tl.trans(far), after_products)
        if DV is not None:
            if MASK is not None:
                kept = seen(MASK, start + rows, start + rows < end)
                gradient = tl.where(kept[:, None], gradient, 0.0)
            if ADD:
                other = load_tile(DV, dv_row, start, end, rows, values, E, False)
                gradient = gradient.to(other.dtype).to(tl.float32) + other.to(tl.float32)
            store_tile(DV, dv_row, start, end, gradient, rows, values, E, False)
    if PARTS is not None:
        width: tl.constexpr = ROWS + HALO
        base = PARTS + (head * tl.num_programs(0) + part) * ROWS * width + rows[:, None] * width
        tl.store(base + rows[None, :], own_products)
        tl.store(base + ROWS + halo[None, :], after_products)


@jit
def filter_kernel(
    PARTS,
    DW,
    samples,
    heads,
    parts,
    TAPS: tl.constexpr,
    ROWS: tl.constexpr,
    HALO: tl.constexpr,
    MANY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """DW[head, K − 1 − s] = the sum of the s-th diagonals of all PARTS of a head, for BLOCK s."""
    h = tl.program_id(0).to(tl.int64)
    s = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    entry = tl.arange(0, MANY * ROWS)
    width: tl.constexpr = ROWS + HALO
    diagonal = (entry % ROWS * (width + 1))[:, None] + s[None, :]
    total = tl.zeros([MANY * ROWS, BLOCK], tl.float32)
    for start in range(0, samples * parts, MANY):
        index = start + entry // ROWS
        place = ((index // parts * heads + h) * parts + index % parts) * ROWS * width
        inside = (index < samples * parts)[:, None] & (s < TAPS)[None, :]
        total += tl.load(PARTS + place[:, None] + diagonal, mask=inside, other=0.0)
    tl.store(DW + h * TAPS + TAPS - 1 - s, tl.sum(total, axis=0), mask=s < TAPS)
