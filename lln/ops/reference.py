"""Every op as the paper writes it: O(N²), any dtype. The oracle of the tests; read it first.

All functions take the set of visible pairs as a boolean matrix made by :func:`visible`, so that
masks, causality and blocks are stated once and cannot differ between ops. ``alpha`` is ``[B, H]``,
``beta`` is ``[B, Hkv]``; query head h reads key head h // (H / Hkv).
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lln.ops.window.near import Near
from lln.protocols import Call, compute_dtype


def refuses(call: Call) -> str | None:
    """The reference has no dropout and no state before causal keys."""
    if unknown := call.needs - {"learned_mix", "windows", "features"}:
        return f"the O(N²) reference does not know {', '.join(sorted(unknown))}"
    return None


def visible(
    queries: int,
    keys: int,
    *,
    key_mask: Bool[Tensor, "B M"] | None = None,
    is_causal: bool = False,
    causal_block: int | None = None,
    block: int | None = None,
    device: torch.device | str | None = None,
) -> Bool[Tensor, "#B 1 N M"]:
    """Which query sees which key: position i + M − N sees j (bottom-right alignment).

    Causal with ``causal_block`` K, position i sees the keys of its own block and of those before:
    j // K ≤ i // K.
    """
    i = torch.arange(queries, device=device)[:, None] + keys - queries
    j = torch.arange(keys, device=device)[None, :]
    seen = torch.ones(queries, keys, dtype=torch.bool, device=device)
    if is_causal:
        size = causal_block or 1
        past = j.div(size, rounding_mode="floor") <= i.div(size, rounding_mode="floor")
        seen = seen & past
    if block is not None:
        same = i.div(block, rounding_mode="floor") == j.div(block, rounding_mode="floor")
        seen = seen & same
    seen = seen[None, None]
    return seen if key_mask is None else seen & key_mask[:, None, None, :]


def near_field(
    queries: int,
    keys: int,
    near: Near,
    *,
    key_mask: Bool[Tensor, "B M"] | None = None,
    is_causal: bool = False,
    causal_block: int | None = None,
    device: torch.device | str | None = None,
) -> Bool[Tensor, "#B 1 N M"]:
    """Which of the keys that a query sees are near it: window and sinks.

    The window of block b is C·b − overlap … C·(b+1) + overlap − 1; sinks are the first valid keys.
    """
    seen = visible(
        queries, keys, key_mask=key_mask, is_causal=is_causal, causal_block=causal_block,
        device=device,
    )  # fmt: skip
    i = torch.arange(queries, device=device)[:, None] + keys - queries
    j = torch.arange(keys, device=device)[None, :]
    block, overlap, sinks = near.window
    start = i.div(block, rounding_mode="floor") * block
    window = (j >= start - overlap) & (j < start + block + overlap)
    valid = torch.ones(1, keys, dtype=torch.bool, device=device) if key_mask is None else key_mask
    first = valid & (valid.cumsum(1) <= sinks)
    return seen & (window[None, None] | first[:, None, None, :])


def repeat_heads(x: Tensor, heads: int) -> Tensor:
    """Give every query head its key head: ``[B, Hkv, ...] -> [B, H, ...]``."""
    return x.repeat_interleave(heads // max(x.shape[1], 1), dim=1)


def lln_scores(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv M D"],
    *,
    alpha: Float[Tensor, "B H"],
    beta: Float[Tensor, "B Hkv"],
) -> Float[Tensor, "B H N M"]:
    """ln Σ_l exp(α q_il + β k_jl): the logarithm of the numerator of eq. (9)."""
    features = repeat_heads(beta[..., None, None] * k, q.shape[1])
    queries = alpha[..., None, None] * q
    if q.shape[2] == 0:
        return queries @ features.transpose(-1, -2)  # [B, H, 0, M], still part of the graph
    rows = [  # one query at a time: the N×M×D array is never built
        torch.logsumexp(queries[:, :, i, None, :] + features, dim=-1) for i in range(q.shape[2])
    ]
    return torch.stack(rows, dim=2)


def softmax_scores(
    q: Float[Tensor, "B H N D"], k: Float[Tensor, "B Hkv M D"], *, scale: float
) -> Float[Tensor, "B H N M"]:
    """scale · q_iᵀk_j, the exponent of eq. (2)."""
    return q @ repeat_heads(k, q.shape[1]).transpose(-1, -2) * scale


def normalize_rows(
    scores: Float[Tensor, "B H N M"], seen: Bool[Tensor, "#B 1 N M"]
) -> Float[Tensor, "B H N M"]:
    """Softmax over the visible keys, eq. (6) and (9); a row that sees no key is zero."""
    if scores.shape[-1] == 0:
        return scores
    p = torch.softmax(scores.masked_fill(~seen, -torch.inf), dim=-1)
    return p.masked_fill(~seen.any(-1, keepdim=True), 0).masked_fill(~seen, 0)


def attend(
    p: Float[Tensor, "B H N M"],
    v: Float[Tensor, "B Hkv M E"],
    key_mask: Bool[Tensor, "B M"] | None = None,
) -> Float[Tensor, "B H N E"]:
    """Σ_j P_ij v_j; the content of masked keys is ignored, NaN included."""
    if key_mask is not None:
        v = v.masked_fill(~key_mask[:, None, :, None], 0)
    return p @ repeat_heads(v, p.shape[1])


def lln_matrix(
    q: Tensor,
    k: Tensor,
    *,
    alpha: Float[Tensor, "B H"],
    beta: Float[Tensor, "B Hkv"],
    key_mask: Bool[Tensor, "B M"] | None = None,
    is_causal: bool = False,
    causal_block: int | None = None,
) -> Float[Tensor, "B H N M"]:
    """P of eq. (9), the sum restricted to visible keys."""
    seen = visible(
        q.shape[2], k.shape[2], key_mask=key_mask, is_causal=is_causal, causal_block=causal_block,
        device=q.device,
    )  # fmt: skip
    if key_mask is not None:
        k = k.masked_fill(~key_mask[:, None, :, None], 0)
    scores = lln_scores(q, k, alpha=alpha, beta=beta)
    return normalize_rows(scores, seen)


def block_diagonal_matrix(
    q: Tensor,
    k: Tensor,
    *,
    block: int,
    scale: float,
    key_mask: Bool[Tensor, "B M"] | None = None,
    is_causal: bool = False,
) -> Float[Tensor, "B H N M"]:
    """Softmax attention inside blocks of ``block`` positions (Fig. 3, right branch)."""
    seen = visible(
        q.shape[2], k.shape[2], key_mask=key_mask, is_causal=is_causal, block=block, device=q.device
    )
    if key_mask is not None:
        k = k.masked_fill(~key_mask[:, None, :, None], 0)
    return normalize_rows(softmax_scores(q, k, scale=scale), seen)


def near_matrix(
    q: Tensor,
    k: Tensor,
    *,
    block: int,
    overlap: int = 0,
    sinks: int = 0,
    scale: float,
    key_mask: Bool[Tensor, "B M"] | None = None,
    is_causal: bool = False,
    causal_block: int | None = None,
) -> Float[Tensor, "B H N M"]:
    """Softmax attention over the near keys: blocks that overlap, and sinks."""
    near = near_field(
        q.shape[2], k.shape[2], Near(block, overlap=overlap, sinks=sinks), key_mask=key_mask,
        is_causal=is_causal, causal_block=causal_block, device=q.device,
    )  # fmt: skip
    if key_mask is not None:
        k = k.masked_fill(~key_mask[:, None, :, None], 0)
    return normalize_rows(softmax_scores(q, k, scale=scale), near)


def near_far_matrix(
    q: Tensor,
    k: Tensor,
    *,
    q_far: Tensor,
    k_far: Tensor,
    alpha: Float[Tensor, "B H"],
    beta: Float[Tensor, "B Hkv"],
    gamma: Float[Tensor, "B H"],
    block: int,
    overlap: int = 0,
    sinks: int = 0,
    scale: float,
    key_mask: Bool[Tensor, "B M"] | None = None,
    is_causal: bool = False,
) -> Float[Tensor, "B H N M"]:
    """One normaliser for weights e^s of near keys and e^γ Σ_l e^(α q_il + β k_jl) of all others."""
    queries, keys = q.shape[2], k.shape[2]
    seen = visible(queries, keys, key_mask=key_mask, is_causal=is_causal, device=q.device)
    near = near_field(
        queries, keys, Near(block, overlap=overlap, sinks=sinks), key_mask=key_mask,
        is_causal=is_causal, device=q.device,
    )  # fmt: skip
    if key_mask is not None:
        hidden = ~key_mask[:, None, :, None]
        k, k_far = k.masked_fill(hidden, 0), k_far.masked_fill(hidden, 0)
    exact = softmax_scores(q, k, scale=scale)
    linear = lln_scores(q_far, k_far, alpha=alpha, beta=beta)
    linear = linear + gamma[..., None, None]
    return normalize_rows(torch.where(near, exact, linear), seen)


def _rounded_once(op: Callable[..., Tensor]) -> Callable[..., Tensor]:
    """Compute in float32 or wider and return the dtype of q."""

    @functools.wraps(op)
    def wide(q: Tensor, k: Tensor, v: Tensor, **options: Any) -> Tensor:
        dtype = compute_dtype(q, k, v)
        return op(q.to(dtype), k.to(dtype), v.to(dtype), **options).to(q.dtype)

    return wide


@_rounded_once
def bidirectional(q, k, v, *, alpha, beta, key_mask=None) -> Tensor:
    """LLN attention, eq. (8)."""
    p = lln_matrix(q, k, alpha=alpha, beta=beta, key_mask=key_mask)
    return attend(p, v, key_mask)


@_rounded_once
def causal(q, k, v, *, alpha, beta, key_mask=None) -> Tensor:
    """LLN attention, eq. (8) with the sum restricted to j ≤ i + M − N."""
    p = lln_matrix(q, k, alpha=alpha, beta=beta, key_mask=key_mask, is_causal=True)
    return attend(p, v, key_mask)


@_rounded_once
def block_causal(q, k, v, *, alpha, beta, causal_block, key_mask=None) -> Tensor:
    """LLN attention, eq. (8) with the sum restricted to j // K ≤ (i + M − N) // K."""
    scales = {"alpha": alpha, "beta": beta}
    masks = {"key_mask": key_mask, "is_causal": True, "causal_block": causal_block}
    return attend(lln_matrix(q, k, **scales, **masks), v, key_mask)


@_rounded_once
def block_diagonal(q, k, v, *, block, scale, key_mask=None, is_causal=False) -> Tensor:
    """The block-diagonal softmax branch of Fig. 3."""
    p = block_diagonal_matrix(
        q, k, block=block, scale=scale, key_mask=key_mask, is_causal=is_causal
    )
    return attend(p, v, key_mask)


@_rounded_once
def lln_diag(
    q, k, v, *, alpha, beta, block, scale, overlap=0, sinks=0, mix=None, q_far=None, k_far=None,
    key_mask=None, is_causal=False, causal_block=None,
) -> Tensor:  # fmt: skip
    """LLN+Diag of Fig. 3: the average of the two branches, or with the weight ``mix`` of LLN."""
    scales = {"alpha": alpha, "beta": beta}
    masks = {"key_mask": key_mask, "is_causal": is_causal, "causal_block": causal_block}
    q_far, k_far = q if q_far is None else q_far, k if k_far is None else k_far
    linear = lln_matrix(q_far.to(q.dtype), k_far.to(q.dtype), **scales, **masks)
    local = near_matrix(q, k, block=block, scale=scale, overlap=overlap, sinks=sinks, **masks)
    weight = 0.5 if mix is None else mix.to(q.dtype)[:, None, None]
    return attend(weight * linear + (1 - weight) * local, v, key_mask)


@_rounded_once
def near(q, k, v, *, block, scale, overlap=0, sinks=0, key_mask=None, is_causal=False) -> Tensor:
    """Softmax attention over the near keys."""
    p = near_matrix(
        q, k, block=block, overlap=overlap, sinks=sinks, scale=scale, key_mask=key_mask,
        is_causal=is_causal,
    )  # fmt: skip
    return attend(p, v, key_mask)


@_rounded_once
def near_far(
    q, k, v, *, q_far, k_far, alpha, beta, gamma, block, scale, overlap=0, sinks=0,
    key_mask=None, is_causal=False,
) -> Tensor:  # fmt: skip
    """Near keys exactly, far keys by LLN, under one normaliser."""
    p = near_far_matrix(
        q, k, q_far=q_far.to(q.dtype), k_far=k_far.to(q.dtype), alpha=alpha, beta=beta,
        gamma=gamma, block=block, overlap=overlap, sinks=sinks, scale=scale,
        key_mask=key_mask, is_causal=is_causal,
    )  # fmt: skip
    return attend(p, v, key_mask)


def summarize(k, v, *, beta, key_mask=None) -> tuple[Tensor, Tensor]:
    """L_l = ln Σ_j exp(β k_jl) and M_l = Σ_j exp(β k_jl − L_l) v_j of :class:`lln.State`."""
    dtype = compute_dtype(k, v)
    if key_mask is not None:
        k = k.masked_fill(~key_mask[:, None, :, None], 0)
    features = beta[..., None, None] * k.to(dtype)
    features = features.transpose(-1, -2)  # [B, Hkv, D, M]: a row for each feature
    seen = visible(k.shape[3], k.shape[2], key_mask=key_mask, device=k.device)
    log_mass = torch.logsumexp(features.masked_fill(~seen, -torch.inf), dim=-1)
    return log_mass, attend(normalize_rows(features, seen), v.to(dtype), key_mask)


def read(q, log_mass, mean, *, alpha) -> Tensor:
    """Σ_l softmax_l(α q_il + L_l) M_l; 0 for the state of no keys."""
    log_mass, mean = repeat_heads(log_mass, q.shape[1]), repeat_heads(mean, q.shape[1])
    empty = (log_mass == -torch.inf).all(-1)[..., None, None]
    level = log_mass[..., None, :].masked_fill(empty, 0)
    slots = torch.softmax(alpha[..., None, None] * q.to(mean.dtype) + level, dim=-1)
    return (slots.masked_fill(empty, 0) @ mean).to(q.dtype)


def varlen(
    q, k, v, cu_q, cu_k, *, alpha, beta, key_mask=None, block=None, scale=1.0, is_causal=False,
) -> Tensor:  # fmt: skip
    """Each packed sequence by itself, one after the other."""
    op = causal if is_causal else bidirectional
    if block is not None:
        op = functools.partial(lln_diag, block=block, scale=scale, is_causal=is_causal)
    out = [q.new_zeros((0, q.shape[1], v.shape[2]))]
    for s in range(len(cu_q) - 1):
        queries, keys = slice(cu_q[s], cu_q[s + 1]), slice(cu_k[s], cu_k[s + 1])
        sequence = (x.transpose(0, 1)[None] for x in (q[queries], k[keys], v[keys]))
        options = {
            "alpha": alpha[s : s + 1],
            "beta": beta[s : s + 1],
            "key_mask": None if key_mask is None else key_mask[None, keys],
        }
        out.append(op(*sequence, **options)[0].transpose(0, 1))
    return torch.cat(out)
