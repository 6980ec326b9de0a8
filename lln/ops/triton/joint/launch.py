"""Launchers of the kernels that join near and far keys."""

from __future__ import annotations

import math
from typing import Any, NamedTuple

import torch
from torch import Tensor

from lln.ops.triton.joint.far_kernels import far_keys_kernel, join_backward_kernel, join_kernel
from lln.ops.triton.launching import Launch, Layout, layout, planned, row_strides, rows_of, steps
from lln.ops.triton.library import floats, mask_stride, rows_contiguous
from lln.ops.triton.linear.launch import summarize_parts
from lln.ops.triton.tiles import Tile, padded, tile
from lln.ops.triton.triangle.launch import NOTHING, scan


class Cut(NamedTuple):
    """How queries are cut into blocks, and keys into segments between the edges of windows."""

    block: int
    overlap: int
    is_causal: bool
    tokens: int

    @property
    def step(self) -> int:
        """Keys of a segment: every window begins and ends between two of them."""
        return math.gcd(self.block, self.overlap)

    @property
    def blocks(self) -> int:
        """Number of blocks."""
        return steps(self.tokens, self.block)

    @property
    def segments(self) -> int:
        """Number of segments that hold all keys."""
        return steps(self.tokens, self.step)

    @property
    def states(self) -> int:
        """Number of segments some block may see: causal, none after the last window begins."""
        if not self.is_causal:
            return self.segments
        return max(1, ((self.blocks - 1) * self.block - self.overlap) // self.step)


def empty_states(k: Tensor, v: Tensor, cut: Cut) -> tuple[Tensor, Tensor]:
    """Uninitialised states before and after each segment; none after it if causal."""
    (b, heads, _, d), e = k.shape, v.shape[-1]
    shape = b * heads, cut.states, d * (e + 2)
    return floats(k, *shape), floats(k, *((0,) if cut.is_causal else shape))


def _constants(kernel: str, q: Layout, d: int, e: int) -> tuple[Tile, dict[str, Any]]:
    t = tile(kernel, d, e, *q[2:])
    return t, {"D": d, "E": e, "BD": padded(d), "BE": padded(e), "ROWS": t.rows, **t.options}


def join(
    near: Tensor, near_log: Tensor, q: Tensor, k: Tensor, v: Tensor,
    alpha: Tensor, beta: Tensor, gamma: Tensor, key_mask: Tensor | None, normalize_keys: bool,
    cut: Cut,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(out, lse, states before, states after)."""
    (b, heads, queries, d), e = q.shape, v.shape[-1]
    parts, _ = summarize_parts(k, v, beta, key_mask, normalize_keys, (cut.states, cut.step))
    before, after = empty_states(k, v, cut)
    scan(parts, before, NOTHING, d, e, reverse=False)
    if not cut.is_causal:
        scan(parts, after, NOTHING, d, e, reverse=True)
    rows, launch = _join_plan(
        layout(q), layout(near), v.shape, near_log.stride(), alpha.stride(), gamma.stride(), cut
    )
    out, lse = near.new_empty_strided(*rows), floats(q, b, heads, queries)
    states = before, None if cut.is_causal else after
    launch(q, near, near_log, out, lse, *states, alpha, gamma)
    return out, lse, before, after


@planned
def _join_plan(
    q: Layout, near: Layout, v: torch.Size, near_log: tuple[int, ...], alpha: tuple[int, ...],
    gamma: tuple[int, ...], cut: Cut,
) -> tuple[Any, Launch]:  # fmt: skip
    ((b, heads, queries, d), q_strides, *_), (_, kv_heads, _, e) = q, v
    t, constants = _constants("far_read", q, d, e)
    out = rows_of(near, e)
    return out, Launch(
        join_kernel, (cut.blocks, b * heads),
        (*row_strides(q_strides, near[1]), *near_log[:2], *out[1][:3], *alpha, *gamma,
         heads, heads // kv_heads, queries, cut.states, cut.block, cut.overlap, cut.step),
        FULL=cut.block % t.rows == 0 and queries % cut.block == 0, **constants,
    )  # fmt: skip


class Gradients(NamedTuple):
    near: Tensor
    near_log: Tensor
    q: Tensor
    k: Tensor
    v: Tensor
    alpha: Tensor
    beta: Tensor
    gamma: Tensor


def join_backward(
    dout: Tensor, near: Tensor, near_log: Tensor, q: Tensor, k: Tensor, v: Tensor,
    alpha: Tensor, beta: Tensor, gamma: Tensor, key_mask: Tensor | None,
    lse: Tensor, before: Tensor, after: Tensor, normalize_keys: bool, cut: Cut,
) -> Gradients:  # fmt: skip
    """All gradients; those of queries that share a key head are summed in the kernels."""
    (b, heads, queries, d), (_, kv_heads, _, e) = q.shape, v.shape
    dout = rows_contiguous(dout)
    (dq_rows, dnear_rows, dk_rows, dv_rows), launch, launch_keys = _join_backward_plan(
        layout(q), layout(near), layout(k), layout(v), dout.stride(), near_log.stride(),
        alpha.stride(), beta.stride(), gamma.stride(), mask_stride(key_mask), normalize_keys, cut,
    )  # fmt: skip
    dq, dnear = q.new_empty_strided(*dq_rows), near.new_empty_strided(*dnear_rows)
    dnear_log = floats(q, b, heads, queries)
    parts = floats(q, b * kv_heads, cut.blocks, d * (e + 3))
    slopes, shifts = (floats(q, b, heads, cut.blocks) for _ in range(2))
    states = before, None if cut.is_causal else after
    launch(
        dout, q, near, near_log, lse, *states, alpha, gamma, dq, dnear, dnear_log, parts, slopes,
        shifts,
    )  # fmt: skip
    later = torch.empty_like(parts)
    scan(parts, later, NOTHING, d, e, reverse=True)
    earlier = None
    if not cut.is_causal:
        earlier = torch.empty_like(parts)
        scan(parts, earlier, NOTHING, d, e, reverse=False)
    dk, dv = k.new_empty_strided(*dk_rows), v.new_empty_strided(*dv_rows)
    dbeta = floats(k, b, kv_heads, cut.segments)
    launch_keys(k, v, key_mask, beta, later, earlier, dk, dv, dbeta)
    return Gradients(dnear, dnear_log, dq, dk, dv, slopes.sum(-1), dbeta.sum(-1), shifts.sum(-1))


@planned
def _join_backward_plan(
    q: Layout, near: Layout, k: Layout, v: Layout, dout: tuple[int, ...],
    near_log: tuple[int, ...], alpha: tuple[int, ...], beta: tuple[int, ...],
    gamma: tuple[int, ...], mask: int | None, normalize_keys: bool, cut: Cut,
) -> tuple[tuple[Any, ...], Launch, Launch]:  # fmt: skip
    (b, heads, queries, d), (_, kv_heads, keys, e) = q[0], v[0]
    t, constants = _constants("far_read_backward", q, d, e)
    dq, dnear, dk, dv = rows_of(q, d), rows_of(near, e), rows_of(k, d), rows_of(v, e)
    launch = Launch(
        join_backward_kernel, (cut.blocks, b * kv_heads),
        (*row_strides(dout, q[1], near[1]), *near_log[:2], *row_strides(dq[1], dnear[1]), *alpha,
         *gamma, kv_heads, heads // kv_heads, queries, cut.states, cut.block, cut.overlap,
         cut.step),
        FULL=cut.block % t.rows == 0 and queries % cut.block == 0, **constants,
    )  # fmt: skip
    t, constants = _constants("far_keys", q, d, e)
    launch_keys = Launch(
        far_keys_kernel, (cut.segments, b * kv_heads),
        (*row_strides(k[1], v[1], dk[1], dv[1]), mask or 0, *beta, kv_heads, keys, cut.blocks,
         cut.block, cut.overlap, cut.step),
        FULL=cut.step % t.rows == 0 and keys % cut.step == 0, HAS_MASK=mask is not None,
        NORMALIZE=normalize_keys, **constants,
    )  # fmt: skip
    return (dq, dnear, dk, dv), launch, launch_keys
