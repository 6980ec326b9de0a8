"""Linformer: keys and values projected along the sequence."""

from __future__ import annotations

import torch
from torch import Tensor, nn

from lln.baselines.base import Core, Layer
from lln.ops.common.arguments import check_positive_int


class Linformer(Core):
    r"""Linformer (Wang et al. 2020, arXiv:2006.04768).

        out = softmax(Q (E K)ᵀ / √d) (F V),  E, F r×L learned, shared by the heads

    O(N r d) time, O(N r) memory. Shorter inputs use the first N columns of E and F; a masked token
    contributes zero to every projected row.

    Args:
        rank: r.
        share: Use E for the values, too.
    """

    def __init__(self, layer: Layer, *, rank: int = 256, share: bool = False) -> None:
        super().__init__(layer)
        check_positive_int("rank", rank)
        bound = rank**-0.5

        def projection() -> nn.Parameter:
            return nn.Parameter(torch.empty(rank, layer.longest).uniform_(-bound, bound))

        self.key_projection = projection()
        self.value_projection = None if share else projection()

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        keys = k.shape[2]
        self.layer.check_length(keys)
        shorter = self.key_projection[:, :keys].to(k)
        k = shorter @ k
        v = (
            shorter if self.value_projection is None else self.value_projection[:, :keys].to(v)
        ) @ v
        return (q @ k.mT * q.shape[-1] ** -0.5).softmax(-1) @ v
