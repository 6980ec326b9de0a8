"""Near keys by torch's flex_attention: a fused kernel with the logarithm of its normaliser.

For CUDA, until near and far are fused in kernels of our own. The mask of blocks is made from the
windows, in O((N / 128)²) small integers; flex_attention compiles the rest.
"""

from __future__ import annotations

import functools
import warnings
from typing import Any

import torch
from torch import Tensor

from lln.protocols import HALF

BLOCK = 128  # rows and columns of a tile of flex_attention


def refuses(q: Tensor, k: Tensor, v: Tensor) -> str | None:
    """Why flex_attention cannot serve these tensors, or None."""
    if not q.is_cuda or q.dtype not in HALF:
        return f"q is {q.dtype} on {q.device.type}; flex_attention is used for half precision CUDA"
    if q.shape[2] != k.shape[2] or q.shape[2] < BLOCK:
        return f"{q.shape[2]} queries of {k.shape[2]} keys; flex_attention takes equally many"
    widths = {q.shape[3], v.shape[3]}
    if not widths <= {16, 32, 64, 128, 256}:
        return f"widths {sorted(widths)} are not powers of two from 16 on"
    return None


def near(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    *,
    block: int,
    overlap: int,
    sinks: int,
    scale: float,
    key_mask: Tensor | None,
    is_causal: bool,
) -> tuple[Tensor, Tensor]:
    """Softmax attention over windows and sinks, and logsumexp of its scores.

    Sinks are the first keys, so not together with a mask, under which they may stand anywhere.
    """
    from torch.nn.attention.flex_attention import flex_attention

    mask = _mask(q, block, overlap, sinks, key_mask, is_causal)
    options = {"scale": scale, "enable_gqa": q.shape[1] != k.shape[1]}
    if torch.compiler.is_compiling() or not q.is_cuda:
        return _with_logarithm(flex_attention, q, k, v, mask, options)
    with warnings.catch_warnings():  # the compiler looks at the gradients of its inputs
        warnings.filterwarnings("ignore", "The .grad attribute of a Tensor that is not a leaf")
        return _with_logarithm(_compiled(), q, k, v, mask, options)


def _with_logarithm(attend: Any, q: Tensor, k: Tensor, v: Tensor, mask: Any, options: dict) -> Any:
    """Call it for output and logsumexp, as this version of torch wants to be asked."""
    try:
        from torch.nn.attention.flex_attention import AuxRequest
    except ImportError:
        return attend(q, k, v, block_mask=mask, return_lse=True, **options)
    out, extra = attend(q, k, v, block_mask=mask, return_aux=AuxRequest(lse=True), **options)
    return out, extra.lse


@functools.cache
def _compiled() -> Any:
    from torch.nn.attention.flex_attention import flex_attention

    return torch.compile(flex_attention, dynamic=False)


def _mask(
    q: Tensor, block: int, overlap: int, sinks: int, key_mask: Tensor | None, is_causal: bool
) -> Any:
    """Which tiles hold near keys, and which keys of theirs are near."""
    from torch.nn.attention.flex_attention import BlockMask

    tokens = q.shape[2]
    right = 0 if is_causal else overlap

    def is_near(b: Tensor, h: Tensor, i: Tensor, j: Tensor) -> Tensor:
        start = i // block * block
        near = (j >= start - overlap) & (j < start + block + right)
        if sinks:
            near = near | (j < sinks)
        if is_causal:
            near = near & (j <= i)
        return near if key_mask is None else near & key_mask[b, j]

    count = -(-tokens // BLOCK)
    rows = torch.arange(count, device=q.device)
    first = (rows * BLOCK // block * block - overlap).clamp(min=0) // BLOCK
    end = (rows * BLOCK + BLOCK - 1).clamp(max=tokens - 1) // block * block + block + right
    if is_causal:
        end = torch.minimum(end, rows * BLOCK + BLOCK)
    last = (end.clamp(max=tokens) - 1) // BLOCK
    number = last - first + 1
    tiles = (first[:, None] + rows) % count
    if sinks:
        extra = (first > 0) & (number < count)
        tiles = torch.where((rows == number[:, None]) & extra[:, None], 0, tiles)
        number = number + extra
    shape = (1, 1, count)
    return BlockMask.from_kv_blocks(
        number.to(torch.int32).view(shape),
        tiles.to(torch.int32).view(*shape, count),
        BLOCK_SIZE=BLOCK,
        mask_mod=is_near,
        seq_lengths=(tokens, tokens),
    )
