"""An online softmax per row, as nodes: what parts of the keys give, merged under one maximum."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from lln.ops.common.onnx.values import axes, filled, finite_or_zero, op


@dataclass(frozen=True)
class Rows:
    """Maximum, mass relative to it ``[…, n, 1]``, and weighted sum of values ``[…, n, E]``."""

    top: Any
    mass: Any
    total: Any

    def map(self, change: Callable[[Any, int], Any], width: int) -> Rows:
        """Change all three alike; ``change`` gets each and its last size, ``width`` of the sums."""
        return Rows(change(self.top, 1), change(self.mass, 1), change(self.total, width))

    def merge(self, other: Rows) -> Rows:
        """Put the rows of other keys under the same maximum."""
        top = op.Max(self.top, other.top)
        shift = finite_or_zero(top)
        mine, theirs = op.Exp(op.Sub(self.top, shift)), op.Exp(op.Sub(other.top, shift))
        mass = op.Add(op.Mul(self.mass, mine), op.Mul(other.mass, theirs))
        return Rows(top, mass, op.Add(op.Mul(self.total, mine), op.Mul(other.total, theirs)))

    def normalized(self) -> tuple[Any, Any]:
        """Output, and the logarithm of the normaliser; 0 and −inf in rows that see nothing."""
        blind = op.Equal(self.mass, 0.0)
        out = op.Div(self.total, filled(self.mass, blind, 1.0))
        return out, op.Add(finite_or_zero(self.top), op.Log(self.mass))


def slot_weights(scores: Any) -> tuple[Any, Any]:
    """exp(s − max s) along the last axis, and the maximum, −inf where there is none."""
    top = op.ReduceMax(scores, axes(-1), keepdims=1)
    return op.Exp(op.Sub(scores, finite_or_zero(top))), top


def read_rows(scores: Any, means: Any) -> Rows:
    """The rows of scores α q + L that read M."""
    slots, top = slot_weights(scores)
    return Rows(top, op.ReduceSum(slots, axes(-1), keepdims=1), op.MatMul(slots, means))
