"""Hedgehog: learned exponential features."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor, nn

from lln.baselines.base import Layer
from lln.baselines.linear import PositiveCore


class Hedgehog(PositiveCore):
    r"""Hedgehog (Zhang et al. 2024, arXiv:2402.04347).

        φ(x) = [softmax(W x); softmax(−W x)],  W d×d per head, one for queries and one for keys

    W starts as the identity; the paper then distils the softmax weights of a trained model, which
    is left to the training loop. O(N d²) time, O(N d) memory.
    """

    def __init__(self, layer: Layer, *, causal: bool = False, calibrate: bool = False) -> None:
        super().__init__(layer, causal=causal, calibrate=calibrate)
        identity = torch.eye(layer.head_dim).expand(layer.num_heads, -1, -1)
        self.query_map = nn.Parameter(identity.clone())
        self.key_map = nn.Parameter(identity.clone())

    def features(self, q: Tensor, k: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k = self._mapped(q, k)
        return _spines(q, torch.softmax), _spines(k, torch.softmax)

    def log_features(self, q: Tensor, k: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        q, k = self._mapped(q, k)
        return _spines(q, torch.log_softmax), _spines(k, torch.log_softmax)

    def _mapped(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        return q @ self.query_map.to(q).mT, k @ self.key_map.to(k).mT


def _spines(x: Tensor, normalize: Callable[[Tensor, int], Tensor]) -> Tensor:
    return torch.cat([normalize(x, -1), normalize(-x, -1)], dim=-1)
