"""Packed sequences: each item of work is a piece of one sequence, so padding costs nothing."""

from __future__ import annotations

from jaxtyping import Bool, Float, Int
from torch import Tensor

from lln.ops.common.gradients import contiguous_like, register_with_gradient
from lln.ops.common.kernels.library import rows_contiguous
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
    return _varlen(q, k, v, alpha, beta, cu_q, cu_k, key_mask)


def _forward(q, k, v, alpha, beta, cu_q, cu_k, key_mask) -> tuple[Tensor, ...]:
    out, lse, *_ = _shapes(q, k, v, alpha, beta, cu_q, cu_k, key_mask)
    q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
    merged = launch.summarize(k, v, cu_k, beta, key_mask)
    launch.read(q, cu_q, alpha, merged, out, lse)
    return out, lse, *merged


def _shapes(q, k, v, alpha, beta, cu_q, cu_k, key_mask) -> tuple[Tensor, ...]:
    out = q.new_empty((*q.shape[:2], v.shape[2]))
    return out, launch.empty_packed_lse(q), *launch.empty_packed_state(k, v, cu_k)


def _backward(
    dout, q, k, v, alpha, beta, cu_q, cu_k, key_mask, lse, log_mass, mean, norm, need_alpha,
    need_beta,
) -> tuple[Tensor | None, ...]:  # fmt: skip
    dq, dk, dv = contiguous_like(q, k, v)
    dout, q, k, v = (rows_contiguous(x) for x in (dout, q, k, v))
    state = Merged(log_mass, mean, norm)
    parts, slope_q = launch.read_backward(dout, q, cu_q, alpha, lse, state, dq, need_alpha)
    slope_k = launch.summarize_backward(
        parts, k, v, cu_k, beta, key_mask, norm, dk, dv, need_beta=need_beta
    )
    slopes = (slope_q, alpha), (slope_k, beta)
    return dq, dk, dv, *(None if x is None else x.view(of.shape) for x, of in slopes)


_varlen, _ = register_with_gradient(
    "varlen(Tensor q, Tensor k, Tensor v, Tensor alpha, Tensor beta, Tensor cu_q, Tensor cu_k, "
    "Tensor? key_mask) -> (Tensor out, Tensor lse, Tensor log_mass, Tensor mean, Tensor norm)",
    slopes=("alpha", "beta"),
    forward=_forward,
    shapes=_shapes,
    backward=_backward,
    like=contiguous_like,
)
