"""PolaFormer: linear attention that keeps the signs of queries and keys apart."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lln.baselines.base import Layer, TokenMixer, merge, wide
from lln.baselines.linear import divide
from lln.ops.common.arguments import check_positive_int, hide


class PolaFormer(TokenMixer):
    r"""Polarity-aware linear attention (Meng et al. 2025, arXiv:2501.15061).

        φ₊(x) = max(x/s, 0)^p,  φ₋(x) = max(−x/s, 0)^p,  p = 1 + α sigmoid(w),  s = softplus(u)
        same_ij  = φ₊(q_i)ᵀφ₊(k_j) + φ₋(q_i)ᵀφ₋(k_j)
        other_ij = φ₋(q_i)ᵀφ₊(k_j) + φ₊(q_i)ᵀφ₋(k_j)
        out = W_o (G ⊙ ([same V_1 | other V_2] + conv(V))),  rows of same and other sum to 1

    V_1 and V_2 are the halves of a head's values, w and u a number per head and dimension,
    G = X W_g the coefficients of the two streams, conv a depthwise convolution with a filter for
    every dimension of a head. O(N d²) time with 2d features, O(N d) memory.

    Streams, power, coefficients and convolution are the mechanism, and G is made from the tokens,
    so there is no core on q, k, v alone. What the authors' image models add belongs to the model:
    positions on the keys, coarser keys (sr_ratio), LayerNorm and windows around it. Their
    convolution is 5×5 over an image; tokens here are a sequence, so it is of 5 tokens.

    Args:
        alpha: The largest power less 1; p starts at 1 + α/2.
        kernel_size: Of the convolution, odd; 0 leaves it out.

    Numerics: features of a query are divided by their largest, those of all keys by theirs, which
    cancels in the ratio: powers up to 5 would leave the range of float32. The authors add 1e-6 to
    denominators; here they are exact, and a stream that sees no key of its sign gives 0.
    """

    def __init__(self, layer: Layer, *, alpha: float = 4.0, kernel_size: int = 5) -> None:
        super().__init__(layer)
        if layer.head_dim % 2:
            raise ValueError(
                f"dim={layer.dim} with num_heads={layer.num_heads} gives heads of "
                f"{layer.head_dim}, but the two streams share a head's values in halves; choose an "
                "even head size"
            )
        if alpha < 0:
            raise ValueError(f"alpha={alpha} is negative; powers below 1 flatten, pass 0 or more")
        if kernel_size:
            check_positive_int("kernel_size", kernel_size)
            if kernel_size % 2 == 0:
                raise ValueError(f"kernel_size={kernel_size} is even; pass an odd number or 0")
        self.alpha = alpha
        self.query, self.key, self.value = (nn.Linear(layer.dim, layer.dim) for _ in range(3))
        self.gate = nn.Linear(layer.dim, layer.dim)
        self.out = nn.Linear(layer.dim, layer.dim)
        self.power = nn.Parameter(torch.zeros(layer.num_heads, 1, layer.head_dim))
        self.scale = nn.Parameter(torch.zeros(layer.num_heads, 1, layer.head_dim))
        self.conv = None
        if kernel_size:
            width = layer.head_dim
            half = kernel_size // 2
            self.conv = nn.Conv1d(width, width, kernel_size, padding=half, groups=width)

    def mix(self, x: Tensor, key_mask: Tensor | None) -> Tensor:
        q, k, v = (self.split(project(x)) for project in (self.query, self.key, self.value))
        v = hide(v, key_mask)
        mixed = self._attend(q, hide(k, key_mask), v)
        return self.out(self.gate(x) * merge(mixed))

    @wide
    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Both streams and the convolution. A masked key is 0 and so are its features."""
        same, other, keys = self._features(q, k)
        first, second = v.chunk(2, dim=-1)
        total = keys.sum(2)[..., None]
        out = torch.cat(
            [
                divide(same @ (keys.mT @ first), same @ total),
                divide(other @ (keys.mT @ second), other @ total),
            ],
            dim=-1,
        )
        return out if self.conv is None else out + self._convolve(self.conv, v)

    def _features(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Features of queries for keys of the same and of the other sign, and those of keys."""
        power = 1 + self.alpha * self.power.to(q).sigmoid()
        scale = F.softplus(self.scale.to(q))
        q, k = q / scale, k / scale
        positive, negative = q.relu() ** power, (-q).relu() ** power
        keys = torch.cat([k.relu() ** power, (-k).relu() ** power], dim=-1)
        same, other = torch.cat([positive, negative], -1), torch.cat([negative, positive], -1)
        largest = _or_one(same.amax(-1, keepdim=True))
        return same / largest, other / largest, keys / _or_one(keys.amax((-2, -1), keepdim=True))

    def _convolve(self, conv: nn.Conv1d, v: Float[Tensor, "B H N D"]) -> Float[Tensor, "B H N D"]:
        bias = None if conv.bias is None else conv.bias.to(v)
        across = v.flatten(0, 1).mT  # [B·H, D, N]
        out = F.conv1d(across, conv.weight.to(v), bias, padding=conv.padding, groups=conv.groups)
        return out.mT.unflatten(0, v.shape[:2])

    def attention_matrix(
        self, x: Float[Tensor, "B N dim"], key_mask: Bool[Tensor, "B N"] | None = None
    ) -> Float[Tensor, "B 2H N N"]:
        """Weights of the streams before coefficients and convolution: same of all heads, other."""
        x = self._checked(x, key_mask)
        q, k = self.split(self.query(x)), hide(self.split(self.key(x)), key_mask)
        return self._weights(q, k)

    @wide
    def _weights(self, q: Tensor, k: Tensor) -> Tensor:
        same, other, keys = self._features(q, k)
        scores = torch.cat([same @ keys.mT, other @ keys.mT], dim=1)
        return divide(scores, scores.sum(-1, keepdim=True))


def _or_one(largest: Tensor) -> Tensor:
    """What features are divided by, a constant of the backward pass since it cancels."""
    return largest.detach().masked_fill(largest == 0, 1)
