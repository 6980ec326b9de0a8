"""Launchers of the backward pass of windows, sinks and far keys."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from lln.ops.common.kernels.launching import Launch, planned, row_strides, rows_of, steps
from lln.ops.common.kernels.library import floats, rows_contiguous
from lln.ops.common.kernels.tiles import padded
from lln.ops.window.kernels.joint.backward_kernels import joint_dkdv_kernel, joint_dq_kernel
from lln.ops.window.kernels.joint.launch import (
    Far,
    FarPlan,
    Near,
    NearPlan,
    States,
    Strides,
    Window,
    chosen,
    empty_states,
    of_queries,
    scan,
    slots_of,
    tensors_of,
)

Needs = tuple[bool, bool, bool]  # the gradients of alpha, beta and gamma


class Gradients(NamedTuple):
    q: Tensor
    k: Tensor
    v: Tensor
    q_far: Tensor | None = None
    k_far: Tensor | None = None
    alpha: Tensor | None = None
    beta: Tensor | None = None
    gamma: Tensor | None = None


def backward(
    dout: Tensor, dlse: Tensor | None, near: Near, far: Far | None, out: Tensor, lse: Tensor,
    states: States | None, window: Window, needs: Needs = (False, False, False),
) -> Gradients:  # fmt: skip
    """All gradients; those of queries that share a key head are summed in the kernels.

    Features of far keys that are q and k themselves have no gradients of their own.
    """
    dout = rows_contiguous(dout)
    plans = near.plan, None if far is None else far.plan, window, dout.stride()
    found = _queries(dout, dlse, near, far, out, lse, states, window, needs, plans)
    dk, dk_far, dv, dbeta = _keys(dout, near, far, lse, found, needs[1], plans)
    parts = zip((found.dalpha, dbeta, found.dgamma), needs, strict=True)
    sums = (None if x is None or not need else x.sum(-1) for x, need in parts)
    return Gradients(found.dq, dk, dv, found.dq_far, dk_far, *sums)


class OfQueries(NamedTuple):
    """What the first pass leaves to the second one, beside gradients."""

    dq: Tensor
    dq_far: Tensor | None
    delta: Tensor
    dsinks: list[Tensor] | tuple[None, None]
    states: tuple[Tensor | None, ...]  # what blocks give to the far keys that they see, merged
    dalpha: Tensor | None
    dgamma: Tensor | None


Plans = tuple[NearPlan, FarPlan | None, Window, Strides]


def _queries(
    dout: Tensor, dlse: Tensor | None, near: Near, far: Far | None, out: Tensor, lse: Tensor,
    states: States | None, window: Window, needs: Needs, plans: Plans,
) -> OfQueries:  # fmt: skip
    q, k, v, sinks, key_mask = near
    (b, heads, tokens, d), (_, kv_heads, _, e) = q.shape, v.shape
    (dq_rows, far_rows), tiles, launch = _queries_plan(*plans, out.stride())
    dq, delta = q.new_empty_strided(*dq_rows), floats(q, b, heads, tokens)
    dsinks: Any = None, None
    if sinks is not None:
        dsinks = [floats(q, b * heads, tiles, sinks.shape[1], width) for width in (d, e)]
    wanted = needs[0] or needs[2]
    dalpha, dgamma = (floats(q, b, heads, tiles) if wanted else None for _ in range(2))
    q_far, dq_far, level, parts = None, None, None, (None, None)
    if far is not None:
        q_far = far.q
        dq_far = None if q_far is None else q_far.new_empty_strided(*far_rows)
        parts = empty_states(v, window.blocks, (q if q_far is None else q_far).shape[-1])
        level = torch.empty_like(parts.logs)
    launch(
        q, k, v, q_far, key_mask, sinks, *tensors_of(far, states), out, lse, dout, dlse, dq, dq_far,
        delta, *dsinks, *parts, level, dalpha, dgamma,
    )  # fmt: skip
    if sinks is not None:
        dsinks = [x.unflatten(0, (-1, heads // kv_heads)).sum((1, 2)) for x in dsinks]
    merged: tuple[Tensor | None, ...] = None, None, None
    if isinstance(parts, States):
        (logs, means), levels = scan(parts, level, window.directions, backward=True)
        merged = logs, means, levels
    return OfQueries(dq, dq_far, delta, dsinks, merged, dalpha, dgamma)


@planned
def _queries_plan(
    near: NearPlan, far: FarPlan | None, window: Window, dout: Strides, out: Strides
) -> tuple[tuple[Any, Any], int, Launch]:
    (b, heads, _, d), kv_heads = near.q[0], near.k[0][1]
    t, constants = chosen("_dq", near, far)
    rows = min(t.rows, padded(window.block))
    tiles = window.blocks * steps(window.block, rows)
    features = near.q if far is None or far.q is None else far.q
    dq, dq_far = rows_of(near.q, d), rows_of(features, slots_of(near, far))
    strides = near.q[1], near.k[1], near.v[1], features[1], out, dout, dq[1], dq_far[1]
    numbers, more = of_queries(near, far, window, rows, strides)
    launch = Launch(
        joint_dq_kernel, (tiles, b * heads) if far is None else (window.blocks, b * kv_heads),
        numbers, **constants, **more,
    )  # fmt: skip
    return (dq, dq_far), tiles, launch


def _keys(
    dout: Tensor, near: Near, far: Far | None, lse: Tensor, found: OfQueries, need_beta: bool,
    plans: Plans,
) -> tuple[Tensor, Tensor | None, Tensor, Tensor | None]:  # fmt: skip
    """(dk, dk_far, dv, parts of dbeta)."""
    q, k, v, sinks, key_mask = near
    (dk_rows, far_rows, dv_rows), programs, launch = _keys_plan(*plans)
    dk, dv = k.new_empty_strided(*dk_rows), v.new_empty_strided(*dv_rows)
    k_far, far_mask, beta, dk_far, dbeta = None, None, None, None, None
    if far is not None:
        k_far, far_mask, beta = far.k, far.key_mask, far.beta
        dk_far = None if k_far is None else k_far.new_empty_strided(*far_rows)
        dbeta = floats(k, *k.shape[:2], programs) if need_beta else None
    launch(
        q, k, v, k_far, key_mask, far_mask, sinks, *found.states, beta, lse, found.delta, dout,
        *found.dsinks, dk, dk_far, dv, dbeta,
    )  # fmt: skip
    return dk, dk_far, dv, dbeta


@planned
def _keys_plan(
    near: NearPlan, far: FarPlan | None, window: Window, dout: Strides
) -> tuple[tuple[Any, Any, Any], int, Launch]:
    heads, (b, kv_heads, tokens, d), e = near.q[0][1], near.k[0], near.v[0][-1]
    t, constants = chosen("_dkdv", near, far)
    rows, step, origin = t.rows, t.rows, 0
    features, beta, far_mask = near.k, (0, 0), None
    if far is not None:
        rows, step, origin = min(t.rows, padded(window.step)), window.step, window.origin
        features, beta, far_mask = far.k or near.k, far.beta, far.mask
    tiles = steps(step, rows)
    programs = steps(tokens - origin, step) * tiles
    dk, dk_far, dv = rows_of(near.k, d), rows_of(features, slots_of(near, far)), rows_of(near.v, e)
    strides = near.q[1], near.k[1], near.v[1], features[1], dout, dk[1], dk_far[1], dv[1]
    launch = Launch(
        joint_dkdv_kernel, (programs, b * kv_heads),
        ((*row_strides(*strides), near.mask or 0, far_mask or 0, beta),
         window.numbers(step, origin), tiles, window.blocks, kv_heads, heads // kv_heads),
        ROWS=rows, COLS=rows, CAUSAL=window.causal, NEAR=window.near,
        FULL=window.whole(rows, rows) and near.mask is None, **constants,
    )  # fmt: skip
    return (dk, dk_far, dv), programs, launch
