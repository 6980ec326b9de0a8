"""Causal LLN as nodes: trees inside tiles, a Scan of states between them.

The same cut as :mod:`lln.ops.causal.tree`: every pair of tokens of a tile meets in a
rectangle that is fully visible, so that no key underflows because of a later one.
"""

from __future__ import annotations

from typing import Any

from lln.ops.common.onnx.prefix import states_before
from lln.ops.common.onnx.rows import Rows, read_rows, slot_weights
from lln.ops.common.onnx.values import (
    NOTHING,
    Floats,
    MaybeBools,
    MaybeFloats,
    axes,
    cut,
    filled,
    finite_or_zero,
    hidden,
    is_nothing,
    length,
    missing,
    narrow,
    op,
    padded,
    per_head,
    repeated,
    reshaped,
    swapped,
    without_dropout,
)
from lln.ops.common.onnx.values import wide as wide_input
from lln.ops.linear.onnx import key_features, state_of

TILE = 64
_BROADCAST_BELOW = 4  # heights whose matrix products are too small to be worth one


def causal(
    q: Floats,
    k: Floats,
    v: Floats,
    alpha: Floats,
    beta: Floats,
    key_mask: MaybeBools,
    log_mass: Floats,
    mean: Floats,
    slot_dropout: MaybeFloats,
    wide: bool,
) -> Any:
    """Output ``[B, H, N, E]`` and ℓ ``[B, H, N]``, +inf in rows that see nothing."""
    without_dropout(slot_dropout)
    inputs, heads, after = (q, k, v), q.shape[1], missing(length(q), TILE)
    width, values_width = q.shape[3], v.shape[3]

    def whole_tiles(x: Any, value: float = 0.0) -> Any:
        return padded(x, axes(0), after, value)

    features = key_features(wide_input(k, *inputs), beta, key_mask)
    values = hidden(wide_input(v, *inputs), key_mask)
    a = whole_tiles(op.Mul(wide_input(q, *inputs), per_head(alpha)))
    f = whole_tiles(repeated(features, k.shape[1], heads, width), NOTHING)
    u = whole_tiles(repeated(values, k.shape[1], heads, values_width))
    rows = _inside_tiles(a, f, u, heads, width, values_width)
    states = states_before(
        _flat_repeated(log_mass, log_mass.shape[1], heads, width),
        repeated(mean, mean.shape[1], heads, values_width),
        *state_of(_tiles(f, heads, width), _tiles(u, heads, values_width), 5),
    )
    scores = op.Add(_tiles(a, heads, width), op.Unsqueeze(states[0], axes(3)))
    before = read_rows(scores, states[1])
    before = before.map(lambda x, size: reshaped(x, 0, heads, -1, size), values_width)
    out, level = rows.merge(before).normalized()
    level = cut(op.Squeeze(level, axes(3)), axes(0), length(q))
    level = filled(level, is_nothing(level), -NOTHING)
    return narrow(cut(out, axes(0), length(q)), inputs, wide), level


def _inside_tiles(a: Any, f: Any, values: Any, heads: int, width: int, values_width: int) -> Rows:
    """Causal attention inside each tile, not yet normalised."""
    weights, top = slot_weights(op.Add(a, f))
    mass = op.ReduceSum(weights, axes(-1), keepdims=1)
    rows = Rows(top, mass, op.Mul(mass, values))
    height = 1
    while height < TILE:
        half = _Halves(heads, height)
        keys, shown = half.left(f, width), half.left(values, values_width)
        best = op.ReduceMax(keys, axes(-2), keepdims=1)
        slots, top = slot_weights(op.Add(half.right(a, width), best))
        shares = op.Exp(op.Sub(keys, finite_or_zero(best)))
        mass = op.ReduceSum(
            op.Mul(slots, op.ReduceSum(shares, axes(-2), keepdims=1)), axes(-1), keepdims=1
        )
        met = Rows(top, mass, _mixed(slots, shares, shown, height))
        left, right = rows.map(half.left, values_width), rows.map(half.right, values_width)
        rows = half.join(left, right.merge(met), values_width)
        height *= 2
    return rows


class _Halves:
    """Groups of 2 h tokens, ``[B, H, n, W]`` cut into keys to the left and rows to the right."""

    def __init__(self, heads: int, height: int) -> None:
        self.heads, self.height = heads, height

    def left(self, x: Any, width: int) -> Any:
        return self._half(x, width, 0)

    def right(self, x: Any, width: int) -> Any:
        return self._half(x, width, 1)

    def join(self, left: Rows, right: Rows, width: int) -> Rows:
        def joined(x: Any, y: Any, size: int) -> Any:
            both = op.Concat(op.Unsqueeze(x, axes(3)), op.Unsqueeze(y, axes(3)), axis=3)
            return reshaped(both, 0, self.heads, -1, size)

        return Rows(
            joined(left.top, right.top, 1),
            joined(left.mass, right.mass, 1),
            joined(left.total, right.total, width),
        )

    def _half(self, x: Any, width: int, number: int) -> Any:
        pairs = reshaped(x, 0, self.heads, -1, 2, self.height, width)
        return op.Gather(pairs, op.Constant(value_int=number), axis=3)


def _mixed(slots: Any, shares: Any, values: Any, height: int) -> Any:
    """(slots sharesᵀ) values over groups ``[B, H, g, h, D]``."""
    if height >= _BROADCAST_BELOW:
        return op.MatMul(op.MatMul(slots, swapped(shares, 5)), values)
    pairs = op.Mul(op.Unsqueeze(slots, axes(4)), op.Unsqueeze(shares, axes(3)))
    weights = op.ReduceSum(pairs, axes(-1), keepdims=1)  # [B, H, g, h, h, 1]
    return op.ReduceSum(op.Mul(weights, op.Unsqueeze(values, axes(3))), axes(-2), keepdims=0)


def _tiles(x: Any, heads: int, width: int) -> Any:
    return reshaped(x, 0, heads, -1, TILE, width)


def _flat_repeated(x: Any, of: int, heads: int, width: int) -> Any:
    """``[B, Hkv, D] -> [B, H, D]``."""
    if of == heads:
        return x
    return reshaped(repeated(op.Unsqueeze(x, axes(2)), of, heads, width), 0, heads, width)
