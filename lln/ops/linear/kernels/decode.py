"""Single-token decoding in one launch: constant time and memory per token, whatever came before."""

from __future__ import annotations

import torch
import triton
from jaxtyping import Bool, Float
from torch import Tensor

from lln.ops.common.kernels.library import mask_stride, on_device, rows_contiguous
from lln.ops.common.kernels.tiles import padded
from lln.ops.common.registration import register
from lln.ops.linear.kernels.decode_kernels import decode_kernel


def decode(
    q: Float[Tensor, "B H 1 D"],
    k: Float[Tensor, "B Hkv 1 D"],
    v: Float[Tensor, "B Hkv 1 E"],
    log_mass: Float[Tensor, "B Hkv D"],
    mean: Float[Tensor, "B Hkv D E"],
    *,
    alpha: Float[Tensor, "B H"],
    beta: Float[Tensor, "B Hkv"],
    key_mask: Bool[Tensor, "B 1"] | None = None,
) -> tuple[Float[Tensor, "B H 1 E"], Float[Tensor, "B Hkv D"], Float[Tensor, "B Hkv D E"]]:
    """(out, log_mass, mean): the token joins the state (float32), then its query reads it.

    Equals merging the state with that of the token and reading the result. The given state is not
    changed. For inference: gradients do not flow.
    """
    return _decode(q, k, v, log_mass, mean, alpha, beta, key_mask)


def _decode_impl(q, k, v, log_mass, mean, alpha, beta, key_mask) -> tuple[Tensor, Tensor, Tensor]:
    b, kv_heads, d, e = mean.shape
    out, new_log_mass, new_mean = _decode_fake(q, k, v, log_mass, mean, alpha, beta, key_mask)
    if out.numel() == 0:
        return out, new_log_mass, new_mean
    q, k, v = rows_contiguous(q), rows_contiguous(k), rows_contiguous(v)
    block = min(padded(e), 8192 // padded(d))
    with on_device(q):
        decode_kernel[(b * kv_heads, triton.cdiv(e, block))](
            q, k, v, log_mass.contiguous(), mean.contiguous(), key_mask, alpha, beta,
            out, new_log_mass, new_mean,
            *q.stride()[:2], *k.stride()[:2], *v.stride()[:2], *out.stride()[:2],
            mask_stride(key_mask) or 0, *alpha.stride(), *beta.stride(),
            kv_heads, q.shape[1] // kv_heads,
            D=d, E=e, BD=padded(d), BE=block, num_warps=4,
        )  # fmt: skip
    return out, new_log_mass, new_mean


def _decode_fake(q, k, v, log_mass, mean, alpha, beta, key_mask) -> tuple[Tensor, Tensor, Tensor]:
    out = q.new_empty((*q.shape[:3], v.shape[-1]))
    return (
        out,
        log_mass.new_empty(log_mass.shape, dtype=torch.float32),
        mean.new_empty(mean.shape, dtype=torch.float32),
    )


_decode = register(
    "decode(Tensor q, Tensor k, Tensor v, Tensor log_mass, Tensor mean, Tensor alpha, Tensor beta, "
    "Tensor? key_mask) -> (Tensor out, Tensor log_mass, Tensor mean)",
    _decode_impl,
    _decode_fake,
)
