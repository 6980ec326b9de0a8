"""Causal LLN attention: keys before a segment as a state, keys inside it chunk by chunk."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lln.ops.causal.kernels import launch
from lln.ops.common.gradients import register_with_gradient
from lln.ops.common.kernels.library import empty_rows
from lln.ops.common.parts import causal_by_parts
from lln.ops.linear.kernels.launch import empty_lse, prepared
from lln.ops.linear.kernels.state import read, summarize

if TYPE_CHECKING:
    from lln.ops.linear.state import State

LOG2E = 1.4426950408889634


def causal(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv M D"],
    v: Float[Tensor, "B Hkv M E"],
    *,
    alpha: Float[Tensor, "B H"],
    beta: Float[Tensor, "B Hkv"],
    key_mask: Bool[Tensor, "B M"] | None = None,
    state: State | None = None,
    slot_dropout: None = None,
) -> Float[Tensor, "B H N E"]:
    """Causal LLN attention: query i sees keys j ≤ i + M − N, and those of ``state``."""
    if slot_dropout is not None:
        raise ValueError("slot_dropout is not supported by impl='triton'; use impl='eager'")

    def attend(q, k, v, key_mask, _, given):
        log_mass, mean = given or (None, None)
        return _causal(q, k, v, alpha, beta, log_mass, mean, key_mask)

    return causal_by_parts(
        q, k, v, key_mask, state,
        summarize=lambda k, v, mask: summarize(k, v, beta=beta, key_mask=mask),
        attend=attend,
        read=lambda q, log_mass, mean, _: read(q, log_mass, mean, alpha=alpha),
    )  # fmt: skip


def _given(log_mass: Tensor | None, mean: Tensor | None) -> launch.Given:
    if log_mass is None or mean is None:
        return launch.NOTHING
    return launch.Given(log_mass.contiguous(), mean.contiguous())


def _forward(q, k, v, alpha, beta, log_mass, mean, key_mask) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v, key_mask = prepared(q, k, v, key_mask)
    return launch.causal(q, k, v, alpha, beta, key_mask, _given(log_mass, mean))


def _shapes(q, k, v, alpha, beta, log_mass, mean, key_mask) -> tuple[Tensor, Tensor, Tensor]:
    return empty_rows(q, v.shape[-1]), empty_lse(q), empty_states(q, k, v)


def empty_states(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Uninitialised states before the tiles; none without a token."""
    if q.numel() == 0 or v.numel() == 0:
        return q.new_empty(0, dtype=torch.float32)
    return launch.empty_before(q, k, v)


def _backward(
    dout, q, k, v, alpha, beta, log_mass, mean, key_mask, lse, before, need_alpha, need_beta,
    need_log_mass, need_mean,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    q, k, v, key_mask = prepared(q, k, v, key_mask)
    given, need_state = _given(log_mass, mean), need_log_mass or need_mean
    found = launch.causal_backward(
        dout, q, k, v, alpha, beta, key_mask, given, lse, before,
        need_alpha=need_alpha, need_beta=need_beta, need_state=need_state,
    )  # fmt: skip
    state = _state_gradients(found.start, given) if need_state else (None, None)
    return found.dq, found.dk, found.dv, found.dalpha, found.dbeta, *state


def _state_gradients(start: Tensor | None, given: launch.Given) -> tuple[Tensor, Tensor]:
    """dM_l = W_l Σ a dO, dL_l = M_l·dM_l − W_l Σ a δ with W = exp(L + Q); summed over the group."""
    assert start is not None and given.log_mass is not None and given.mean is not None
    b, kv_heads, d, e = given.mean.shape
    total, peak, _, extra = start.unflatten(0, (b, kv_heads, -1)).split([d * e, d, d, d], dim=-1)
    weight = torch.exp2(given.log_mass[:, :, None] * LOG2E + peak)
    d_mean = (weight[..., None] * total.unflatten(-1, (d, e))).sum(2)
    return (given.mean * d_mean).sum(-1) - (weight * extra).sum(2), d_mean


def empty_gradients(q: Tensor, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Uninitialised dq, dk, dv in the memory order that :func:`launch.causal_backward` gives."""
    group = q.shape[1] != k.shape[1]
    like_k = k.new_empty(k.shape) if group else empty_rows(k, k.shape[-1])
    like_v = v.new_empty(v.shape) if group else empty_rows(v, v.shape[-1])
    return empty_rows(q, q.shape[-1]), like_k, like_v


_causal, _ = register_with_gradient(
    "causal(Tensor q, Tensor k, Tensor v, Tensor alpha, Tensor beta, Tensor? log_mass, "
    "Tensor? mean, Tensor? key_mask) -> (Tensor out, Tensor lse, Tensor before)",
    slopes=("alpha", "beta", "log_mass", "mean"),
    forward=_forward,
    shapes=_shapes,
    backward=_backward,
    like=empty_gradients,
)
