"""Launchers of the summarize and read kernels: from tensors to grids, nothing differentiable.

Every function takes q [B, H, N, D], k [B, Hkv, M, D], v [B, Hkv, M, E] with contiguous rows and
at least one token, and allocates what the kernels write.
"""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lln.ops.common.kernels.launching import (
    Launch,
    Layout,
    layout,
    planned,
    row_strides,
    rows_of,
    steps,
)
from lln.ops.common.kernels.library import contiguous_mask, floats, mask_stride, rows_contiguous
from lln.ops.common.kernels.tiles import most_gradient_parts, padded, split, tile, value_block
from lln.ops.linear.kernels.read_kernels import read_backward_kernel, read_kernel
from lln.ops.linear.kernels.summarize_kernels import (
    merge_gradients_kernel,
    merge_kernel,
    summarize_backward_kernel,
    summarize_kernel,
)


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
    return Merged(floats(k, b, heads, d), floats(k, b, heads, d, e), floats(k, b, heads, 2, d))


def empty_lse(q: Tensor) -> Tensor:
    """Uninitialised logsumexp of every query: one number, or two for float32 (PRECISE)."""
    b, heads, queries, _ = q.shape
    return floats(q, b, heads, 2 if precise(q) else 1, queries)


def lse_strides(q: Layout) -> tuple[int, int]:
    """Batch and head strides of :func:`empty_lse`."""
    (_, heads, queries, _), _, dtype, _ = q
    rows = 2 if dtype == torch.float32 else 1
    return heads * rows * queries, rows * queries


def precise(q: Tensor) -> bool:
    """Whether logsumexp is kept as two numbers."""
    return q.dtype == torch.float32


def summarize_parts(
    k: Tensor, v: Tensor, beta: Tensor, key_mask: Tensor | None,
    segments: tuple[int, int] | None = None,
) -> tuple[Tensor, int]:  # fmt: skip
    """Partial states of every key head, and their number per head.

    ``segments`` = (count, span) fixes the parts: the first ``count`` segments of ``span`` keys.
    """
    shape, launch = _summarize_plan(
        layout(k), layout(v), beta.stride(), mask_stride(key_mask), segments
    )
    parts = floats(k, *shape)
    launch(k, v, beta, key_mask, parts, None, None)
    return parts, shape[1]


@planned
def _summarize_plan(
    k: Layout, v: Layout, beta: tuple[int, ...], mask: int | None,
    segments: tuple[int, int] | None,
) -> tuple[tuple[int, int, int], Launch]:  # fmt: skip
    ((b, heads, keys, d), k_strides, dtype, device), ((*_, e), v_strides, *_) = k, v
    t = tile("summarize", d, e, dtype, device)
    block = value_block(d, e, dtype, t)
    columns = steps(e, block)
    count, span = segments or split(keys, b * heads * columns, t, device, merged=True)
    keys = min(keys, count * span)
    return (b * heads, count, d * (e + 2)), Launch(
        summarize_kernel, (count, b * heads, columns),
        ((*row_strides(k_strides, v_strides), beta, mask or 0), heads, keys, span),
        D=d, E=e, BD=padded(d), BE=block, ROWS=t.rows,
        FULL=keys % t.rows == 0 and span % t.rows == 0, **t.options,
    )  # fmt: skip


def merge(parts: Tensor, count: int, state: Merged, *, natural: bool = False) -> None:
    """Fill ``state`` from the parts of its heads."""
    _merge_plan(state.mean.shape, count, natural, parts.device)(parts, *state, None)


@planned
def _merge_plan(shape: tuple[int, ...], count: int, natural: bool, _: torch.device) -> Launch:
    b, heads, d, e = shape
    block = min(padded(e), 128)
    return Launch(
        merge_kernel, (b * heads, steps(d, 4), steps(e, block)), (0, heads, count),
        D=d, E=e, BD=4, BE=block, MANY=8, NATURAL=natural, num_warps=4,
    )  # fmt: skip


def read(
    q: Tensor, alpha: Tensor, state: Merged | None, *, parts: Tensor | None = None, count: int = 0,
    kv_heads: int, e: int, save: bool, natural: bool = False,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(out, lse) from a merged state, or from parts (then ``state`` is filled if ``save``)."""
    rows, launch = _read_plan(layout(q), alpha.stride(), count, kv_heads, e, save, natural)
    out = q.new_empty_strided(*rows)
    lse = empty_lse(q) if save else None
    launch(q, out, lse, alpha, parts, *(state or (None, None, None)), None, None)
    return out, lse


@planned
def _read_plan(
    q: Layout, alpha: tuple[int, ...], count: int, kv_heads: int, e: int, save: bool, natural: bool
) -> tuple[Any, Launch]:
    (b, heads, queries, d), q_strides, dtype, device = q
    t = tile("read", d, e, dtype, device)
    block = value_block(d, e, dtype, t)
    columns = steps(e, block)
    pieces, span = split(queries, b * heads * columns, t, device)
    rows = rows_of(q, e)
    return rows, Launch(
        read_kernel, (pieces, b * heads, columns),
        ((*row_strides(q_strides, rows[1]), lse_strides(q) if save else (0, 0), alpha),
         heads, heads // kv_heads, queries, span, count),
        D=d, E=e, BD=padded(d), BE=block, ROWS=t.rows, FULL=queries % t.rows == 0,
        NATURAL=natural, PRECISE=dtype == torch.float32, SAVE=save, **t.options,
    )  # fmt: skip


def read_backward(
    dout: Tensor, q: Tensor, alpha: Tensor, lse: Tensor, log_mass: Tensor, mean: Tensor,
    *, need_alpha: bool = False, natural: bool = False, parts_only: bool = False,
    mix: Tensor | None = None, share: float = 1.0,
) -> tuple[Any, Tensor, Tensor | None]:  # fmt: skip
    """(dq, parts [B·Hkv, count, D·E + D] of (dM, g), dalpha or None).

    ``parts_only``: dq is None, too.
    """
    dout = rows_contiguous(dout)
    rows, parts_shape, slopes_shape, launch = _read_backward_plan(
        layout(q), dout.stride(), mean.shape, alpha.stride(), lse.stride(), parts_only, natural,
        share,
    )  # fmt: skip
    dq = None if parts_only else q.new_empty_strided(*rows)
    parts = floats(q, *parts_shape)
    slopes = floats(q, *slopes_shape) if need_alpha else None
    launch(q, dout, lse, alpha, mix, log_mass, mean, dq, parts, slopes, None, None)
    return dq, parts, None if slopes is None else slopes.sum(-1)


@planned
def _read_backward_plan(
    q: Layout, dout: tuple[int, ...], mean: torch.Size, alpha: tuple[int, ...],
    lse: tuple[int, ...], parts_only: bool, natural: bool, share: float,
) -> tuple[Any, tuple[int, int, int], tuple[int, int, int], Launch]:  # fmt: skip
    ((b, heads, queries, d), q_strides, dtype, device), (_, kv_heads, _, e) = q, mean
    t = tile("read_backward", d, e, dtype, device)
    block = value_block(d, e, dtype, t)
    columns = steps(e, block)
    pieces, span = split(queries, b * heads * columns, t, device, merged=True)
    rows = ((0, 0, 0, 0), (1, 1, 1, 1)) if parts_only else rows_of(q, d)
    group = heads // kv_heads
    launch = Launch(
        read_backward_kernel, (pieces, b * heads, columns),
        ((*row_strides(q_strides, dout, rows[1]), lse[:2], alpha), heads, group, queries, span,
         share),
        D=d, E=e, BD=padded(d), BE=block, ROWS=t.rows, FULL=queries % t.rows == 0,
        NATURAL=natural, PRECISE=dtype == torch.float32, **t.options,
    )  # fmt: skip
    return rows, (b * kv_heads, group * pieces, d * (e + 1)), (b, heads, pieces), launch


def merge_gradients(parts: Tensor) -> Tensor:
    """Σ over the parts of each key head: [B·Hkv, 1, D·E + D]."""
    heads, _, size = parts.shape
    total = parts.new_empty((heads, 1, size))
    _merge_gradients_plan(parts.shape, parts.device)(parts, total, None)
    return total


@planned
def _merge_gradients_plan(shape: tuple[int, ...], _: torch.device) -> Launch:
    heads, count, size = shape
    return Launch(
        merge_gradients_kernel, (heads, steps(size, 256)), (0, 1, 1, count, size),
        BLOCK=256, MANY=8, num_warps=4,
    )  # fmt: skip


def few_parts(parts: Tensor, d: int, e: int) -> Tensor:
    """The gradient parts themselves if every reader can add them for itself, else their sum."""
    return merge_gradients(parts) if parts.shape[1] > most_gradient_parts(d, e) else parts


def summarize_backward(
    parts: Tensor, k: Tensor, v: Tensor, beta: Tensor, key_mask: Tensor | None,
    norm: Tensor, *, need_beta: bool,
) -> tuple[Tensor, Tensor, Tensor | None]:  # fmt: skip
    """(dk, dv, dbeta or None) from the parts of (dM, g)."""
    parts = few_parts(parts, k.shape[-1], v.shape[-1])
    dk_rows, dv_rows, slopes_shape, launch = _summarize_backward_plan(
        layout(k), layout(v), beta.stride(), mask_stride(key_mask), parts.shape[1]
    )
    dk, dv = k.new_empty_strided(*dk_rows), v.new_empty_strided(*dv_rows)
    slopes = floats(k, *slopes_shape) if need_beta else None
    launch(k, v, beta, key_mask, norm, parts, dk, dv, slopes, None, None)
    return dk, dv, None if slopes is None else slopes.sum(-1)


@planned
def _summarize_backward_plan(
    k: Layout, v: Layout, beta: tuple[int, ...], mask: int | None, count: int
) -> tuple[Any, Any, tuple[int, int, int], Launch]:
    ((b, heads, keys, d), k_strides, dtype, device), ((*_, e), v_strides, *_) = k, v
    t = tile("summarize_backward", d, e, dtype, device)
    pieces, span = split(keys, b * heads, t, device)
    dk, dv = rows_of(k, d), rows_of(v, e)
    launch = Launch(
        summarize_backward_kernel, (pieces, b * heads),
        ((*row_strides(k_strides, v_strides, dk[1], dv[1]), beta, mask or 0), heads, keys,
         span, count),
        D=d, E=e, BD=padded(d), BE=value_block(d, e, dtype, t), ROWS=t.rows,
        FULL=keys % t.rows == 0, **t.options,
    )  # fmt: skip
    return dk, dv, (b, heads, pieces), launch


def prepared(q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Any:
    """q, k, v with contiguous rows and the mask with contiguous keys: views wherever possible."""
    return rows_contiguous(q), rows_contiguous(k), rows_contiguous(v), contiguous_mask(key_mask)
