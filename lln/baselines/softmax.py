"""Softmax attention: the yardstick."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lln.baselines.base import Core, Layer, masked_softmax
from lln.ops.taps.convolution import check_conv, convolve_tokens, draw_filters_

IMPLEMENTATIONS = ("sdpa", "matrix")


class Softmax(Core):
    r"""Scaled dot-product attention (Vaswani et al. 2017, arXiv:1706.03762).

        out_i = Σ_j softmax_j(q_iᵀk_j / √d) v_j

    O(N²d) time; O(N d) memory with ``impl="sdpa"`` (torch's fused kernels), O(N²) with "matrix",
    which builds P.

    Args:
        causal: Query i sees keys j ≤ i + M − N.
        conv: Width of Nyströmformer's convolution of the values, added to the output: tells apart
            what it does for other mechanisms from what they do. 0 leaves it out. Odd unless causal.
    """

    def __init__(
        self,
        layer: Layer,
        *,
        impl: str = "sdpa",
        causal: bool = False,
        conv: int = 0,
    ) -> None:
        super().__init__(layer)
        if impl not in IMPLEMENTATIONS:
            raise ValueError(f"impl={impl!r} is unknown; choose from {', '.join(IMPLEMENTATIONS)}")
        check_conv(conv, causal=causal)
        self.impl, self.causal, self.crosses = impl, causal, not conv
        self.conv_weight = None
        if conv:
            self.conv_weight = nn.Parameter(torch.empty(layer.num_heads, conv))
            draw_filters_(self.conv_weight, conv)

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        # torch's kernels keep their sums in float32: nothing has to be widened.
        return (
            self.attend(q, k, v, key_mask)
            if self.impl == "sdpa"
            else super()._attend(q, k, v, key_mask)
        )

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        out = self._softmax(q, k, v, key_mask)
        if self.conv_weight is None:
            return out
        return out + convolve_tokens(v, self.conv_weight, causal=self.causal)

    def _softmax(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        seen = visible(q, k, key_mask, causal=self.causal)
        if self.impl == "matrix":
            return masked_softmax(q @ k.mT * q.shape[-1] ** -0.5, seen) @ v
        if seen is None:
            return F.scaled_dot_product_attention(q, k, v)
        blind = ~seen.any(-1, keepdim=True)  # all masked is NaN or 0 there, by kernel
        out = F.scaled_dot_product_attention(q, k, v, attn_mask=seen | blind)
        return out.masked_fill(blind, 0)


def visible(
    q: Tensor,
    k: Tensor,
    key_mask: Tensor | None,
    *,
    causal: bool,
) -> Tensor | None:
    """True where a query may see a key, ``[B or 1, 1, 1 or N, M]``; None if everywhere."""
    seen = None if key_mask is None else key_mask[:, None, None, :]
    if not causal:
        return seen
    queries, keys = q.shape[2], k.shape[2]
    triangle = torch.ones(queries, keys, dtype=torch.bool, device=q.device).tril(keys - queries)
    return triangle[None, None] if seen is None else seen & triangle
