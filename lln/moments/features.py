"""The scale of any positive features at which linear attention is as concentrated as wanted."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lln.moments.rows import counted_first
from lln.ops.common.arguments import check_alike, check_features_alone, check_mask, no_autocast
from lln.protocols import compute_dtype

ROWS = 64  # of each sample and head whose entropy is measured
_STEPS = 30  # of the bisection: the factor is known to 1e-8 of its range
_RANGE = (-7.0, 7.0)  # of the natural logarithm of the factor


@torch.no_grad()
def match_features(
    q_features: Float[Tensor, "B H N S"],
    k_features: Float[Tensor, "B Hkv M S"],
    target: float | Tensor,
    *,
    key_mask: Bool[Tensor, "B M"] | None = None,
    query_mask: Bool[Tensor, "B N"] | None = None,
    rows: int = ROWS,
) -> Float[Tensor, "B H"]:
    r"""The factor of log-features that gives linear attention a wanted entropy, in O(rows M S).

    Weights are Σ_l exp(c (q_il + k_jl)), normalised over the keys j; c is found so that the mean
    entropy of ``rows`` evenly spaced queries is ``target``. For features of any kind: those of
    Performer, ELU or Hedgehog are exponentials of something, too.

    Args:
        q_features, k_features: Logarithms of positive features, ``[B, H, N, S]`` and
            ``[B, Hkv, M, S]``, any floating dtype.
        target: Bits, a number or ``[B, H]``, e.g. from :func:`softmax_entropy`.
        key_mask, query_mask: True = counts.

    Returns:
        c, float32 (float64 for float64 inputs), a constant of the backward pass: alpha and beta of
        :func:`lln.attention` with these features. An entropy that no factor reaches gives the
        nearest end of the range e^−7 … e^7.

    Example:
        >>> wanted = softmax_entropy(q, k)
        >>> c = match_features(q @ w, k @ w, wanted)        # [2, 8, 100, 64] @ [64, 256] -> [2, 8]
    """
    check_features_alone(q_features, k_features)
    check_mask("key_mask", key_mask, k_features.shape[0], k_features.shape[2], k_features)
    check_mask("query_mask", query_mask, q_features.shape[0], q_features.shape[2], q_features)
    dtype, heads = compute_dtype(q_features, k_features), q_features.shape[1]
    queries, counted = _some_rows(q_features.to(dtype), query_mask, rows)
    keys = k_features.to(dtype).repeat_interleave(heads // max(k_features.shape[1], 1), dim=1)
    wanted = torch.as_tensor(target, dtype=dtype, device=keys.device)
    wanted = wanted.expand(keys.shape[:2])
    low, high = (torch.full_like(wanted, edge) for edge in _RANGE)
    with no_autocast(keys):
        for _ in range(_STEPS):
            middle = (low + high) / 2
            scale = middle.exp()[..., None, None]
            found = _mean_entropy(log_products(scale * queries, scale * keys), key_mask, counted)
            flatter = found > wanted  # a larger factor is sharper
            low, high = torch.where(flatter, middle, low), torch.where(flatter, high, middle)
    return ((low + high) / 2).exp()


@torch.no_grad()
def softmax_entropy(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv M D"],
    *,
    scale: float | None = None,
    key_mask: Bool[Tensor, "B M"] | None = None,
    query_mask: Bool[Tensor, "B N"] | None = None,
    rows: int = ROWS,
) -> Float[Tensor, "B H"]:
    """Mean entropy in bits of evenly spaced rows of softmax attention, in O(rows M D).

    Args:
        q: Queries ``[B, H, N, D]``, any floating dtype.
        k: Keys ``[B, Hkv, M, D]``.
        key_mask, query_mask: True = counts.
    """
    check_alike("q", q, "k", k)
    dtype = compute_dtype(q, k)
    factor = float(q.shape[-1] ** -0.5 if scale is None else scale)
    queries, counted = _some_rows(q.to(dtype), query_mask, rows)
    keys = k.to(dtype).repeat_interleave(q.shape[1] // max(k.shape[1], 1), dim=1)
    with no_autocast(q):
        scores = factor * queries @ keys.transpose(-1, -2)
        return _mean_entropy(scores, key_mask, counted)


def _some_rows(q: Tensor, query_mask: Tensor | None, rows: int) -> tuple[Tensor, Tensor]:
    """At most ``rows`` evenly spaced queries of those that count, and which are any, ``[B, rows]``.

    Masked queries are skipped, so that leaving them out chooses the same ones.
    """
    count = min(rows, q.shape[2])
    place = torch.arange(count, device=q.device)
    if query_mask is None:
        step = max(q.shape[2], 1) / max(count, 1)
        counted = torch.ones(len(q), count, dtype=torch.bool, device=q.device)
        return q[:, :, (place * step).long()], counted
    valid = query_mask.sum(1, keepdim=True)
    step = (valid / max(rows, 1)).clamp(min=1)
    index = counted_first(query_mask).gather(1, (place * step).long())
    wide = index[:, None, :, None].expand(-1, q.shape[1], -1, q.shape[3])
    counted = place < valid
    return q.gather(2, wide).masked_fill(~counted[:, None, :, None], 0), counted


def log_products(q: Tensor, k: Tensor, *, least: float = 0.0) -> Tensor:
    """ln Σ_l exp(q_il + k_jl), by a product of what is left after the largest exponents.

    Where all terms are too small for the dtype beside the product of the largest ones, that product
    times ``least``: −inf unless a gradient is wanted.
    """
    top_q, top_k = q.detach().amax(-1, keepdim=True), k.detach().amax(-1, keepdim=True)
    products = (q - top_q).exp() @ (k - top_k).exp().transpose(-1, -2)
    return products.clamp(min=least).log() + top_q + top_k.transpose(-1, -2)


def _mean_entropy(scores: Tensor, key_mask: Tensor | None, counted: Tensor) -> Tensor:
    """Bits of the rows ``[B, H, n, M]`` that count, on average."""
    if key_mask is not None:
        scores = scores.masked_fill(~key_mask[:, None, None], -torch.inf)
    log_p = torch.log_softmax(scores, dim=-1)
    terms = (log_p.exp() * log_p).masked_fill(log_p == -torch.inf, 0)
    rows = -terms.nan_to_num().sum(-1) / math.log(2)
    weight = counted[:, None].to(rows.dtype)
    return (rows * weight).sum(-1) / weight.sum(-1).clamp(min=1)
