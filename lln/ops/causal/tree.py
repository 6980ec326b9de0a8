"""The safe causal tile: every pair of tokens is met in a rectangle that is fully visible.

A prefix with one maximum per feature underflows when a later key of the same tile is an outlier.
So a tile of C = 2^p tokens is split like a binary tree: each token meets itself, then for
h = 1, 2, 4, …, C/2 each group of h keys meets the h rows to its right. All keys of such a
rectangle are visible to all its rows, so its best (feature, key) pair scales to exactly 1 for some
key and nothing that matters can underflow.

Shapes: ``a = α q``, ``f = β k`` (−inf if masked) are ``[X, n, D]``, values ``[X, n, E]``, with X
heads of all samples and n a multiple of C.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lln.ops.common.features import finite_or_zero, times_transposed

# Below this height a batch of tiny matrix products costs more than a broadcast product.
_BROADCAST_BELOW = 4


@dataclass
class Rows:
    """An online softmax per row: maximum ``top``, mass relative to it, weighted sum of values."""

    top: Tensor  # [X, n]
    mass: Tensor  # [X, n]
    total: Tensor  # [X, n, E]

    def view_right(self, height: int) -> Rows:
        """The rows to the right of each group of ``height`` keys, as views."""
        return Rows(*(right(x, height) for x in (self.top, self.mass, self.total)))

    def add_(self, top: Tensor, mass: Tensor, total: Tensor) -> None:
        """Merge other keys into these rows, in place."""
        higher = torch.maximum(self.top, top)
        shift = finite_or_zero(higher)
        mine, theirs = (self.top - shift).exp_(), (top - shift).exp_()
        self.mass.mul_(mine).addcmul_(mass, theirs)
        self.total.mul_(mine[..., None]).addcmul_(total, theirs[..., None])
        self.top.copy_(higher)


def left(x: Tensor, height: int) -> Tensor:
    """``[X, n, ...] -> [X, n/2h, h, ...]``: the groups whose tokens act as keys."""
    return x.unflatten(1, (-1, 2, height))[:, :, 0]


def right(x: Tensor, height: int) -> Tensor:
    """``[X, n, ...] -> [X, n/2h, h, ...]``: the groups whose tokens act as rows."""
    return x.unflatten(1, (-1, 2, height))[:, :, 1]


def heights(tile: int) -> Iterator[int]:
    """1, 2, 4, …, tile/2."""
    height = 1
    while height < tile:
        yield height
        height *= 2


def pair_products(x: Tensor, y: Tensor) -> Tensor:
    """x yᵀ over small groups ``[X, g, h, D] -> [X, g, h, h]``."""
    if x.shape[-2] < _BROADCAST_BELOW:
        return (x[..., :, None, :] * y[..., None, :, :]).sum(-1)
    return times_transposed(x, y)


def mix_rows(weights: Tensor, x: Tensor) -> Tensor:
    """weights · x over small groups ``[X, g, h, h], [X, g, h, D] -> [X, g, h, D]``."""
    if x.shape[-2] < _BROADCAST_BELOW:
        return (weights[..., None] * x[..., None, :, :]).sum(-2)
    return weights @ x


def attend_tile(a: Tensor, f: Tensor, values: Tensor, dropout: Tensor | None, tile: int) -> Rows:
    """Causal attention inside each tile of ``tile`` tokens, not yet normalised."""
    scores = a + f
    top = scores.amax(-1)
    weights = scores.sub_(finite_or_zero(top)[..., None]).exp_()
    mass = weights.sum(-1)
    kept = mass if dropout is None else (weights * dropout).sum(-1)
    rows = Rows(top, mass, kept[..., None] * values)
    for height in heights(tile):
        keys, best = left(f, height), left(f, height).amax(-2, keepdim=True)
        scores = right(a, height) + best
        top = scores.amax(-1)
        slots = scores.sub_(finite_or_zero(top)[..., None]).exp_()
        shares = (keys - finite_or_zero(best)).exp_()
        mass = (slots * shares.sum(-2, keepdim=True)).sum(-1)
        if dropout is not None:
            slots *= right(dropout, height)
        total = mix_rows(pair_products(slots, shares), left(values, height))
        rows.view_right(height).add_(top, mass, total)
    return rows


@dataclass
class _Rectangle:
    """The weights of one height: W_ijl = slots_il · shares_jl ≤ 1, both already normalised."""

    height: int
    slots: Tensor  # exp(a + R − ℓ)  [X, n/2h, h, D]
    shares: Tensor  # exp(f − R)      [X, n/2h, h, D]


class Tree:
    """The weights of the trees in a backward pass: of each token with itself, and the rectangles.

    ``row_mass [X, n]`` are the rows' log-denominators ℓ.
    """

    def __init__(self, a: Tensor, f: Tensor, row_mass: Tensor, tile: int) -> None:
        self.own = (a + f - row_mass[..., None]).exp_()
        self.pairs: list[_Rectangle] = []
        for height in heights(tile):
            best = left(f, height).amax(-2, keepdim=True)
            slots = (right(a, height) + best).sub_(right(row_mass, height)[..., None]).exp_()
            shares = (left(f, height) - finite_or_zero(best)).exp_()
            self.pairs.append(_Rectangle(height, slots, shares))

    def pull_and_seen(self, d_out: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Σ_{j≤i} W_ijl v_j·dO_i and Σ_{j≤i} W_ijl, each ``[X, n, D]``."""
        pull, seen = self.own * (d_out * values).sum(-1, keepdim=True), self.own.clone()
        for pair in self.pairs:
            products = pair_products(right(d_out, pair.height), left(values, pair.height))
            right(pull, pair.height).add_(pair.slots * mix_rows(products, pair.shares))
            right(seen, pair.height).add_(pair.slots * pair.shares.sum(-2, keepdim=True))
        return pull, seen

    def scale_(self, rows: Tensor) -> None:
        """Multiply the weights of each row, in place."""
        self.own *= rows[..., None]
        for pair in self.pairs:
            pair.slots *= right(rows, pair.height)[..., None]

    def key_gradients(
        self, d_out: Tensor, values: Tensor, delta: Tensor, dropout: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Σ_{i≥j} W_ijl (D_il v_j·dO_i − δ_i) and Σ_{i≥j,l} D_il W_ijl dO_i."""
        reach = (d_out * values).sum(-1, keepdim=True)
        own = self.own if dropout is None else self.own * dropout
        d_f = own * reach - self.own * delta[..., None]
        d_v = own.sum(-1, keepdim=True) * d_out
        for pair in self.pairs:
            height, slots = pair.height, pair.slots
            if dropout is not None:
                slots = slots * right(dropout, height)
            products = pair_products(left(values, height), right(d_out, height))
            level = (pair.slots * right(delta, height)[..., None]).sum(-2, keepdim=True)
            left(d_f, height).add_(pair.shares * (mix_rows(products, slots) - level))
            asked = pair_products(pair.shares, slots)
            left(d_v, height).add_(mix_rows(asked, right(d_out, height)))
        return d_f, d_v
