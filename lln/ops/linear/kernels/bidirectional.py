"""Bidirectional LLN attention: two launches forward, two backward, a merge between if split."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lln.ops.common.gradients import register_with_gradient
from lln.ops.common.kernels.library import empty_rows, rows_like
from lln.ops.common.kernels.tiles import MERGE_IN_READER
from lln.ops.common.registration import register
from lln.ops.linear.kernels import launch


def bidirectional(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv M D"],
    v: Float[Tensor, "B Hkv M E"],
    *,
    alpha: Float[Tensor, "B H"],
    beta: Float[Tensor, "B Hkv"],
    key_mask: Bool[Tensor, "B M"] | None = None,
    slot_dropout: None = None,
) -> Float[Tensor, "B H N E"]:
    """LLN attention, eq. (8) of arXiv:2311.13541, as :func:`lln.ops.reference.bidirectional`.

    Numerics: sums in float32; the factors of each dot are rounded to the input dtype.
    """
    if slot_dropout is not None:
        raise ValueError("slot_dropout is not supported by impl='triton'; use impl='eager'")
    if torch.is_grad_enabled() and any(x.requires_grad for x in (q, k, v, alpha, beta)):
        return _train(q, k, v, alpha, beta, key_mask)
    return _infer(q, k, v, alpha, beta, key_mask)


def _forward(
    q: Tensor, k: Tensor, v: Tensor, alpha: Tensor, beta: Tensor, key_mask: Tensor | None,
    save: bool,
) -> tuple[Tensor, Tensor | None, launch.Merged | None]:  # fmt: skip
    q, k, v, key_mask = launch.prepared(q, k, v, key_mask)
    parts, count = launch.summarize_parts(k, v, beta, key_mask)
    merge_first = count > MERGE_IN_READER
    state = launch.empty_state(k, v) if save or merge_first else None
    if state is not None and merge_first:
        launch.merge(parts, count, state)
    out, lse = launch.read(
        q, alpha, state, parts=None if merge_first else parts, count=count,
        kv_heads=k.shape[1], e=v.shape[-1], save=save,
    )  # fmt: skip
    return out, lse, state


def _infer_impl(q, k, v, alpha, beta, key_mask) -> Tensor:
    if q.numel() == 0 or k.numel() == 0 or v.numel() == 0:
        return empty_rows(q, v.shape[-1]).zero_()
    return _forward(q, k, v, alpha, beta, key_mask, save=False)[0]


def _infer_fake(q, k, v, alpha, beta, key_mask) -> Tensor:
    return empty_rows(q, v.shape[-1])


def _train_impl(q, k, v, alpha, beta, key_mask) -> tuple[Tensor, ...]:
    out, lse, state = _forward(q, k, v, alpha, beta, key_mask, save=True)
    assert lse is not None and state is not None
    return out, lse, *state


def _train_fake(q, k, v, alpha, beta, key_mask) -> tuple[Tensor, ...]:
    return empty_rows(q, v.shape[-1]), launch.empty_lse(q), *launch.empty_state(k, v)


def _backward(
    dout, q, k, v, alpha, beta, key_mask, lse, log_mass, mean, norm, need_alpha, need_beta
) -> tuple[Tensor | None, ...]:
    q, k, v, key_mask = launch.prepared(q, k, v, key_mask)
    dq, parts, dalpha = launch.read_backward(
        dout, q, alpha, lse, log_mass, mean, need_alpha=need_alpha
    )
    dk, dv, dbeta = launch.summarize_backward(
        parts, k, v, beta, key_mask, norm, need_beta=need_beta
    )
    return dq, dk, dv, dalpha, dbeta


_INPUTS = "Tensor q, Tensor k, Tensor v, Tensor alpha, Tensor beta, Tensor? key_mask"
_infer = register(f"bidirectional({_INPUTS}) -> Tensor", _infer_impl, _infer_fake)
_train, _ = register_with_gradient(
    f"bidirectional_train({_INPUTS}) -> "
    "(Tensor out, Tensor lse, Tensor log_mass, Tensor mean, Tensor norm)",
    slopes=("alpha", "beta"),
    forward=_train_impl,
    shapes=_train_fake,
    backward=_backward,
    like=rows_like,
)
