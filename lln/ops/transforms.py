"""torch.func over the operators: samples of a vmap join the batch, and grad finds the gradient.

Left to itself, torch.library calls an operator once per sample, and the autograd.Function that it
makes of a gradient has no ``setup_context``, without which torch.func.grad refuses it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

_FUNCTIONS: dict[Any, type[torch.autograd.Function]] = {}


def join_batches(op: Callable[..., Any]) -> Callable[..., Any]:
    """The vmap rule of an operator all of whose tensors begin with the batch.

    For ``torch.library.register_vmap``.
    """

    def rule(info: Any, in_dims: tuple[int | None, ...], *args: Any) -> tuple[Any, Any]:
        count = info.batch_size
        joined = [
            _join(x, dim, count) if isinstance(x, Tensor) else x
            for x, dim in zip(args, in_dims, strict=True)
        ]
        out = op(*joined)
        if isinstance(out, Tensor):
            return out.unflatten(0, (count, -1)), 0
        return tuple(x.unflatten(0, (count, -1)) for x in out), (0,) * len(out)

    return rule


def _join(x: Tensor, dim: int | None, count: int) -> Tensor:
    """``[count, B, ...]`` to ``[count·B, ...]``, whichever dimension the samples are in."""
    stacked = x.expand(count, *x.shape) if dim is None else x.movedim(dim, 0)
    return stacked.flatten(0, 1)


def let_grad_find(
    op: Callable[..., Any], save: Callable[..., None], backward: Callable[..., Any]
) -> None:
    """Have :func:`call` give this gradient to torch.func: arguments as of ``register_autograd``."""

    class Transformable(torch.autograd.Function):
        generate_vmap_rule = True

        @staticmethod
        def forward(*args: Any) -> Any:
            return op(*args)

        @staticmethod
        def setup_context(ctx: Any, inputs: tuple[Any, ...], output: Any) -> None:
            save(ctx, inputs, output)

    Transformable.backward = staticmethod(backward)
    _FUNCTIONS[op] = Transformable


def active() -> bool:
    """Whether a function of torch.func is at work; not where the compiler traces it."""
    return not torch.compiler.is_compiling() and torch._C._are_functorch_transforms_active()


def call(op: Callable[..., Any], *args: Any) -> Any:
    """An operator, inside and outside of torch.func."""
    function = _FUNCTIONS.get(op) if active() else None
    return op(*args) if function is None else function.apply(*args)
