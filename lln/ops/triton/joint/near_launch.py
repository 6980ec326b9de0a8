"""Launchers of the kernels of windows and sinks."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from lln.ops.triton.joint.near_kernels import near_dkdv_kernel, near_dq_kernel, near_kernel
from lln.ops.triton.launching import Launch, Layout, layout, planned, row_strides, rows_of, steps
from lln.ops.triton.library import floats, mask_stride, rows_contiguous
from lln.ops.triton.tiles import Tile, padded, tile

Window = tuple[int, int, float, bool]  # block, overlap, scale, causal


def _rows(t: Tile, block: int) -> int:
    """Rows of a tile of queries, which lie in one block."""
    return min(t.rows, padded(block))


def _constants(t: Tile, d: int, e: int, sinks: int, mask: int | None) -> dict[str, Any]:
    return {
        "D": d, "E": e, "BD": padded(d), "BE": padded(e), "COLS": t.rows, "SINKS": sinks,
        "HAS_MASK": mask is not None, "num_warps": t.warps, "num_stages": t.stages,
    }  # fmt: skip


def _count(sinks: Tensor | None) -> int:
    return 0 if sinks is None else sinks.shape[1]


def near(
    q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None, key_mask: Tensor | None, window: Window
) -> tuple[Tensor, Tensor]:
    """(out, log)."""
    rows, launch = _near_plan(
        layout(q), layout(k), layout(v), _count(sinks), mask_stride(key_mask), window
    )
    out, log = q.new_empty_strided(*rows), floats(q, *q.shape[:3])
    launch(q, k, v, key_mask, sinks, out, log)
    return out, log


@planned
def _near_plan(
    q: Layout, k: Layout, v: Layout, sinks: int, mask: int | None, window: Window
) -> tuple[Any, Launch]:
    ((b, heads, tokens, d), _, dtype, device), (_, kv_heads, _, e) = q, v[0]
    block, overlap, scale, causal = window
    t = tile("near", d, e, dtype, device)
    rows = _rows(t, block)
    per_block = steps(block, rows)
    out = rows_of(q, e)
    return out, Launch(
        near_kernel, (_programs(tokens, block, per_block), b * heads),
        (*row_strides(q[1], k[1], v[1], out[1]), mask or 0,
         heads, heads // kv_heads, tokens, block, overlap, per_block, scale),
        ROWS=rows, BS=padded(sinks), CAUSAL=causal, **_constants(t, d, e, sinks, mask),
    )  # fmt: skip


def near_backward(
    dout: Tensor, dlog: Tensor, q: Tensor, k: Tensor, v: Tensor, sinks: Tensor | None,
    key_mask: Tensor | None, out: Tensor, log: Tensor, window: Window,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(dq, dk, dv)."""
    (b, heads, tokens, d), (_, kv_heads, _, e) = q.shape, v.shape
    dout, dlog = rows_contiguous(dout), dlog.contiguous()
    count = _count(sinks)
    (dq_rows, dk_rows, dv_rows), programs, launch_dq, launch_dkdv = _near_backward_plan(
        layout(q), layout(k), layout(v), out.stride(), dout.stride(), count, mask_stride(key_mask),
        window,
    )  # fmt: skip
    dq, delta = q.new_empty_strided(*dq_rows), floats(q, b, heads, tokens)
    sink_k, sink_v = (floats(q, b * heads, programs, count, width) for width in (d, e))
    launch_dq(q, k, v, key_mask, sinks, out, log, dout, dlog, dq, delta, sink_k, sink_v)
    if count:
        group = heads // kv_heads
        sink_k, sink_v = (x.unflatten(0, (-1, group)).sum((1, 2)) for x in (sink_k, sink_v))
    dk, dv = k.new_empty_strided(*dk_rows), v.new_empty_strided(*dv_rows)
    launch_dkdv(q, k, v, key_mask, sinks, log, delta, dout, sink_k, sink_v, dk, dv)
    return dq, dk, dv


@planned
def _near_backward_plan(
    q: Layout, k: Layout, v: Layout, out: tuple[int, ...], dout: tuple[int, ...], sinks: int,
    mask: int | None, window: Window,
) -> tuple[tuple[Any, Any, Any], int, Launch, Launch]:  # fmt: skip
    ((b, heads, tokens, d), _, dtype, device), (_, kv_heads, _, e) = q, v[0]
    block, overlap, scale, causal = window
    group = heads // kv_heads
    dq, dk, dv = rows_of(q, d), rows_of(k, d), rows_of(v, e)
    t = tile("near_dq", d, e, dtype, device)
    rows = _rows(t, block)
    per_block = steps(block, rows)
    programs = _programs(tokens, block, per_block)
    launch_dq = Launch(
        near_dq_kernel, (programs, b * heads),
        (*row_strides(q[1], k[1], v[1], out, dout, dq[1]), mask or 0,
         heads, group, tokens, block, overlap, per_block, scale),
        ROWS=rows, BS=padded(sinks), CAUSAL=causal, **_constants(t, d, e, sinks, mask),
    )  # fmt: skip
    t = tile("near_dkdv", d, e, dtype, device)
    launch_dkdv = Launch(
        near_dkdv_kernel, (steps(tokens, t.rows), b * kv_heads),
        (*row_strides(q[1], k[1], v[1], dout, dk[1], dv[1]), mask or 0,
         kv_heads, group, tokens, block, overlap, scale),
        ROWS=t.rows, CAUSAL=causal, **_constants(t, d, e, sinks, mask),
    )  # fmt: skip
    return (dq, dk, dv), programs, launch_dq, launch_dkdv


def _programs(tokens: int, block: int, per_block: int) -> int:
    """Tiles of queries: of the last block only those that hold some."""
    whole, rest = divmod(tokens, block)
    return whole * per_block + (per_block if rest else 0)


def contiguous_positions(sinks: Tensor | None) -> Tensor | None:
    """Positions ``[B, n]`` as the kernels read them; None without any."""
    if sinks is None or sinks.shape[1] == 0:
        return None
    return sinks.to(torch.int64).contiguous()
