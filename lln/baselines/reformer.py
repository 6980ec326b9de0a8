"""Reformer: attention among tokens that hash to the same bucket."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float, Int
from torch import Tensor, nn

from lln.baselines.base import Layer, TokenMixer, identity, merge, valid, wide
from lln.ops.common.arguments import check_positive_int, hide

SELF_PENALTY = 1e5  # a token attends to itself only if to nothing else


class Reformer(TokenMixer):
    r"""LSH attention with shared queries and keys (Kitaev et al. 2020, arXiv:2001.04451).

        k_j = q_j / |q_j|;  bucket(x) = argmax([x R; −x R]) per round, R random
        P_i = {j in the bucket of i, in the chunk of i or the one before}
        out_i = Σ_r exp(z_ir − z_i) Σ_{j∈P_ir} exp(q_iᵀk_j/√d − m_ijr − z_ir) v_j,
        m_ijr = ln #{rounds in which j ∈ P_i}, or 10⁵ for j = i;  z the logarithms of the sums

    Tokens are sorted by (bucket, position) and cut into chunks of c. O(N R c d) time and O(N R c)
    memory for R rounds.

    Args:
        chunk: c; the number of buckets is even and about (valid tokens) / c.
        rounds: Hash rounds R.
        resample: Draw other rotations at every training step; evaluation uses those of ``seed``.

    Numerics: masked tokens get no bucket and are sorted behind all others, and the number of
    buckets is counted per sample, so padding changes nothing. The first chunk has none before it
    (public versions wrap around to the end of another round).
    """

    rotations: Tensor

    def __init__(
        self,
        layer: Layer,
        *,
        chunk: int = 64,
        rounds: int = 4,
        resample: bool = True,
        seed: int = 0,
    ) -> None:
        super().__init__(layer)
        check_positive_int("chunk", chunk)
        check_positive_int("rounds", rounds)
        self.chunk, self.rounds, self.resample = chunk, rounds, resample
        self.query_key = nn.Linear(layer.dim, layer.dim)
        self.value = nn.Linear(layer.dim, layer.dim)
        self.out = nn.Linear(layer.dim, layer.dim)
        half = -(-layer.longest // (2 * chunk))
        shape = rounds, layer.head_dim, half
        rotations = torch.randn(shape, generator=layer.generator(seed))
        self.register_buffer("rotations", rotations)

    def mix(self, x: Tensor, key_mask: Tensor | None) -> Tensor:
        return self.out(merge(self._heads(x, self.value(x), key_mask)))

    def _heads(self, x: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        self.layer.check_length(x.shape[1])
        seen = valid(x, key_mask)
        qk = self.split(hide(self.query_key(x), seen))
        return self._attend(qk, self.split(hide(v, seen)), seen)

    @wide
    def _attend(self, qk: Tensor, v: Tensor, seen: Tensor) -> Tensor:
        buckets = self.buckets(qk.detach(), seen)
        order = buckets.argsort(dim=-1, stable=True)  # token in each place
        place = order.argsort(dim=-1)  # place of each token
        own, around, there = self._chunks(order)
        k = F.normalize(qk, dim=-1) * qk.shape[-1] ** -0.5
        scores = _rows(qk, own) @ _rows(k, around).mT  # [B, H, R, chunks, c, 2c]
        scores = scores - self._times_met(buckets, place // self.chunk, own, around).log()
        scores = scores - SELF_PENALTY * (own[..., :, None] == around[..., None, :])

        together = _look_up(buckets, own)[..., :, None] == _look_up(buckets, around)[..., None, :]
        there = there & _look_up(seen[:, None, None].expand_as(buckets), around)
        together = together & there[..., None, :]
        blind = ~together.any(-1, keepdim=True)
        scores = scores.masked_fill(~together, -torch.inf).masked_fill(blind, 0)
        mass = torch.logsumexp(scores, dim=-1, keepdim=True)
        weights = (scores - mass).exp().masked_fill(~together, 0)

        out, mass = _unsort(weights @ _rows(v, around), place), _unsort(mass, place)
        return (torch.softmax(mass, dim=2) * out).sum(2)

    def buckets(
        self, x: Float[Tensor, "B H N D"], seen: Bool[Tensor, "B N"]
    ) -> Int[Tensor, "B H R N"]:
        """The bucket of each token and round; masked tokens get a bucket behind all others."""
        rotations = self.rotations.to(x)
        if self.training and self.resample:
            rotations = torch.randn_like(rotations)
        half = rotations.shape[-1]
        rotated = x[:, :, None] @ rotations  # [B, H, R, N, buckets / 2]
        wanted = (seen.sum(1) + 2 * self.chunk - 1) // (2 * self.chunk)
        spare = torch.arange(half, device=x.device) >= wanted[:, None, None, None, None]
        both = torch.cat([x.masked_fill(spare, -torch.inf) for x in (rotated, -rotated)], dim=-1)
        return both.argmax(-1).masked_fill(~seen[:, None, None], 2 * half)

    def _chunks(self, order: Int[Tensor, "B H R N"]) -> tuple[Tensor, Tensor, Tensor]:
        """Tokens of each chunk, those of the chunk before and its own, and which of these exist."""
        tokens = order.shape[-1]
        own = F.pad(order, (0, -tokens % self.chunk)).unflatten(-1, (-1, self.chunk))
        around = torch.cat([_before(own), own], dim=-1)
        place = torch.arange(own.shape[-2] * self.chunk, device=order.device)
        place = place.view(own.shape[-2:])
        place = torch.cat([place - self.chunk, place], dim=-1)  # negative before the first chunk
        there = ((place >= 0) & (place < tokens)).expand_as(around)
        return own, around, there

    def _times_met(self, buckets: Tensor, chunks: Tensor, own: Tensor, around: Tensor) -> Tensor:
        """In how many rounds each pair shares a bucket, in the same or consecutive chunks; ≥ 1."""
        count = torch.zeros((), device=own.device)
        for r in range(self.rounds):
            bucket, chunk = (x[:, :, r, None].expand_as(x) for x in (buckets, chunks))
            ahead = _look_up(chunk, own)[..., :, None] - _look_up(chunk, around)[..., None, :]
            same = _look_up(bucket, own)[..., :, None] == _look_up(bucket, around)[..., None, :]
            count = count + (same & (ahead >= 0) & (ahead <= 1))
        return count.clamp(min=1)

    def attention_matrix(
        self, x: Float[Tensor, "B N dim"], key_mask: Bool[Tensor, "B N"] | None = None
    ) -> Float[Tensor, "B H N N"]:
        """The weights of all rounds together. O(N²), for looking at."""
        x = self._checked(x, key_mask)
        return self._heads(x, identity(x, self.layer.num_heads), key_mask)


def _before(x: Tensor) -> Tensor:
    """The chunk before each chunk, ``[B, H, R, chunks, c]``; zeros before the first."""
    return F.pad(x, (0, 0, 1, 0))[..., :-1, :]


def _look_up(x: Tensor, at: Int[Tensor, "B H R chunks c"]) -> Tensor:
    """x ``[B, H, R, N]`` of the tokens ``at``."""
    return x.gather(3, at.flatten(3)).view_as(at)


def _rows(x: Float[Tensor, "B H N D"], at: Int[Tensor, "B H R chunks c"]) -> Tensor:
    """x of the tokens ``at``: ``[B, H, R, chunks, c, D]``."""
    index = at.flatten(2)[..., None].expand(-1, -1, -1, x.shape[-1])
    return x.gather(2, index).view(*at.shape, x.shape[-1])


def _unsort(x: Float[Tensor, "B H R chunks c E"], place: Int[Tensor, "B H R N"]) -> Tensor:
    """What stands in the place of each token: ``[B, H, R, N, E]``."""
    return x.flatten(3, 4).gather(3, place[..., None].expand(*place.shape, x.shape[-1]))
