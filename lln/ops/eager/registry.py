"""Registers a Python function as a torch operator: opaque to the compiler, own gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lln.ops.arguments import no_autocast
from lln.ops.derivatives import once, without_tangents
from lln.ops.transforms import join_batches, let_grad_find

# Defined through a Library: torch.library.custom_op would load the compiler at the first call.
_LIBRARY = torch.library.Library("lln", "FRAGMENT")


def register(
    name: str,
    schema: str,
    compute: Callable[..., Any],
    shapes: Callable[..., Any],
    *,
    save: Callable[..., None] | None = None,
    differentiate: Callable[..., Any] | None = None,
    batched: bool = True,
) -> Callable[..., Any]:
    """``lln::<name>_eager``, computed by ``compute`` with autocast off.

    ``shapes`` gives empty results for tracing; ``save`` and ``differentiate`` are the two halves of
    the gradient, as in ``torch.library.register_autograd``; ``batched`` says that all tensors begin
    with the batch.
    """

    def without_autocast(*args):
        with no_autocast(next(arg for arg in args if isinstance(arg, Tensor))):
            return compute(*args)

    full_name = f"lln::{name}_eager"
    _LIBRARY.define(f"{name}_eager{schema}")
    _LIBRARY.impl(f"{name}_eager", without_autocast, "CompositeExplicitAutograd")
    torch.library.register_fake(full_name, shapes, lib=_LIBRARY)
    op = getattr(torch.ops.lln, f"{name}_eager").default
    if batched:
        torch.library.register_vmap(full_name, join_batches(op), lib=_LIBRARY)
    if save is not None and differentiate is not None:
        backward = once(differentiate)
        torch.library.register_autograd(full_name, backward, setup_context=save, lib=_LIBRARY)
        let_grad_find(op, save, backward)
    return without_tangents(op)
