"""ReBased: a learned quadratic kernel of few features."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lln.baselines.base import Layer
from lln.baselines.linear import LinearCore
from lln.ops.common.arguments import check_positive_int


class Rebased(LinearCore):
    r"""ReBased (Aksenov et al. 2024, arXiv:2402.10644).

        κ(q, k) = (q'ᵀk')²,  x' = γ ⊙ norm(x) + β,  norm = layer norm without affine part

    with γ, β of their own for queries and keys, on q and k of width d' (16); the square is the
    inner product of the d'(d'+1)/2 monomials of second order. O(N d'²d) time, O(N d'²) memory.

    Args:
        feature_dim: d'.
    """

    def __init__(self, layer: Layer, *, feature_dim: int = 16, causal: bool = False) -> None:
        super().__init__(layer, causal=causal)
        check_positive_int("feature_dim", feature_dim)
        self.key_dim = feature_dim
        self.gamma = nn.Parameter(torch.ones(2, feature_dim))  # queries, keys
        self.beta = nn.Parameter(torch.zeros(2, feature_dim))
        pairs = torch.triu_indices(feature_dim, feature_dim)
        self.register_buffer("pairs", pairs, persistent=False)

    pairs: Tensor

    def features(self, q: Tensor, k: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        return self._monomials(q, 0), self._monomials(k, 1)

    def _monomials(self, x: Tensor, which: int) -> Tensor:
        x = F.layer_norm(x, x.shape[-1:])
        x = x * self.gamma[which].to(x) + self.beta[which].to(x)
        rows, columns = self.pairs
        twice = (rows != columns).to(x) * (2**0.5 - 1) + 1  # x_a x_b stands for two entries
        return x[..., rows] * x[..., columns] * twice
