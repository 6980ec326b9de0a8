"""TransNormer T1: ReLU blocks below, elu features above."""

from __future__ import annotations

import torch.nn.functional as F
from torch import Tensor

from lln.baselines.transnormer import TransNormer


class TransNormerT1(TransNormer):
    r"""TransNormer T1 (Qin et al. 2022, arXiv:2210.10340).

        DiagAttention: RMSNorm(ReLU(QKᵀ/√d) V) in blocks;  NormAttention: φ(x) = elu(x)

    See :class:`lln.baselines.transnormer.TransNormer` for schedule, positions and cost.
    """

    def feature(self, x: Tensor) -> Tensor:
        return F.elu(x)

    def blocks(self, scores: Tensor, seen: Tensor) -> Tensor:
        return scores.relu().masked_fill(~seen, 0)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        return self.finish(self.weigh(q, k, v, key_mask))
