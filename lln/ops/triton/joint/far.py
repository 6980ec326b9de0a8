"""Far keys by LLN, joined with what near keys gave under one normaliser."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lln.ops.registration import register
from lln.ops.triton.joint import launch
from lln.ops.triton.joint.launch import Cut
from lln.ops.triton.library import contiguous_mask, empty_rows, floats, rows_contiguous


def join(
    near: Float[Tensor, "B H N E"],
    near_log: Float[Tensor, "B H N"],
    q: Float[Tensor, "B H N S"],
    k: Float[Tensor, "B Hkv N S"],
    v: Float[Tensor, "B Hkv N E"],
    *,
    alpha: Float[Tensor, "B H"],
    beta: Float[Tensor, "B Hkv"],
    gamma: Float[Tensor, "B H"],
    key_mask: Bool[Tensor, "B N"] | None = None,
    normalize_keys: bool = False,
    block: int,
    overlap: int,
    is_causal: bool,
) -> Float[Tensor, "B H N E"]:
    """u · near + (1 − u) · far, u = sigmoid(near_log − γ − far_log): see :mod:`lln.ops.near_far`.

    ``near_log`` is the natural logarithm of the near keys' sum, −inf without any. ``key_mask``
    leaves out what is not far, such as sinks, beside the windows.
    """
    window = normalize_keys, block, overlap, is_causal
    return _join(near, near_log.float(), q, k, v, alpha, beta, gamma, key_mask, *window)[0]


def block_causal(
    q: Float[Tensor, "B H N S"],
    k: Float[Tensor, "B Hkv N S"],
    v: Float[Tensor, "B Hkv N E"],
    *,
    alpha: Float[Tensor, "B H"],
    beta: Float[Tensor, "B Hkv"],
    causal_block: int,
    key_mask: Bool[Tensor, "B N"] | None = None,
    normalize_keys: bool = False,
) -> Float[Tensor, "B H N E"]:
    """Causal LLN attention whose queries see all of their block: far keys that end after it."""
    shape = *q.shape[:3], v.shape[-1]
    nothing = q.new_zeros((1, 1, 1, shape[-1])).expand(shape)
    no_sum = q.new_full(shape[:3], -torch.inf, dtype=torch.float32)
    window = normalize_keys, causal_block, -causal_block, True
    level = torch.zeros_like(alpha)
    return _join(nothing, no_sum, q, k, v, alpha, beta, level, key_mask, *window)[0]


def _prepared(near, near_log, q, k, v, key_mask) -> tuple[Any, ...]:
    log = near_log if near_log.stride(-1) == 1 else near_log.contiguous()
    rows = (rows_contiguous(x) for x in (q, k, v))
    return rows_contiguous(near), log, *rows, contiguous_mask(key_mask)


def _join_impl(
    near, near_log, q, k, v, alpha, beta, gamma, key_mask, normalize_keys, block, overlap, causal
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if q.numel() == 0 or v.numel() == 0:
        empty = _join_fake(
            near, near_log, q, k, v, alpha, beta, gamma, key_mask, normalize_keys, block, overlap,
            causal,
        )  # fmt: skip
        return tuple(x.zero_() for x in empty)  # pyright: ignore[reportReturnType]
    near, near_log, q, k, v, key_mask = _prepared(near, near_log, q, k, v, key_mask)
    cut = Cut(block, overlap, causal, q.shape[2])
    return launch.join(near, near_log, q, k, v, alpha, beta, gamma, key_mask, normalize_keys, cut)


def _join_fake(
    near, near_log, q, k, v, alpha, beta, gamma, key_mask, normalize_keys, block, overlap, causal
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    states = launch.empty_states(k, v, Cut(block, overlap, causal, q.shape[2]))
    return empty_rows(near, v.shape[-1]), floats(q, *q.shape[:3]), *states


def _backward_impl(
    dout, near, near_log, q, k, v, alpha, beta, gamma, key_mask, lse, before, after,
    normalize_keys, block, overlap, causal,
) -> tuple[Tensor, ...]:  # fmt: skip
    if q.numel() == 0 or v.numel() == 0:
        return tuple(
            x.zero_() for x in _backward_fake(dout, near, near_log, q, k, v, alpha, beta, gamma)
        )
    near, near_log, q, k, v, key_mask = _prepared(near, near_log, q, k, v, key_mask)
    cut = Cut(block, overlap, causal, q.shape[2])
    return launch.join_backward(
        dout, near, near_log, q, k, v, alpha, beta, gamma, key_mask, lse, before, after,
        normalize_keys, cut,
    )  # fmt: skip


def _backward_fake(
    dout, near, near_log, q, k, v, alpha, beta, gamma, *others: Any
) -> tuple[Tensor, ...]:
    return (
        empty_rows(near, near.shape[-1]), floats(q, *q.shape[:3]),
        *(empty_rows(x, x.shape[-1]) for x in (q, k, v)),
        *(floats(q, *x.shape) for x in (alpha, beta, gamma)),
    )  # fmt: skip


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:9], *output[1:])
    ctx.options = inputs[9:]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor, *unused: Tensor | None) -> tuple[Tensor | None, ...]:
    if dout is None:
        return (None,) * 13
    found = _backward(dout, *ctx.saved_tensors, *ctx.options)
    return *found, *([None] * 5)


_INPUTS = (
    "Tensor near, Tensor near_log, Tensor q, Tensor k, Tensor v, Tensor alpha, Tensor beta, "
    "Tensor gamma, Tensor? key_mask"
)
_WINDOW = "bool normalize_keys, int block, int overlap, bool causal"
_join = register(
    f"join_far({_INPUTS}, {_WINDOW}) -> (Tensor out, Tensor lse, Tensor before, Tensor after)",
    _join_impl,
    _join_fake,
    save=_save,
    differentiate=_differentiate,
)
_backward = register(
    f"join_far_backward(Tensor dout, {_INPUTS}, Tensor lse, Tensor before, Tensor after, {_WINDOW})"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward_impl,
    _backward_fake,
)
