"""Skyformer: Gaussian kernel attention through sampled points."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lln.baselines.base import Core, Layer, valid
from lln.baselines.pseudoinverse import pseudoinverse
from lln.ops.common.arguments import check_positive_int

LAST = 2**31 - 1  # the turn of a masked token, which never comes


class Skyformer(Core):
    r"""Skyformer (Chen et al. 2021, arXiv:2111.00035).

        out = C(Q, S) D (D (C(S, S) + γI) D)⁻¹ D C(S, K) V,  C(x, y) = exp(−|x − y|²/(2√d))

    S holds m points, half of them queries and half keys, drawn without replacement among the valid
    tokens; D = rowsum(C(S, S) + γI)^{-1/2}; the inverse by six iterations. The kernel's rows are
    not normalised. O(N m d) time, O(N m) memory.

    Args:
        landmarks: m.
        ridge: γ.
        iterations: Of the inverse.
        resample: Draw other points at every training step; evaluation uses those of ``seed``.
    """

    crosses = False
    turn: Tensor

    def __init__(
        self,
        layer: Layer,
        *,
        landmarks: int = 128,
        ridge: float = 0.1,
        iterations: int = 6,
        resample: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(layer)
        check_positive_int("landmarks", landmarks)
        if landmarks % 2:
            raise ValueError(f"landmarks={landmarks} is odd; half are queries and half keys")
        self.landmarks, self.ridge = landmarks, ridge
        self.iterations, self.resample = iterations, resample
        # A token's turn to be drawn: depends on its position only, not on the rest of the batch.
        generator = layer.generator(seed)
        turns = [torch.randperm(layer.longest, generator=generator) for _ in range(2)]
        self.register_buffer("turn", torch.stack(turns))

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        tokens = q.shape[2]
        self.layer.check_length(tokens)
        seen = valid(q, key_mask)
        scale = q.shape[-1] ** -0.25
        q, k = q * scale, k * scale
        turn = self.turn[:, :tokens]
        if self.training and self.resample:
            turn = torch.randint_like(turn, LAST)
        chosen = [draw(seen, order, self.landmarks // 2) for order in turn]
        points = torch.cat([take(x, at) for x, (at, _) in zip((q, k), chosen, strict=True)], dim=2)
        real = torch.cat([there for _, there in chosen], dim=1)[:, None, :, None]  # [B, 1, m, 1]
        inner = gaussian(points, points).masked_fill(~(real & real.mT), 0)
        inner = inner + self.ridge * torch.diag_embed(real[..., 0].to(inner))
        degree = inner.sum(-1, keepdim=True)
        d = degree.masked_fill(~real, 1).rsqrt().masked_fill(~real, 0)
        inverse = pseudoinverse(d * inner * d.mT, steps=self.iterations)
        right = gaussian(points, k).masked_fill(~seen[:, None, None], 0)
        left = gaussian(q, points).masked_fill(~real.mT, 0)
        return left @ (d * (inverse @ (d * (right @ v))))


def gaussian(x: Float[Tensor, "... n d"], y: Float[Tensor, "... m d"]) -> Float[Tensor, "... n m"]:
    """exp(−|x_i − y_j|²/2), by the inner products; at most 1 whatever rounding does."""
    half = lambda z: z.square().sum(-1, keepdim=True) / 2  # noqa: E731
    return (x @ y.mT - half(x) - half(y).mT).clamp(max=0).exp()


def draw(
    seen: Bool[Tensor, "B N"], turn: Int[Tensor, " N"], count: int
) -> tuple[Int[Tensor, "B m"], Bool[Tensor, "B m"]]:
    """The ``count`` valid tokens whose turn comes first, and which of them exist."""
    count = min(count, seen.shape[1])
    found = torch.where(seen, turn, LAST).topk(count, dim=1, largest=False)
    return found.indices, found.values < LAST


def take(x: Float[Tensor, "B H N D"], at: Int[Tensor, "B m"]) -> Float[Tensor, "B H m D"]:
    index = at[:, None, :, None].expand(-1, x.shape[1], -1, x.shape[3])
    return x.gather(2, index)
