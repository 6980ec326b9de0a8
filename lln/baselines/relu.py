"""The ReLU kernel of Fig. 2."""

from __future__ import annotations

from torch import Tensor

from lln.baselines.kernel import KernelCore


class Relu(KernelCore):
    r"""Attention with κ(q, k) = max(qᵀk, 0), rows divided by their sum (Fig. 2 of 2311.13541).

    O(N²d) time, O(N²) memory. Homogeneous, hence indifferent to temperature.
    """

    def kernel(self, scores: Tensor) -> Tensor:
        return scores.relu()
