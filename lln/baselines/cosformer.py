"""CosFormer: ReLU features weighted by the cosine of the distance."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lln.baselines.base import Layer
from lln.baselines.linear import LinearCore


class Cosformer(LinearCore):
    r"""CosFormer (Qin et al. 2022, arXiv:2202.08791).

        κ(q_i, k_j) = ReLU(q_i)ᵀReLU(k_j) cos(π(i − j) / 2L)

    as 2d features [ReLU(x) sin(πi/2L), ReLU(x) cos(πi/2L)]. O(N d²) time, O(N d) memory.

    Args:
        horizon: L, at least the longest input: ``max_length`` by default. Their code takes the
            length of the current input, so that a token's output changes with the padding.
    """

    crosses = False  # positions of queries and keys are those of one sequence

    def __init__(self, layer: Layer, *, horizon: int | None = None, causal: bool = False) -> None:
        super().__init__(layer, causal=causal)
        self.horizon = layer.longest if horizon is None else horizon
        if self.horizon < layer.longest:
            raise ValueError(
                f"horizon={horizon} is below max_length={layer.max_length}: weights of distant "
                "tokens would be negative; pass at least max_length, or None"
            )

    def features(self, q: Tensor, k: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        self.layer.check_length(k.shape[2])
        angle = torch.arange(k.shape[2], dtype=q.dtype, device=q.device)[:, None]
        angle = angle * (math.pi / 2 / self.horizon)
        waves = angle.sin(), angle.cos()

        def weighted(x: Tensor) -> Tensor:
            return torch.cat([x.relu() * wave for wave in waves], dim=-1)

        return weighted(q), weighted(k)
