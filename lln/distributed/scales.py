"""alpha and beta of a sequence that is split over processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from lln.distributed.exchange import gather
from lln.moments import standard_deviations
from lln.moments.calibration import match_heads
from lln.protocols import compute_dtype

if TYPE_CHECKING:
    from lln.moments import MomentFit


def measured_scales(
    q: Tensor,
    k: Tensor,
    key_mask: Tensor | None,
    query_mask: Tensor | None,
    group: Any,
    method: str | MomentFit,
    normalize_keys: bool,
    impl: str | None,
) -> tuple[Tensor, Tensor]:
    """alpha and beta of the whole sequence, as constants of the backward pass."""
    key_heads = k.shape[1]
    sigma_q, sigma_k = standard_deviations(
        q, k, key_mask=key_mask, query_mask=query_mask, impl=impl
    )
    own = [
        *_count_and_mean(q.detach(), query_mask, key_heads),
        sigma_q,
        *_count_and_mean(k.detach(), key_mask, key_heads),
        sigma_k,
    ]
    slices = gather(torch.stack([x.double() for x in own], dim=-1), group)
    sigma_q, sigma_k = (
        _pooled(*part.unbind(-1)).to(sigma_q.dtype) for part in slices.split(3, dim=-1)
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


def _count_and_mean(x: Tensor, mask: Tensor | None, key_heads: int) -> tuple[Tensor, Tensor]:
    """Number and mean of the elements of valid tokens, per sample and key head."""
    elements = x.shape[1] // key_heads * x.shape[3]
    if mask is None:
        count = x.new_full((x.shape[0], 1), x.shape[2] * elements, dtype=torch.float64)
    else:
        x = x.masked_fill(~mask[:, None, :, None], 0)
        count = mask.sum(1, keepdim=True).double() * elements
    total = x.sum((2, 3), dtype=compute_dtype(x)).unflatten(1, (key_heads, -1)).sum(-1)
    return count.expand(-1, key_heads), total / count.clamp(min=1)


def _pooled(count: Tensor, mean: Tensor, sigma: Tensor) -> Tensor:
    """The standard deviation of the union of samples with these counts, means and deviations."""
    whole = count.sum(0).clamp(min=1)
    centre = (count * mean).sum(0) / whole
    return ((count * (sigma**2 + (mean - centre) ** 2)).sum(0) / whole).sqrt()
