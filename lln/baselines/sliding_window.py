"""Sliding window: softmax over the tokens nearby."""

from __future__ import annotations

from torch import Tensor

from lln.baselines.base import Core, Layer, masked_softmax, valid
from lln.baselines.window import banded, half_window, surroundings


class SlidingWindow(Core):
    r"""Softmax attention in a band (Child et al. 2019, arXiv:1904.10509; Beltagy et al. 2020).

        out_i = Σ_{|i−j| ≤ w/2} softmax_j(q_iᵀk_j / √d) v_j

    O(N w d) time, O(N w) memory. Longformer without its global tokens.

    Args:
        window: w, even: w/2 keys on either side, and the token itself.
        causal: Only the w/2 keys before, and the token itself.
    """

    crosses = False

    def __init__(self, layer: Layer, *, window: int = 512, causal: bool = False) -> None:
        super().__init__(layer)
        self.reach, self.causal = half_window(window), causal

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        q = q * q.shape[-1] ** -0.5
        scores, seen = banded(q, k, valid(q, key_mask), reach=self.reach, causal=self.causal)
        around = surroundings(v, scores.shape[-2], reach=self.reach)
        return (masked_softmax(scores, seen) @ around).flatten(2, 3)[:, :, : q.shape[2]]
