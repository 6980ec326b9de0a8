"""Launchers of the kernels that join near and far keys."""

from __future__ import annotations

import math
from typing import NamedTuple

import torch
import triton
from torch import Tensor

from lln.ops.triton.joint.far_kernels import far_keys_kernel, join_backward_kernel, join_kernel
from lln.ops.triton.library import (
    empty_rows,
    floats,
    mask_stride,
    on_device,
    rows_contiguous,
    strides,
)
from lln.ops.triton.linear.launch import summarize_parts
from lln.ops.triton.tiles import Tile, padded, tile
from lln.ops.triton.triangle.launch import Given, scan

NOTHING = Given(None, None)


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
        return triton.cdiv(self.tokens, self.block)

    @property
    def segments(self) -> int:
        """Number of segments that hold all keys."""
        return triton.cdiv(self.tokens, self.step)

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


def _options(kernel: str, q: Tensor, d: int, e: int) -> tuple[Tile, dict]:
    t = tile(kernel, d, e, q.dtype, q.device)
    return t, {"D": d, "E": e, "BD": padded(d), "BE": padded(e), "ROWS": t.rows, **t.options}


def join(
    near: Tensor, near_log: Tensor, q: Tensor, k: Tensor, v: Tensor,
    alpha: Tensor, beta: Tensor, gamma: Tensor, key_mask: Tensor | None, normalize_keys: bool,
    cut: Cut,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    """(out, lse, states before, states after)."""
    (b, heads, queries, d), (_, kv_heads, _, e) = q.shape, v.shape
    parts, _ = summarize_parts(k, v, beta, key_mask, normalize_keys, (cut.states, cut.step))
    before, after = empty_states(k, v, cut)
    scan(parts, before, NOTHING, d, e, reverse=False)
    if not cut.is_causal:
        scan(parts, after, NOTHING, d, e, reverse=True)
    out, lse = empty_rows(near, e), floats(q, b, heads, queries)
    t, options = _options("far_read", q, d, e)
    full = cut.block % t.rows == 0 and queries % cut.block == 0
    with on_device(q):
        join_kernel[(cut.blocks, b * heads)](
            q, near, near_log, out, lse, before, None if cut.is_causal else after, alpha, gamma,
            *strides(q), *strides(near), *near_log.stride()[:2], *strides(out), *alpha.stride(),
            *gamma.stride(), heads, heads // kv_heads, queries, cut.states,
            cut.block, cut.overlap, cut.step, FULL=full, **options,
        )  # fmt: skip
    return out, lse, before, after


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
    (b, heads, queries, d), (_, kv_heads, keys, e) = q.shape, v.shape
    dout = rows_contiguous(dout)
    dq, dnear, dnear_log = empty_rows(q, d), empty_rows(near, e), floats(q, b, heads, queries)
    parts = floats(q, b * kv_heads, cut.blocks, d * (e + 3))
    slopes, shifts = (floats(q, b, heads, cut.blocks) for _ in range(2))
    t, options = _options("far_read_backward", q, d, e)
    full = cut.block % t.rows == 0 and queries % cut.block == 0
    with on_device(q):
        join_backward_kernel[(cut.blocks, b * kv_heads)](
            dout, q, near, near_log, lse, before, None if cut.is_causal else after, alpha, gamma,
            dq, dnear, dnear_log, parts, slopes, shifts,
            *strides(dout), *strides(q), *strides(near), *near_log.stride()[:2], *strides(dq),
            *strides(dnear), *alpha.stride(), *gamma.stride(), kv_heads, heads // kv_heads, queries,
            cut.states, cut.block, cut.overlap, cut.step, FULL=full, **options,
        )  # fmt: skip
    later = torch.empty_like(parts)
    scan(parts, later, NOTHING, d, e, reverse=True)
    earlier = None
    if not cut.is_causal:
        earlier = torch.empty_like(parts)
        scan(parts, earlier, NOTHING, d, e, reverse=False)
    dk, dv = empty_rows(k, d), empty_rows(v, e)
    dbeta = floats(k, b, kv_heads, cut.segments)
    t, options = _options("far_keys", q, d, e)
    full = cut.step % t.rows == 0 and keys % cut.step == 0
    with on_device(q):
        far_keys_kernel[(cut.segments, b * kv_heads)](
            k, v, key_mask, beta, later, earlier, dk, dv, dbeta,
            *strides(k), *strides(v), *strides(dk), *strides(dv), mask_stride(key_mask),
            *beta.stride(), kv_heads, keys, cut.blocks, cut.block, cut.overlap, cut.step,
            FULL=full, HAS_MASK=key_mask is not None, NORMALIZE=normalize_keys, **options,
        )  # fmt: skip
    return Gradients(dnear, dnear_log, dq, dk, dv, slopes.sum(-1), dbeta.sum(-1), shifts.sum(-1))
