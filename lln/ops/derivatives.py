"""What the operators know of their derivatives: the first, backwards.

torch.library passes by forward-mode derivatives without a word, and calls an operator without a
gradient a constant: both would be wrong numbers. Here they are errors.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.autograd import forward_ad

from lln.ops import transforms

REMEDY = 'impl="reference" has it, in O(N²) time and memory'


def without_tangents(op: Callable[..., Any]) -> Callable[..., Any]:
    """An operator that raises at tensors with a forward-mode derivative, which it would drop."""

    def call(*args: Any) -> Any:
        if forward_ad._current_level >= 0 and any(map(_has_tangent, args)):
            raise NotImplementedError(
                f"LLN in linear time has no forward-mode derivative (jvp, dual tensors); {REMEDY}"
            )
        return transforms.call(op, *args)

    return call


def _has_tangent(x: Any) -> bool:
    return isinstance(x, Tensor) and forward_ad.unpack_dual(x).tangent is not None


def once(differentiate: Callable[..., Any]) -> Callable[..., Any]:
    """A gradient ``(ctx, *d_out)`` whose results raise where they are differentiated again."""

    def backward(ctx: Any, *gradients: Tensor | None) -> Any:
        if not torch.is_grad_enabled():
            return differentiate(ctx, *gradients)
        with torch.no_grad():
            found = differentiate(ctx, *gradients)
        known = [x for x in (*ctx.saved_tensors, *gradients) if x is not None and x.requires_grad]
        several = isinstance(found, tuple)
        last = tuple(
            x if x is None or not known else _Last.apply(x, *known)
            for x in (found if several else (found,))
        )
        return last if several else last[0]

    return backward


class _Last(torch.autograd.Function):
    """Its first input, as if it came from the others by a function without a gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, *known: Tensor) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, ...], output: Tensor) -> None:
        """Nothing to keep."""

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> Any:
        raise NotImplementedError(f"LLN in linear time has no second derivative; {REMEDY}")
