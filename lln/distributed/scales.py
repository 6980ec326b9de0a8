"""alpha and beta of a sequence that is split over processes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from jaxtyping import Float
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from lln.distributed.exchange import gather
from lln.distributed.layout import BATCH, HEADS, MASK, QKV, Layout
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


@torch.no_grad()
def whole_variances(
    q: Tensor,
    k: Tensor,
    *,
    key_mask: Tensor | None,
    query_mask: Tensor | None,
    impl: str | None,
) -> Float[Tensor, "2 Hkv"]:
    """σ_q² and σ_k² of DTensors, averaged over all samples by their valid tokens.

    The same on every process; NaN without a valid token.
    """
    layout = Layout.of(q, k, k)
    samples, key_heads = q.shape[0], k.shape[1]
    own_q, own_k = layout.local(q.detach(), QKV), layout.local(k.detach(), QKV)
    masks = [None if x is None else layout.local(x, MASK) for x in (query_mask, key_mask)]
    rows, heads = own_k.shape[:2]
    found = own_k.new_zeros((rows, heads, 6), dtype=torch.float64)
    if rows and heads:
        options: dict[str, Any] = {"query_mask": masks[0], "key_mask": masks[1], "impl": impl}
        sigma_q, sigma_k = standard_deviations(own_q, own_k, **options)
        parts = [
            *(*_count_and_mean(own_q, masks[0], heads), sigma_q),
            *(*_count_and_mean(own_k, masks[1], heads), sigma_k),
        ]
        found = torch.stack([x.double() for x in parts], dim=-1)
    dimension = layout.over_tokens
    slices = found[None] if dimension is None else gather(found, layout.mesh.get_group(dimension))
    table = [
        x
        for part in slices.split(3, dim=-1)
        for x in (_pooled(*part.unbind(-1)).square(), part[..., 0].sum(0))
    ]
    whole = DTensor.from_local(
        torch.stack(table, dim=-1),
        layout.mesh,
        [Shard(axis) if axis in (BATCH, HEADS) else Replicate() for axis in layout.axes],
        run_check=False,
        shape=torch.Size((samples, key_heads, 4)),
        stride=(key_heads * 4, 4, 1),
    ).full_tensor()
    means = [
        torch.where(count > 0, variance * count, 0).sum(0) / count.sum(0)
        for variance, count in (whole[..., :2].unbind(-1), whole[..., 2:].unbind(-1))
    ]
    return torch.stack(means).to(compute_dtype(q))


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
