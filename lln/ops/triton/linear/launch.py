"""Launchers of the summarize and read kernels: from tensors to grids, nothing differentiable.

Every function takes q [B, H, N, D], k [B, Hkv, M, D], v [B, Hkv, M, E] with contiguous rows and
at least one token, and allocates what the kernels write.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
from torch import Tensor

from lln.ops.triton.library import (
    alike,
    contiguous_mask,
    empty_rows,
    floats,
    mask_stride,
    on_device,
    rows_contiguous,
    strides,
)
from lln.ops.triton.linear.read_kernels import read_backward_kernel, read_kernel
from lln.ops.triton.linear.summarize_kernels import (
    merge_gradients_kernel,
    merge_kernel,
    summarize_backward_kernel,
    summarize_kernel,
)
from lln.ops.triton.tiles import most_gradient_parts, padded, split, tile, value_block


class Merged(NamedTuple):
    """A state in memory, float32.

    ``log_mass`` is a natural logarithm where users see it (``natural``), a base-2 one inside the
    fused ops. ``norm`` holds what the backward pass of the keys needs: the base-2 peak of the
    features and the mass relative to it.
    """

    log_mass: Tensor  # [B, Hkv, D]
    mean: Tensor  # [B, Hkv, D, E]
    norm: Tensor  # [B, Hkv, 2, D]


def empty_state(k: Tensor, v: Tensor) -> Merged:
    """Uninitialised memory for the state of k, v."""
    (b, heads, _, d), e = k.shape, v.shape[-1]
    shapes = (b, heads, d), (b, heads, d, e), (b, heads, 2, d)
    return Merged(*(floats(k, *shape) for shape in shapes))


def empty_lse(q: Tensor) -> Tensor:
    """Uninitialised logsumexp of every query: one number, or two for float32 (PRECISE)."""
    b, heads, queries, _ = q.shape
    return floats(q, b, heads, 2 if precise(q) else 1, queries)


def precise(q: Tensor) -> bool:
    """Whether logsumexp is kept as two numbers."""
    return q.dtype == torch.float32


def summarize_parts(
    k: Tensor, v: Tensor, beta: Tensor, key_mask: Tensor | None, normalize_keys: bool,
    segments: tuple[int, int] | None = None,
) -> tuple[Tensor, int]:  # fmt: skip
    """Partial states of every key head, and their number per head.

    ``segments`` = (count, span) fixes the parts: the first ``count`` segments of ``span`` keys.
    """
    (b, heads, keys, d), e = k.shape, v.shape[-1]
    t = tile("summarize", d, e, k.dtype, k.device)
    block = value_block(d, e, k.dtype, t)
    columns = triton.cdiv(e, block)
    count, span = segments or split(keys, b * heads * columns, t, k.device, merged=True)
    keys = min(keys, count * span)
    parts = floats(k, b * heads, count, d * (e + 2))
    with on_device(k):
        summarize_kernel[(count, b * heads, columns)](
            k, v, beta, key_mask, parts, None, None,
            *strides(k), *strides(v), *beta.stride(), mask_stride(key_mask), heads, keys, span,
            D=d, E=e, BD=padded(d), BE=block, ROWS=t.rows,
            FULL=keys % t.rows == 0 and span % t.rows == 0, HAS_MASK=key_mask is not None,
            NORMALIZE=normalize_keys, ALIKE=alike(k, v), **t.options,
        )  # fmt: skip
    return parts, count


def merge(parts: Tensor, count: int, state: Merged, *, natural: bool = False) -> None:
    """Fill ``state`` from the parts of its heads."""
    b, heads, d, e = state.mean.shape
    block = min(padded(e), 128)
    with on_device(parts):
        merge_kernel[(b * heads, triton.cdiv(d, 4), triton.cdiv(e, block))](
            parts, *state, None, 0, heads, count,
            D=d, E=e, BD=4, BE=block, MANY=8, NATURAL=natural, num_warps=4,
        )  # fmt: skip


def read(
    q: Tensor, alpha: Tensor, state: Merged | None, *, parts: Tensor | None = None, count: int = 0,
    kv_heads: int, e: int, save: bool, natural: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(out, lse) from a merged state, or from parts (then ``state`` is filled if ``save``)."""
    b, heads, queries, d = q.shape
    t = tile("read", d, e, q.dtype, q.device)
    block = value_block(d, e, q.dtype, t)
    columns = triton.cdiv(e, block)
    pieces, span = split(queries, b * heads * columns, t, q.device)
    out = empty_rows(q, e)
    lse = empty_lse(q) if save else None
    with on_device(q):
        read_kernel[(pieces, b * heads, columns)](
            q, out, lse, alpha, parts, *(state or (None, None, None)), None, None,
            *strides(q), *strides(out), *((0, 0) if lse is None else lse.stride()[:2]),
            *alpha.stride(),
            heads, heads // kv_heads, queries, span, count,
            D=d, E=e, BD=padded(d), BE=block, ROWS=t.rows, FULL=queries % t.rows == 0,
            NATURAL=natural, PRECISE=precise(q), SAVE=save, ALIKE=alike(q, out),
            **t.options,
        )  # fmt: skip
    return out, lse


def read_backward(
    dout: Tensor, q: Tensor, alpha: Tensor, lse: Tensor, log_mass: Tensor, mean: Tensor,
    *, need_alpha: bool = False, natural: bool = False, parts_only: bool = False,
    mix: Tensor | None = None, share: float = 1.0,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(dq, parts [B·Hkv, count, D·E + D] of (dM, g), dalpha or None); ``parts_only`` skips dq."""
    (b, heads, queries, d), (_, kv_heads, _, e) = q.shape, mean.shape
    dout = rows_contiguous(dout)
    t = tile("read_backward", d, e, q.dtype, q.device)
    block = value_block(d, e, q.dtype, t)
    columns = triton.cdiv(e, block)
    pieces, span = split(queries, b * heads * columns, t, q.device, merged=True)
    dq = q.new_empty((0, 0, 0, 0)) if parts_only else empty_rows(q, d)
    group = heads // kv_heads
    parts = floats(q, b * kv_heads, group * pieces, d * (e + 1))
    slopes = floats(q, b, heads, pieces) if need_alpha else None
    with on_device(q):
        read_backward_kernel[(pieces, b * heads, columns)](
            q, dout, lse, alpha, mix, log_mass, mean, None if parts_only else dq, parts, slopes,
            None, None, *strides(q), *strides(dout), *strides(dq), *lse.stride()[:2],
            *alpha.stride(),
            heads, group, queries, span, share,
            D=d, E=e, BD=padded(d), BE=block, ROWS=t.rows, FULL=queries % t.rows == 0,
            NATURAL=natural, PRECISE=precise(q), ALIKE=alike(q, dout, dq),
            **t.options,
        )  # fmt: skip
    return dq, parts, None if slopes is None else slopes.sum(-1)


def merge_gradients(parts: Tensor) -> Tensor:
    """Σ over the parts of each key head: [B·Hkv, 1, D·E + D]."""
    heads, count, size = parts.shape
    total = parts.new_empty((heads, 1, size))
    with on_device(parts):
        merge_gradients_kernel[(heads, triton.cdiv(size, 256))](
            parts, total, None, 0, 1, 1, count, size, BLOCK=256, MANY=8, num_warps=4
        )
    return total


def few_parts(parts: Tensor, d: int, e: int) -> Tensor:
    """The gradient parts themselves if every reader can add them for itself, else their sum."""
    return merge_gradients(parts) if parts.shape[1] > most_gradient_parts(d, e) else parts


def summarize_backward(
    parts: Tensor, k: Tensor, v: Tensor, beta: Tensor, key_mask: Tensor | None,
    norm: Tensor, *, normalize_keys: bool, need_beta: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(dk, dv, dbeta or None) from the parts of (dM, g)."""
    (b, heads, keys, d), e = k.shape, v.shape[-1]
    parts = few_parts(parts, d, e)
    t = tile("summarize_backward", d, e, k.dtype, k.device)
    block = value_block(d, e, k.dtype, t)
    pieces, span = split(keys, b * heads, t, k.device)
    dk, dv = empty_rows(k, d), empty_rows(v, e)
    slopes = floats(k, b, heads, pieces) if need_beta else None
    with on_device(k):
        summarize_backward_kernel[(pieces, b * heads)](
            k, v, beta, key_mask, norm, parts, dk, dv, slopes, None, None,
            *strides(k), *strides(v), *strides(dk), *strides(dv), *beta.stride(),
            mask_stride(key_mask), heads, keys, span, parts.shape[1],
            D=d, E=e, BD=padded(d), BE=block, ROWS=t.rows,
            FULL=keys % t.rows == 0, HAS_MASK=key_mask is not None, NORMALIZE=normalize_keys,
            ALIKE=alike(k, v, dk, dv), **t.options,
        )  # fmt: skip
    return dk, dv, None if slopes is None else slopes.sum(-1)


def prepared(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Any:
    """q, k, v with contiguous rows and the mask with contiguous keys: views wherever possible."""
    return rows_contiguous(q), rows_contiguous(k), rows_contiguous(v), contiguous_mask(key_mask)
