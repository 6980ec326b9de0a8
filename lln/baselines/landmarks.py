"""Attention by way of landmarks: a few points of the context, which read it and are read."""

from __future__ import annotations

from typing import NamedTuple

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from lln.baselines.base import Core, Layer
from lln.ops.common.arguments import check_positive_int
from lln.protocols import compute_dtype


class Read(NamedTuple):
    """What is kept of a context, whatever its length: landmarks, their values, which exist."""

    landmarks: Float[Tensor, "B H m D"]
    values: Float[Tensor, "B H m E"]
    real: Bool[Tensor, "B m"] | None


class Landmarks(Core):
    r"""Softmax attention to m landmarks, which have read the context by softmax attention.

        C = softmax(S Kᵀ) K,  out = softmax(Q Cᵀ) softmax(C Kᵀ) V,  scores divided by √d

    S are m of the keys that may be seen, chosen whatever their order, see :func:`spread`; C are the
    means of the keys around them. The two outer softmaxes are those of Agent attention (Han et al.
    2023, arXiv:2312.08874), whose landmarks are averages of neighbouring queries. In the words of
    LLN, C are the slots: they lie where the keys do, and all have the same mass. O(N m d) time,
    O(N d) memory.

    A context is read once and kept in m (D + E) numbers a head, for as many queries as come:

        kept = core.remember(k, v, key_mask)
        out = core.recall(q, kept)              # core(q, k, v, key_mask), in two steps

    Args:
        landmarks: m; a context of fewer keys has one for each.

    Numerics: torch's fused attention keeps its sums in float32.
    """

    def __init__(self, layer: Layer, *, landmarks: int = 128) -> None:
        super().__init__(layer)
        check_positive_int("landmarks", landmarks)
        self.landmarks = landmarks

    def _attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        # The sums are inside torch's kernels: nothing has to be widened.
        return self.recall(q, self.remember(k, v, key_mask))

    def remember(
        self,
        k: Float[Tensor, "B H M D"],
        v: Float[Tensor, "B H M E"],
        key_mask: Bool[Tensor, "B M"] | None = None,
    ) -> Read:
        """Read a context; what masked keys hold must be finite, and does not count."""
        start, real = spread(k, key_mask, self.landmarks)
        seen = None if key_mask is None else key_mask | ~key_mask.any(1, keepdim=True)
        landmarks = attend(start, k, k, seen)
        return Read(landmarks, attend(landmarks, k, v, seen), real)

    def recall(self, q: Float[Tensor, "B H N D"], kept: Read) -> Float[Tensor, "B H N E"]:
        """What queries find in a context that was read."""
        if kept.real is None:
            return attend(q, kept.landmarks, kept.values, None)
        blind = ~kept.real.any(1, keepdim=True)
        out = attend(q, kept.landmarks, kept.values, kept.real | blind)
        return out.masked_fill(blind[:, None, None], 0)


def attend(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B H M D"],
    v: Float[Tensor, "B H M E"],
    seen: Bool[Tensor, "B M"] | None,
) -> Float[Tensor, "B H N E"]:
    mask = None if seen is None else seen[:, None, None]
    return F.scaled_dot_product_attention(q, k, v, attn_mask=mask)


def spread(
    k: Float[Tensor, "B H M D"], key_mask: Bool[Tensor, "B M"] | None, count: int
) -> tuple[Float[Tensor, "B H m D"], Bool[Tensor, "B m"] | None]:
    """``count`` of the keys that may be seen, whatever their order, and which of them exist.

    The l-th of m is the ⌊(l + ½) n / m⌋-th of n keys in the order of the sum of their features; if
    n < m, every key is taken once.
    """
    batch, heads, keys, _ = k.shape
    count = min(count, keys)
    height = k.detach().to(compute_dtype(k)).sum(-1)  # [B, H, M]
    place = torch.arange(count, device=k.device)
    if key_mask is None:
        turn, real = (2 * place + 1) * keys // (2 * count), None
    else:
        total = key_mask.sum(1, keepdim=True)  # [B, 1]
        turn = torch.where(total < count, place, (2 * place + 1) * total // (2 * count))
        real = place < total
        height = height.masked_fill(~key_mask[:, None], torch.inf)
    turn = turn.expand(batch, count)[:, None].expand(-1, heads, -1)
    at = height.argsort(-1).gather(-1, turn)
    return k.gather(2, at[..., None].expand(-1, -1, -1, k.shape[3])), real
