"""summarize, read and merge as nodes, as :mod:`lln.ops.linear.eager_state` computes them."""

from __future__ import annotations

from typing import Any

from lln.ops.common.onnx.values import (
    NOTHING,
    Floats,
    MaybeBools,
    MaybeFloats,
    axes,
    filled,
    finite_or_zero,
    hidden,
    is_nothing,
    length,
    narrow,
    op,
    per_head,
    reshaped,
    swapped,
    without_dropout,
)
from lln.ops.common.onnx.values import wide as wide_input


def summarize(
    k: Floats,
    v: Floats,
    beta: Floats,
    key_mask: MaybeBools,
) -> Any:
    """L ``[B, Hkv, D]`` and M ``[B, Hkv, D, E]``."""
    if k.shape[2] == 0:
        return _empty(k, v)
    features = key_features(wide_input(k, v), beta, key_mask)
    return state_of(features, hidden(wide_input(v, k), key_mask), 4)


def read(
    q: Floats,
    alpha: Floats,
    log_mass: Floats,
    mean: Floats,
    slot_dropout: MaybeFloats,
    wide: bool,
) -> Any:
    """softmax_l(α q + L) · M; 0 for the empty state, whose means are 0."""
    without_dropout(slot_dropout)
    empty = is_nothing(op.ReduceMax(log_mass, axes(-1), keepdims=1))
    level = op.Unsqueeze(filled(log_mass, empty, 0.0), axes(2))
    rows = op.Mul(wide_input(q, mean), per_head(alpha))
    # the rows of all heads that share a key head, side by side
    rows = reshaped(rows, 0, log_mass.shape[1], -1, q.shape[3])
    out = op.MatMul(op.Softmax(op.Add(rows, level), axis=-1), mean)
    return narrow(reshaped(out, 0, q.shape[1], -1, mean.shape[3]), (q, mean), wide)


def state_of(features: Any, values: Any, rank: int) -> tuple[Any, Any]:
    """L and M of keys along the last axis but one of ``rank``; −inf and 0 without a key."""
    shift = finite_or_zero(op.ReduceMax(features, axes(-2), keepdims=1))
    weights = op.Exp(op.Sub(features, shift))
    mass = op.ReduceSum(weights, axes(-2), keepdims=0)
    total = op.MatMul(swapped(weights, rank), values)
    mean = op.Div(total, op.Unsqueeze(filled(mass, op.Equal(mass, 0.0), 1.0), axes(-1)))
    return op.Add(op.Squeeze(shift, axes(-2)), op.Log(mass)), mean


def merge(log_mass: Any, mean: Any, other_mass: Any, other_mean: Any) -> tuple[Any, Any]:
    """The state of the union of two disjoint sets of keys."""
    shift = finite_or_zero(op.Max(log_mass, other_mass))
    mine, theirs = op.Exp(op.Sub(log_mass, shift)), op.Exp(op.Sub(other_mass, shift))
    mass = op.Add(mine, theirs)
    some = filled(mass, op.Equal(mass, 0.0), 1.0)
    parts = ((mine, mean), (theirs, other_mean))
    shares = [op.Mul(op.Unsqueeze(op.Div(w, some), axes(-1)), m) for w, m in parts]
    return op.Add(shift, op.Log(mass)), op.Add(*shares)


def key_features(k: Any, beta: Any, key_mask: Any | None) -> Any:
    """β k_jl of wide keys; −inf where ``key_mask`` is False."""
    return hidden(op.Mul(k, per_head(beta)), key_mask, NOTHING)


def _empty(k: Any, v: Any) -> tuple[Any, Any]:
    """The state of no keys."""
    heads, width = k.shape[1], k.shape[3]
    like = wide_input(v, k)
    sizes = op.Concat(length(k, 0), axes(heads, width), axis=0)
    none = op.CastLike(op.Expand(op.Constant(value_float=NOTHING), sizes), like)
    sizes = op.Concat(sizes, axes(v.shape[3]), axis=0)
    return none, op.CastLike(op.Expand(op.Constant(value_float=0.0), sizes), like)
