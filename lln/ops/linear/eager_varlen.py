"""Packed sequences in plain PyTorch: groups of similar length run as padded batches.

Sequences whose lengths share a power of two are padded together (less than twice the work); their
padding is masked, which for these ops equals truncation. Sequences whose queries and keys differ in
number run one by one where positions count, since bottom-right alignment and padding do not mix.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lln.ops.causal.eager_causal import causal, causal_backward, causal_op
from lln.ops.common.gradients import register_with_gradient
from lln.ops.common.parts import early_and_blind
from lln.ops.common.registration import without_autocast
from lln.ops.linear.eager_state import (
    bidirectional,
    read_backward,
    summarize_backward,
    summarize_op,
)
from lln.ops.window.eager_lln_diag import lln_diag
from lln.ops.window.eager_near_far import blocks_backward
from lln.protocols import compute_dtype


@dataclass(frozen=True)
class _Group:
    """Some sequences: their numbers and where their queries and keys stand."""

    members: list[int]
    queries: list[slice]
    keys: list[slice]

    def pad(self, x: Tensor, parts: list[slice]) -> Tensor:
        """``[T, H, D] -> [S, H, longest, D]``, zero where nothing stands."""
        longest = max(part.stop - part.start for part in parts)
        padded = x.new_zeros(len(parts), x.shape[1], longest, x.shape[2])
        for row, part in enumerate(parts):
            padded[row, :, : part.stop - part.start] = x[part].transpose(0, 1)
        return padded

    def unpad_(self, target: Tensor, x: Tensor, parts: list[slice]) -> None:
        """Write ``[S, H, longest, D]`` back into ``[T, H, D]``."""
        for row, part in enumerate(parts):
            target[part] = x[row, :, : part.stop - part.start].transpose(0, 1)

    def mask(self, valid: Tensor | None, parts: list[slice], device: torch.device) -> Tensor:
        """True where a valid token stands, ``[S, longest]``."""
        longest = max(part.stop - part.start for part in parts)
        mask = torch.zeros(len(parts), longest, dtype=torch.bool, device=device)
        for row, part in enumerate(parts):
            length = part.stop - part.start
            mask[row, :length] = True if valid is None else valid[part]
        return mask


def _groups(cu_q: Tensor, cu_k: Tensor, positions_count: bool) -> Iterator[_Group]:
    starts_q, starts_k = cu_q.tolist(), cu_k.tolist()
    buckets: dict[object, list[int]] = {}
    for s in range(len(starts_q) - 1):
        queries, keys = starts_q[s + 1] - starts_q[s], starts_k[s + 1] - starts_k[s]
        if queries == 0 and keys == 0:
            continue
        alone = positions_count and queries != keys
        kind = ("alone", s) if alone else (queries.bit_length(), keys.bit_length())
        buckets.setdefault(kind, []).append(s)
    for members in buckets.values():
        yield _Group(
            members,
            [slice(starts_q[s], starts_q[s + 1]) for s in members],
            [slice(starts_k[s], starts_k[s + 1]) for s in members],
        )


def in_groups(
    attend: Callable[..., Tensor],
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    *,
    alpha: Tensor,
    beta: Tensor,
    gamma: Tensor | None,
    key_mask: Tensor | None,
    query_mask: Tensor | None,
    **options: Any,
) -> Tensor:
    """Call ``attend`` on padded batches of the sequences, where no operator takes them packed.

    It gets ``q, k, v [S, H, longest, D]``, their masks, and the scales of their sequences. torch
    differentiates it.
    """
    out = q.new_zeros((*q.shape[:2], v.shape[-1]))
    for group in _groups(cu_q, cu_k, positions_count=True):
        attended = attend(
            group.pad(q, group.queries),
            group.pad(k, group.keys),
            group.pad(v, group.keys),
            query_mask=group.mask(query_mask, group.queries, q.device),
            key_mask=group.mask(key_mask, group.keys, k.device),
            alpha=alpha[group.members],
            beta=beta[group.members],
            gamma=None if gamma is None else gamma[group.members],
            **options,
        )
        group.unpad_(out, attended, group.queries)
    return out


def _attend(q, k, v, alpha, beta, key_mask, block, scale, is_causal) -> Tensor:
    options = {"alpha": alpha, "beta": beta, "key_mask": key_mask}
    if block:
        return lln_diag(q, k, v, block=block, scale=scale, is_causal=is_causal, **options)
    return (causal if is_causal else bidirectional)(q, k, v, **options)


def _varlen(q, k, v, cu_q, cu_k, alpha, beta, key_mask, block, scale, is_causal) -> Tensor:
    out = q.new_zeros((*q.shape[:2], v.shape[-1]))
    for group in _groups(cu_q, cu_k, is_causal or block > 0):
        attended = _attend(
            group.pad(q, group.queries),
            group.pad(k, group.keys),
            group.pad(v, group.keys),
            alpha[group.members],
            beta[group.members],
            group.mask(key_mask, group.keys, k.device),
            block,
            scale,
            is_causal,
        )
        group.unpad_(out, attended, group.queries)
    return out


def _bidirectional_backward(d_out, q, k, v, alpha, beta, key_mask):
    log_mass, mean = summarize_op(k, v, beta, key_mask)
    d_q, d_alpha, d_log_mass, d_mean = read_backward(d_out, q, alpha, log_mass, mean, None, False)
    d_k, d_v, d_beta = summarize_backward(d_log_mass, d_mean, k, v, beta, key_mask, log_mass, mean)
    return [d_q, d_k, d_v, d_alpha, d_beta]


def _causal_backward(d_out, q, k, v, alpha, beta, key_mask):
    """Gradients: early keys are a state before the square, blind queries see nothing."""
    early, blind = early_and_blind(q, k)
    prefix = k[:, :, :early], v[:, :, :early], beta, key_mask[:, :early]
    state = summarize_op(*prefix)
    square = q[:, :, blind:], k[:, :, early:], v[:, :, early:], alpha, beta, key_mask[:, early:]
    _, row_mass = causal_op(*square, *state, None, False)
    d_q, d_k, d_v, d_alpha, d_beta, *d_state = causal_backward(
        d_out[:, :, blind:], torch.zeros_like(row_mass), *square, *state, None, row_mass, False
    )
    d_early_k, d_early_v, d_early_beta = summarize_backward(*d_state, *prefix, *state)
    d_q = torch.cat([torch.zeros_like(q[:, :, :blind]), d_q], 2)
    d_k, d_v = torch.cat([d_early_k, d_k], 2), torch.cat([d_early_v, d_v], 2)
    return [d_q, d_k, d_v, d_alpha, d_beta + d_early_beta]


def _attend_backward(
    d_out, q, k, v, alpha, beta, key_mask, block, scale, is_causal
) -> list[Tensor]:
    """Gradients of q, k, v, α, β by the ops' own backward passes.

    Called inside an op, where autograd does not record.
    """
    linear = _causal_backward if is_causal else _bidirectional_backward
    if not block:
        return linear(d_out, q, k, v, alpha, beta, key_mask)
    wide = compute_dtype(q, k, v)
    half = d_out.to(wide) / 2
    q, k, v = q.to(wide), k.to(wide), v.to(wide)
    grads = linear(half, q, k, v, alpha, beta, key_mask)
    local = blocks_backward(half, q, k, v, key_mask, block, scale, is_causal)
    for i in range(3):
        grads[i] = grads[i] + local[i]
    return grads


def _varlen_backward(
    d_out, q, k, v, cu_q, cu_k, alpha, beta, key_mask, block, scale, is_causal
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:
    d_q, d_k, d_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    d_alpha, d_beta = torch.zeros_like(alpha), torch.zeros_like(beta)
    for group in _groups(cu_q, cu_k, is_causal or block > 0):
        grads = _attend_backward(
            group.pad(d_out, group.queries),
            group.pad(q, group.queries),
            group.pad(k, group.keys),
            group.pad(v, group.keys),
            alpha[group.members],
            beta[group.members],
            group.mask(key_mask, group.keys, k.device),
            block,
            scale,
            is_causal,
        )
        group.unpad_(d_q, grads[0], group.queries)
        group.unpad_(d_k, grads[1], group.keys)
        group.unpad_(d_v, grads[2], group.keys)
        d_alpha[group.members], d_beta[group.members] = grads[3], grads[4]
    return d_q, d_k, d_v, d_alpha, d_beta


def _shapes(q, k, v, cu_q, cu_k, alpha, beta, key_mask, block, scale, is_causal):
    return q.new_empty((*q.shape[:2], v.shape[-1]))


varlen_op, _ = register_with_gradient(
    "varlen_eager(Tensor q, Tensor k, Tensor v, Tensor cu_q, Tensor cu_k, Tensor alpha, "
    "Tensor beta, Tensor? key_mask, int block, float scale, bool is_causal) -> Tensor out",
    forward=_varlen,
    shapes=_shapes,
    backward=_varlen_backward,
    gradients=("q", "k", "v", "alpha", "beta"),
    around=lambda compute, _: without_autocast(compute),
)


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
