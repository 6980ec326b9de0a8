"""KVT: softmax over the k nearest keys of each query."""

from __future__ import annotations

import torch
from torch import Tensor

from lln.baselines.base import Core, Layer, masked_softmax
from lln.baselines.softmax import visible
from lln.ops.common.arguments import check_positive_int


class Knn(Core):
    r"""k-NN attention (Wang et al. 2022, KVT, arXiv:2106.00515).

        out_i = Σ_{j ∈ T_i} softmax_{j ∈ T_i}(q_iᵀk_j / √d) v_j,  T_i = the k largest q_iᵀk_j

    O(N²d) time, O(N²) memory: every score is computed to find the largest.

    Args:
        neighbours: k; with fewer visible keys all of them are taken.
        causal: Query i chooses among keys j ≤ i + M − N.
    """

    def __init__(self, layer: Layer, *, neighbours: int = 100, causal: bool = False) -> None:
        super().__init__(layer)
        check_positive_int("neighbours", neighbours)
        self.neighbours, self.causal = neighbours, causal

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        scores = q @ k.mT * q.shape[-1] ** -0.5
        seen = visible(q, k, key_mask, causal=self.causal)
        ranked = scores.detach()
        if seen is not None:
            ranked = ranked.masked_fill(~seen, -torch.inf)
        nearest = ranked.topk(min(self.neighbours, k.shape[2]), dim=-1).indices
        chosen = torch.zeros_like(scores, dtype=torch.bool).scatter_(-1, nearest, True)
        return masked_softmax(scores, chosen if seen is None else chosen & seen) @ v
