"""Registers a Python function as a torch operator: opaque to the compiler, own gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor


def register(
    name: str,
    schema: str,
    compute: Callable[..., Any],
    shapes: Callable[..., Any],
    *,
    save: Callable[..., None] | None = None,
    differentiate: Callable[..., Any] | None = None,
) -> Callable[..., Any]:
    """``lln::<name>_eager``, computed by ``compute`` with autocast off.

    ``shapes`` gives empty results for tracing; ``save`` and ``differentiate`` are the two halves of
    the gradient, as in ``torch.library.register_autograd``.
    """

    def without_autocast(*args):
        device = next(arg.device.type for arg in args if isinstance(arg, Tensor))
        with torch.autocast(device, enabled=False):
            return compute(*args)

    op = torch.library.custom_op(
        f"lln::{name}_eager", without_autocast, mutates_args=(), schema=schema
    )
    op.register_fake(shapes)
    if differentiate is not None:
        op.register_autograd(differentiate, setup_context=save)
    return op
