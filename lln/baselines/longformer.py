"""Longformer: a sliding window and a few global tokens."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lln.baselines.base import Layer, TokenMixer, identity, masked_softmax, merge, valid, wide
from lln.baselines.window import banded, half_window, surroundings
from lln.ops.common.arguments import hide


class Longformer(TokenMixer):
    r"""Longformer (Beltagy et al. 2020, arXiv:2004.05150).

        local token i:  softmax over {j: |i−j| ≤ w/2} ∪ {global tokens} of q_iᵀk_j / √d
        global token:   softmax over all tokens, with projections W_q', W_k', W_v' of its own

    O(N (w + g) d) time, O(N (w + g)) memory. The first ``global_tokens`` positions are global, as
    the [CLS] token is in classification.

    Args:
        window: w, even: w/2 keys on either side.
        global_tokens: g, at least 1; without them it is the mechanism "sliding_window".
    """

    def __init__(self, layer: Layer, *, window: int = 512, global_tokens: int = 1) -> None:
        super().__init__(layer)
        if global_tokens < 1:
            raise ValueError(
                f"global_tokens={global_tokens} must be positive; use 'sliding_window' for none"
            )
        self.reach, self.global_tokens = half_window(window), global_tokens
        self.query, self.key, self.value = (nn.Linear(layer.dim, layer.dim) for _ in range(3))
        self.global_query, self.global_key, self.global_value = (
            nn.Linear(layer.dim, layer.dim) for _ in range(3)
        )
        self.out = nn.Linear(layer.dim, layer.dim)

    def mix(self, x: Tensor, key_mask: Tensor | None) -> Tensor:
        return self.out(merge(self._attend(x, key_mask, self.value(x), self.global_value(x))))

    def _attend(self, x: Tensor, key_mask: Tensor | None, v: Tensor, global_v: Tensor) -> Tensor:
        seen = valid(x, key_mask)
        q, k, v = (self.split(hide(part, seen)) for part in (self.query(x), self.key(x), v))
        local = self._local(q, k, v, seen)
        q = self.split(self.global_query(x[:, : self.global_tokens]))
        k, v = (self.split(hide(part, seen)) for part in (self.global_key(x), global_v))
        return torch.cat([self._global(q, k, v, seen), local[:, :, self.global_tokens :]], dim=2)

    @wide
    def _global(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        """Global tokens look at everything."""
        return masked_softmax(q @ k.mT * q.shape[-1] ** -0.5, seen[:, None, None]) @ v

    @wide
    def _local(self, q: Tensor, k: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        """One softmax over the band and the global tokens; those are taken out of the band."""
        tokens, marked = q.shape[2], self.global_tokens
        q = q * q.shape[-1] ** -0.5
        position = torch.arange(tokens, device=q.device)
        scores, near = banded(q, k, seen & (position >= marked), reach=self.reach)
        runs, size, around = scores.shape[2:]
        q = F.pad(q, (0, 0, 0, runs * size - tokens))
        scores = torch.cat([scores, (q @ k[:, :, :marked].mT).unflatten(2, (runs, size))], dim=-1)
        far = seen[:, None, None, None, :marked].expand(-1, -1, runs, size, -1)
        weights = masked_softmax(scores, torch.cat([near, far], dim=-1))
        out = weights[..., :around] @ surroundings(v, size, reach=self.reach)
        out = out + weights[..., around:] @ v[:, :, None, :marked]
        return out.flatten(2, 3)[:, :, :tokens]

    def attention_matrix(
        self, x: Float[Tensor, "B N dim"], key_mask: Bool[Tensor, "B N"] | None = None
    ) -> Float[Tensor, "B H N N"]:
        """The weights of every token, each on the values of its own kind. O(N²)."""
        x = self._checked(x, key_mask)
        eye = identity(x, self.layer.num_heads)
        return self._attend(x, key_mask, eye, eye)
