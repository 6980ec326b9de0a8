"""Near keys exactly and far keys by LLN, under one normaliser: one operator, in three launches.

The state of a block's far keys is one more tile of its softmax, whose columns are the slots; see
:mod:`lln.ops.window.kernels.joint.near_kernels`.
"""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lln.ops.common.gradients import register_with_gradient
from lln.ops.common.kernels.library import empty_rows, floats, rows_like
from lln.ops.window.eager_near_far import far_mask, sink_positions
from lln.ops.window.kernels.joint.launch import Far, Near, States, Window, empty_states, forward
from lln.ops.window.kernels.joint.launch_backward import backward


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


def near_with_log(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv N D"],
    v: Float[Tensor, "B Hkv N E"],
    *,
    sinks: Int[Tensor, "B n"] | None = None,
    key_mask: Bool[Tensor, "B N"] | None = None,
    block: int,
    overlap: int,
    scale: float,
    is_causal: bool,
) -> tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N"]]:
    """Output and natural logarithm of the sum of near keys; −inf and 0 where there is none.

    ``sinks`` are positions of keys that every query sees; N or more where there is none.
    """
    return _near(q, k, v, sinks, key_mask, block, overlap, scale, is_causal)


def near_far(
    q, k, v, *, q_far, k_far, alpha, beta, gamma, block, scale, overlap=0, sinks=0,
    key_mask=None, is_causal=False,
) -> Tensor:  # fmt: skip
    """u · near + (1 − u) · far, u = sigmoid(ℓ_near − γ − ℓ_far).

    Features that are ``q`` and ``k`` themselves are read once, and have one gradient.
    """
    always = sink_positions(k, sinks, key_mask) if sinks else None
    features = None if q_far is q else q_far, None if k_far is k else k_far
    masks = always, key_mask, far_mask(k, always, key_mask)
    window = block, overlap, scale, is_causal
    return _near_far(q, k, v, *features, alpha, beta, gamma, *masks, *window)


def block_causal(
    q: Float[Tensor, "B H N S"],
    k: Float[Tensor, "B Hkv N S"],
    v: Float[Tensor, "B Hkv N E"],
    *,
    alpha: Float[Tensor, "B H"],
    beta: Float[Tensor, "B Hkv"],
    causal_block: int,
    key_mask: Bool[Tensor, "B N"] | None = None,
) -> Float[Tensor, "B H N E"]:
    """Causal LLN attention whose queries see all of their block: far keys that end after it."""
    level = torch.zeros_like(alpha)
    masks = None, key_mask, key_mask
    window = causal_block, -causal_block, 1.0, True
    return _near_far(q, k, v, None, None, alpha, beta, level, *masks, *window)


def _parsed(
    q, k, v, q_far, k_far, alpha, beta, gamma, sinks, key_mask, far_mask, block, overlap, scale,
    causal,
) -> tuple[Near, Far, Window]:  # fmt: skip
    far = Far.prepared(q_far, k_far, alpha, beta, gamma, far_mask)
    window = Window(block, overlap, scale, causal, q.shape[2])
    return Near.prepared(q, k, v, sinks, key_mask), far, window


def _forward(*given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    out, lse, states = forward(*_parsed(*given))
    assert states is not None
    return out, lse, states.logs, states.means


def _shapes(q, k, v, *given: Any) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    _, far, window = _parsed(q, k, v, *given)
    slots = (q if far.q is None else far.q).shape[-1]
    states = empty_states(v, window.states, slots, window.directions)
    return empty_rows(q, v.shape[-1]), floats(q, *q.shape[:3]), states.logs, states.means


def _backward(dout, *given: Any) -> tuple[Tensor | None, ...]:
    inputs, (out, lse, logs, means), options = given[:11], given[11:15], given[15:-3]
    near, far, window = _parsed(*inputs, *options)
    return backward(dout, None, near, far, out, lse, States(logs, means), window, given[-3:])


def _like(q, k, v, q_far, k_far) -> tuple[Tensor, ...]:
    own = (floats(q, 0) if x is None else empty_rows(x, x.shape[-1]) for x in (q_far, k_far))
    return *rows_like(q, k, v), *own


_near_far, _ = register_with_gradient(
    "near_far(Tensor q, Tensor k, Tensor v, Tensor? q_far, Tensor? k_far, Tensor alpha, "
    "Tensor beta, Tensor gamma, Tensor? sinks, Tensor? key_mask, Tensor? far_mask, int block, "
    "int overlap, float scale, bool causal) "
    "-> (Tensor out, Tensor lse, Tensor logs, Tensor means)",
    forward=_forward,
    shapes=_shapes,
    backward=_backward,
    gradients=("q", "k", "v", "q_far", "k_far"),
    slopes=("alpha", "beta", "gamma"),
    like=_like,
    saved_from=0,
)


def _near_forward(q, k, v, sinks, key_mask, block, overlap, scale, causal) -> tuple[Tensor, Tensor]:
    window = Window(block, overlap, scale, causal, q.shape[2])
    return forward(Near.prepared(q, k, v, sinks, key_mask), None, window)[:2]


def _near_shapes(q, k, v, *_: Any) -> tuple[Tensor, Tensor]:
    return empty_rows(q, v.shape[-1]), floats(q, *q.shape[:3])


def _near_backward(
    d_out, d_log, q, k, v, sinks, key_mask, out, log, block, overlap, scale, causal
) -> tuple[Tensor | None, ...]:
    window = Window(block, overlap, scale, causal, q.shape[2])
    near = Near.prepared(q, k, v, sinks, key_mask)
    return backward(d_out, d_log.contiguous(), near, None, out, log, None, window)[:3]


_near, _ = register_with_gradient(
    "near(Tensor q, Tensor k, Tensor v, Tensor? sinks, Tensor? key_mask, int block, int overlap, "
    "float scale, bool causal) -> (Tensor out, Tensor log)",
    forward=_near_forward,
    shapes=_near_shapes,
    backward=_near_backward,
    like=rows_like,
    outputs=2,
    saved_from=0,
    empty=(0.0, -torch.inf),
)
