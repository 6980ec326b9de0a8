"""Linear-time plain PyTorch: the CPU path, and the fallback everywhere.

Same op names as :mod:`lln.ops`. ``wide`` asks for the compute dtype instead of that of q, so that
LLN+Diag rounds once, not three times.
"""

from __future__ import annotations

import functools

import torch
from torch import Tensor

from lln.ops.causal.eager_causal import causal_op
from lln.ops.common.arguments import transforms_active
from lln.ops.common.parts import causal_by_parts
from lln.ops.linear.eager_state import merge, read_op, summarize_op
from lln.ops.linear.eager_varlen import varlen_op
from lln.ops.window import fused_blocks
from lln.ops.window.eager_far import far_op
from lln.ops.window.eager_near_far import near, near_far
from lln.protocols import Call

__all__ = [
    "bidirectional",
    "block_causal",
    "block_diagonal",
    "causal",
    "lln_diag",
    "merge",
    "near",
    "near_far",
    "read",
    "refuses",
    "summarize",
    "varlen",
]


def refuses(call: Call) -> str | None:
    """None: plain PyTorch takes everything."""
    return None


def summarize(k, v, *, beta, key_mask=None) -> tuple[Tensor, Tensor]:
    """(L, M) of a set of keys in the compute dtype."""
    return summarize_op(k, v, beta, key_mask)


def read(q, log_mass, mean, *, alpha, slot_dropout=None, wide=False) -> Tensor:
    """softmax_l(α q + L) · M."""
    return read_op(q, alpha, log_mass, mean, slot_dropout, wide)


def bidirectional(q, k, v, *, alpha, beta, key_mask=None, slot_dropout=None, wide=False) -> Tensor:
    """LLN attention: every query reads the summary of all keys."""
    log_mass, mean = summarize(k, v, beta=beta, key_mask=key_mask)
    return read(q, log_mass, mean, alpha=alpha, slot_dropout=slot_dropout, wide=wide)


def causal(
    q,
    k,
    v,
    *,
    alpha,
    beta,
    key_mask=None,
    state=None,
    slot_dropout=None,
    wide=False,
) -> Tensor:
    """Causal LLN attention: query i sees keys j ≤ i + M − N, and those of ``state``."""

    def before(k, v, mask):
        return summarize(k, v, beta=beta, key_mask=mask)

    def attend(q, k, v, key_mask, drop, given):
        given = given or before(k[:, :, :0], v[:, :, :0], None)
        out, _ = causal_op(q, k, v, alpha, beta, key_mask, *given, drop, wide)
        return out

    def read_alone(q, log_mass, mean, drop):
        return read(q, log_mass, mean, alpha=alpha, slot_dropout=drop, wide=wide)

    return causal_by_parts(
        q, k, v, key_mask, state, slot_dropout, summarize=before, attend=attend, read=read_alone
    )


def block_causal(
    q,
    k,
    v,
    *,
    alpha,
    beta,
    causal_block,
    key_mask=None,
    slot_dropout=None,
    wide=False,
) -> Tensor:
    """Causal LLN attention whose queries see all of their block: the prefix state it ends.

    Far keys end where a window begins: that of a block with an overlap of −K begins at its end.
    """
    before = summarize(k[:, :, :0], v[:, :, :0], beta=beta)
    out, _ = far_op(
        *(q, k, v, alpha, beta, *before, key_mask, slot_dropout),
        *(causal_block, -causal_block, 0, True),
    )
    return out if wide else out.to(q.dtype)


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


def varlen(
    q,
    k,
    v,
    cu_q,
    cu_k,
    *,
    alpha,
    beta,
    key_mask=None,
    block=None,
    scale=1.0,
    is_causal=False,
) -> Tensor:
    """LLN attention of each packed sequence by itself; LLN+Diag with ``block``."""
    return varlen_op(q, k, v, cu_q, cu_k, alpha, beta, key_mask, block or 0, scale, is_causal)
