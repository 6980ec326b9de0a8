"""FLASH: gated attention units with exact chunks and a linear global part."""

from __future__ import annotations

import math

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lln.baselines.base import Layer, TokenMixer, identity, valid, wide
from lln.baselines.window import segments
from lln.ops.common.arguments import check_positive_int, hide

BIAS_BUCKETS, BIAS_DISTANCE = 32, 128  # of T5's relative positions


class Flash(TokenMixer):
    r"""FLASH, the gated attention unit with mixed chunks (Hua et al. 2022, arXiv:2202.10447).

        out = W_o (u ⊙ (A v + L v)),  u = silu(W_u x),  v = silu(W_v x),  z = silu(W_z x)
        A = ReLU²(q kᵀ/C + bias) inside chunks of C,   L v = q' (Σ_j k'_j v_jᵀ) / n

    q, k, q', k' are four affine copies γ ⊙ z + β of one z of width s; the bias is T5's. One head.
    Replaces attention *and* feed-forward network: twice as many layers. The residual and the norm
    before the unit belong to the network. O(N (C s + C e + s e)) time for e = expansion · dim,
    O(N (C + e)) memory.

    Args:
        chunk: C.
        query_dim: s.
        expansion: Channels of u and v per channel of x.

    Numerics: n counts valid tokens; masked ones are neither keys of A nor of the sum.
    """

    def __init__(
        self, layer: Layer, *, chunk: int = 256, query_dim: int = 128, expansion: int = 2
    ) -> None:
        super().__init__(layer)
        for name, value in (("chunk", chunk), ("query_dim", query_dim), ("expansion", expansion)):
            check_positive_int(name, value)
        self.chunk, channels = chunk, expansion * layer.dim
        self.gate = nn.Linear(layer.dim, channels)
        self.value = nn.Linear(layer.dim, channels)
        self.shared = nn.Linear(layer.dim, query_dim)
        self.out = nn.Linear(channels, layer.dim)
        self.gamma = nn.Parameter(torch.empty(4, query_dim).normal_(std=0.02))
        self.beta = nn.Parameter(torch.zeros(4, query_dim))  # q, q', k, k'
        self.bias = nn.Parameter(torch.empty(BIAS_BUCKETS).normal_(std=0.02))

    def mix(self, x: Tensor, key_mask: Tensor | None) -> Tensor:
        v = F.silu(self.value(x))
        return self.out(F.silu(self.gate(x)) * self._attend(x, v, key_mask))

    def _attend(self, x: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        seen = valid(x, key_mask)
        return self._weigh(hide(v, seen), F.silu(self.shared(x)), seen)

    @wide
    def _weigh(self, v: Tensor, z: Tensor, seen: Tensor) -> Tensor:
        q, far_q, k, far_k = (
            z[:, None] * self.gamma.to(z)[:, None] + self.beta.to(z)[:, None]
        ).unbind(1)
        count = seen.sum(1).clamp(min=1).to(z)[:, None, None]
        far = far_q @ (hide(far_k, seen).mT @ v / count)
        chunks = [segments(part, self.chunk, dim=1) for part in (q, k, v)]
        scores = chunks[0] @ chunks[1].mT / self.chunk + self._position_bias(z)
        there = segments(seen.float(), self.chunk, dim=1)[:, :, None] > 0
        weights = scores.relu().square().masked_fill(~there, 0)
        return far + (weights @ chunks[2]).flatten(1, 2)[:, : v.shape[1]]

    def _position_bias(self, like: Tensor) -> Float[Tensor, "C C"]:
        position = torch.arange(self.chunk, device=like.device)
        bucket = t5_bucket(position - position[:, None])
        return self.bias.to(like)[bucket]

    def attention_matrix(
        self, x: Float[Tensor, "B N dim"], key_mask: Bool[Tensor, "B N"] | None = None
    ) -> Float[Tensor, "B 1 N N"]:
        """A + L: weights before the gate, signed, rows of any sum. O(N²)."""
        x = self._checked(x, key_mask)
        return self._attend(x, identity(x, 1), key_mask)[:, None]


def t5_bucket(offset: Tensor) -> Tensor:
    """T5's bucket of key position minus query position: exact when near, logarithmic when far."""
    half = BIAS_BUCKETS // 2
    exact = half // 2
    distance = offset.abs()
    far = (distance.clamp(min=1).float() / exact).log() / math.log(BIAS_DISTANCE / exact)
    far = (exact + (far * (half - exact)).long()).clamp(max=half - 1)
    return torch.where(distance < exact, distance, far) + half * (offset > 0)
