"""LLN+Diag in plain PyTorch: both branches in the compute dtype, rounded once together."""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from lln.ops.causal.eager_causal import causal
from lln.ops.common.arguments import transforms_active
from lln.ops.linear.eager_state import bidirectional
from lln.ops.window import fused_blocks
from lln.ops.window.eager_far import block_causal
from lln.ops.window.eager_near_far import near


def lln_diag(
    q,
    k,
    v,
    *,
    alpha,
    beta,
    block,
    scale,
    overlap=0,
    sinks=0,
    key_mask=None,
    is_causal=False,
    causal_block=None,
    mix=None,
    q_far=None,
    k_far=None,
    slot_dropout=None,
    probability_dropout=None,
) -> Tensor:
    """mix · LLN + (1 − mix) · softmax over near keys; the average if ``mix`` is None."""
    attend = causal if is_causal else bidirectional
    if causal_block is not None:  # which holds whole blocks of the diagonal: nothing to hide there
        attend, is_causal = functools.partial(block_causal, causal_block=causal_block), False
    linear = attend(
        q if q_far is None else q_far,
        k if k_far is None else k_far,
        v,
        alpha=alpha,
        beta=beta,
        key_mask=key_mask,
        slot_dropout=slot_dropout,
        wide=True,
    )
    window = {"overlap": overlap, "sinks": sinks} if overlap or sinks else {}
    local = (near if window else block_diagonal)(
        q,
        k,
        v,
        block=block,
        scale=scale,
        key_mask=key_mask,
        is_causal=is_causal,
        probability_dropout=probability_dropout,
        wide=True,
        **window,
    )
    if mix is None and (causal_block or transforms_active()):  # which refuse to write in place
        return (0.5 * (linear + local)).to(q.dtype)
    if mix is None:
        return linear.lerp_(local, 0.5).to(q.dtype)  # fresh memory costs more than arithmetic
    return torch.lerp(local, linear, mix.to(linear.dtype)[:, None, None]).to(q.dtype)


def block_diagonal(
    q,
    k,
    v,
    *,
    block,
    scale,
    key_mask=None,
    is_causal=False,
    probability_dropout=None,
    wide=False,
) -> Tensor:
    """Softmax attention inside blocks: windows without overlap, or torch's own for short ones."""
    options = {"key_mask": key_mask, "is_causal": is_causal, "wide": wide}
    if fused_blocks.takes(q, k, v, probability_dropout):
        return fused_blocks.attend_in_blocks(q, k, v, block=block, scale=scale, **options)
    options["probability_dropout"] = probability_dropout
    return near(q, k, v, block=block, scale=scale, **options)
