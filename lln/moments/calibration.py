"""From q and k straight to alpha and beta."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from lln.moments.line import MomentFit
from lln.moments.matching import match_moments
from lln.moments.statistics import score_variance, standard_deviations

TARGETS = ("product", "measured")


def calibrate(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv M D"],
    *,
    key_mask: Bool[Tensor, "B M"] | None = None,
    query_mask: Bool[Tensor, "B N"] | None = None,
    method: str | MomentFit = "paper",
    target: str = "product",
    normalize_keys: bool = False,
    impl: str | None = None,
) -> tuple[Float[Tensor, "B H"], Float[Tensor, "B Hkv"]]:
    """Measure q and k per sample and head, and match LLN attention to softmax attention on them.

    Args:
        key_mask, query_mask: True = counts; the content of other tokens never matters.
        method, normalize_keys: See :func:`match_moments`.
        target: σ_sm² to match: "product", σ_q²σ_k², or "measured", the true variance of the
            scores, which contains C_cross of eq. (5).
        impl: As in :func:`lln.attention`: "eager" and "reference" launch no kernel of ours.

    Returns:
        alpha, beta: constants of the backward pass, float32 (float64 for float64 inputs), finite
        even for constant inputs and samples without a valid token. Query heads that share a key
        head share alpha.

    Example:
        >>> alpha, beta = calibrate(q, k, method="entropy")     # [2, 8, 100, 64] -> [2, 8], [2, 8]
    """
    if target not in TARGETS:
        names = " or ".join(repr(name) for name in TARGETS)
        raise ValueError(f"target={target!r} is unknown; pass {names}")
    sigma_q, sigma_k = standard_deviations(
        q, k, key_mask=key_mask, query_mask=query_mask, impl=impl
    )
    measured = None
    if target == "measured":
        measured = score_variance(q, k, key_mask=key_mask, query_mask=query_mask)
    alpha, beta = match_moments(
        sigma_q,
        sigma_k,
        q.shape[-1],
        method=method,
        normalize_keys=normalize_keys,
        score_variance=measured,
        impl=impl,
    )
    group = q.shape[1] // k.shape[1]
    return alpha[:, :, None].expand(-1, -1, group).flatten(1), beta
