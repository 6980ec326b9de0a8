"""The quick causal tile: one square of products with the future cut off, where that is safe.

    W_ijl = exp(α q_il + R_l − s_i) · exp(β k_jl − R_l),    R_l = β k_0l, the first key of the tile

Every row sees the first key, so some weight of it is exactly 1 and nothing that matters underflows;
no row's arithmetic depends on later keys. A key far above the first would overflow:
:func:`is_tame` measures how far they go; ordinary activations pass, outliers go through
:mod:`lln.ops.causal.tree`.

Shapes as in the tree: ``a = α q``, ``f = β k`` ``[X, n, D]``, n a multiple of the tile.
"""

from __future__ import annotations

import torch
from torch import Tensor

from lln.ops.causal.tree import Rows
from lln.ops.common.features import finite_or_zero, times_transposed

# How far a key may lie above the first of its tile: sums of such weights times values stay finite.
_REACH = {torch.float32: 60.0, torch.float64: 600.0}


def is_tame(f: Tensor, tile: int, *others: Tensor) -> bool:
    """Whether no feature rises too far above the first key of its tile.

    ``others`` are what the weights multiply; they must be finite, because a weight of 0 would pass
    a NaN of the future on. Values are read back, so only a CPU is asked: a GPU would stall.
    """
    if f.device.type != "cpu" or f.dtype not in _REACH or f.numel() == 0:
        return False
    if not all(x.sum().isfinite() for x in others):
        return False
    tiles = f.unflatten(1, (-1, tile))
    return bool((tiles.amax(-2, keepdim=True) - _first_key(tiles)).amax() <= _REACH[f.dtype])


def _first_key(tiles: Tensor) -> Tensor:
    """Features of the first key of each tile that is not masked, 0 if there is none."""
    first = tiles[..., :1, :]
    if not first.isneginf().any():
        return first
    index = (~tiles.isneginf().all(-1)).int().argmax(-1)  # the first of equal ones
    index = index[..., None, None].expand_as(first)
    return finite_or_zero(tiles.gather(-2, index))


def attend_square(a: Tensor, f: Tensor, values: Tensor, dropout: Tensor | None, tile: int) -> Rows:
    """Causal attention inside each tile, as :func:`lln.ops.causal.tree.attend_tile`."""
    a, f, values = (x.unflatten(1, (-1, tile)) for x in (a, f, values))
    first = _first_key(f)
    scores = a + first
    top = scores.amax(-1)
    slots = scores.sub_(top[..., None]).exp_()
    shares = (f - first).exp_()
    weights = times_transposed(slots, shares).tril_()
    mass = weights.sum(-1)
    if dropout is not None:
        weights = times_transposed(slots.mul_(dropout.unflatten(1, (-1, tile))), shares).tril_()
    total = weights @ values
    top = top.masked_fill(mass == 0, -torch.inf)  # a row that sees nothing has no maximum
    return Rows(*(x.flatten(1, 2) for x in (top, mass, total)))


class Square:
    """The weights of the squares in a backward pass, W_ijl = slots_il · shares_jl for j ≤ i.

    slots = exp(a + R − ℓ) ≤ 1 for every row that sees the first key.
    """

    def __init__(self, a: Tensor, f: Tensor, row_mass: Tensor, tile: int) -> None:
        self.tile = tile
        first = _first_key(self._tiles(f))
        scores = (self._tiles(a) + first).sub_(self._tiles(row_mass)[..., None])
        self.slots = scores.clamp_(max=0).exp_()  # rows before the first key see none of the tile
        self.shares = (self._tiles(f) - first).exp_()

    def _tiles(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, self.tile))

    def pull_and_seen(self, d_out: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Σ_{j≤i} W_ijl v_j·dO_i and Σ_{j≤i} W_ijl, each ``[X, n, D]``."""
        products = times_transposed(self._tiles(d_out), self._tiles(values)).tril_()
        pull = self.slots * (products @ self.shares)
        seen = self.slots * self.shares.cumsum(-2)
        return pull.flatten(1, 2), seen.flatten(1, 2)

    def scale_(self, rows: Tensor) -> None:
        """Multiply the weights of each row, in place."""
        self.slots *= self._tiles(rows)[..., None]

    def key_gradients(
        self, d_out: Tensor, values: Tensor, delta: Tensor, dropout: Tensor | None
    ) -> tuple[Tensor, Tensor]:
        """Σ_{i≥j} W_ijl (D_il v_j·dO_i − δ_i) and Σ_{i≥j,l} D_il W_ijl dO_i."""
        d_out, values, delta = self._tiles(d_out), self._tiles(values), self._tiles(delta)
        slots = self.slots if dropout is None else self.slots * self._tiles(dropout)
        products = times_transposed(values, d_out).triu_()
        level = (self.slots * delta[..., None]).flip(-2).cumsum(-2).flip(-2)
        d_f = self.shares * (products @ slots - level)
        d_v = times_transposed(self.shares, slots).triu_() @ d_out
        return d_f.flatten(1, 2), d_v.flatten(1, 2)
