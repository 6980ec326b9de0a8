"""summarize and read as ops of their own: the state of keys, and what queries get from it."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lln.ops.common.gradients import contiguous_like, register_with_gradient
from lln.ops.common.kernels.library import (
    contiguous_mask,
    empty_rows,
    rows_contiguous,
    rows_like,
)
from lln.ops.linear.kernels import launch


def summarize(
    k: Float[Tensor, "B Hkv M D"],
    v: Float[Tensor, "B Hkv M E"],
    *,
    beta: Float[Tensor, "B Hkv"],
    key_mask: Bool[Tensor, "B M"] | None = None,
) -> tuple[Float[Tensor, "B Hkv D"], Float[Tensor, "B Hkv D E"]]:
    """(L, M) of a set of keys, float32: see :func:`lln.ops.linear.state.summarize`."""
    return _summarize(k, v, beta, key_mask)


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
    return _read(q, log_mass, mean, alpha)


def _summarize_forward(k, v, beta, key_mask) -> tuple[Tensor, ...]:
    state = launch.empty_state(k, v)
    k, v, key_mask = rows_contiguous(k), rows_contiguous(v), contiguous_mask(key_mask)
    parts, count = launch.summarize_parts(k, v, beta, key_mask)
    launch.merge(parts, count, state, natural=True)
    return tuple(state)


def _summarize_shapes(k, v, beta, key_mask) -> tuple[Tensor, ...]:
    return tuple(launch.empty_state(k, v))


def _summarize_backward(
    d_log_mass, d_mean, k, v, beta, key_mask, log_mass, mean, norm, need_beta
) -> tuple[Tensor, Tensor, Tensor | None]:
    k, v, key_mask = rows_contiguous(k), rows_contiguous(v), contiguous_mask(key_mask)
    g = d_log_mass - (d_mean * mean).sum(-1)
    parts = torch.cat([d_mean.flatten(2), g], dim=-1).flatten(0, 1).unsqueeze(1)
    return launch.summarize_backward(parts, k, v, beta, key_mask, norm, need_beta=need_beta)


def _read_forward(q, log_mass, mean, alpha) -> tuple[Tensor, Tensor | None]:
    state = launch.Merged(log_mass.contiguous(), mean.contiguous(), log_mass)
    return launch.read(
        rows_contiguous(q), alpha, state,
        kv_heads=mean.shape[1], e=mean.shape[-1], save=True, natural=True,
    )  # fmt: skip


def _read_shapes(q, log_mass, mean, alpha) -> tuple[Tensor, Tensor]:
    return empty_rows(q, mean.shape[-1]), launch.empty_lse(q)


def _read_backward(
    d_out, q, log_mass, mean, alpha, lse, need_alpha
) -> tuple[Tensor, Tensor, Tensor, Tensor | None]:
    log_mass, mean = log_mass.contiguous(), mean.contiguous()
    dq, parts, dalpha = launch.read_backward(
        d_out, rows_contiguous(q), alpha, lse, log_mass, mean, need_alpha=need_alpha, natural=True
    )
    d, e = mean.shape[2:]
    total = launch.merge_gradients(parts)
    d_mean = total[:, 0, : d * e].reshape(mean.shape)
    d_log_mass = (d_mean * mean).sum(-1) + total[:, 0, d * e :].reshape(log_mass.shape)
    return dq, d_log_mass, d_mean.clone(), dalpha


def _read_like(q, log_mass, mean) -> tuple[Tensor, ...]:
    return *rows_like(q), *contiguous_like(log_mass, mean)


_summarize, _ = register_with_gradient(
    "summarize(Tensor k, Tensor v, Tensor beta, Tensor? key_mask) "
    "-> (Tensor log_mass, Tensor mean, Tensor norm)",
    forward=_summarize_forward,
    shapes=_summarize_shapes,
    backward=_summarize_backward,
    gradients=("k", "v"),
    slopes=("beta",),
    like=rows_like,
    outputs=2,
    saved_from=0,
    empty=(-torch.inf,),
)
_read, _ = register_with_gradient(
    "read(Tensor q, Tensor log_mass, Tensor mean, Tensor alpha) -> (Tensor out, Tensor lse)",
    forward=_read_forward,
    shapes=_read_shapes,
    backward=_read_backward,
    gradients=("q", "log_mass", "mean"),
    slopes=("alpha",),
    like=_read_like,
)
