"""Near keys exactly and far keys by LLN, under one normaliser: one operator, in three launches.

The state of a block's far keys is one more tile of its softmax, whose columns are the slots; see
:mod:`lln.ops.triton.joint.near_kernels`.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lln.ops.eager.joint.near_far import far_mask, sink_positions
from lln.ops.registration import register
from lln.ops.triton.joint.launch import Far, Near, States, Window, empty_states, forward
from lln.ops.triton.joint.launch_backward import backward
from lln.ops.triton.joint.near import near_with_log
from lln.ops.triton.library import empty_rows, floats


def near(
    q, k, v, *, block, scale, overlap=0, sinks=0, key_mask=None, is_causal=False
) -> Tensor:  # fmt: skip
    """Softmax attention over windows of blocks and sinks."""
    return near_and_log(
        q, k, v, block=block, scale=scale, overlap=overlap, sinks=sinks, key_mask=key_mask,
        is_causal=is_causal,
    )[0]  # fmt: skip


def near_and_log(
    q, k, v, *, block, scale, overlap, sinks, key_mask, is_causal
) -> tuple[Tensor, Tensor]:
    """Output and logarithm of the sum of near keys."""
    always = sink_positions(k, sinks, key_mask) if sinks else None
    window = {"block": block, "overlap": overlap, "scale": scale, "is_causal": is_causal}
    return near_with_log(q, k, v, sinks=always, key_mask=key_mask, **window)


def near_far(
    q, k, v, *, q_far, k_far, alpha, beta, gamma, block, scale, overlap=0, sinks=0, far="others",
    key_mask=None, is_causal=False, normalize_keys=False,
) -> Tensor:  # fmt: skip
    """u · near + (1 − u) · far, u = sigmoid(ℓ_near − γ − ℓ_far).

    Features that are ``q`` and ``k`` themselves are read once, and have one gradient.
    """
    always = sink_positions(k, sinks, key_mask) if sinks else None
    features = None if q_far is q else q_far, None if k_far is k else k_far
    masks = always, key_mask, far_mask(k, always, key_mask)
    window = normalize_keys, block, overlap, scale, is_causal
    return _near_far(q, k, v, *features, alpha, beta, gamma, *masks, *window)[0]


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
    level = torch.zeros_like(alpha)
    masks = None, key_mask, key_mask
    window = normalize_keys, causal_block, -causal_block, 1.0, True
    return _near_far(q, k, v, None, None, alpha, beta, level, *masks, *window)[0]


def _impl(
    q, k, v, q_far, k_far, alpha, beta, gamma, sinks, key_mask, far_mask, normalize_keys, block,
    overlap, scale, causal,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    if q.numel() == 0 or v.numel() == 0:
        empty = _fake(
            q, k, v, q_far, k_far, alpha, beta, gamma, sinks, key_mask, far_mask, normalize_keys,
            block, overlap, scale, causal,
        )  # fmt: skip
        return tuple(x.zero_() for x in empty)  # pyright: ignore[reportReturnType]
    near = Near.prepared(q, k, v, sinks, key_mask)
    far = Far.prepared(q_far, k_far, alpha, beta, gamma, far_mask, normalize_keys)
    out, lse, states = forward(near, far, Window(block, overlap, scale, causal, q.shape[2]))
    assert states is not None
    return out, lse, states.logs, states.means


def _fake(
    q, k, v, q_far, k_far, alpha, beta, gamma, sinks, key_mask, far_mask, normalize_keys, block,
    overlap, scale, causal,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    window = Window(block, overlap, scale, causal, q.shape[2])
    slots = (q if q_far is None else q_far).shape[-1]
    states = empty_states(v, window.states, slots, window.directions)
    return empty_rows(q, v.shape[-1]), floats(q, *q.shape[:3]), states.logs, states.means


def _backward_impl(
    dout, q, k, v, q_far, k_far, alpha, beta, gamma, sinks, key_mask, far_mask, out, lse, logs,
    means, normalize_keys, block, overlap, scale, causal, *needs,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    if q.numel() == 0 or v.numel() == 0:
        gradients = _backward_fake(
            dout, q, k, v, q_far, k_far, alpha, beta, gamma, sinks, key_mask, far_mask, out, lse,
            logs, means, normalize_keys, block, overlap, scale, causal, *needs,
        )  # fmt: skip
        return tuple(x.zero_() for x in gradients)
    near = Near.prepared(q, k, v, sinks, key_mask)
    far = Far.prepared(q_far, k_far, alpha, beta, gamma, far_mask, normalize_keys)
    window = Window(block, overlap, scale, causal, q.shape[2])
    return backward(dout, None, near, far, out, lse, States(logs, means), window, needs)


def _backward_fake(
    dout, q, k, v, q_far, k_far, alpha, beta, gamma, sinks, key_mask, far_mask, out, lse, logs,
    means, normalize_keys, block, overlap, scale, causal, *needs,
) -> tuple[Tensor, ...]:  # fmt: skip
    own = (lse.new_empty(0) if x is None else empty_rows(x, x.shape[-1]) for x in (q_far, k_far))
    scales = zip((alpha, beta, gamma), needs, strict=True)
    return (
        *(empty_rows(x, x.shape[-1]) for x in (q, k, v)), *own,
        *(floats(lse, *(x.shape if need else (0,))) for x, need in scales),
    )  # fmt: skip


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs[:11], *output)
    ctx.options = inputs[11:]
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor, *unused: Tensor | None) -> tuple[Tensor | None, ...]:
    if dout is None:
        return (None,) * 16
    wanted = ctx.needs_input_grad
    found = _backward(dout, *ctx.saved_tensors, *ctx.options, *wanted[5:8])
    return *(x if need else None for x, need in zip(found, wanted, strict=False)), *([None] * 8)


_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor? q_far, Tensor? k_far, Tensor alpha, Tensor beta, "
    "Tensor gamma, Tensor? sinks, Tensor? key_mask, Tensor? far_mask"
)
_WINDOW = "bool normalize_keys, int block, int overlap, float scale, bool causal"
_near_far = register(
    f"near_far({_INPUTS}, {_WINDOW}) -> (Tensor out, Tensor lse, Tensor logs, Tensor means)",
    _impl,
    _fake,
    save=_save,
    differentiate=_differentiate,
)
_backward = register(
    f"near_far_backward(Tensor dout, {_INPUTS}, Tensor out, Tensor lse, Tensor logs, Tensor means, "
    f"{_WINDOW}, bool need_alpha, bool need_beta, bool need_gamma) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward_impl,
    _backward_fake,
)
