"""Causal LLN+Diag, averaged: causal LLN, then the blocks onto what it has written.

Forward, half of the block-diagonal softmax is added to half of the output of LLN in place;
backward, half of its gradients to half of those of LLN. No third pass puts both together.
"""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from lln.ops.causal.kernels import launch
from lln.ops.causal.kernels.causal import empty_gradients, empty_states
from lln.ops.common.gradients import register_with_gradient
from lln.ops.common.kernels.library import empty_rows
from lln.ops.linear.kernels.launch import empty_lse, prepared
from lln.ops.window.kernels.blocks.launch import diag, diag_backward, empty_diag_lse


def causal_average(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv N D"],
    v: Float[Tensor, "B Hkv N E"],
    alpha: Float[Tensor, "B H"],
    beta: Float[Tensor, "B Hkv"],
    key_mask: Bool[Tensor, "B N"] | None,
    block: int,
    scale: float,
) -> Float[Tensor, "B H N E"]:
    """½ causal LLN + ½ causal softmax among the positions of one block (Fig. 3)."""
    return _causal_average(q, k, v, alpha, beta, key_mask, block, scale)


def _forward(q, k, v, alpha, beta, key_mask, block, scale) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    q, k, v, key_mask = prepared(q, k, v, key_mask)
    out, lse, before = launch.causal(q, k, v, alpha, beta, key_mask, launch.NOTHING)
    _, local_lse = diag(
        q, k, v, key_mask, block=block, scale=scale, is_causal=True, save=True, add_to=out,
    )  # fmt: skip
    assert local_lse is not None
    return out, lse, before, local_lse


def _shapes(q, k, v, alpha, beta, key_mask, block, scale) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    local_lse = empty_diag_lse(q, linear=False)
    return empty_rows(q, v.shape[-1]), empty_lse(q), empty_states(q, k, v), local_lse


def _backward(
    dout, q, k, v, alpha, beta, key_mask, lse, before, local_lse, block, scale, need_alpha,
    need_beta,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    q, k, v, key_mask = prepared(q, k, v, key_mask)
    found = launch.causal_backward(
        dout, q, k, v, alpha, beta, key_mask, launch.NOTHING, lse, before,
        need_alpha=need_alpha, need_beta=need_beta, need_state=False,
    )  # fmt: skip
    gradients = found.dq, found.dk, found.dv
    diag_backward(
        dout, q, k, v, key_mask, local_lse, block=block, scale=scale, is_causal=True,
        add_to=gradients,
    )  # fmt: skip
    halves = (None if x is None else 0.5 * x for x in (found.dalpha, found.dbeta))
    return *gradients, *halves


_causal_average, _ = register_with_gradient(
    "causal_average(Tensor q, Tensor k, Tensor v, Tensor alpha, Tensor beta, Tensor? key_mask, "
    "int block, float scale) -> (Tensor out, Tensor lse, Tensor before, Tensor local_lse)",
    slopes=("alpha", "beta"),
    forward=_forward,
    shapes=_shapes,
    backward=_backward,
    like=empty_gradients,
)
