"""Launchers of the kernels of windows and sinks."""

from __future__ import annotations

import torch
import triton
from torch import Tensor

from lln.ops.triton.joint.near_kernels import near_dkdv_kernel, near_dq_kernel, near_kernel
from lln.ops.triton.library import (
    empty_rows,
    floats,
    mask_stride,
    on_device,
    rows_contiguous,
    strides,
)
from lln.ops.triton.tiles import Tile, padded, tile

Window = tuple[int, int, float, bool]  # block, overlap, scale, causal


def _rows(t: Tile, block: int) -> int:
    """Rows of a tile of queries, which lie in one block."""
    return min(t.rows, padded(block))


def _options(t: Tile, q: Tensor, v: Tensor, sinks: Tensor | None, mask: Tensor | None) -> dict:
    d, e, count = q.shape[-1], v.shape[-1], 0 if sinks is None else sinks.shape[1]
    return {
        "D": d, "E": e, "BD": padded(d), "BE": padded(e), "COLS": t.rows, "SINKS": count,
        "HAS_MASK": mask is not None, "num_warps": t.warps, "num_stages": t.stages,
    }  # fmt: skip


def near(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, key_mask: Tensor | None, window: Window
) -> tuple[Tensor, Tensor]:
    """(out, log)."""
    (b, heads, tokens, d), (_, kv_heads, _, e) = q.shape, v.shape
    block, overlap, scale, causal = window
    t = tile("near", d, e, q.dtype, q.device)
    rows = _rows(t, block)
    out, log = empty_rows(q, e), floats(q, b, heads, tokens)
    per_block = triton.cdiv(block, rows)
    grid = (_programs(tokens, block, per_block), b * heads)
    options = _options(t, q, v, sinks, key_mask)
    with on_device(q):
        near_kernel[grid](
            q, k, v, key_mask, sinks, out, log,
            *strides(q), *strides(k), *strides(v), *strides(out), mask_stride(key_mask),
            heads, heads // kv_heads, tokens, block, overlap, per_block, scale,
            ROWS=rows, BS=padded(options["SINKS"]), CAUSAL=causal, **options,
        )  # fmt: skip
    return out, log


def near_backward(
    dout: Tensor, dlog: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None,
    key_mask: Tensor | None, out: Tensor, log: Tensor, window: Window,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv)."""
    (b, heads, tokens, d), (_, kv_heads, _, e) = q.shape, v.shape
    block, overlap, scale, causal = window
    group = heads // kv_heads
    dout, dlog = rows_contiguous(dout), dlog.contiguous()
    t = tile("near_dq", d, e, q.dtype, q.device)
    rows = _rows(t, block)
    per_block = triton.cdiv(block, rows)
    programs = _programs(tokens, block, per_block)
    options = _options(t, q, v, sinks, key_mask)
    count = options["SINKS"]
    dq, delta = empty_rows(q, d), floats(q, b, heads, tokens)
    sink_k, sink_v = (floats(q, b * heads, programs, count, width) for width in (d, e))
    with on_device(q):
        near_dq_kernel[(programs, b * heads)](
            q, k, v, key_mask, sinks, out, log, dout, dlog, dq, delta, sink_k, sink_v,
            *strides(q), *strides(k), *strides(v), *strides(out), *strides(dout), *strides(dq),
            mask_stride(key_mask), heads, group, tokens, block, overlap, per_block, scale,
            ROWS=rows, BS=padded(count), CAUSAL=causal, **options,
        )  # fmt: skip
    if count:
        sink_k, sink_v = (x.unflatten(0, (-1, group)).sum((1, 2)) for x in (sink_k, sink_v))
    dk, dv = empty_rows(k, d), empty_rows(v, e)
    t = tile("near_dkdv", d, e, q.dtype, q.device)
    options = _options(t, q, v, sinks, key_mask)
    with on_device(q):
        near_dkdv_kernel[(triton.cdiv(tokens, t.rows), b * kv_heads)](
            q, k, v, key_mask, sinks, log, delta, dout, sink_k, sink_v, dk, dv,
            *strides(q), *strides(k), *strides(v), *strides(dout), *strides(dk), *strides(dv),
            mask_stride(key_mask), kv_heads, group, tokens, block, overlap, scale,
            ROWS=t.rows, CAUSAL=causal, **options,
        )  # fmt: skip
    return dq, dk, dv


def _programs(tokens: int, block: int, per_block: int) -> int:
    """Tiles of queries: of the last block only those that hold some."""
    whole, rest = divmod(tokens, block)
    return whole * per_block + (per_block if rest else 0)


def contiguous_positions(sinks: Tensor | None) -> Tensor | None:
    """Positions ``[B, n]`` as the kernels read them; None without any."""
    if sinks is None or sinks.shape[1] == 0:
        return None
    return sinks.to(torch.int64).contiguous()
