"""TransNormer T2: softmax blocks below, elu + 1 features above."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from lln.baselines.base import masked_softmax
from lln.baselines.transnormer import TransNormer


class TransNormerT2(TransNormer):
    r"""TransNormer T2 (Qin et al. 2022, arXiv:2210.10340).

        DiagAttention: softmax(QKᵀ/√d) V in blocks;  NormAttention: φ(x) = 1 + elu(x)

    See :class:`lln.baselines.transnormer.TransNormer` for schedule, positions and cost.
    """

    def feature(self, x: Tensor) -> Tensor:
        return F.elu(x) + 1

    def blocks(self, scores: Tensor, seen: Tensor) -> Tensor:
        return masked_softmax(scores, seen)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        out = self.weigh(q, k, v, key_mask)
        return self.finish(out) if self.kind == "norm" else out
