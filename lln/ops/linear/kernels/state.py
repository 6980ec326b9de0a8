"""summarize and read as ops of their own: the state of keys, and what queries get from it."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lln.ops.common.kernels.library import contiguous_mask, empty_rows, rows_contiguous
from lln.ops.common.registration import register
from lln.ops.linear.kernels import launch


def summarize(
    k: Float[Tensor, "B Hkv M D"],
    v: Float[Tensor, "B Hkv M E"],
    *,
    beta: Float[Tensor, "B Hkv"],
    key_mask: Bool[Tensor, "B M"] | None = None,
) -> tuple[Float[Tensor, "B Hkv D"], Float[Tensor, "B Hkv D E"]]:
    """(L, M) of a set of keys, float32: see :func:`lln.ops.linear.state.summarize`."""
    return _summarize(k, v, beta, key_mask)[:2]


def read(
    q: Float[Tensor, "B H N D"],
    log_mass: Float[Tensor, "B Hkv D"],
    mean: Float[Tensor, "B Hkv D E"],
    *,
    alpha: Float[Tensor, "B H"],
    slot_dropout: None = None,
) -> Float[Tensor, "B H N E"]:
    """softmax_l(α q + L) · M: see :func:`lln.ops.linear.state.read`."""
    if slot_dropout is not None:
        raise ValueError("slot_dropout is not supported by impl='triton'; use impl='eager'")
    return _read(q, log_mass, mean, alpha)[0]


def _summarize_impl(k, v, beta, key_mask) -> tuple[Tensor, ...]:
    state = launch.empty_state(k, v)
    if k.numel() == 0 or v.numel() == 0:
        return state.log_mass.fill_(-torch.inf), state.mean.zero_(), state.norm.zero_()
    k, v, key_mask = rows_contiguous(k), rows_contiguous(v), contiguous_mask(key_mask)
    parts, count = launch.summarize_parts(k, v, beta, key_mask)
    launch.merge(parts, count, state, natural=True)
    return tuple(state)


def _summarize_fake(k, v, beta, key_mask) -> tuple[Tensor, ...]:
    return tuple(launch.empty_state(k, v))


def _summarize_backward_impl(
    d_log_mass, d_mean, k, v, beta, key_mask, log_mass, mean, norm, need_beta
) -> tuple[Tensor, Tensor, Tensor | None]:
    if k.numel() == 0 or v.numel() == 0:
        return torch.zeros_like(k), torch.zeros_like(v), mean.new_zeros(beta.shape)
    k, v, key_mask = rows_contiguous(k), rows_contiguous(v), contiguous_mask(key_mask)
    g = d_log_mass - (d_mean * mean).sum(-1)
    parts = torch.cat([d_mean.flatten(2), g], dim=-1).flatten(0, 1).unsqueeze(1)
    dk, dv, dbeta = launch.summarize_backward(
        parts, k, v, beta, key_mask, norm, need_beta=need_beta
    )
    return dk, dv, dbeta


def _summarize_backward_fake(
    d_log_mass, d_mean, k, v, beta, key_mask, log_mass, mean, norm, need_beta
) -> tuple[Tensor, Tensor, Tensor]:
    slope = mean.new_empty(beta.shape if need_beta else (0,))
    return empty_rows(k, k.shape[-1]), empty_rows(v, v.shape[-1]), slope


def _summarize_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, *output)
    ctx.mark_non_differentiable(output[2])


def _summarize_differentiate(
    ctx: Any, d_log_mass: Tensor, d_mean: Tensor, _: Tensor | None
) -> tuple[Tensor | None, ...]:
    need_beta = ctx.needs_input_grad[2]
    dk, dv, dbeta = _summarize_backward(d_log_mass, d_mean, *ctx.saved_tensors, need_beta)
    return dk, dv, dbeta if need_beta else None, None


def _read_impl(q, log_mass, mean, alpha) -> tuple[Tensor, Tensor]:
    if q.numel() == 0 or mean.numel() == 0:
        out, lse = _read_fake(q, log_mass, mean, alpha)
        return out.zero_(), lse.fill_(torch.inf)
    state = launch.Merged(log_mass.contiguous(), mean.contiguous(), log_mass)
    out, lse = launch.read(
        rows_contiguous(q), alpha, state,
        kv_heads=mean.shape[1], e=mean.shape[-1], save=True, natural=True,
    )  # fmt: skip
    assert lse is not None
    return out, lse


def _read_fake(q, log_mass, mean, alpha) -> tuple[Tensor, Tensor]:
    return empty_rows(q, mean.shape[-1]), launch.empty_lse(q)


def _read_backward_impl(
    dout, q, log_mass, mean, alpha, lse, need_alpha
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    if q.numel() == 0 or mean.numel() == 0:
        zeros = torch.zeros_like
        return zeros(q), zeros(log_mass), zeros(mean), lse.new_zeros(alpha.shape)
    log_mass, mean = log_mass.contiguous(), mean.contiguous()
    dq, parts, dalpha = launch.read_backward(
        dout, rows_contiguous(q), alpha, lse, log_mass, mean, need_alpha=need_alpha, natural=True
    )
    d, e = mean.shape[2:]
    total = launch.merge_gradients(parts)
    d_mean = total[:, 0, : d * e].reshape(mean.shape)
    d_log_mass = (d_mean * mean).sum(-1) + total[:, 0, d * e :].reshape(log_mass.shape)
    return dq, d_log_mass, d_mean.clone(), dalpha


def _read_backward_fake(
    dout, q, log_mass, mean, alpha, lse, need_alpha
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    slope = lse.new_empty(alpha.shape if need_alpha else (0,))
    return (
        empty_rows(q, q.shape[-1]),
        log_mass.new_empty(log_mass.shape),
        mean.new_empty(mean.shape),
        slope,
    )


def _read_save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, ...]) -> None:
    ctx.save_for_backward(*inputs, output[1])
    ctx.mark_non_differentiable(output[1])
    ctx.set_materialize_grads(False)


def _read_differentiate(ctx: Any, dout: Tensor, _: Tensor | None) -> tuple[Tensor | None, ...]:
    if dout is None:
        return (None,) * 4
    need_alpha = ctx.needs_input_grad[3]
    dq, d_log_mass, d_mean, dalpha = _read_backward(dout, *ctx.saved_tensors, need_alpha)
    return dq, d_log_mass, d_mean, dalpha if need_alpha else None


_KEYS = "Tensor k, Tensor v, Tensor beta, Tensor? key_mask"
_STATE = "Tensor log_mass, Tensor mean"
_summarize = register(
    f"summarize({_KEYS}) -> ({_STATE}, Tensor norm)",
    _summarize_impl,
    _summarize_fake,
    save=_summarize_save,
    differentiate=_summarize_differentiate,
)
_summarize_backward = register(
    f"summarize_backward(Tensor d_log_mass, Tensor d_mean, {_KEYS}, {_STATE}, Tensor norm, "
    "bool need_beta) -> (Tensor, Tensor, Tensor)",
    _summarize_backward_impl,
    _summarize_backward_fake,
)
_read = register(
    f"read(Tensor q, {_STATE}, Tensor alpha) -> (Tensor out, Tensor lse)",
    _read_impl,
    _read_fake,
    save=_read_save,
    differentiate=_read_differentiate,
)
_read_backward = register(
    f"read_backward(Tensor dout, Tensor q, {_STATE}, Tensor alpha, Tensor lse, bool need_alpha) "
    "-> (Tensor, Tensor, Tensor, Tensor)",
    _read_backward_impl,
    _read_backward_fake,
)
