"""Launchers of LLN+Diag with blocks of more than a tile and with windows that overlap."""

from __future__ import annotations

import math
from typing import Any

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
from lln.ops.common.kernels.library import floats, mask_stride, rows_contiguous
from lln.ops.common.kernels.tiles import DIAG_PROGRAM, Tile, fused_backward, padded, split, tile
from lln.ops.linear.kernels.launch import Merged, merge_gradients, read_backward
from lln.ops.window.kernels.blocks.launch import empty_diag_lse
from lln.ops.window.kernels.blocks.wide_backward_kernels import wide_dkdv_kernel, wide_dq_kernel
from lln.ops.window.kernels.blocks.wide_kernels import wide_kernel

Window = tuple[int, int, float]  # block, overlap, scale
MOST_UNROLLED = 128  # tokens of a window that are met without a loop: the next window loads ahead
LEAST_SLOPE = 1e-30  # of scores; 0 would make −inf, a key that is not there, no number


def wide(
    q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None, alpha: Tensor, mix: Tensor | None,
    window: Window, *, state: Merged | None, parts: Tensor | None, count: int, save: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """(out, lse) of both branches; the linear one is read from ``state`` or from ``parts``."""
    rows, launch = _wide_plan(
        layout(q), layout(k), layout(v), mask_stride(key_mask), alpha.stride(), window, count, save
    )
    out = q.new_empty_strided(*rows)
    lse = empty_diag_lse(q, linear=True) if save else None
    launch(q, k, v, out, lse, key_mask, alpha, mix, parts, *(state or (None, None, None)))
    return out, lse


def _fitted(queries: int, keys: int, window: Window) -> tuple[int, int]:
    """Queries of a tile, all of one block, and its keys, no more than a window has."""
    block, overlap, _ = window
    queries, keys = min(queries, padded(block)), min(keys, padded(block + 2 * overlap))
    if block % queries:
        queries = min(queries, 64)
    if block % keys or overlap % keys:
        keys = min(keys, 64)
    return queries, keys


def _narrowed(t: Tile, rows: int) -> Tile:
    """A tile of fewer rows: four warps for every 64, more would do the same work twice."""
    return t._replace(rows=rows, warps=min(t.warps, max(4, rows // 16)))


def _regular(queries: int, keys: int, tokens: int, window: Window) -> tuple[bool, bool]:
    """Whether all tiles are full and seen as a whole, and whether all windows are alike, too."""
    block, overlap, _ = window
    full = not (block % queries or tokens % queries or block % keys or tokens % keys)
    full = full and overlap % keys == 0
    return full, full and not overlap and tokens % block == 0


def _unrolled(alike: bool, block: int, step: int) -> int:
    """The tiles that each tile meets, where these are always as many, and few; else 0."""
    return block // step if alike and block <= MOST_UNROLLED else 0


def _tiles(rows: int, tokens: int, block: int) -> tuple[int, int]:
    """Tiles of queries in a block, and in all."""
    per_block = steps(block, rows)
    return per_block, tokens // block * per_block + steps(tokens % block, rows)


@planned
def _wide_plan(
    q: Layout, k: Layout, v: Layout, mask: int | None, alpha: tuple[int, ...], window: Window,
    count: int, save: bool,
) -> tuple[Any, Launch]:  # fmt: skip
    ((b, heads, tokens, d), q_strides, dtype, device), (_, kv_heads, _, e) = q, v[0]
    block, overlap, scale = window
    short = block <= MOST_UNROLLED and not overlap
    t = tile("wide" if short else "wide_loop", d, e, dtype, device)
    rows, columns = _fitted(t.rows, t.columns, window)
    t = _narrowed(t, rows)
    full, same = _regular(rows, columns, tokens, window)
    per_block, tiles = _tiles(rows, tokens, block)
    pieces, span = split(tiles * rows, b * heads, t, device, program=DIAG_PROGRAM)
    out = rows_of(q, e)
    every = q_strides, k[1], v[1], out[1]
    return out, Launch(
        wide_kernel, (pieces, b * heads),
        ((*row_strides(*every), mask or 0, alpha), heads, heads // kv_heads, tokens, block, overlap,
         per_block, tiles, span // rows, count, max(abs(scale) * math.log2(math.e), LEAST_SLOPE)),
        D=d, E=e, ROWS=rows, COLS=columns,
        UNROLL=_unrolled(t.ahead and same, block, columns), FULL=full,
        FLIP=scale < 0, SAVE=save, **t.options,
    )  # fmt: skip


def wide_backward(
    dout: Tensor, out: Tensor, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None,
    alpha: Tensor, beta: Tensor, mix: Tensor | None, lse: Tensor, state: Merged, window: Window, *,
    slopes: tuple[bool, bool, bool],
) -> tuple[Any, ...]:  # fmt: skip
    """(dq, dk, dv, dalpha, dbeta, dmix); slopes that are not asked for are None."""
    dout, out = rows_contiguous(dout), rows_contiguous(out)
    given = layout(q), layout(k), layout(v), dout.stride(), mask_stride(key_mask)
    dq_rows, parts_shape, pieces, launch = _wide_dq_plan(
        *given, out.stride(), alpha.stride(), window
    )
    need_alpha, need_beta, need_mix = slopes
    dq, parts = q.new_empty_strided(*dq_rows), None
    if fused_backward(q.shape[-1], v.shape[-1]):
        parts = floats(q, *parts_shape)
    delta = floats(q, *q.shape[:3])
    dalpha = floats(q, *q.shape[:2], pieces) if need_alpha else None
    dmix = floats(q, *q.shape[:2], pieces) if need_mix else None
    launch(
        q, k, v, out, dout, lse, key_mask, alpha, mix, state.log_mass, state.mean, dq, delta, parts,
        dalpha, dmix,
    )  # fmt: skip
    if parts is None:
        _, parts, _ = read_backward(
            dout, q, alpha, lse, state.log_mass, state.mean, parts_only=True, mix=mix, share=0.5
        )
    gradient = parts if parts.shape[1] == 1 else merge_gradients(parts)
    dk_rows, dv_rows, pieces, launch = _wide_dkdv_plan(*given, beta.stride(), window)
    dk, dv = k.new_empty_strided(*dk_rows), v.new_empty_strided(*dv_rows)
    dbeta = floats(k, *k.shape[:2], pieces) if need_beta else None
    launch(q, k, v, dout, lse, delta, key_mask, beta, mix, state.norm, gradient, dk, dv, dbeta)
    dalpha, dbeta, dmix = (
        x if x is None else x.sum(over) for x, over in ((dalpha, -1), (dbeta, -1), (dmix, (0, -1)))
    )
    return dq, dk, dv, dalpha, dbeta, dmix


@planned
def _wide_dq_plan(
    q: Layout, k: Layout, v: Layout, dout: tuple[int, ...], mask: int | None,
    out: tuple[int, ...], alpha: tuple[int, ...], window: Window,
) -> tuple[Any, tuple[int, int, int], int, Launch]:  # fmt: skip
    ((b, heads, tokens, d), q_strides, dtype, device), (_, kv_heads, _, e) = q, v[0]
    block, overlap, scale = window
    t = tile("wide_dq", d, e, dtype, device)
    rows, columns = _fitted(t.rows, t.columns, window)
    t = _narrowed(t, rows)
    full, _ = _regular(rows, columns, tokens, window)
    per_block, tiles = _tiles(rows, tokens, block)
    pieces, span = split(tiles * rows, b * heads, t, device, merged=True, program=DIAG_PROGRAM)
    dq, group = rows_of(q, d), heads // kv_heads
    every = q_strides, k[1], v[1], out, dout, dq[1]
    launch = Launch(
        wide_dq_kernel, (pieces, b * heads),
        ((*row_strides(*every), mask or 0, alpha), heads, group, tokens, block, overlap, per_block,
         tiles, span // rows, scale),
        D=d, E=e, ROWS=rows, COLS=columns, FULL=full, **t.options,
    )  # fmt: skip
    return dq, (b * kv_heads, group * pieces, d * (e + 1)), pieces, launch


@planned
def _wide_dkdv_plan(
    q: Layout, k: Layout, v: Layout, dout: tuple[int, ...], mask: int | None,
    beta: tuple[int, ...], window: Window,
) -> tuple[Any, Any, int, Launch]:  # fmt: skip
    ((b, heads, tokens, d), q_strides, dtype, device), (_, kv_heads, _, e) = q, v[0]
    block, overlap, scale = window
    t = tile("wide_dkdv", d, e, dtype, device)
    rows, columns = _fitted(t.columns, t.rows, window)
    t = _narrowed(t, columns)
    full, same = _regular(rows, columns, tokens, window)
    group, tiles = heads // kv_heads, steps(tokens, columns)
    pieces, span = split(tiles * columns, b * kv_heads, t, device, program=DIAG_PROGRAM)
    dk, dv = rows_of(k, d), rows_of(v, e)
    every = q_strides, k[1], v[1], dout, dk[1], dv[1]
    launch = Launch(
        wide_dkdv_kernel, (pieces, b * kv_heads),
        ((*row_strides(*every), mask or 0, beta), kv_heads, tokens, block, overlap, tiles,
         span // columns, scale),
        D=d, E=e, ROWS=rows, COLS=columns, GROUP=group,
        UNROLL=_unrolled(t.ahead and same and group == 1, block, rows), FULL=full,
        WHOLE=block % rows == 0, **t.options,
    )  # fmt: skip
    return dk, dv, pieces, launch
