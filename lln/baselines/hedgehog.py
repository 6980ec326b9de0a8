"""Hedgehog: learned exponential features."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lln.baselines.base import Layer
from lln.baselines.linear import LinearCore


class Hedgehog(LinearCore):
    r"""Hedgehog (Zhang et al. 2024, arXiv:2402.04347).

        φ(x) = [softmax(W x); softmax(−W x)],  W d×d per head, one for queries and one for keys

    W starts as the identity; the paper then distils the softmax weights of a trained model, which
    is left to the training loop. O(N d²) time, O(N d) memory.
    """

    def __init__(self, layer: Layer, *, causal: bool = False) -> None:
        super().__init__(layer, causal=causal)
        identity = torch.eye(layer.head_dim).expand(layer.num_heads, -1, -1)
        self.query_map = nn.Parameter(identity.clone())
        self.key_map = nn.Parameter(identity.clone())

    def features(self, q: Tensor, k: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        return _spines(q @ self.query_map.to(q).mT), _spines(k @ self.key_map.to(k).mT)


def _spines(x: Tensor) -> Tensor:
    return torch.cat([x.softmax(-1), (-x).softmax(-1)], dim=-1)
