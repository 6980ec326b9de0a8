"""The two branches as nodes: near keys in windows, far keys by LLN.

See :mod:`lln.ops.window.eager_near` and :mod:`lln.ops.window.eager_far`. Keys are those of the
whole sequence, from the first one on; queries of the far branch are those of the same tokens.
"""

from __future__ import annotations

from typing import Any

from lln.ops.common.onnx.prefix import states_after, states_before
from lln.ops.common.onnx.rows import read_rows, slot_weights
from lln.ops.common.onnx.values import (
    NOTHING,
    Floats,
    MaybeBools,
    MaybeFloats,
    axes,
    cut,
    end,
    filled,
    finite_or_zero,
    hidden,
    length,
    missing,
    op,
    padded,
    per_head,
    repeated,
    reshaped,
    swapped,
    without_dropout,
)
from lln.ops.common.onnx.values import wide as wide_input
from lln.ops.linear.onnx import key_features, merge, state_of


def near(
    q: Floats,
    k: Floats,
    v: Floats,
    sink_k: Floats,
    sink_v: Floats,
    sink_position: Any,
    key_mask: MaybeBools,
    dropout: MaybeFloats,
    block: int,
    overlap: int,
    scale: float,
    origin: int,
    causal: bool,
) -> Any:
    """Softmax over windows and sinks: output and the logarithm of its normaliser."""
    _check(origin, dropout)
    inputs, heads, right = (q, k, v), q.shape[1], 0 if causal else overlap
    after, width = missing(length(k), block), overlap + block + right
    starts = op.Unsqueeze(_starts(k, after, block), axes(1))  # [T, 1], where the blocks begin
    places = op.Add(starts, op.Constant(value_ints=list(range(width))))
    around = axes(overlap), op.Add(after, axes(right))

    def windows(x: Any) -> Any:
        own = repeated(hidden(wide_input(x, *inputs), key_mask), x.shape[1], heads, x.shape[3])
        return op.Gather(padded(own, *around), places, axis=2)  # [B, H, T, W, D]

    def sinks(x: Any) -> Any:
        own = repeated(wide_input(x, *inputs), x.shape[1], heads, x.shape[3])
        return op.Unsqueeze(own, axes(2))  # [B, H, 1, n, D]

    queries, blind = _aligned(wide_input(q, *inputs), q, k)
    rows = padded(queries, axes(0), after)
    rows = op.Mul(reshaped(rows, 0, heads, -1, block, q.shape[3]), scale)
    seen = op.Gather(padded(_there(k, key_mask), *around), places, axis=2)
    seen = op.Greater(swapped(seen, 5), 0.0)  # [B or 1, 1, T, 1, W]
    if causal:
        seen = op.And(seen, _past(block, width, overlap))
    scores = op.MatMul(rows, swapped(windows(k), 5))
    scores = filled(scores, op.Not(seen), NOTHING)
    count = sink_k.shape[2]
    if count:
        first = op.Sub(starts, axes(overlap))  # of each window, [T, 1]
        position = op.Unsqueeze(sink_position, axes(1))
        seen = op.Less(position, first)  # [B, T, n]
        if not causal:
            later = op.GreaterOrEqual(position, op.Add(first, axes(width)))
            seen = op.Or(seen, op.And(later, op.Less(position, length(k))))
        seen = op.Unsqueeze(seen, axes(1, 3))
        pulled = op.MatMul(rows, swapped(sinks(sink_k), 5))
        scores = op.Concat(scores, filled(pulled, op.Not(seen), NOTHING), axis=-1)
    weights, top = slot_weights(scores)
    mass = op.ReduceSum(weights, axes(-1), keepdims=1)
    weights = op.Div(weights, filled(mass, op.Equal(mass, 0.0), 1.0))
    out = op.MatMul(cut(weights, axes(0), axes(width), 4) if count else weights, windows(v))
    if count:
        kept = cut(weights, axes(width), axes(width + count), 4)
        out = op.Add(out, op.MatMul(kept, sinks(sink_v)))
    level = reshaped(op.Add(finite_or_zero(top), op.Log(mass)), 0, heads, -1, 1)
    out = reshaped(out, 0, heads, -1, v.shape[3])
    level = _as_queries(level, q, k, blind, NOTHING)
    return _as_queries(out, q, k, blind, 0.0), op.Squeeze(level, axes(3))


def far(
    q: Floats,
    k: Floats,
    v: Floats,
    alpha: Floats,
    beta: Floats,
    log_mass: Floats,
    mean: Floats,
    key_mask: MaybeBools,
    dropout: MaybeFloats,
    block: int,
    overlap: int,
    origin: int,
    causal: bool,
) -> Any:
    """LLN over the keys outside of each block's window: output and logarithm.

    Causal with overlap −block, over the keys of the block itself and those before.
    """
    _check(origin, dropout)
    if q.shape[2] != k.shape[2]:
        raise ValueError(
            "near and far keys, and causal_block, are exported for whole sequences, queries and "
            "keys of the same tokens"
        )
    inputs, heads = (q, k, v), k.shape[1]
    after, none = missing(length(q), block), (log_mass, mean)
    features = key_features(wide_input(k, *inputs), beta, key_mask)
    values = hidden(wide_input(v, *inputs), key_mask)
    total, shift = op.Add(length(k), after), axes(max(overlap, 0))

    def states(before: Any, behind: Any, start: Any) -> tuple[Any, Any]:
        """The states of tiles of keys, moved by the overlap."""
        stop = op.Add(start, total)

        def tiles(x: Any, width: int, value: float) -> Any:
            x = cut(padded(x, before, behind, value), start, stop)
            return reshaped(x, 0, heads, -1, block, width)

        return state_of(tiles(features, k.shape[3], NOTHING), tiles(values, v.shape[3], 0.0), 5)

    own = states(shift, after, axes(0))
    seen = states_before(*none, *own)
    if overlap < 0:  # causal blocks, which see themselves, too
        seen = merge(*seen, *own)
    if not causal:
        others = states_after(*none, *states(axes(0), op.Add(after, shift), shift))
        seen = merge(*seen, *others)
    masses = repeated(seen[0], heads, q.shape[1], k.shape[3])
    means = _repeated_means(seen[1], heads, q.shape[1], k.shape[3], v.shape[3])
    rows = padded(op.Mul(wide_input(q, *inputs), per_head(alpha)), axes(0), after)
    rows = reshaped(rows, 0, q.shape[1], -1, block, q.shape[3])
    out, level = read_rows(op.Add(rows, op.Unsqueeze(masses, axes(3))), means).normalized()
    return _joined(out, level, q, v)


def _joined(out: Any, level: Any, q: Any, v: Any) -> tuple[Any, Any]:
    """``[B, H, T, C, …]`` as tokens, without those of the padding."""
    out = cut(reshaped(out, 0, q.shape[1], -1, v.shape[3]), axes(0), length(q))
    return out, cut(reshaped(level, 0, q.shape[1], -1), axes(0), length(q))


def _repeated_means(x: Any, of: int, heads: int, width: int, values_width: int) -> Any:
    """``[B, Hkv, T, D, E] -> [B, H, T, D, E]``."""
    if of == heads:
        return x
    flat = repeated(reshaped(x, 0, of, -1, values_width), of, heads, values_width)
    return reshaped(flat, 0, heads, -1, width, values_width)


def _starts(q: Any, after: Any, block: int) -> Any:
    """Where the blocks begin, ``[T]``."""
    total = op.Squeeze(op.Add(length(q), after), axes(0))
    return op.Range(op.Constant(value_int=0), total, op.Constant(value_int=block))


def _there(k: Any, key_mask: Any | None) -> Any:
    """1.0 where a key may be seen, ``[B or 1, 1, M, 1]``."""
    if key_mask is not None:
        return op.Unsqueeze(op.Cast(key_mask, to=1), axes(1, 3))
    ones = op.Expand(op.Constant(value_float=1.0), length(k))
    return op.Unsqueeze(ones, axes(0, 1, 3))


def _past(block: int, width: int, overlap: int) -> Any:
    """Whether column w of a window is at most row i, ``[C, W]``."""
    column = op.Unsqueeze(op.Constant(value_ints=list(range(width))), axes(0))
    row = op.Unsqueeze(op.Constant(value_ints=list(range(overlap, overlap + block))), axes(1))
    return op.LessOrEqual(column, row)


def _aligned(queries: Any, q: Any, k: Any) -> tuple[Any, Any | None]:
    """The queries at the positions of the keys, and how many stand before the first key.

    Query i stands at key i + M − N. None: queries and keys are equally many.
    """
    if q.shape[2] == k.shape[2]:
        return queries, None
    surplus = op.Sub(length(k), length(q))
    blind = op.Max(op.Neg(surplus), axes(0))
    return padded(cut(queries, blind, end()), op.Max(surplus, axes(0)), axes(0)), blind


def _as_queries(x: Any, q: Any, k: Any, blind: Any | None, nothing: float) -> Any:
    """The rows of the queries out of ``[B, H, T·C, E]``, which begins with the first key."""
    if blind is None:
        return cut(x, axes(0), length(q))
    first = op.Max(op.Sub(length(k), length(q)), axes(0))
    return padded(cut(x, first, length(k)), blind, axes(0), nothing)


def _check(origin: int, dropout: Any | None) -> None:
    without_dropout(dropout)
    if origin:
        raise ValueError("windows are exported for whole sequences, from their first token on")
