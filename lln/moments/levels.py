"""The level of LLN's weights beside softmax's, where both stand under one normaliser."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lln.moments.statistics import mean_and_covariance
from lln.ops.arguments import no_autocast
from lln.protocols import compute_dtype


@torch.no_grad()
def match_level(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv M D"],
    *,
    alpha: Float[Tensor, "B H"],
    beta: Float[Tensor, "B Hkv"],
    scale: float | None = None,
    q_far: Float[Tensor, "B H N S"] | None = None,
    k_far: Float[Tensor, "B Hkv M S"] | None = None,
    key_mask: Bool[Tensor, "B M"] | None = None,
    query_mask: Bool[Tensor, "B N"] | None = None,
    is_causal: bool = False,
    normalize_keys: bool = False,
) -> Float[Tensor, "B H"]:
    r"""γ with which a key weighs the same in both attentions, on average, in O((N + M) D²) time.

    Matching α and β gives the two kernels the same log-variance, not the same mean. With scores
    s_ij = scale q_i·k_j of mean μ_s and variance σ_s², and K_i keys in L_i (docs/equations.md):
        γ = μ_s + σ_s²/2 − mean_i[logsumexp_l(α q_il + L_il) − ln K_i],  L_il = ln Σ_j exp(β k_jl)

    Args:
        scale: Of the softmax scores; 1/sqrt(D) by default.
        q_far, k_far: What the LLN branch sees instead of q and k.
        key_mask, query_mask: True = counts; the content of other tokens never matters.
        is_causal: Take L_i and K_i over the keys up to each query.

    Returns:
        A constant of the backward pass, float32 (float64 for float64 inputs); 0 without a valid
        pair.
    """
    dtype, heads = compute_dtype(q, k), q.shape[1]
    factor = float(q.shape[-1] ** -0.5 if scale is None else scale)
    q_far, k_far = q if q_far is None else q_far, k if k_far is None else k_far
    group = heads // max(k.shape[1], 1)
    with no_autocast(q):
        mean_q, cov_q = mean_and_covariance(q, query_mask, heads)
        mean_k, cov_k = mean_and_covariance(k, key_mask, k.shape[1])
        mean_k, cov_k = (x.repeat_interleave(group, dim=1) for x in (mean_k, cov_k))
        variance = (cov_q * cov_k).sum((-2, -1))
        variance = variance + (cov_k @ mean_q * mean_q).sum((-2, -1))
        variance = variance + (cov_q @ mean_k * mean_k).sum((-2, -1))
        mean = (mean_q * mean_k).sum((-2, -1))
        exact = factor * mean + factor**2 / 2 * variance
        excess, counted = _excess(q_far, k_far, alpha, beta, key_mask, is_causal, normalize_keys)
        if query_mask is not None:
            counted = counted & query_mask[:, None]
        rows = counted.sum(-1)
        total = excess.masked_fill(~counted, 0).sum(-1)
        level = exact - total / rows.clamp(min=1)
    return torch.where(rows > 0, level, 0).to(dtype)


def _excess(
    q: Tensor,
    k: Tensor,
    alpha: Tensor,
    beta: Tensor,
    key_mask: Tensor | None,
    is_causal: bool,
    normalize_keys: bool,
) -> tuple[Float[Tensor, "B H N"], Bool[Tensor, "B 1 N"]]:
    """logsumexp_l(α q_il + L_il) − ln K_i of every query, and which of them see a key."""
    dtype, queries, keys = compute_dtype(q, k), q.shape[2], k.shape[2]
    features = k.to(dtype) * beta.to(dtype)[..., None, None]
    if normalize_keys:
        features = torch.log_softmax(features, dim=-1)
    valid = k.new_ones((k.shape[0], keys), dtype=torch.bool) if key_mask is None else key_mask
    features = features.masked_fill(~valid[:, None, :, None], -torch.inf)
    if is_causal:
        # of queries at positions M − N … M − 1; those before the first key see nothing
        features = torch.nn.functional.pad(features, (0, 0, 1, 0), value=-torch.inf)
        last = (torch.arange(queries, device=q.device) + keys - queries + 1).clamp(min=0)
        mass = features.logcumsumexp(2)[:, :, last]
        count = torch.nn.functional.pad(valid, (1, 0)).cumsum(1)[:, last]
    else:
        mass = torch.logsumexp(features, dim=2, keepdim=True)
        count = valid.sum(1, keepdim=True).expand(-1, queries)
    seen = (count > 0)[:, None]
    group = q.shape[1] // max(k.shape[1], 1)
    mass = mass.masked_fill(mass == -torch.inf, 0).repeat_interleave(group, dim=1)
    scores = q.to(dtype) * alpha.to(dtype)[..., None, None] + mass
    return torch.logsumexp(scores, dim=-1) - count.clamp(min=1).log()[:, None], seen
