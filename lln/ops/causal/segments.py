"""A causal call cut into segments of tiles, and the states carried from tile to tile.

A segment is the part of the sequence that is vectorised over its tiles at once; temporaries are
bounded by its size, whatever the length.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lln.ops.common.features import finite_or_zero, fitting
from lln.protocols import compute_dtype

TILE = 64
# Elements of a segment: of one head on a CPU, of all on a GPU.
SEGMENT_ELEMENTS, SEGMENT_ELEMENTS_OF_A_GPU = 1 << 17, 1 << 25


def segments(x: Tensor, tile: int) -> list[slice]:
    """Slices of whole tiles over the tokens of ``x [B, H, N, D]``; the last may be shorter."""
    length, per_tile = x.shape[2], x.shape[3] * tile
    size = fitting(x, per_tile, SEGMENT_ELEMENTS, SEGMENT_ELEMENTS_OF_A_GPU) * tile
    return [slice(start, min(start + size, length)) for start in range(0, length, size)]


def _tile_size(length: int) -> int:
    """The length of a tile: a power of two, no longer than the sequence needs."""
    return min(TILE, 1 << max(0, length - 1).bit_length())


def pad(x: Tensor, tile: int, value: float = 0.0) -> Tensor:
    """Pad the tokens of ``[X, n, ...]`` to whole tiles."""
    missing = -x.shape[1] % tile
    if not missing:
        return x
    return torch.cat([x, x.new_full((x.shape[0], missing, *x.shape[2:]), value)], dim=1)


class Inputs:
    """The arguments of one call, ready to be cut into segments in the compute dtype.

    Key heads are repeated for the query heads that share them, one segment at a time.
    """

    def __init__(self, q, k, v, alpha, beta, key_mask, dropout) -> None:
        self.q, self.k, self.v = q, k, v
        self.alpha, self.beta, self.key_mask = alpha, beta, key_mask
        self.dropout = dropout
        self.dtype = compute_dtype(q, k, v)
        self.group = q.shape[1] // max(k.shape[1], 1)
        self.tile = _tile_size(q.shape[2])

    def expand(self, x: Tensor) -> Tensor:
        """``[B, Hkv, ...] -> [X, ...]`` with X = B·H."""
        repeated = x if self.group == 1 else x.repeat_interleave(self.group, dim=1)
        return repeated.flatten(0, 1)

    def reduce(self, x: Tensor) -> Tensor:
        """The gradient of :meth:`expand`."""
        return x.unflatten(0, (self.q.shape[0], -1, self.group)).sum(2)

    def queries(self, part: slice) -> Tensor:
        scaled = self.q[:, :, part].to(self.dtype) * self.alpha[..., None, None]
        return pad(scaled.flatten(0, 1), self.tile)

    def features(self, part: slice) -> Tensor:
        """β k, −inf where masked, ``[B, Hkv, n, D]``."""
        scaled = self.k[:, :, part].to(self.dtype) * self.beta[..., None, None]
        if self.key_mask is not None:
            scaled = scaled.masked_fill(~self.key_mask[:, None, part, None], -torch.inf)
        return scaled

    def keys(self, part: slice) -> Tensor:
        return pad(self.expand(self.features(part)), self.tile, -torch.inf)

    def values(self, part: slice) -> Tensor:
        v = self.v[:, :, part].to(self.dtype)
        if self.key_mask is not None:
            v = v.masked_fill(~self.key_mask[:, None, part, None], 0)
        return pad(self.expand(v), self.tile)

    def kept(self, part: slice) -> Tensor | None:
        if self.dropout is None:
            return None
        return pad(self.dropout[:, :, part].to(self.dtype).flatten(0, 1), self.tile)

    def key_gradients(self, d_features: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """Gradients of k and β from that of the expanded features."""
        d, features = self.reduce(d_features), self.features(part)
        k = self.k[:, :, part].to(self.dtype).masked_fill(features == -torch.inf, 0)
        return d * self.beta[..., None, None], (d * k).sum((-1, -2))


def prefix_states(
    f: Tensor, values: Tensor, log_mass: Tensor, mean: Tensor, tile: int
) -> tuple[Tensor, Tensor]:
    """State before each tile, and after the last: ``[T+1, X, D]`` and ``[T+1, X, D, E]``."""
    f, values = f.unflatten(1, (-1, tile)), values.unflatten(1, (-1, tile))
    best = finite_or_zero(f.amax(-2))
    weights = (f - best[..., None, :]).exp_()
    mass = weights.sum(-2)
    totals = (weights.transpose(-1, -2) @ values).transpose(0, 1)  # relative to `best`
    tile_mass = (best + mass.log()).transpose(0, 1)
    before = torch.logcumsumexp(torch.cat([log_mass[None], tile_mass]), dim=0)
    shift = finite_or_zero(before)
    fade = (before[:-1] - shift[1:]).exp_()[..., None]
    entry = (best.transpose(0, 1) - shift[1:]).exp_()[..., None]
    means = totals.new_empty(len(totals) + 1, *mean.shape)
    means[0] = mean
    torch.mul(totals, entry, out=means[1:])
    for t in range(len(totals)):
        means[t + 1].addcmul_(means[t], fade[t])
    return before, means
