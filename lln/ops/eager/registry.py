"""Registers a Python function as a torch operator: opaque to the compiler, own gradient."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from lln.ops.arguments import no_autocast
from lln.ops.derivatives import once, without_tangents

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
) -> Callable[..., Any]:
    """``lln::<name>_eager``, computed by ``compute`` with autocast off.

    ``shapes`` gives empty results for tracing; ``save`` and ``differentiate`` are the two halves of
    the gradient, as in ``torch.library.register_autograd``.
    """

    def without_autocast(*args):
        with no_autocast(next(arg for arg in args if isinstance(arg, Tensor))):
            return compute(*args)

    op = f"lln::{name}_eager"
    _LIBRARY.define(f"{name}_eager{schema}")
    _LIBRARY.impl(f"{name}_eager", without_autocast, "CompositeExplicitAutograd")
    torch.library.register_fake(op, shapes, lib=_LIBRARY)
    if differentiate is not None:
        torch.library.register_autograd(op, once(differentiate), setup_context=save, lib=_LIBRARY)
    return without_tangents(getattr(torch.ops.lln, f"{name}_eager").default)
