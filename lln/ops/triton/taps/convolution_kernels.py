# type: ignore
"""Kernels of the convolution over tokens: its output, and the products that its filter learns from.

    out_n = Σ_t w_t v_{n + t − before},   dw_t = Σ_n dO_n · v_{n + t − before}

A tile of ROWS outputs needs ROWS + K − 1 values, which are two tiles: one of ROWS that starts
``before`` rows above the outputs, and the next HALO ≥ K − 1. Their band matrices stay in registers.
"""

from __future__ import annotations

import triton.language as tl

from lln.ops.triton.features import dot, dot_add, jit, load_tile, store_tile


@jit
def band_tile(W, rows, columns, shift, TAPS: tl.constexpr):
    """[rows, columns] = w[columns + shift − rows], zero outside the filter."""
    place = columns[None, :] + shift - rows[:, None]
    return tl.load(W + place, mask=(place >= 0) & (place < TAPS), other=0.0)


@jit
def load_around(
    pointer, stride, first, tokens, rows, columns, WIDTH: tl.constexpr, BLOCK: tl.constexpr
):
    """Rows first + rows of a matrix [tokens, WIDTH]; zero before its start and after its end."""
    index = first + rows
    inside = ((index >= 0) & (index < tokens))[:, None]
    if WIDTH % BLOCK != 0:
        inside = inside & (columns < WIDTH)[None, :]
    pointers = pointer + tl.cast(index, tl.int64)[:, None] * stride + columns[None, :]
    return tl.load(pointers, mask=inside, other=0.0)


@jit
def convolve_kernel(
    V,
    W,
    OUT,
    v_batch,
    v_head,
    v_row,
    out_batch,
    out_head,
    out_row,
    w_head,
    heads,
    tokens,
    span,
    E: tl.constexpr,
    BE: tl.constexpr,
    TAPS: tl.constexpr,
    BEFORE: tl.constexpr,
    ROWS: tl.constexpr,
    HALO: tl.constexpr,
):
    """OUT of ``span`` tokens of one head."""
    part, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = head // heads, head % heads
    V += b * v_batch + h * v_head
    OUT += b * out_batch + h * out_head
    rows, halo, values = tl.arange(0, ROWS), tl.arange(0, HALO), tl.arange(0, BE)
    dtype: tl.constexpr = V.dtype.element_ty
    own = band_tile(W + h * w_head, rows, rows, 0, TAPS).to(dtype)
    after = band_tile(W + h * w_head, rows, halo, ROWS, TAPS).to(dtype)
    end = tl.minimum((part + 1) * span, tokens)
    for start in range(part * span, end, ROWS):
        first = start - BEFORE
        near = load_around(V, v_row, first, tokens, rows, values, E, BE)
        far = load_around(V, v_row, first + ROWS, tokens, halo, values, E, BE)
        out = dot_add(after, far, dot(own, near))
        store_tile(OUT, out_row, start, end, out, rows, values, E, BE, False)


@jit
def filter_gradient_kernel(
    V,
    DOUT,
    PARTS,
    v_batch,
    v_head,
    v_row,
    dout_batch,
    dout_head,
    dout_row,
    heads,
    tokens,
    span,
    E: tl.constexpr,
    BE: tl.constexpr,
    TAPS: tl.constexpr,
    BEFORE: tl.constexpr,
    ROWS: tl.constexpr,
    HALO: tl.constexpr,
):
    """PARTS[head, part] [ROWS, ROWS + HALO] = Σ over tiles of dO vᵀ: dw_t stands on a diagonal."""
    part, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
    b, h = head // heads, head % heads
    V += b * v_batch + h * v_head
    DOUT += b * dout_batch + h * dout_head
    rows, halo, values = tl.arange(0, ROWS), tl.arange(0, HALO), tl.arange(0, BE)
    own = tl.zeros([ROWS, ROWS], tl.float32)
    after = tl.zeros([ROWS, HALO], tl.float32)
    end = tl.minimum((part + 1) * span, tokens)
    for start in range(part * span, end, ROWS):
        first = start - BEFORE
        dout = load_tile(DOUT, dout_row, start, end, rows, values, E, BE, False)
        near = load_around(V, v_row, first, tokens, rows, values, E, BE)
        far = load_around(V, v_row, first + ROWS, tokens, halo, values, E, BE)
        own = dot_add(dout, tl.trans(near), own)
        after = dot_add(dout, tl.trans(far), after)
    width: tl.constexpr = ROWS + HALO
    base = PARTS + (head * tl.num_programs(0) + part) * ROWS * width + rows[:, None] * width
    tl.store(base + rows[None, :], own)
    tl.store(base + ROWS + halo[None, :], after)
