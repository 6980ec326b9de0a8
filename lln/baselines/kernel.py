"""Attention with a kernel of the score qᵀk that does not factor: the N×N matrix is built."""

from __future__ import annotations

from torch import Tensor

from lln.baselines.base import Core, Layer
from lln.baselines.linear import divide
from lln.baselines.softmax import visible


class KernelCore(Core):
    """out_i = Σ_j κ_ij v_j / Σ_j κ_ij; a row without any weight gives 0. O(N²) time and memory.

    Args:
        causal: Query i sees keys j ≤ i + M − N.
    """

    def __init__(self, layer: Layer, *, causal: bool = False) -> None:
        super().__init__(layer)
        self.causal = causal

    def kernel(self, scores: Tensor) -> Tensor:
        """κ as a function of qᵀk/√d."""
        raise NotImplementedError

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        weights = self.kernel(q @ k.mT * q.shape[-1] ** -0.5)
        seen = visible(q, k, key_mask, causal=self.causal)
        if seen is not None:
            weights = weights.masked_fill(~seen, 0)
        return divide(weights @ v, weights.sum(-1, keepdim=True))
