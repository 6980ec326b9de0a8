"""What every launcher needs from its tensors."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor


def rows_contiguous(x: Tensor) -> Tensor:
    """x with contiguous rows, copied only if they are not: the kernels take any other stride."""
    return x if x.stride(-1) == 1 or x.shape[-1] == 1 else x.contiguous()


def empty_rows(like: Tensor, width: int) -> Tensor:
    """Uninitialised [B, H, N, width] in the memory order of ``like``.

    A transposed projection [B, N, H, D] gets an output of the same order, so that merging the
    heads afterwards copies nothing.
    """
    b, h, n, _ = like.shape
    if like.stride(1) < like.stride(2):
        return like.new_empty((b, n, h, width)).transpose(1, 2)
    return like.new_empty((b, h, n, width))


def rows_like(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Uninitialised gradients of tensors like q, k and v, each in the memory order of its own."""
    return tuple(empty_rows(x, x.shape[-1]) for x in tensors)


def floats(like: Tensor, *shape: int) -> Tensor:
    """Uninitialised float32 on the device of ``like``."""
    return like.new_empty(shape, dtype=torch.float32)


def on_device(x: Tensor) -> AbstractContextManager[Any]:
    """Launch on the device of ``x``; free when it is the current one."""
    if x.is_cuda and x.device.index != torch.cuda.current_device():
        return torch.cuda.device(x.device)
    return nullcontext()


def contiguous_mask(mask: Tensor | None) -> Tensor | None:
    """A mask [B, tokens] with contiguous tokens, copied only if they are not."""
    return mask if mask is None or mask.stride(-1) == 1 else mask.contiguous()


def mask_stride(mask: Tensor | None) -> int | None:
    """Distance between the masks of two samples; None without a mask."""
    return None if mask is None else mask.stride(0)
