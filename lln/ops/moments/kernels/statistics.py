"""σ_q and σ_k of every sample and key head in one pass over q and k."""

from __future__ import annotations

import torch
import triton
from jaxtyping import Bool, Float
from torch import Tensor

from lln.ops.common.kernels.launching import Launch, Layout, layout, planned, row_strides
from lln.ops.common.kernels.library import contiguous_mask, mask_stride, rows_contiguous
from lln.ops.common.kernels.tiles import padded, split, tile, whole_tiles
from lln.ops.common.registration import register
from lln.ops.moments.kernels.statistics_kernels import deviation_kernel, moments_kernel


def standard_deviations(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv M D"],
    *,
    key_mask: Bool[Tensor, "B M"] | None = None,
    query_mask: Bool[Tensor, "B N"] | None = None,
) -> tuple[Float[Tensor, "B Hkv"], Float[Tensor, "B Hkv"]]:
    """Biased standard deviations over tokens and features, float32, not differentiable.

    σ_q is pooled over the query heads that share a key head. Masked tokens do not count, whatever
    they hold; a sample without tokens has deviation 0.
    """
    return _deviations(q.detach(), k.detach(), key_mask, query_mask)


def _deviations_impl(
    q: Tensor, k: Tensor, key_mask: Tensor | None, query_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    sigma_q, sigma_k = _deviations_fake(q, k, key_mask, query_mask)
    if q.numel() == 0 and k.numel() == 0:
        return sigma_q.zero_(), sigma_k.zero_()
    parts = moments_of_parts(q, k, key_mask, query_mask)
    _deviation_plan(q.shape[:2], k.shape[:2], parts.shape[1], q.device)(parts, sigma_q, sigma_k)
    return sigma_q, sigma_k


def moments_of_parts(
    q: Tensor, k: Tensor, key_mask: Tensor | None, query_mask: Tensor | None
) -> Tensor:
    """Count, mean and squared deviation of parts: [B·(H + Hkv), parts, 3], query heads first."""
    if q.numel() == 0 and k.numel() == 0:
        return q.new_zeros((q.shape[0] * (q.shape[1] + k.shape[1]), 1, 3), dtype=torch.float32)
    q, k = rows_contiguous(q), rows_contiguous(k)
    key_mask, query_mask = contiguous_mask(key_mask), contiguous_mask(query_mask)
    shape, launch = _moments_plan(
        layout(q), layout(k), mask_stride(query_mask), mask_stride(key_mask)
    )
    parts = q.new_empty(shape, dtype=torch.float32)
    launch(q, k, query_mask, key_mask, parts)
    return parts


@planned
def _moments_plan(
    q: Layout, k: Layout, query_mask: int | None, key_mask: int | None
) -> tuple[tuple[int, int, int], Launch]:
    ((b, heads, queries, d), q_strides, dtype, device), ((_, kv_heads, keys, _), k_strides, *_) = (
        q,
        k,
    )
    t = tile("statistics", d, d, dtype, device)
    rows = b * (heads + kv_heads)
    count, _ = split(max(queries, keys), rows, t, device)
    q_span, k_span = whole_tiles(queries, count, t), whole_tiles(keys, count, t)
    return (rows, count, 3), Launch(
        moments_kernel, (count, rows),
        ((*row_strides(q_strides, k_strides), query_mask or 0, key_mask or 0), b, heads, kv_heads,
         queries, keys, q_span, k_span),
        D=d, BD=padded(d), ROWS=t.rows,
        FULL=0 < queries == count * q_span and 0 < keys == count * k_span, STAGES=t.stages,
        num_warps=t.warps, num_stages=t.stages,
    )  # fmt: skip


@planned
def _deviation_plan(
    q_heads: tuple[int, ...], k_heads: tuple[int, ...], count: int, _: torch.device
) -> Launch:
    (b, heads), kv_heads = q_heads, k_heads[1]
    group = heads // kv_heads * count
    return Launch(
        deviation_kernel, (b * kv_heads,), (b, heads, group, count),
        BLOCK=triton.next_power_of_2(group), num_warps=1,
    )  # fmt: skip


def _deviations_fake(
    q: Tensor, k: Tensor, key_mask: Tensor | None, query_mask: Tensor | None
) -> tuple[Tensor, Tensor]:
    shape = k.shape[:2]
    return k.new_empty(shape, dtype=torch.float32), k.new_empty(shape, dtype=torch.float32)


_deviations = register(
    "standard_deviations(Tensor q, Tensor k, Tensor? key_mask, Tensor? query_mask) "
    "-> (Tensor, Tensor)",
    _deviations_impl,
    _deviations_fake,
)
