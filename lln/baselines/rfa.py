"""RFA: random Fourier features of the Gaussian kernel on unit vectors."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from lln.baselines.base import Layer
from lln.baselines.linear import LinearCore
from lln.ops.common.arguments import check_positive_int


class Rfa(LinearCore):
    r"""Random feature attention (Peng et al. 2021, arXiv:2103.02143), without the gate.

        φ(x) = m^{-1/2} [sin(Ω x̂), cos(Ω x̂)],  Ω = σ ⊙ Ω̃,  Ω̃ Gaussian,  x̂ = x/|x|

    so that E φ(q)ᵀφ(k) = exp(−|σ ⊙ (q̂ − k̂)|²/2), the softmax kernel of unit vectors up to a
    constant. σ is learned per head and channel. O(N m d) time, O(N m) memory.

    Args:
        num_features: m; 2m numbers per token.
        floor: Features may be negative: the mean kernel value of a query is clamped from below.
        seed: Of Ω̃, drawn once, per layer and head.
    """

    gaussian: Tensor

    def __init__(
        self,
        layer: Layer,
        *,
        num_features: int = 64,
        floor: float = 1e-2,
        seed: int = 0,
        causal: bool = False,
    ) -> None:
        super().__init__(layer, causal=causal)
        check_positive_int("num_features", num_features)
        shape = layer.num_heads, num_features, layer.head_dim
        self.floor = floor
        self.register_buffer("gaussian", torch.randn(shape, generator=layer.generator(seed)))
        self.sigma = nn.Parameter(torch.ones(layer.num_heads, layer.head_dim))

    def features(self, q: Tensor, k: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        return self._waves(q), self._waves(k)

    def _waves(self, x: Tensor) -> Tensor:
        projection = self.gaussian.to(x) * self.sigma.to(x)[:, None]
        angle = F.normalize(x, dim=-1) @ projection.mT
        return projection.shape[1] ** -0.5 * torch.cat([angle.sin(), angle.cos()], dim=-1)

    def ratio(self, numerator: Tensor, denominator: Tensor, count: Tensor) -> Tensor:
        return numerator / torch.maximum(denominator, self.floor * count.clamp(min=1))
