"""Softmax attention inside blocks as nodes; see :mod:`lln.ops.window.eager_blocks`."""

from __future__ import annotations

from typing import Any

from lln.onnx.translations.values import (
    NOTHING,
    Floats,
    MaybeBools,
    MaybeFloats,
    any_of,
    axes,
    cut,
    end,
    filled,
    hidden,
    length,
    narrow,
    op,
    padded,
    repeated,
    reshaped,
    swapped,
    without_dropout,
)
from lln.onnx.translations.values import wide as wide_input


def block_diagonal(
    q: Floats,
    k: Floats,
    v: Floats,
    key_mask: MaybeBools,
    dropout: MaybeFloats,
    block: int,
    scale: float,
    is_causal: bool,
    wide: bool,
) -> Any:
    """All blocks at once; the last one is padded with keys that nobody sees."""
    without_dropout(dropout)
    heads, after = q.shape[1], missing(length(k), block)

    def keys_in_blocks(x: Any) -> Any:
        x, own = hidden(wide_input(x, q, k, v), key_mask), x
        x = repeated(x, own.shape[1], heads, own.shape[3])
        return in_blocks(x, after, heads, block, own.shape[3])

    queries, blind = aligned(wide_input(q, k, v), q, k)
    rows = op.Mul(in_blocks(queries, after, heads, block, q.shape[3]), scale)
    seen = seen_in_blocks(k, key_mask, after, block)
    if is_causal:
        seen = op.And(seen, triangle(block))
    scores = op.MatMul(rows, swapped(keys_in_blocks(k), 5))
    out = op.MatMul(masked_softmax(scores, seen), keys_in_blocks(v))
    out = reshaped(out, 0, heads, -1, v.shape[3])
    return narrow(as_queries(out, q, k, blind), (q, k, v), wide)


def aligned(queries: Any, q: Any, k: Any) -> tuple[Any, Any | None]:
    """The queries at the positions of the keys, and how many stand before the first key.

    Query i stands at key i + M − N. None: queries and keys are equally many.
    """
    if q.shape[2] == k.shape[2]:
        return queries, None
    surplus = op.Sub(length(k), length(q))
    blind = op.Max(op.Neg(surplus), axes(0))
    return padded(cut(queries, blind, end()), op.Max(surplus, axes(0)), axes(0)), blind


def as_queries(out: Any, q: Any, k: Any, blind: Any | None) -> Any:
    """The rows of the queries out of ``[B, H, T·C, E]``, which begins with the first key."""
    if blind is None:
        return cut(out, axes(0), length(q))
    first = op.Max(op.Sub(length(k), length(q)), axes(0))
    return padded(cut(out, first, length(k)), blind, axes(0))


def missing(tokens: Any, block: int) -> Any:
    """How many tokens the last block lacks, ``[1]``."""
    return op.Mod(op.Neg(tokens), axes(block))


def in_blocks(x: Any, after: Any, heads: int, block: int, width: int) -> Any:
    """``[B, H, n, D] -> [B, H, T, C, D]``."""
    return reshaped(padded(x, axes(0), after), 0, heads, -1, block, width)


def seen_in_blocks(k: Any, key_mask: Any | None, after: Any, block: int) -> Any:
    """Which places of the blocks hold a key that may be seen, ``[B or 1, 1, T, 1, C]``."""
    if key_mask is None:
        total = op.Squeeze(op.Add(length(k), after), axes(0))
        there = op.Less(op.Range(0, total, 1), length(k))
        return reshaped(there, 1, 1, -1, 1, block)
    there = padded(op.Unsqueeze(op.Cast(key_mask, to=1), axes(1, 3)), axes(0), after)
    return op.Greater(reshaped(there, 0, 1, -1, 1, block), 0.0)


def triangle(block: int) -> Any:
    """Whether column j is at most row i, ``[C, C]``."""
    place = op.Constant(value_ints=list(range(block)))
    return op.LessOrEqual(op.Unsqueeze(place, axes(0)), op.Unsqueeze(place, axes(1)))


def masked_softmax(scores: Any, seen: Any) -> Any:
    """Softmax over the columns where ``seen``; 0 in rows that see nothing."""
    blind = op.Not(any_of(seen))
    weights = op.Softmax(filled(scores, op.Not(op.Or(seen, blind)), NOTHING), axis=-1)
    return filled(weights, blind, 0.0)
