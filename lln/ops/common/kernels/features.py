# type: ignore
"""What the kernels share: exponents in base 2, the merge of partial states, exact dots.

Inside the kernels every exponent is a base-2 logarithm, because the hardware exponentiates in
base 2: ``alpha`` and ``beta`` are multiplied by log2(e) once per program. Peaks start at a finite
``FLOOR`` instead of −inf, so that the difference of two peaks of nothing is 0 and not NaN.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from lln.ops.common.kernels import tiles

jit: Any = triton.jit  # to a type checker a kernel is no Python: each kernel file opts out of it
known: Any = triton.constexpr_function  # computed by the compiler, in Python
padded: Any = known(tiles.padded)
LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)
FLOOR = tl.constexpr(-3.0e38)


@jit
def locate(PLAN, CU, heads, tokens):
    """(sample, head, part, first row, tokens of the sample, index of this program's part).

    Padded batches have a grid (parts, samples · heads). Packed sequences have a grid (items, heads)
    and a plan: the sequence of each item, then the first item of each sequence. Items beyond the
    last sequence lie behind its end, so they find nothing to do.
    """
    if PLAN is None:
        part, head = tl.program_id(0), tl.program_id(1).to(tl.int64)
        b, h = head // heads, head % heads
        first = b * 0
        index = head * tl.num_programs(0) + part
    else:
        item, h = tl.program_id(0), tl.program_id(1).to(tl.int64)
        b = tl.load(PLAN + item).to(tl.int64)
        part = item - tl.load(PLAN + tl.num_programs(0) + b)
        first = tl.load(CU + b).to(tl.int64)
        tokens = (tl.load(CU + b + 1) - first).to(tl.int32)
        index = h * tl.num_programs(0) + item
    return b, h, part, first, tokens, index


@jit
def dot(a, b):
    """a @ b accumulated in float32; float32 operands as three TF32 terms each, nothing is lost."""
    return tl.dot(a, b, input_precision="tf32x3")


@jit
def dot_add(a, b, total):
    """total + a @ b, as :func:`dot`."""
    return tl.dot(a, b, acc=total, input_precision="tf32x3")


@jit
def dot_scores(a, b):
    """a @ b of queries and keys whose result is an exponent: its absolute error counts.

    Three TF32 terms lose two bits of float32 that decide between large scores.
    """
    return tl.dot(a, b, input_precision="ieee")


@jit
def dot_factors(a, b, WIDE: tl.constexpr, TERMS: tl.constexpr):
    """a @ b of exponential factors in WIDE, which has the exponents of float32.

    Factors of bfloat16 inputs are one bfloat16 number, those of float16 inputs two TERMS, of which
    the product of the small ones is left out; three TERMS are float32, as in :func:`dot`. An ``a``
    that is WIDE already is exact.
    """
    if TERMS == 3:
        product = dot(a.to(tl.float32), b)
    else:
        high_a, high_b = a.to(WIDE), b.to(WIDE)
        product = tl.dot(high_a, high_b)
        if TERMS == 2:
            product = tl.dot(high_a, (b - high_b.to(tl.float32)).to(WIDE), acc=product)
            if a.dtype != WIDE:
                product = tl.dot((a - high_a.to(tl.float32)).to(WIDE), high_b, acc=product)
    return product


@jit
def identity(WIDTH: tl.constexpr, dtype: tl.constexpr, THROUGH: tl.constexpr):
    """The matrix that :func:`as_float` multiplies by; of width 1 if it shall not (not THROUGH)."""
    # beyond 128 features it would fill the shared memory, and float32 is what it should be
    used: tl.constexpr = THROUGH and WIDTH <= 128 and dtype != tl.float32
    index = tl.arange(0, WIDTH if used else 1)
    return (index[:, None] == index[None, :]).to(dtype)


@jit
def as_float(tile, eye):
    """A tile [rows, features] in float32.

    With an identity of its width it goes through the tensor cores, tile · I, which is exact: the
    result is held the way a dot holds it, and what follows (softmax and the next dot) stays in
    registers, as in flash attention, without a trip through shared memory.
    """
    through: tl.constexpr = eye.shape[0] > 1
    return tl.dot(tile, eye) if through else tile.to(tl.float32)


@jit
def as_float_transposed(tile, eye):
    """:func:`as_float` of the transpose: [features, rows]."""
    through: tl.constexpr = eye.shape[0] > 1
    return tl.dot(eye, tl.trans(tile)) if through else tl.trans(tile).to(tl.float32)


@jit
def of_head(strides, b, h):
    """How far head h of sample b is from the first one."""
    return b * strides[0] + h * strides[1]


@jit
def row_of(strides, first):
    """How far two rows are apart: as far as those of the ``first`` tensor if nothing is said.

    Then one set of addresses inside a tile serves both, which saves registers; see
    :func:`lln.ops.common.kernels.launching.row_strides`.
    """
    return first if strides[2] is None else strides[2]


@known
def divides(block, width):
    """Whether blocks of so many columns fill the width, so that none of them lies outside."""
    return width % block == 0


@jit
def load_tile(
    pointer,
    stride,
    start,
    end,
    rows,
    columns,
    WIDTH: tl.constexpr,
    FULL: tl.constexpr,
):
    """Rows start + rows < end of a matrix [·, WIDTH], zero outside; FULL: all rows exist."""
    base = pointer + tl.cast(start, tl.int64) * stride
    pointers = base + rows[:, None] * stride + columns[None, :]
    if divides(columns.shape[0], WIDTH):
        if FULL:
            tile = tl.load(pointers)
        else:
            tile = tl.load(pointers, mask=(rows < end - start)[:, None], other=0.0)
    else:
        inside = (rows < end - start)[:, None] & (columns < WIDTH)[None, :]
        tile = tl.load(pointers, mask=inside, other=0.0)
    return tile


@jit
def store_tile(
    pointer,
    stride,
    start,
    end,
    value,
    rows,
    columns,
    WIDTH: tl.constexpr,
    FULL: tl.constexpr,
):
    """The counterpart of :func:`load_tile`, in the dtype of ``pointer``."""
    base = pointer + tl.cast(start, tl.int64) * stride
    pointers = base + rows[:, None] * stride + columns[None, :]
    value = value.to(pointer.dtype.element_ty)
    if divides(columns.shape[0], WIDTH):
        if FULL:
            tl.store(pointers, value)
        else:
            tl.store(pointers, value, mask=(rows < end - start)[:, None])
    else:
        inside = (rows < end - start)[:, None] & (columns < WIDTH)[None, :]
        tl.store(pointers, value, mask=inside)


@jit
def load_parts(
    PARTS,
    first,
    count,
    features,
    values,
    D: tl.constexpr,
    E: tl.constexpr,
):
    """Merge ``count`` consecutive partial states: (peak, mass, sum) with mass, sum / 2^peak.

    A part is D·E sums, D peaks and D masses, in this order.
    """
    peak = tl.full(features.shape, FLOOR, tl.float32)
    mass = tl.zeros(features.shape, tl.float32)
    total = tl.zeros([features.shape[0], values.shape[0]], tl.float32)
    inside = features < D
    block = inside[:, None] & (values < E)[None, :]
    for part in range(count):
        base = PARTS + (first + part) * (D * E + 2 * D)
        part_peak = tl.load(base + D * E + features, mask=inside, other=FLOOR)
        part_mass = tl.load(base + D * E + D + features, mask=inside, other=0.0)
        part_sum = tl.load(base + features[:, None] * E + values[None, :], mask=block, other=0.0)
        top = tl.maximum(peak, part_peak)
        old = tl.exp2(peak - top)
        new = tl.exp2(part_peak - top)
        mass = mass * old + part_mass * new
        total = total * old[:, None] + part_sum * new[:, None]
        peak = top
    return peak, mass, total


@jit
def normalized(peak, mass, total):
    """(log2 of the mass, mean value per feature); an empty state is (−inf, 0)."""
    empty = mass == 0.0
    log_mass = tl.where(empty, float("-inf"), peak + tl.log2(mass))
    mean = total / tl.where(empty, 1.0, mass)[:, None]
    return log_mass, mean
