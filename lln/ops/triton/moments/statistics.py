"""σ_q and σ_k of every sample and key head in one pass over q and k."""

from __future__ import annotations

import torch
import triton
from jaxtyping import Bool, Float
from torch import Tensor

from lln.ops.registration import register
from lln.ops.triton.library import contiguous_mask, mask_stride, on_device, rows_contiguous, strides
from lln.ops.triton.moments.statistics_kernels import deviation_kernel, moments_kernel
from lln.ops.triton.tiles import padded, split, tile, whole_tiles


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
    (b, heads, queries, d), (_, kv_heads, keys, _) = q.shape, k.shape
    sigma_q, sigma_k = _deviations_fake(q, k, key_mask, query_mask)
    if q.numel() == 0 and k.numel() == 0:
        return sigma_q.zero_(), sigma_k.zero_()
    q, k = rows_contiguous(q), rows_contiguous(k)
    key_mask, query_mask = contiguous_mask(key_mask), contiguous_mask(query_mask)
    t = tile("statistics", d, d, q.dtype, q.device)
    count, _ = split(max(queries, keys), b * (heads + kv_heads), t, q.device)
    q_span, k_span = whole_tiles(queries, count, t), whole_tiles(keys, count, t)
    parts = q.new_empty((b * (heads + kv_heads), count, 3), dtype=torch.float32)
    with on_device(q):
        moments_kernel[(count, b * (heads + kv_heads))](
            q, k, query_mask, key_mask, parts, *strides(q), *strides(k),
            mask_stride(query_mask) or 0, mask_stride(key_mask) or 0, b, heads, kv_heads, queries,
            keys, q_span, k_span, D=d, BD=padded(d), ROWS=t.rows,
            FULL=0 < queries == count * q_span and 0 < keys == count * k_span, STAGES=t.stages,
            num_warps=t.warps, num_stages=t.stages,
        )  # fmt: skip
        group = heads // kv_heads * count
        deviation_kernel[(b * kv_heads,)](
            parts, sigma_q, sigma_k, b, heads, group, count,
            BLOCK=triton.next_power_of_2(group), num_warps=1,
        )  # fmt: skip
    return sigma_q, sigma_k


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
