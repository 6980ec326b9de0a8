"""Packed sequences: each item of work is a piece of one sequence, so padding costs nothing."""

from __future__ import annotations

from typing import Any

from jaxtyping import Bool, Float, Int
from torch import Tensor

from lln.ops.common.kernels.library import rows_contiguous
from lln.ops.common.registration import register
from lln.ops.linear.kernels import launch_packed as launch
from lln.ops.linear.kernels.launch import Merged


def varlen(
    q: Float[Tensor, "T H D"],
    k: Float[Tensor, "Tk Hkv D"],
    v: Float[Tensor, "Tk Hkv E"],
    cu_q: Int[Tensor, " S1"],
    cu_k: Int[Tensor, " S1"],
    *,
    alpha: Float[Tensor, "S H"],
    beta: Float[Tensor, "S Hkv"],
    key_mask: Bool[Tensor, " Tk"] | None = None,
    block: int | None = None,
    scale: float = 1.0,
    is_causal: bool = False,
) -> Float[Tensor, "T H E"]:
    """LLN attention of each packed sequence by itself; see :func:`lln.ops.linear.varlen.varlen`.

    Never looks at the lengths on the host. There is no causal kernel and none with blocks.
    """
    if is_causal or block is not None:
        raise ValueError("is_causal and block are not supported by impl='triton'; use impl='eager'")
    cu_q, cu_k = cu_q.to(q.device), cu_k.to(q.device)
    return _forward(q, k, v, cu_q, cu_k, alpha, beta, key_mask)[0]


def _nothing(q: Tensor, v: Tensor, cu_q: Tensor) -> bool:
    return q.numel() == 0 or v.shape[1] * v.shape[2] == 0 or cu_q.shape[0] < 2


def _forward_impl(q, k, v, cu_q, cu_k, alpha, beta, key_mask) -> tuple[Tensor, ...]:
    out, lse, *state = _forward_fake(q, k, v, cu_q, cu_k, alpha, beta, key_mask)
    if _nothing(q, v, cu_q):
        return tuple(x.zero_() for x in (out, lse, *state))
    q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
    merged = launch.summarize(k, v, cu_k, beta, key_mask)
    launch.read(q, cu_q, alpha, merged, out, lse)
    return out, lse, *merged


def _forward_fake(q, k, v, cu_q, cu_k, alpha, beta, key_mask) -> tuple[Tensor, ...]:
    out = q.new_empty((*q.shape[:2], v.shape[2]))
    return out, launch.empty_packed_lse(q), *launch.empty_packed_state(k, v, cu_k)


def _backward_impl(
    dout, q, k, v, cu_q, cu_k, alpha, beta, key_mask, lse, log_mass, mean, norm, need_alpha,
    need_beta,
) -> tuple[Tensor, ...]:  # fmt: skip
    dq, dk, dv, dalpha, dbeta = _backward_fake(
        dout, q, k, v, cu_q, cu_k, alpha, beta, key_mask, lse, log_mass, mean, norm, need_alpha,
        need_beta,
    )  # fmt: skip
    if _nothing(q, v, cu_q):
        return tuple(x.zero_() for x in (dq, dk, dv, dalpha, dbeta))
    dout, q, k, v = (rows_contiguous(x) for x in (dout, q, k, v))
    state = Merged(log_mass, mean, norm)
    parts, slope_q = launch.read_backward(dout, q, cu_q, alpha, lse, state, dq, need_alpha)
    slope_k = launch.summarize_backward(
        parts, k, v, cu_k, beta, key_mask, norm, dk, dv, need_beta=need_beta
    )
    return (
        dq, dk, dv,
        dalpha if slope_q is None else slope_q.view(alpha.shape),
        dbeta if slope_k is None else slope_k.view(beta.shape),
    )  # fmt: skip


def _backward_fake(
    dout, q, k, v, cu_q, cu_k, alpha, beta, key_mask, lse, log_mass, mean, norm, need_alpha,
    need_beta,
) -> tuple[Tensor, ...]:  # fmt: skip
    return (
        q.new_empty(q.shape), k.new_empty(k.shape), v.new_empty(v.shape),
        lse.new_empty(alpha.shape if need_alpha else (0,)),
        lse.new_empty(beta.shape if need_beta else (0,)),
    )  # fmt: skip


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, *output[1:])
    ctx.mark_non_differentiable(*output[1:])
    ctx.set_materialize_grads(False)


def _differentiate(ctx: Any, dout: Tensor, *unused: Tensor | None) -> tuple[Tensor | None, ...]:
    if dout is None:
        return (None,) * 8
    need_alpha, need_beta = ctx.needs_input_grad[5:7]
    dq, dk, dv, dalpha, dbeta = _backward(dout, *ctx.saved_tensors, need_alpha, need_beta)
    slopes = dalpha if need_alpha else None, dbeta if need_beta else None
    return dq, dk, dv, None, None, *slopes, None


_INPUTS = (
    "Tensor q, Tensor k, Tensor v, Tensor cu_q, Tensor cu_k, Tensor alpha, Tensor beta, "
    "Tensor? key_mask"
)
_SAVED = "Tensor lse, Tensor log_mass, Tensor mean, Tensor norm"
_forward = register(
    f"varlen({_INPUTS}) -> (Tensor out, {_SAVED})",
    _forward_impl,
    _forward_fake,
    save=_save,
    differentiate=_differentiate,
)
_backward = register(
    f"varlen_backward(Tensor dout, {_INPUTS}, {_SAVED}, bool need_alpha, bool need_beta) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor)",
    _backward_impl,
    _backward_fake,
)
