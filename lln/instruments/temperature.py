"""The temperature of attention: how strongly its inputs spread the logarithm of its weights."""

from __future__ import annotations

from typing import TYPE_CHECKING

from jaxtyping import Bool, Float
from torch import Tensor

from lln import moments
from lln.instruments.checks import tokens_taking_part
from lln.ops.common.arguments import as_scale
from lln.ops.reference import repeat_heads

if TYPE_CHECKING:
    from lln.moments import MomentFit

TARGETS = ("product", "measured")


def temperature(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv M D"],
    *,
    target: str = "product",
    key_mask: Bool[Tensor, "B M"] | None = None,
    query_mask: Bool[Tensor, "B N"] | None = None,
) -> Float[Tensor, "B H"]:
    r"""Temperature of softmax attention on these queries and keys.

    Eq. (5) of arXiv:2311.13541v4:
        τ_sm = 1/σ_sm = 1/√(σ_q² σ_k² + C_cross).

    Args:
        q: Queries ``[B, H, N, D]``, any floating dtype.
        k: Keys ``[B, Hkv, M, D]``.
        target: "product" leaves out C_cross, as eq. (10) does; "measured" takes the variance of
            all scores q_iᵀk_j/√D, which defines C_cross, in O(N D²).
        key_mask, query_mask: As in :func:`lln.instruments.measure`.

    Returns:
        One number per sample and head in float32 or wider; inf where the scores are constant.

    Example:
        >>> temperature(q, k)          # [2, 8, 128, 64] -> [2, 8], near 1 for standard normals
    """
    queries, keys = tokens_taking_part(q, k, key_mask, query_mask)
    if target not in TARGETS:
        names = " or ".join(repr(name) for name in TARGETS)
        raise ValueError(f"target={target!r} is unknown; pass {names}")
    k = repeat_heads(k, q.shape[1])
    if target == "measured":
        return moments.score_variance(q, k, key_mask=keys, query_mask=queries).rsqrt()
    sigma_q, sigma_k = moments.standard_deviations(q, k, key_mask=keys, query_mask=queries)
    return (sigma_q * sigma_k).reciprocal()


def lln_temperature(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv M D"],
    *,
    alpha: float | Tensor,
    beta: float | Tensor,
    fit: MomentFit | None = None,
    key_mask: Bool[Tensor, "B M"] | None = None,
    query_mask: Bool[Tensor, "B N"] | None = None,
) -> Float[Tensor, "B H"]:
    r"""Temperature of LLN attention on these queries and keys.

    Eq. (11) of arXiv:2311.13541v4:
        τ_lln = 1/√(a (α²σ_q² + β²σ_k²) + b).

    Args:
        q: Queries ``[B, H, N, D]``, any floating dtype.
        k: Keys ``[B, Hkv, M, D]``.
        alpha, beta: Numbers, ``[H]`` / ``[Hkv]`` or ``[B, H]`` / ``[B, Hkv]``.
        fit: The line (a, b), for example ``lln.moments.PAPER``. None measures instead of
            predicting: 1/√Var_j[ln P_ij], the within-row variance of the matrix itself, O(N²).

    Returns:
        One number per sample and head in float32 or wider; inf where the variance is not positive,
        as the line is for small inputs.

    Example:
        >>> lln_temperature(q, k, alpha=2.0, beta=2.0, fit=lln.moments.PAPER)     # -> [B, H]
    """
    if fit is None:
        from lln.instruments.concentration import measure

        options = {"key_mask": key_mask, "query_mask": query_mask, "measures": ("temperature",)}
        return measure(q, k, kernel="lln", alpha=alpha, beta=beta, **options).temperature
    queries, keys = tokens_taking_part(q, k, key_mask, query_mask)
    heads = q.shape[1]
    scale_q = as_scale("alpha", alpha, q.shape[0], heads, q)
    scale_k = repeat_heads(as_scale("beta", beta, k.shape[0], k.shape[1], k), heads)
    sigma_q, sigma_k = moments.standard_deviations(
        q, repeat_heads(k, heads), key_mask=keys, query_mask=queries
    )
    sigma2 = (scale_q * sigma_q).square() + (scale_k * sigma_k).square()
    return (fit.a * sigma2 + fit.b).clamp(min=0).rsqrt()
