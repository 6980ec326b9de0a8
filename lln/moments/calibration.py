"""alpha and beta straight from q and k."""

from __future__ import annotations

from typing import Any

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lln.moments.line import MomentFit
from lln.moments.matching import check_method, kernel_options, match_moments
from lln.moments.statistics import (
    check_measured,
    packed_standard_deviations,
    standard_deviations,
)
from lln.ops import triton
from lln.ops.common.arguments import transforms_active
from lln.ops.dispatch import may_launch
from lln.protocols import Call


def measure_scales(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv M D"],
    *,
    key_mask: Bool[Tensor, "B M"] | None = None,
    query_mask: Bool[Tensor, "B N"] | None = None,
    method: str | MomentFit = "paper",
    normalize_keys: bool = False,
    impl: str | None = None,
) -> tuple[Float[Tensor, "B H"], Float[Tensor, "B Hkv"]]:
    """Measure q and k per sample and head, and match LLN attention to softmax attention on them.

    σ_sm² is taken as σ_q²σ_k². Its correction C_cross, eq. (5), is in :func:`score_variance`, which
    :func:`match_moments` takes.

    Args:
        q: Queries ``[B, H, N, D]``, any floating dtype.
        k: Keys ``[B, Hkv, M, D]``.
        key_mask, query_mask: True = counts; the content of other tokens never matters.
        method, normalize_keys: See :func:`match_moments`.
        impl: As in :func:`lln.attention`: "eager" and "reference" launch no kernel of ours.

    Returns:
        alpha, beta: constants of the backward pass, float32 (float64 for float64 inputs), finite
        even for constant inputs and samples without a valid token. Query heads that share a key
        head share alpha.

    Example:
        >>> alpha, beta = measure_scales(q, k, method="entropy")    # [2, 8, 9, 64] -> [2, 8] each
    """
    check_measured(q, k, key_mask, query_mask)
    check_method(method)
    if in_two_launches(q, k, impl):
        options = kernel_options(method, q.shape[-1], normalize_keys)
        return triton.measure(q, k, key_mask=key_mask, query_mask=query_mask, **options)
    sigma_q, sigma_k = standard_deviations(
        q, k, key_mask=key_mask, query_mask=query_mask, impl=impl
    )
    return match_heads(
        sigma_q,
        sigma_k,
        q.shape[1],
        q.shape[-1],
        method=method,
        normalize_keys=normalize_keys,
        impl=impl,
    )


def in_two_launches(q: Tensor, k: Tensor, impl: str | None) -> bool:
    """Whether kernels measure and match at once; a compiler fuses the formulas by itself."""
    if torch.compiler.is_compiling() or not may_launch(impl) or transforms_active():
        return False
    return triton.refuses(Call("measure", q, k, k)) is None


def measure_packed_scales(
    q: Float[Tensor, "T H D"],
    k: Float[Tensor, "Tk Hkv D"],
    cu_q: Int[Tensor, " S1"],
    cu_k: Int[Tensor, " S1"],
    *,
    key_mask: Bool[Tensor, " Tk"] | None = None,
    query_mask: Bool[Tensor, " T"] | None = None,
    method: str | MomentFit = "paper",
    normalize_keys: bool = False,
    impl: str | None = None,
) -> tuple[Float[Tensor, "S H"], Float[Tensor, "S Hkv"]]:
    """Measure packed sequences one by one, as :func:`measure_scales` does samples; no check.

    Args:
        cu_q, cu_k: As in :func:`lln.attention_varlen`.
    """
    sigma_q, sigma_k = packed_standard_deviations(
        q, k, cu_q, cu_k, key_mask=key_mask, query_mask=query_mask
    )
    return match_heads(
        sigma_q,
        sigma_k,
        q.shape[1],
        q.shape[-1],
        method=method,
        normalize_keys=normalize_keys,
        impl=impl,
    )


def match_heads(
    sigma_q: Float[Tensor, "*B Hkv"],
    sigma_k: Float[Tensor, "*B Hkv"],
    heads: int,
    head_dim: int,
    **options: Any,
) -> tuple[Float[Tensor, "*B H"], Float[Tensor, "*B Hkv"]]:
    """Match each key head by :func:`match_moments`; query heads that share one share its alpha.

    Args:
        heads: H, the number of query heads.
        options: Those of :func:`match_moments`.
    """
    alpha, beta = match_moments(sigma_q, sigma_k, head_dim, **options)
    group = heads // alpha.shape[-1]
    return alpha[..., None].expand(*alpha.shape, group).flatten(-2), beta
