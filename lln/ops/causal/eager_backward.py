"""The backward pass of causal LLN attention: one walk over rows, one walk back over keys.

    dq_il = α Σ_{j≤i} W_ijl (D_il v_j·dO_i − δ_i),   δ_i = dO_i · out_i − dℓ_i
    dk_jl = β Σ_{i≥j} W_ijl (D_il v_j·dO_i − δ_i),   dv_j = Σ_{i≥j} Σ_l D_il W_ijl dO_i

Inside tiles the same squares or fully visible rectangles as in the forward pass; between tiles the
rows read the carried state, and the keys a state of the future that is carried from the end.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lln.ops.causal.segments import Inputs, pad, prefix_states, segments
from lln.ops.causal.square import Square, is_tame
from lln.ops.causal.tree import Tree
from lln.ops.common.features import finite_or_zero, times_transposed


class _Future:
    """What rows to come ask of a key: c_l = max_i(α q_il − ℓ_i), Σ e^{…−c} dO_i, Σ e^{…−c} δ_i."""

    def __init__(self, like: Tensor, mean: Tensor) -> None:
        self.top = torch.full_like(like, -torch.inf)  # [X, D]
        self.asked = torch.zeros_like(mean)  # [X, D, E]
        self.level = torch.zeros_like(like)  # [X, D]

    def add_(self, top: Tensor, asked: Tensor, level: Tensor) -> None:
        higher = torch.maximum(self.top, top)
        shift = finite_or_zero(higher)
        mine, theirs = (self.top - shift).exp_(), (top - shift).exp_()
        self.asked = self.asked * mine[..., None] + asked * theirs[..., None]
        self.level = self.level * mine + level * theirs
        self.top = higher

    def before_tiles(
        self, segment: _Segment, rows: _RowSide
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Walk the tiles of a segment backwards, yielding what the rows after each tile ask."""
        scores = segment.tiles(segment.a - segment.row_mass[..., None])
        tops = scores.amax(-2)
        weights = (scores - finite_or_zero(tops)[..., None, :]).exp_()
        weights *= segment.tiles(rows.exact)[..., None]
        levels = (weights * segment.tiles(rows.delta)[..., None]).sum(-2)
        if segment.kept is not None:
            weights = weights * segment.tiles(segment.kept)
        asked = weights.transpose(-1, -2) @ segment.tiles(segment.d_out)
        for t in reversed(range(scores.shape[1])):
            yield self.top, self.asked, self.level
            self.add_(tops[:, t], asked[:, t], levels[:, t])


@dataclass
class _Segment:
    """One segment's operands, padded to whole tiles; row_mass is ℓ."""

    tile: int
    a: Tensor  # α q     [X, n, D]
    f: Tensor  # β k     [X, n, D]
    values: Tensor  # [X, n, E]
    kept: Tensor | None  # dropout of the slots [X, n, D]
    d_out: Tensor  # [X, n, E]
    d_row_mass: Tensor  # [X, n]
    row_mass: Tensor  # [X, n]

    def tiles(self, x: Tensor) -> Tensor:
        """``[X, n, ...] -> [X, T, C, ...]``."""
        return x.unflatten(1, (-1, self.tile))

    def dropped(self, x: Tensor) -> Tensor:
        return x if self.kept is None else x * self.kept


@dataclass
class _RowSide:
    """What the pass over rows finds: weights that sum to 1 per row, δ, and the gradient of α q."""

    inside: Square | Tree  # weights within the tiles
    exact: Tensor  # correction of exp(−ℓ) [X, n]
    delta: Tensor  # dO_i · out_i − dℓ_i  [X, n]
    d_a: Tensor  # [X, n, D]


def _row_side(segment: _Segment, log_mass: Tensor, mean: Tensor) -> _RowSide:
    """Slot weights Σ_j W_ijl of each row and their pull Σ_j W_ijl v_j·dO_i."""
    a, f, values, d_out = segment.a, segment.f, segment.values, segment.d_out
    kind = Square if is_tame(f, segment.tile, values, d_out) else Tree
    inside = kind(a, f, segment.row_mass, segment.tile)
    pull, seen = inside.pull_and_seen(d_out, values)
    before, means = prefix_states(f, values, log_mass, mean, segment.tile)
    past = segment.tiles(a) + before[:-1].transpose(0, 1)[..., None, :]
    past = past.sub_(segment.tiles(segment.row_mass)[..., None]).exp_().flatten(1, 2)
    pull += past * (segment.tiles(d_out) @ means[:-1].permute(1, 0, 3, 2)).flatten(1, 2)
    seen += past
    # ℓ is rounded at its own size, which may be thousands: make every row sum to 1 again.
    total = seen.sum(-1)
    exact = total.masked_fill(total == 0, 1).reciprocal_()
    for x in (pull, seen):
        x *= exact[..., None]
    inside.scale_(exact)
    pull = segment.dropped(pull)
    delta = pull.sum(-1) - segment.d_row_mass
    return _RowSide(inside, exact, delta, pull - seen * delta[..., None])


def _key_side(segment: _Segment, rows: _RowSide, future: _Future) -> tuple[Tensor, Tensor]:
    """Σ_i W_ijl (D_il v_j·dO_i − δ_i) and Σ_il D_il W_ijl dO_i: gradients of β k and v."""
    values = segment.values
    d_f, d_v = rows.inside.key_gradients(segment.d_out, values, rows.delta, segment.kept)
    later = future.before_tiles(segment, rows)
    tops, asks, levels = (torch.stack(x[::-1], 1) for x in zip(*later, strict=True))
    shares = (segment.tiles(segment.f) + tops[..., None, :]).exp_()
    pulled = times_transposed(segment.tiles(values), asks) - levels[..., None, :]
    d_f += (shares * pulled).flatten(1, 2)
    d_v += (shares @ asks).flatten(1, 2)
    return d_f, d_v


def _backward_segment(
    inputs: Inputs,
    part: slice,
    d_out: Tensor,
    d_row_mass: Tensor,
    row_mass: Tensor,
    state,
    future: _Future,
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of α q, β k (expanded) and v (expanded) for one segment."""
    tile, length = inputs.tile, part.stop - part.start
    segment = _Segment(
        tile,
        inputs.queries(part),
        inputs.keys(part),
        inputs.values(part),
        inputs.kept(part),
        pad(d_out[:, :, part].to(inputs.dtype).flatten(0, 1), tile),
        pad(d_row_mass[:, :, part].flatten(0, 1), tile),
        pad(row_mass[:, :, part].flatten(0, 1), tile, torch.inf),
    )
    rows = _row_side(segment, *state)
    d_f, d_v = _key_side(segment, rows, future)
    return rows.d_a[:, :length], d_f[:, :length], d_v[:, :length]


def causal_backward(
    d_out,
    d_row_mass,
    q,
    k,
    v,
    alpha,
    beta,
    key_mask,
    log_mass,
    mean,
    slot_dropout,
    row_mass,
    wide,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    """Gradients of q, k, v, α, β, and of the state before them."""
    inputs = Inputs(q, k, v, alpha, beta, key_mask, slot_dropout)
    d_q, d_k, d_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    d_alpha, d_beta = torch.zeros_like(alpha), torch.zeros_like(beta)
    if q.shape[0] * q.shape[1] == 0:
        return d_q, d_k, d_v, d_alpha, d_beta, torch.zeros_like(log_mass), torch.zeros_like(mean)
    parts = segments(q, inputs.tile)
    states = [(inputs.expand(log_mass), inputs.expand(mean))]
    for part in parts[:-1]:
        before, means = prefix_states(
            inputs.keys(part), inputs.values(part), *states[-1], inputs.tile
        )
        states.append((before[-1], means[-1].clone()))
    first_mass, first_mean = states[0]
    future = _Future(first_mass, first_mean)
    for part, state in zip(reversed(parts), reversed(states), strict=False):
        d_a, d_f, d_values = _backward_segment(
            inputs, part, d_out, d_row_mass, row_mass, state, future
        )
        d_a = d_a.unflatten(0, q.shape[:2])
        d_q[:, :, part] = d_a * alpha[..., None, None]
        d_alpha += (d_a * q[:, :, part]).sum((-1, -2))
        d_k[:, :, part], d_beta_part = inputs.key_gradients(d_f, part)
        d_beta += d_beta_part
        d_v[:, :, part] = inputs.reduce(d_values)
    weight = (first_mass + future.top).exp()
    d_mass = inputs.reduce(weight * ((first_mean * future.asked).sum(-1) - future.level))
    d_mean = inputs.reduce(weight[..., None] * future.asked)
    return d_q, d_k, d_v, d_alpha, d_beta, d_mass, d_mean
