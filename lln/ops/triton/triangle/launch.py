"""Launchers of the causal kernels."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

from lln.ops.triton.library import (
    alike,
    empty_rows,
    floats,
    mask_stride,
    on_device,
    rows_contiguous,
    strides,
)
from lln.ops.triton.linear.launch import empty_lse, precise, summarize_parts
from lln.ops.triton.tiles import CHUNK, Tile, padded, segments, tile
from lln.ops.triton.triangle.dkdv_kernels import causal_dkdv_kernel, summarize_queries_kernel
from lln.ops.triton.triangle.dq_kernels import causal_dq_kernel
from lln.ops.triton.triangle.forward_kernels import causal_kernel
from lln.ops.triton.triangle.state_kernels import scan_kernel


class Given(NamedTuple):
    """The state that came before: natural log mass [B, Hkv, D] and mean [B, Hkv, D, E], or None."""

    log_mass: Tensor | None
    mean: Tensor | None


def factors(q: Tensor) -> dict[str, Any]:
    """How the exponential factors are multiplied: they need the exponents of float32.

    bfloat16 has them; float16 inputs have three more digits, so their factors are two bfloat16
    numbers each. Triton's interpreter has no dot of bfloat16.
    """
    interpreted = not isinstance(causal_kernel, triton.JITFunction)
    if q.dtype == torch.float32 or interpreted:
        return {"WIDE": tl.float32, "TERMS": 3}
    return {"WIDE": tl.bfloat16, "TERMS": 2 if q.dtype == torch.float16 else 1}


def carried_values(d: int, e: int) -> int:
    """Columns of a tile of values: no fewer than there are features, up to 64.

    Compiled by Triton 3.6 for an H200, 64 features by 16 values came out wrong in the forward pass,
    whatever the stages, and 64 by 32 in float16 left its memory in the backward pass, which the
    interpreter does not (tests/ops/triton/bounds.py). 64 by 64 and 16 by 16 do neither.
    """
    return max(padded(e), min(padded(d), 64))


def carry_options(t: Tile, q: Tensor) -> dict[str, bool]:
    """Carry sums if the tile says so and the dtype has the exponents: float16 has not."""
    return {"SUMS": t.sums and q.dtype != torch.float16}


def empty_before(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Uninitialised states before the segments, the first of which is given: float32."""
    b, heads, tokens, d = q.shape
    count, _ = segments(tokens, b * heads, q.device)
    return floats(k, b * k.shape[1], count - 1, d * (v.shape[-1] + 2))


def scan(parts: Tensor, merged: Tensor, given: Given, d: int, e: int, *, reverse: bool) -> None:
    """Merge the parts of each head in order (from the last one if ``reverse``) into ``merged``."""
    heads, count, size = parts.shape
    block = min(padded(e), 128)
    with on_device(parts):
        scan_kernel[(heads, triton.cdiv(d, 4), triton.cdiv(e, block))](
            parts, merged, *given, count, D=d, E=e, BD=4, BE=block,
            VECTORS=size // d - e, REVERSE=reverse, num_warps=1,
        )  # fmt: skip


def causal(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, key_mask: Tensor | None,
    given: Given, normalize_keys: bool,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """(out, lse, states before the segments)."""
    (b, heads, tokens, d), (_, kv_heads, _, e) = q.shape, v.shape
    count, span = segments(tokens, b * heads, q.device)
    before = empty_before(q, k, v)
    if count > 1:
        parts, _ = summarize_parts(k, v, beta, key_mask, normalize_keys, (count - 1, span))
        scan(parts, before, given, d, e, reverse=False)
    out, lse = empty_rows(q, e), empty_lse(q)
    t = tile("causal", d, e, q.dtype, q.device)
    with on_device(q):
        causal_kernel[(count, b * heads)](
            q, k, v, out, lse, key_mask, alpha, beta, before, *given,
            *strides(q), *strides(k), *strides(v), *strides(out), mask_stride(key_mask),
            *alpha.stride(), *beta.stride(), heads, heads // kv_heads, tokens, span,
            D=d, E=e, BD=padded(d), BE=carried_values(d, e), ROWS=CHUNK,
            FULL=tokens % CHUNK == 0, HAS_MASK=key_mask is not None, NORMALIZE=normalize_keys,
            PRECISE=precise(q), ALIKE=alike(q, k, v, out), **factors(q), **carry_options(t, q),
            **t.options,
        )  # fmt: skip
    return out, lse, before


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
    normalize_keys: bool, need_alpha: bool, need_beta: bool, need_state: bool,
) -> Gradients:  # fmt: skip
    """All gradients; those of grouped query heads are summed for their key head."""
    (b, heads, tokens, d), (_, kv_heads, _, e) = q.shape, v.shape
    group = heads // kv_heads
    count, span = segments(tokens, b * heads, q.device)
    dout = rows_contiguous(dout)
    dq = empty_rows(q, d)
    delta = floats(q, b, heads, tokens)
    flags = q.new_empty((b * heads, count), dtype=torch.int32)
    alpha_sums = floats(q, b, heads, count) if need_alpha else None
    beta_sums = floats(q, b, kv_heads, group, count) if need_beta else None
    widths = {"D": d, "E": e, "BD": padded(d), "BE": carried_values(d, e)}
    options = {
        "ROWS": CHUNK,
        "FULL": tokens % CHUNK == 0,
        "HAS_MASK": key_mask is not None,
        "NORMALIZE": normalize_keys,
        "PRECISE": precise(q),
        **factors(q),
    }
    scales = (mask_stride(key_mask), *alpha.stride(), *beta.stride(), heads, group, tokens, span)
    t = tile("causal_dq", d, e, q.dtype, q.device)
    with on_device(q):
        causal_dq_kernel[(count, b * heads)](
            q, k, v, dout, lse, key_mask, alpha, beta, before, *given, dq, delta, flags, alpha_sums,
            *strides(q), *strides(k), *strides(v), *strides(dout), *strides(dq), *scales,
            **widths, **options, ALIKE=alike(q, k, v, dout, dq), **carry_options(t, q), **t.options,
        )  # fmt: skip
    first = 0 if need_state else 1
    after = summarize_queries(q, dout, lse, delta, alpha, first, count, span)
    # grouped heads: one gradient per query head, summed afterwards
    dk = empty_rows(k, d) if group == 1 else floats(q, b, heads, tokens, d)
    dv = empty_rows(v, e) if group == 1 else floats(q, b, heads, tokens, e)
    t = tile("causal_dkdv", d, e, q.dtype, q.device)
    with on_device(q):
        causal_dkdv_kernel[(count, b * heads)](
            q, k, v, dout, lse, delta, key_mask, alpha, beta, after, flags, dk, dv, beta_sums,
            *strides(q), *strides(k), *strides(v), *strides(dout), *strides(dk), *strides(dv),
            *scales, first, **widths, **options, ALIKE=alike(q, k, v, dout, dk, dv),
            **carry_options(t, q), **t.options,
        )  # fmt: skip
    if group > 1:
        dk = dk.unflatten(1, (kv_heads, group)).sum(2).to(k.dtype)
        dv = dv.unflatten(1, (kv_heads, group)).sum(2).to(v.dtype)
    return Gradients(
        dq, dk, dv,
        None if alpha_sums is None else alpha_sums.sum(-1),
        None if beta_sums is None else beta_sums.sum((-1, -2)),
        after[:, 0] if need_state else None,
    )  # fmt: skip


def summarize_queries(
    q: Tensor, dout: Tensor, lse: Tensor, delta: Tensor, alpha: Tensor,
    first: int, count: int, span: int,
) -> Tensor:  # fmt: skip
    """States of the queries from each segment on, for the segments from ``first`` on."""
    (b, heads, tokens, d), e = q.shape, dout.shape[-1]
    after = floats(q, b * heads, count - first, d * (e + 3))
    if count == first:
        return after
    parts = torch.empty_like(after)
    t = tile("summarize", d, e, q.dtype, q.device)
    with on_device(q):
        summarize_queries_kernel[(count - first, b * heads)](
            q, dout, lse, delta, alpha, parts, *strides(q), *strides(dout), *alpha.stride(),
            heads, tokens, span, first, D=d, E=e, BD=padded(d), BE=carried_values(d, e),
            ROWS=CHUNK, FULL=tokens % CHUNK == 0, PRECISE=precise(q), ALIKE=alike(q, dout),
            **t.options,
        )  # fmt: skip
    scan(parts, after, Given(None, None), d, e, reverse=True)
    return after
