"""Launchers of the causal kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lln.ops.causal.kernels.dkdv_kernels import causal_dkdv_kernel, summarize_queries_kernel
from lln.ops.causal.kernels.dq_kernels import causal_dq_kernel
from lln.ops.causal.kernels.forward_kernels import causal_kernel
from lln.ops.causal.kernels.state_kernels import scan_kernel
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
from lln.ops.common.kernels.tiles import CHUNK, Tile, padded, segments, tile
from lln.ops.linear.kernels.launch import empty_lse, summarize_parts


class Given(NamedTuple):
    """The state that came before: natural log mass [B, Hkv, D] and mean [B, Hkv, D, E], or None."""

    log_mass: Tensor | None
    mean: Tensor | None


NOTHING = Given(None, None)  # no key came before


def factors(dtype: torch.dtype) -> dict[str, Any]:
    """How the exponential factors are multiplied: they need the exponents of float32.

    bfloat16 has them; float16 inputs have three more digits, so their factors are two bfloat16
    numbers each. Triton's interpreter has no dot of bfloat16.
    """
    interpreted = not isinstance(causal_kernel, triton.JITFunction)
    if dtype == torch.float32 or interpreted:
        return {"WIDE": tl.float32, "TERMS": 3}
    return {"WIDE": tl.bfloat16, "TERMS": 2 if dtype == torch.float16 else 1}


def carried_values(d: int, e: int) -> int:
    """Columns of a tile of values: no fewer than there are features, up to 64.

    Compiled by Triton 3.6 for an H200, 64 features by 16 values came out wrong in the forward pass,
    whatever the stages, and 64 by 32 in float16 left its memory in the backward pass, which the
    interpreter does not (tests/ops/triton/bounds.py). 64 by 64 and 16 by 16 do neither.
    """
    return max(padded(e), min(padded(d), 64))


def carry_options(t: Tile, dtype: torch.dtype) -> dict[str, bool]:
    """Carry sums if the tile says so and the dtype has the exponents: float16 has not."""
    return {"SUMS": t.sums and dtype != torch.float16}


def empty_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Uninitialised states before the segments, the first of which is given: float32."""
    b, heads, tokens, d = q.shape
    count, _ = segments(tokens, b * heads, q.device)
    return floats(k, b * k.shape[1], count - 1, d * (v.shape[-1] + 2))


def scan(parts: Tensor, merged: Tensor, given: Given, d: int, e: int, *, reverse: bool) -> None:
    """Merge the parts of each head in order (from the last one if ``reverse``) into ``merged``."""
    _scan_plan(parts.shape, d, e, reverse, parts.device)(parts, merged, *given)


@planned
def _scan_plan(shape: tuple[int, ...], d: int, e: int, reverse: bool, _: torch.device) -> Launch:
    heads, count, size = shape
    block = min(padded(e), 128)
    return Launch(
        scan_kernel, (heads, steps(d, 4), steps(e, block)), (count,), D=d, E=e, BD=4, BE=block,
        VECTORS=size // d - e, REVERSE=reverse, num_warps=1,
    )  # fmt: skip


class Scales(NamedTuple):
    """What the kernels are told of the mask, alpha and beta: strides, and whether there is one."""

    mask: int | None
    alpha: tuple[int, ...]
    beta: tuple[int, ...]

    def beside(self, *strides: tuple[int, ...]) -> tuple[Any, ...]:
        """All strides that a kernel is told, those of tensors with rows first."""
        return *row_strides(*strides), self.mask or 0, self.alpha, self.beta


def _constants(t: Tile, shape: torch.Size, e: int, dtype: torch.dtype) -> dict[str, Any]:
    """What all kernels of chunks share."""
    tokens, d = shape[2:]
    return {
        "D": d,
        "E": e,
        "BD": padded(d),
        "BE": carried_values(d, e),
        "ROWS": CHUNK,
        "FULL": tokens % CHUNK == 0,
        "PRECISE": dtype == torch.float32,
        **t.options,
    }


def _of_keys(scales: Scales, t: Tile, dtype: torch.dtype) -> dict[str, Any]:
    """What those that see keys have beside it."""
    return {
        **factors(dtype),
        **carry_options(t, dtype),
    }


def causal(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, key_mask: Tensor | None,
    given: Given,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(out, lse, states before the segments)."""
    scales = Scales(mask_stride(key_mask), alpha.stride(), beta.stride())
    (count, span), rows, launch = _causal_plan(layout(q), layout(k), layout(v), scales)
    before = empty_before(q, k, v)
    if count > 1:
        parts, _ = summarize_parts(k, v, beta, key_mask, (count - 1, span))
        scan(parts, before, given, q.shape[-1], v.shape[-1], reverse=False)
    out, lse = q.new_empty_strided(*rows), empty_lse(q)
    launch(q, k, v, out, lse, key_mask, alpha, beta, before, *given)
    return out, lse, before


@planned
def _causal_plan(
    q: Layout, k: Layout, v: Layout, scales: Scales
) -> tuple[tuple[int, int], Any, Launch]:
    shape, _, dtype, device = q
    (b, heads, tokens, d), (_, kv_heads, _, e) = shape, v[0]
    count, span = segments(tokens, b * heads, device)
    out = rows_of(q, e)
    t = tile("causal", d, e, dtype, device)
    launch = Launch(
        causal_kernel, (count, b * heads),
        (scales.beside(q[1], k[1], v[1], out[1]), heads, heads // kv_heads, tokens, span),
        **_constants(t, shape, e, dtype), **_of_keys(scales, t, dtype),
    )  # fmt: skip
    return (count, span), out, launch


class Gradients(NamedTuple):
    dq: Tensor
    dk: Tensor
    dv: Tensor
    dalpha: Tensor | None
    dbeta: Tensor | None
    start: Tensor | None  # the queries as the given state sees them: [B·H, D·E + 3 D]


def causal_backward(
    dout: Tensor, q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor,
    key_mask: Tensor | None, given: Given, lse: Tensor, before: Tensor, *,
    need_alpha: bool, need_beta: bool, need_state: bool,
) -> Gradients:  # fmt: skip
    """All gradients; those of grouped query heads are summed for their key head."""
    (b, heads, tokens, _), kv_heads = q.shape, k.shape[1]
    group = heads // kv_heads
    dout = rows_contiguous(dout)
    scales = Scales(mask_stride(key_mask), alpha.stride(), beta.stride())
    first = 0 if need_state else 1
    (count, span), (dq_rows, *keys), launch_dq, launch_dkdv = _causal_backward_plan(
        layout(q), layout(k), layout(v), dout.stride(), scales, first
    )
    dq = q.new_empty_strided(*dq_rows)
    delta = floats(q, b, heads, tokens)
    flags = q.new_empty((b * heads, count), dtype=torch.int32)
    alpha_sums = floats(q, b, heads, count) if need_alpha else None
    beta_sums = floats(q, b, kv_heads, group, count) if need_beta else None
    launch_dq(
        q, k, v, dout, lse, key_mask, alpha, beta, before, *given, dq, delta, flags, alpha_sums
    )
    after = summarize_queries(q, dout, lse, delta, alpha, first, count, span)
    # grouped heads: one gradient per query head, summed afterwards
    wide = {} if group == 1 else {"dtype": torch.float32}
    dk, dv = (x.new_empty_strided(*rows, **wide) for x, rows in zip((k, v), keys, strict=True))
    launch_dkdv(q, k, v, dout, lse, delta, key_mask, alpha, beta, after, flags, dk, dv, beta_sums)
    if group > 1:
        dk = dk.unflatten(1, (kv_heads, group)).sum(2).to(k.dtype)
        dv = dv.unflatten(1, (kv_heads, group)).sum(2).to(v.dtype)
    return Gradients(
        dq, dk, dv,
        None if alpha_sums is None else alpha_sums.sum(-1),
        None if beta_sums is None else beta_sums.sum((-1, -2)),
        after[:, 0] if need_state else None,
    )  # fmt: skip


@planned
def _causal_backward_plan(
    q: Layout, k: Layout, v: Layout, dout: tuple[int, ...], scales: Scales, first: int
) -> tuple[tuple[int, int], tuple[Any, Any, Any], Launch, Launch]:
    shape, _, dtype, device = q
    (b, heads, tokens, d), (_, kv_heads, _, e) = shape, v[0]
    group = heads // kv_heads
    count, span = segments(tokens, b * heads, device)
    dq, dk, dv = rows_of(q, d), rows_of(k, d), rows_of(v, e)
    if group > 1:
        dk, dv = (
            ((b, heads, tokens, width), (heads * tokens * width, tokens * width, width, 1))
            for width in (d, e)
        )
    numbers, given = (heads, group, tokens, span), (q[1], k[1], v[1], dout)
    t = tile("causal_dq", d, e, dtype, device)
    launch_dq = Launch(
        causal_dq_kernel, (count, b * heads), (scales.beside(*given, dq[1]), *numbers),
        **_constants(t, shape, e, dtype), **_of_keys(scales, t, dtype),
    )  # fmt: skip
    t = tile("causal_dkdv", d, e, dtype, device)
    launch_dkdv = Launch(
        causal_dkdv_kernel, (count, b * heads),
        (scales.beside(*given, dk[1], dv[1]), *numbers, first),
        **_constants(t, shape, e, dtype), **_of_keys(scales, t, dtype),
    )  # fmt: skip
    return (count, span), (dq, dk, dv), launch_dq, launch_dkdv


def summarize_queries(
    q: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, alpha: Tensor,
    first: int, count: int, span: int,
) -> Tensor:  # fmt: skip
    """States of the queries from each segment on, for the segments from ``first`` on."""
    (b, heads, _, d), e = q.shape, dout.shape[-1]
    after = floats(q, b * heads, count - first, d * (e + 3))
    if count == first:
        return after
    parts = torch.empty_like(after)
    launch = _queries_plan(layout(q), layout(dout), alpha.stride(), first, count, span)
    launch(q, dout, lse, delta, alpha, parts)
    scan(parts, after, NOTHING, d, e, reverse=True)
    return after


@planned
def _queries_plan(
    q: Layout, dout: Layout, alpha: tuple[int, ...], first: int, count: int, span: int
) -> Launch:
    shape, _, dtype, device = q
    (b, heads, tokens, d), e = shape, dout[0][-1]
    t = tile("summarize", d, e, dtype, device)
    return Launch(
        summarize_queries_kernel, (count - first, b * heads),
        ((*row_strides(q[1], dout[1]), alpha), heads, tokens, span, first),
        **_constants(t, shape, e, dtype),
    )  # fmt: skip
