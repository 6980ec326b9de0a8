# type: ignore
"""The walk along a window: of a tile of queries over its keys, of a tile of keys over its queries.

Query i of block b sees the keys C·b − o … C·(b+1) + right − 1, right = o or, if causal, up to i.
Scores are s_ij = scale q_i·k_j. Whatever the normaliser n_i is, of the window alone or of a far
state, too, and whatever weight 2^shift the branch has, with r_ij = exp(s_ij − n_i),

    dq_i = scale Σ_j r_ij (w dO_i·v_j − δ_i) k_j,
    dv_j = Σ_i 2^shift r_ij dO_i,    dk_j = scale Σ_i 2^shift r_ij (dO_i·v_j − δ_i) q_i.

Inside, all exponents are base 2. FULL: every tile is whole and no key is masked.

Both families of kernels walk this way: ``blocks.wide_kernels``, where each branch has its own
normaliser and one state serves all blocks, and ``joint.near_kernels``, where both share one and
every block has a state.
"""

from __future__ import annotations

import triton.language as tl

from lln.ops.common.kernels.features import LOG2E, dot, dot_add, dot_scores, jit, load_tile


@jit
def window_of(here, block, overlap, rows_per_block, keys, ROWS: tl.constexpr, CAUSAL: tl.constexpr):
    """(first row, end of the block, start and end of the keys) of a program of queries."""
    number = here // rows_per_block
    start = number * block + here % rows_per_block * ROWS
    stop = tl.minimum((number + 1) * block, keys)
    first = tl.maximum(number * block - overlap, 0)
    last = stop
    if CAUSAL:
        last = tl.minimum(stop, start + ROWS)
    else:
        last = tl.minimum((number + 1) * block + overlap, keys)
    return start, stop, first, last


@jit
def kept(MASK, col, last, cols):
    """Which of the keys col + cols < last may be attended."""
    keep = cols < last - col
    if MASK is not None:
        keep = tl.load(MASK + col + cols, mask=keep, other=0) != 0
    return keep


@jit
def attend_scores(s, slope, v, top, weight, total, FIRST: tl.constexpr):
    """Add keys with exponents s · slope to a running softmax; ``slope`` is positive, top finite.

    FIRST: nothing is in it yet.
    """
    new = tl.maximum(top, tl.max(s, axis=1) * slope)
    p = tl.exp2(s * slope - new[:, None])
    if FIRST:
        weight, total = tl.sum(p, axis=1), dot(p.to(v.dtype), v)
    else:
        shrink = tl.exp2(top - new)
        weight = weight * shrink + tl.sum(p, axis=1)
        total = dot_add(p.to(v.dtype), v, total * shrink[:, None])
    return new, weight, total


@jit
def attend_keys(
    q, K, V, MASK, k_row, v_row, start, col, last, slope, top, weight, total, rows, cols, features,
    values, D: tl.constexpr, E: tl.constexpr, FULL: tl.constexpr, CAUSAL: tl.constexpr,
    FLIP: tl.constexpr, FIRST: tl.constexpr,
):  # fmt: skip
    """:func:`attend_scores` of the queries start + rows to the keys col … < last.

    FLIP: scores are multiplied by −slope.
    """
    k = load_tile(K, k_row, col, last, cols, features, D, FULL)
    v = load_tile(V, v_row, col, last, cols, values, E, FULL)
    s = dot_scores(q, tl.trans(k))
    if FLIP:
        s = -s
    if MASK is not None or not FULL:
        keep = kept(MASK, col, last, cols)
        s = tl.where(keep[None, :], s, float("-inf"))
        if MASK is not None:
            v = tl.where(keep[:, None], v, 0.0)
    if CAUSAL:
        s = tl.where((col + cols)[None, :] <= (start + rows)[:, None], s, float("-inf"))
    return attend_scores(s, slope, v, top, weight, total, FIRST)


@jit
def pull_queries(
    q, dout, K, V, MASK, k_row, v_row, start, col, last, lse, delta, slope, factor, dq, rows, cols,
    features, values, D: tl.constexpr, E: tl.constexpr, FULL: tl.constexpr, CAUSAL: tl.constexpr,
):  # fmt: skip
    """(dq with the keys col … < last of a window, r, dO·v).

    ``factor`` and ``delta`` are w · scale and δ · scale.
    """
    k = load_tile(K, k_row, col, last, cols, features, D, FULL)
    v = load_tile(V, v_row, col, last, cols, values, E, FULL)
    if MASK is not None or not FULL:
        keep = kept(MASK, col, last, cols)
        if MASK is not None:
            k = tl.where(keep[:, None], k, 0.0)
    r = tl.exp2(dot_scores(q, tl.trans(k)) * slope - lse[:, None])
    if MASK is not None or not FULL:
        r = tl.where(keep[None, :], r, 0.0)
    if CAUSAL:
        r = tl.where((col + cols)[None, :] <= (start + rows)[:, None], r, 0.0)
    dr = dot(dout, tl.trans(v))
    if MASK is not None:
        dr = tl.where(keep[None, :], dr, 0.0)
    ds = r * (dr * factor - delta[:, None])
    return dot_add(ds.to(k.dtype), k, dq), r, dr


@jit
def pull_keys(
    k, v, Q, DOUT, LSE, DELTA, q_row, dout_row, start, end, j, keep, block, overlap, scale, shift,
    dk, dv, rows, features, values,
    D: tl.constexpr, E: tl.constexpr, FULL: tl.constexpr, WHOLE: tl.constexpr,
    MASKED: tl.constexpr, CAUSAL: tl.constexpr, NATURAL: tl.constexpr,
):  # fmt: skip
    """(dk, dv) of the keys j with the queries start … < end.

    WHOLE: they are of one block. MASKED: some of ``keep`` are not. NATURAL: LSE is, −inf without
    a key.
    """
    q = load_tile(Q, q_row, start, end, rows, features, D, FULL)
    dout = load_tile(DOUT, dout_row, start, end, rows, values, E, FULL)
    i = start + rows
    if FULL:
        lse, delta = tl.load(LSE + i), tl.load(DELTA + i) * scale
    else:
        lse = tl.load(LSE + i, mask=i < end, other=float("inf"))
        delta = tl.load(DELTA + i, mask=i < end, other=0.0) * scale
    if NATURAL:
        lse = from_natural(lse)
    r = tl.exp2(dot_scores(k, tl.trans(q)) * (scale * LOG2E) - (lse - shift)[None, :])
    if WHOLE and not FULL:
        edge = start // block * block
        keep = keep & (j >= edge - overlap) & (j < edge + block + overlap)
    if MASKED or not FULL:
        r = tl.where(keep[:, None], r, 0.0)
    if not WHOLE:
        edge = i // block * block
        seen = j[:, None] >= (edge - overlap)[None, :]
        r = tl.where(seen & (j[:, None] < (edge + block + overlap)[None, :]), r, 0.0)
    if CAUSAL:
        r = tl.where(j[:, None] <= i[None, :], r, 0.0)
    dv = dot_add(r.to(dout.dtype), dout, dv)
    ds = r * (dot(v, tl.trans(dout)) * scale - delta[None, :])
    if MASKED:
        ds = tl.where(keep[:, None], ds, 0.0)
    return dot_add(ds.to(q.dtype), q, dk), dv


@jit
def from_natural(lse):
    """A natural logarithm in base 2; −inf, no key, becomes +inf, which makes weights 0."""
    return tl.where(lse == float("-inf"), float("inf"), lse * LOG2E)
