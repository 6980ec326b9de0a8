"""What calibration measures: standard deviations of q and k, and the variance of their scores."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lln.ops import triton
from lln.ops.common.arguments import (
    check_alike,
    check_floating,
    check_heads,
    check_mask,
    no_autocast,
)
from lln.ops.dispatch import may_launch
from lln.protocols import Call, compute_dtype


def standard_deviations(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv M D"],
    *,
    key_mask: Bool[Tensor, "B M"] | None = None,
    query_mask: Bool[Tensor, "B N"] | None = None,
    impl: str | None = None,
) -> tuple[Float[Tensor, "B Hkv"], Float[Tensor, "B Hkv"]]:
    """σ_q and σ_k of every sample and key head, over its valid tokens and all features.

    Args:
        q: Queries ``[B, H, N, D]``, any floating dtype.
        k: Keys ``[B, Hkv, M, D]``.
        key_mask, query_mask: True = counts. The content of other tokens never matters, NaN
            included.
        impl: As in :func:`lln.attention`: "eager" and "reference" launch no kernel of ours.

    Returns:
        Biased standard deviations around the mean of all N·D elements; σ_q is pooled over the
        query heads that share a key head. 0 without a valid token. float32 (float64 for float64
        inputs), constants of the backward pass.

    Numerics: two passes, the second one around the mean, so that a large mean costs no digits. On
    a GPU the Triton kernel does both where it can.

    Example:
        >>> sigma_q, sigma_k = standard_deviations(q, k)        # [2, 8, 100, 64] -> [2, 8]
    """
    check_measured(q, k, key_mask, query_mask)
    if may_launch(impl) and triton.refuses(Call("standard_deviations", q, k, k)) is None:
        return triton.standard_deviations(q, k, key_mask=key_mask, query_mask=query_mask)
    return _deviation(q, query_mask, k.shape[1]), _deviation(k, key_mask, k.shape[1])


def packed_standard_deviations(
    q: Float[Tensor, "T H D"],
    k: Float[Tensor, "Tk Hkv D"],
    cu_q: Int[Tensor, " S1"],
    cu_k: Int[Tensor, " S1"],
    *,
    key_mask: Bool[Tensor, " Tk"] | None = None,
    query_mask: Bool[Tensor, " T"] | None = None,
) -> tuple[Float[Tensor, "S Hkv"], Float[Tensor, "S Hkv"]]:
    """σ_q (pooled over the heads that share a key head) and σ_k of each sequence."""
    grouped = q.unflatten(1, (k.shape[1], -1)).flatten(2, 3)  # [T, Hkv, G·D]
    return _packed_deviation(grouped, cu_q, query_mask), _packed_deviation(k, cu_k, key_mask)


def score_variance(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv M D"],
    *,
    key_mask: Bool[Tensor, "B M"] | None = None,
    query_mask: Bool[Tensor, "B N"] | None = None,
    scale: float | None = None,
) -> Float[Tensor, "B Hkv"]:
    r"""Variance of all softmax scores scale·q_i·k_j of valid pairs, in O((N + M) D²).

    The left side of eq. (5), σ_sm² = σ_q²σ_k² + C_cross, without its approximations. With means
    μ and covariance matrices C of the tokens,
        Var_ij[q_i·k_j] = tr(C_q C_k) + μ_qᵀ C_k μ_q + μ_kᵀ C_q μ_k.

    Args:
        q: Queries ``[B, H, N, D]``, any floating dtype.
        k: Keys ``[B, Hkv, M, D]``.
        key_mask, query_mask: True = counts; the content of other tokens never matters.
        scale: 1/sqrt(D) by default.

    Returns:
        One variance for all query heads that share a key head. 0 without a valid pair. float32
        (float64 for float64 inputs), a constant of the backward pass.

    Example:
        >>> variance = score_variance(q, k)                     # [2, 8, 100, 64] -> [2, 8]
    """
    check_measured(q, k, key_mask, query_mask)
    factor = 1 / q.shape[-1] if scale is None else scale**2
    # Under autocast these products would be rounded to half precision.
    with no_autocast(q):
        mean_q, cov_q = _mean_and_covariance(q, query_mask, k.shape[1])
        mean_k, cov_k = _mean_and_covariance(k, key_mask, k.shape[1])
        total = (cov_q * cov_k).sum((-2, -1))
        total = total + (cov_k @ mean_q * mean_q).sum((-2, -1))
        total = total + (cov_q @ mean_k * mean_k).sum((-2, -1))
    return total * factor


def check_measured(
    q: Tensor, k: Tensor, key_mask: Tensor | None, query_mask: Tensor | None
) -> None:
    """Check queries, keys and their masks where no values are given."""
    for name, x in (("q", q), ("k", k)):
        check_floating(name, x)
        if x.dim() != 4:
            raise ValueError(
                f"{name} has shape {list(x.shape)}; pass [batch, heads, tokens, width]"
            )
    check_alike("q", q, "k", k)
    if q.shape[0] != k.shape[0]:
        raise ValueError(f"q has batch size {q.shape[0]}, k has {k.shape[0]}; they must be equal")
    check_heads(q, k.shape[1], k.shape[3])
    check_mask("key_mask", key_mask, k.shape[0], k.shape[2], k)
    check_mask("query_mask", query_mask, q.shape[0], q.shape[2], q)


def _tokens(
    x: Float[Tensor, "B H N D"], mask: Bool[Tensor, "B N"] | None, key_heads: int
) -> tuple[Float[Tensor, "B Hkv T D"], Bool[Tensor, "B 1 T 1"] | None, Tensor | int]:
    """All tokens of the heads that share a key head, which are valid, and how many (at least 1)."""
    group = x.shape[1] // key_heads
    x = x.detach().to(compute_dtype(x)).unflatten(1, (key_heads, group)).flatten(2, 3)
    if mask is None:
        return x, None, max(x.shape[2], 1)
    valid = mask.repeat(1, group)[:, None, :, None]
    return x, valid, valid.sum(2, keepdim=True).clamp(min=1)


def _deviation(
    x: Float[Tensor, "B H N D"], mask: Bool[Tensor, "B N"] | None, key_heads: int
) -> Float[Tensor, "B Hkv"]:
    x, valid, count = _tokens(x, mask, key_heads)

    def average(per_token: Float[Tensor, "B Hkv T 1"]) -> Float[Tensor, "B Hkv 1 1"]:
        if valid is not None:
            per_token = per_token.masked_fill(~valid, 0)
        return per_token.sum(2, keepdim=True) / (count * x.shape[-1])

    mean = average(x.sum(-1, keepdim=True))
    norms = torch.linalg.vector_norm(x - mean, dim=-1, keepdim=True)
    return average(norms.square()).sqrt()[:, :, 0, 0]


def _packed_deviation(x: Tensor, cu: Tensor, mask: Tensor | None) -> Tensor:
    """Biased standard deviation of each sequence over its tokens and features."""
    x = x.detach().to(compute_dtype(x))
    lengths = cu.diff().to(x.device)
    sequence = torch.repeat_interleave(
        torch.arange(len(lengths), device=x.device), lengths, output_size=x.shape[0]
    )
    weight = x.new_ones(x.shape[0]) if mask is None else mask.to(x.dtype)
    if mask is not None:
        x = x.masked_fill(~mask[:, None, None], 0)

    def average(y: Tensor) -> Tensor:
        total = y.new_zeros(len(lengths), y.shape[1]).index_add_(0, sequence, y)
        count = weight.new_zeros(len(lengths)).index_add_(0, sequence, weight)
        return total / count.clamp(min=1)[:, None]

    mean = average(x.mean(-1) * weight[:, None])
    deviation = x - mean[sequence][..., None]
    return average(deviation.square().mean(-1) * weight[:, None]).sqrt()


def _mean_and_covariance(
    x: Float[Tensor, "B H N D"], mask: Bool[Tensor, "B N"] | None, key_heads: int
) -> tuple[Float[Tensor, "B Hkv D 1"], Float[Tensor, "B Hkv D D"]]:
    """Mean and covariance matrix of the valid tokens, over all heads that share a key head."""
    x, valid, count = _tokens(x, mask, key_heads)
    if valid is not None:
        x = x.masked_fill(~valid, 0)
    mean = x.sum(2, keepdim=True) / count
    x = x - mean
    if valid is not None:
        x = x * valid
    return mean.transpose(-1, -2), x.transpose(-1, -2) @ x / count
