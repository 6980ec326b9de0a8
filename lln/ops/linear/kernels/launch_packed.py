"""Launchers for packed sequences [T, H, D]: the kernels of the padded batches with a plan."""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
from torch import Tensor

from lln.ops.common.kernels.launching import row_strides
from lln.ops.common.kernels.library import floats, on_device
from lln.ops.common.kernels.tiles import Tile, padded, split, tile, value_block
from lln.ops.linear.kernels.launch import Merged, precise
from lln.ops.linear.kernels.plan_kernels import plan_kernel
from lln.ops.linear.kernels.read_kernels import read_backward_kernel, read_kernel
from lln.ops.linear.kernels.summarize_kernels import (
    merge_gradients_kernel,
    merge_kernel,
    summarize_backward_kernel,
    summarize_kernel,
)


class Plan(NamedTuple):
    """Items of ``span`` tokens: see :func:`plan_kernel`."""

    table: Tensor
    cu: Tensor
    items: int
    span: int

    @staticmethod
    def make(cu: Tensor, tokens: int, heads: int, t: Tile) -> Plan:
        sequences = cu.shape[0] - 1
        _, span = split(tokens, heads, t, cu.device)
        items = tokens // span + sequences
        table = cu.new_empty(items + sequences + 1, dtype=torch.int32)
        with on_device(cu):
            plan_kernel[(1,)](
                cu, table, sequences, items, span, BLOCK=triton.next_power_of_2(sequences)
            )
        return Plan(table, cu, items, span)


def _strides(*tensors: Tensor) -> tuple[tuple[int | None, ...], ...]:
    """Batch (none), head and row strides of [T, H, D]."""
    return row_strides(*((0, x.stride(1), x.stride(0)) for x in tensors))


def empty_packed_state(k: Tensor, v: Tensor, cu_k: Tensor) -> Merged:
    """Uninitialised states of every sequence and key head."""
    sequences, heads, d, e = cu_k.shape[0] - 1, k.shape[1], k.shape[2], v.shape[2]
    shapes = (sequences, heads, d), (sequences, heads, d, e), (sequences, heads, 2, d)
    return Merged(*(floats(k, *shape) for shape in shapes))


def empty_packed_lse(q: Tensor) -> Tensor:
    """Uninitialised logsumexp of every query: [H, 1 or 2, T]."""
    return floats(q, q.shape[1], 2 if precise(q) else 1, q.shape[0])


def summarize(k: Tensor, v: Tensor, cu_k: Tensor, beta: Tensor, key_mask: Tensor | None) -> Merged:
    """The state of every sequence and key head."""
    (tokens, heads, d), e = k.shape, v.shape[2]
    t = tile("summarize", d, e, k.dtype, k.device)
    block = value_block(d, e, k.dtype, t)
    state = empty_packed_state(k, v, cu_k)
    plan = Plan.make(cu_k, tokens, heads, t)
    parts = floats(k, heads * plan.items, d * (e + 2))
    columns = min(padded(e), 128)
    with on_device(k):
        summarize_kernel[(plan.items, heads, triton.cdiv(e, block))](
            k, v, beta, key_mask, parts, plan.table, cu_k,
            (*_strides(k, v), beta.stride(), 0), heads, tokens, plan.span,
            D=d, E=e, BD=padded(d), BE=block, ROWS=t.rows, FULL=False,
            **t.options,
        )  # fmt: skip
        merge_kernel[(beta.numel(), triton.cdiv(d, 4), triton.cdiv(e, columns))](
            parts, *state, plan.table, plan.items, heads, 0,
            D=d, E=e, BD=4, BE=columns, MANY=8, NATURAL=False, num_warps=4,
        )  # fmt: skip
    return state


def read(q: Tensor, cu_q: Tensor, alpha: Tensor, state: Merged, out: Tensor, lse: Tensor) -> None:
    """Fill out [T, H, E] and lse."""
    (tokens, heads, d), e = q.shape, out.shape[2]
    t = tile("read", d, e, q.dtype, q.device)
    block = value_block(d, e, q.dtype, t)
    plan = Plan.make(cu_q, tokens, heads, t)
    with on_device(q):
        read_kernel[(plan.items, heads, triton.cdiv(e, block))](
            q, out, lse, alpha, None, *state, plan.table, cu_q,
            (*_strides(q, out), (0, lse.stride(0)), alpha.stride()),
            heads, heads // state.mean.shape[1], tokens, plan.span, 0,
            D=d, E=e, BD=padded(d), BE=block, ROWS=t.rows, FULL=False,
            NATURAL=False, PRECISE=precise(q), SAVE=True, **t.options,
        )  # fmt: skip


def read_backward(
    dout: Tensor, q: Tensor, cu_q: Tensor, alpha: Tensor, lse: Tensor, state: Merged, dq: Tensor,
    need_alpha: bool,
) -> tuple[Tensor, Tensor | None]:  # fmt: skip
    """Fill dq; return the gradients (dM, g) [S · Hkv, 1, D·E + D] of the states, and dalpha."""
    (tokens, heads, d), (sequences, kv_heads, _, e) = q.shape, state.mean.shape
    t = tile("read_backward", d, e, q.dtype, q.device)
    block = value_block(d, e, q.dtype, t)
    plan = Plan.make(cu_q, tokens, heads, t)
    parts = floats(q, heads * plan.items, d * (e + 1))
    slopes = floats(q, heads * plan.items, 1) if need_alpha else None
    group = heads // kv_heads
    with on_device(q):
        read_backward_kernel[(plan.items, heads, triton.cdiv(e, block))](
            q, dout, lse, alpha, None, state.log_mass, state.mean, dq, parts, slopes,
            plan.table, cu_q, (*_strides(q, dout, dq), (0, lse.stride(0)), alpha.stride()),
            heads, group, tokens, plan.span, 1.0,
            D=d, E=e, BD=padded(d), BE=block, ROWS=t.rows, FULL=False,
            NATURAL=False, PRECISE=precise(q), **t.options,
        )  # fmt: skip
    total = _add_parts(parts, plan, sequences, kv_heads, group)
    return total, None if slopes is None else _add_parts(slopes, plan, sequences, heads, 1)


def _add_parts(parts: Tensor, plan: Plan, sequences: int, heads: int, group: int) -> Tensor:
    """Σ over the items of each sequence and over the heads of each group: [S · heads, 1, size]."""
    size = parts.shape[1]
    total = parts.new_empty((sequences * heads, 1, size))
    with on_device(parts):
        merge_gradients_kernel[(sequences * heads, triton.cdiv(size, 256))](
            parts, total, plan.table, plan.items, heads, group, 0, size,
            BLOCK=256, MANY=8, num_warps=4,
        )  # fmt: skip
    return total


def summarize_backward(
    parts: Tensor, k: Tensor, v: Tensor, cu_k: Tensor, beta: Tensor, key_mask: Tensor | None,
    norm: Tensor, dk: Tensor, dv: Tensor, *, need_beta: bool,
) -> Tensor | None:  # fmt: skip
    """Fill dk, dv; return dbeta if asked for."""
    (tokens, heads, d), e = k.shape, v.shape[2]
    t = tile("summarize_backward", d, e, k.dtype, k.device)
    plan = Plan.make(cu_k, tokens, heads, t)
    slopes = floats(k, heads * plan.items, 1) if need_beta else None
    with on_device(k):
        summarize_backward_kernel[(plan.items, heads)](
            k, v, beta, key_mask, norm, parts, dk, dv, slopes, plan.table, cu_k,
            (*_strides(k, v, dk, dv), beta.stride(), 0), heads, tokens, plan.span, 1,
            D=d, E=e, BD=padded(d), BE=value_block(d, e, k.dtype, t), ROWS=t.rows, FULL=False,
            **t.options,
        )  # fmt: skip
    return None if slopes is None else _add_parts(slopes, plan, cu_k.shape[0] - 1, heads, 1)
