"""Causal LLN+Diag, averaged: causal LLN, then the blocks onto what it has written.

Forward, half of the block-diagonal softmax is added to half of the output of LLN in place;
backward, half of its gradients to half of those of LLN. No third pass puts both together.
"""

from __future__ import annotations

from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor

from lln.ops.causal.kernels import launch
from lln.ops.causal.kernels.causal import empty_gradients
from lln.ops.common.kernels.library import empty_rows
from lln.ops.common.registration import register
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
    return _forward(q, k, v, alpha, beta, key_mask, block, scale)[0]


def _forward_impl(
    q, k, v, alpha, beta, key_mask, block, scale
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    if q.numel() == 0 or v.numel() == 0:
        empty = _forward_fake(q, k, v, alpha, beta, key_mask, block, scale)
        return tuple(x.zero_() for x in empty)  # pyright: ignore[reportReturnType]
    q, k, v, key_mask = prepared(q, k, v, key_mask)
    out, lse, before = launch.causal(q, k, v, alpha, beta, key_mask, launch.NOTHING)
    _, local_lse = diag(
        q, k, v, key_mask, block=block, scale=scale, is_causal=True, linear=False, save=True,
        add_to=out,
    )  # fmt: skip
    assert local_lse is not None
    return out, lse, before, local_lse


def _forward_fake(
    q, k, v, alpha, beta, key_mask, block, scale
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    lse = empty_lse(q)
    nothing = q.numel() == 0 or v.numel() == 0
    before = lse.new_empty(0) if nothing else launch.empty_before(q, k, v)
    return empty_rows(q, v.shape[-1]), lse, before, empty_diag_lse(q, linear=False)


def _backward_impl(
    dout, q, k, v, alpha, beta, key_mask, lse, before, local_lse, block, scale, need_alpha,
    need_beta,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    if q.numel() == 0 or v.numel() == 0:
        gradients = _backward_fake(
            dout, q, k, v, alpha, beta, key_mask, lse, before, local_lse, block, scale,
            need_alpha, need_beta,
        )  # fmt: skip
        return tuple(x.zero_() for x in gradients)
    q, k, v, key_mask = prepared(q, k, v, key_mask)
    found = launch.causal_backward(
        dout, q, k, v, alpha, beta, key_mask, launch.NOTHING, lse, before,
        need_alpha=need_alpha, need_beta=need_beta, need_state=False,
    )  # fmt: skip
    gradients = found.dq, found.dk, found.dv
    diag_backward(
        dout, q, k, v, key_mask, local_lse, block=block, scale=scale, is_causal=True, linear=False,
        add_to=gradients,
    )  # fmt: skip
    halves = (None if x is None else 0.5 * x for x in (found.dalpha, found.dbeta))
    return *gradients, *halves


def _backward_fake(
    dout, q, k, v, alpha, beta, key_mask, lse, before, local_lse, block, scale, need_alpha,
    need_beta,
) -> tuple[Tensor, ...]:  # fmt: skip
    return (
        *empty_gradients(q, k, v),
        lse.new_empty(alpha.shape if need_alpha else (0,)),
        lse.new_empty(beta.shape if need_beta else (0,)),
    )


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    tensors, ctx.options = inputs[:6], inputs[6:]
    ctx.save_for_backward(*tensors, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor, *unused: Tensor | None) -> tuple[Tensor | None, ...]:
    if dout is None:
        return (None,) * 8
    need = ctx.needs_input_grad[3:5]
    dq, dk, dv, *slopes = _backward(dout, *ctx.saved_tensors, *ctx.options, *need)
    slopes = [slope if needed else None for slope, needed in zip(slopes, need, strict=True)]
    return dq, dk, dv, *slopes, None, None, None


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor alpha, Tensor beta, Tensor? key_mask"
_SAVED = "Tensor lse, Tensor before, Tensor local_lse"
_OPTIONS = "int block, float scale"
_forward = register(
    f"causal_average({_INPUTS}, {_OPTIONS}) -> (Tensor out, {_SAVED})",
    _forward_impl,
    _forward_fake,
    save=_save,
    differentiate=_differentiate,
)
_backward = register(
    f"causal_average_backward(Tensor dout, {_INPUTS}, {_SAVED}, {_OPTIONS}, bool need_alpha, "
    "bool need_beta) -> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward_impl,
    _backward_fake,
)
