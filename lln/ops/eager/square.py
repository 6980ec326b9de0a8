"""The quick causal tile: one square of products with the future cut off, where that is safe.

    W_ijl = exp(α q_il + R_l − s_i) · exp(β k_jl − R_l),    R_l = max_j β k_jl over the tile

R_l may belong to a key that row i does not see. What it sees is then smaller than 1, but not below
exp(−(R_l − min_j β k_jl)): as long as this range is far from the smallest number of the dtype,
every weight keeps its full relative precision and the square equals the tree. :func:`is_tame`
measures the range; ordinary activations pass, outliers go through :mod:`lln.ops.eager.tree`.

Shapes as in the tree: ``a = α q``, ``f = β k`` ``[X, n, D]``, n a multiple of the tile.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lln.ops.eager.features import finite_or_zero
from lln.ops.eager.tree import Rows

# Weights this many times below the visible maximum are lost anyway; they may become 0.
_NEGLIGIBLE = {torch.float32: math.exp(20), torch.float64: math.exp(40)}


def is_tame(f: Tensor, tile: int, *others: Tensor) -> bool:
    """Whether every feature stays within the range of the dtype over every tile.

    ``others`` are what the weights multiply; they must be finite, because a weight of 0 would pass
    a NaN of the future on. Values are read back, so only a CPU is asked: a GPU would stall.
    """
    if f.device.type != "cpu" or f.dtype not in _NEGLIGIBLE or f.numel() == 0:
        return False
    if not all(x.sum().isfinite() for x in others):
        return False
    tiles = f.unflatten(1, (-1, tile))
    best = tiles.amax(-2)
    if tiles.isneginf().any():  # masked keys have no features: they must not widen the range
        tiles = torch.where(tiles.isneginf(), finite_or_zero(best)[..., None, :], tiles)
    reach = -math.log(torch.finfo(f.dtype).tiny * _NEGLIGIBLE[f.dtype])
    return bool((best - tiles.amin(-2)).nan_to_num(nan=torch.inf, neginf=0).amax() <= reach)


def attend_square(a: Tensor, f: Tensor, values: Tensor, dropout: Tensor | None, tile: int) -> Rows:
    """Causal attention inside each tile, as :func:`lln.ops.eager.tree.attend_tile`."""
    a, f, values = (x.unflatten(1, (-1, tile)) for x in (a, f, values))
    best = f.amax(-2, keepdim=True)
    scores = a + best
    top = scores.amax(-1)
    slots = scores.sub_(finite_or_zero(top)[..., None]).exp_()
    shares = (f - finite_or_zero(best)).exp_().transpose(-1, -2)
    weights = (slots @ shares).tril_()
    mass = weights.sum(-1)
    if dropout is not None:
        weights = (slots.mul_(dropout.unflatten(1, (-1, tile))) @ shares).tril_()
    total = weights @ values
    top = top.masked_fill(mass == 0, -torch.inf)  # a row that sees nothing has no maximum
    return Rows(*(x.flatten(1, 2) for x in (top, mass, total)))


class Square:
    """The weights of the squares in a backward pass, W_ijl = slots_il · shares_jl for j ≤ i.

    slots = exp(a + R − ℓ) may exceed 1 as far as the range of the tile goes, which is finite.
    """

    def __init__(self, a: Tensor, f: Tensor, row_mass: Tensor, tile: int) -> None:
        self.tile = tile
        best = self._tiles(f).amax(-2, keepdim=True)
        self.slots = (self._tiles(a) + best).sub_(self._tiles(row_mass)[..., None]).exp_()
        self.shares = (self._tiles(f) - finite_or_zero(best)).exp_()

    def _tiles(self, x: Tensor) -> Tensor:
        return x.unflatten(1, (-1, self.tile))

    def pull_and_seen(self, d_out: Tensor, values: Tensor) -> tuple[Tensor, Tensor]:
        """Σ_{j≤i} W_ijl v_j·dO_i and Σ_{j≤i} W_ijl, each ``[X, n, D]``."""
        products = (self._tiles(d_out) @ self._tiles(values).transpose(-1, -2)).tril_()
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
        products = (values @ d_out.transpose(-1, -2)).triu_()
        level = (self.slots * delta[..., None]).flip(-2).cumsum(-2).flip(-2)
        d_f = self.shares * (products @ slots - level)
        d_v = (self.shares @ slots.transpose(-1, -2)).triu_() @ d_out
        return d_f.flatten(1, 2), d_v.flatten(1, 2)
