"""Causal LLN attention in plain PyTorch: the tree inside tiles, a carried state between them.

    out_i = Σ_{j≤i} Σ_l W_ijl v_j,    W_ijl = exp(α q_il + β k_jl − ℓ_i),
    ℓ_i = ln Σ_{j≤i} Σ_l exp(α q_il + β k_jl)

Saved for the backward pass: q, k, v, the state that came in, and ℓ (N floats per head).
With dropout on the slot weights (mask D_il) the numerator has D_il W_ijl, ℓ is unchanged.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from lln.ops.eager.features import finite_or_zero
from lln.ops.eager.registry import register
from lln.ops.eager.tree import (
    Rows,
    attend_tile,
    left,
    mix_rows,
    pair_products,
    rectangles,
    right,
)
from lln.protocols import compute_dtype

TILE = 64
# Elements of a segment, the part of the sequence that is vectorised over tiles at once.
SEGMENT_ELEMENTS = 1 << 20


def _segments(x: Tensor, tile: int) -> list[slice]:
    """Slices of whole tiles over the tokens of ``x [X, N, D]``; the last may be shorter."""
    per_tile = max(1, x.shape[0] * x.shape[2] * tile)
    size = max(1, SEGMENT_ELEMENTS // per_tile) * tile
    return [slice(start, min(start + size, x.shape[1])) for start in range(0, x.shape[1], size)]


def _tile_size(length: int) -> int:
    """A power of two, no longer than the sequence needs."""
    return min(TILE, 1 << max(0, length - 1).bit_length())


def _pad(x: Tensor, tile: int, value: float = 0.0) -> Tensor:
    """Pad the tokens of ``[X, n, ...]`` to whole tiles."""
    missing = -x.shape[1] % tile
    if not missing:
        return x
    return torch.cat([x, x.new_full((x.shape[0], missing, *x.shape[2:]), value)], dim=1)


class _Inputs:
    """The arguments of one call, ready to be cut into segments in the compute dtype.

    Key heads are repeated for the query heads that share them, one segment at a time.
    """

    def __init__(self, q, k, v, alpha, beta, key_mask, dropout, normalize_keys) -> None:
        self.q, self.k, self.v = q, k, v
        self.alpha, self.beta, self.key_mask = alpha, beta, key_mask
        self.dropout, self.normalize_keys = dropout, normalize_keys
        self.dtype = compute_dtype(q, k, v)
        self.group = q.shape[1] // max(k.shape[1], 1)
        self.tile = _tile_size(q.shape[2])

    def expand(self, x: Tensor) -> Tensor:
        """``[B, Hkv, ...] -> [X, ...]`` with X = B·H."""
        return x.repeat_interleave(self.group, dim=1).flatten(0, 1)

    def reduce(self, x: Tensor) -> Tensor:
        """The gradient of :meth:`expand`."""
        return x.unflatten(0, (self.q.shape[0], -1, self.group)).sum(2)

    def queries(self, part: slice) -> Tensor:
        scaled = self.q[:, :, part].to(self.dtype) * self.alpha[..., None, None]
        return _pad(scaled.flatten(0, 1), self.tile)

    def features(self, part: slice) -> Tensor:
        """β k or its log-softmax, −inf where masked, ``[B, Hkv, n, D]``."""
        scaled = self.k[:, :, part].to(self.dtype) * self.beta[..., None, None]
        if self.normalize_keys:
            scaled = torch.log_softmax(scaled, dim=-1)
        if self.key_mask is not None:
            scaled = scaled.masked_fill(~self.key_mask[:, None, part, None], -torch.inf)
        return scaled

    def keys(self, part: slice) -> Tensor:
        return _pad(self.expand(self.features(part)), self.tile, -torch.inf)

    def values(self, part: slice) -> Tensor:
        v = self.v[:, :, part].to(self.dtype)
        if self.key_mask is not None:
            v = v.masked_fill(~self.key_mask[:, None, part, None], 0)
        return _pad(self.expand(v), self.tile)

    def kept(self, part: slice) -> Tensor | None:
        if self.dropout is None:
            return None
        return _pad(self.dropout[:, :, part].to(self.dtype).flatten(0, 1), self.tile)

    def key_gradients(self, d_features: Tensor, part: slice) -> tuple[Tensor, Tensor]:
        """Gradients of k and β from that of the expanded features."""
        d, features = self.reduce(d_features), self.features(part)
        if self.normalize_keys:
            d = d - features.exp() * d.sum(-1, keepdim=True)
        k = self.k[:, :, part].to(self.dtype).masked_fill(features == -torch.inf, 0)
        return d * self.beta[..., None, None], (d * k).sum((-1, -2))


def _prefix_states(
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


def _forward_segment(
    inputs: _Inputs, part: slice, log_mass: Tensor, mean: Tensor
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Output and ℓ of a segment, and the state after it."""
    tile, length = inputs.tile, part.stop - part.start
    a, f, values = inputs.queries(part), inputs.keys(part), inputs.values(part)
    kept = inputs.kept(part)
    rows = attend_tile(a, f, values, kept, tile)
    before, means = _prefix_states(f, values, log_mass, mean, tile)
    scores = a.unflatten(1, (-1, tile)) + before[:-1].transpose(0, 1)[..., None, :]
    top = scores.amax(-1)
    slots = scores.sub_(finite_or_zero(top)[..., None]).exp_()
    mass = slots.sum(-1)
    if kept is not None:
        slots *= kept.unflatten(1, (-1, tile))
    total = slots @ means[:-1].transpose(0, 1)
    rows.add_(top.flatten(1, 2), mass.flatten(1, 2), total.flatten(1, 2))
    out, row_mass = _normalize(rows)
    return out[:, :length], row_mass[:, :length], before[-1], means[-1]


def _normalize(rows: Rows) -> tuple[Tensor, Tensor]:
    """out and ℓ; a row that sees nothing gives 0 and ℓ = +inf: all its weights are exp(−inf)."""
    blind = rows.mass == 0
    out = rows.total / rows.mass.masked_fill(blind, 1)[..., None]
    return out, (rows.top + rows.mass.log()).masked_fill(blind, torch.inf)


def _causal(
    q, k, v, alpha, beta, key_mask, log_mass, mean, slot_dropout, normalize_keys, wide
) -> tuple[Tensor, Tensor]:
    inputs = _Inputs(q, k, v, alpha, beta, key_mask, slot_dropout, normalize_keys)
    out, row_mass = _causal_shapes(
        q, k, v, alpha, beta, key_mask, log_mass, mean, slot_dropout, normalize_keys, wide
    )
    state = inputs.expand(log_mass), inputs.expand(mean)
    for part in _segments(q.flatten(0, 1), inputs.tile):
        values, masses, *state = _forward_segment(inputs, part, *state)
        out[:, :, part] = values.unflatten(0, q.shape[:2])
        row_mass[:, :, part] = masses.unflatten(0, q.shape[:2])
    return out, row_mass


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
        self,
        a: Tensor,
        row_mass: Tensor,
        exact: Tensor,
        d_out: Tensor,
        delta: Tensor,
        kept: Tensor | None,
    ) -> Iterator[tuple[Tensor, Tensor, Tensor]]:
        """Walk the tiles of a segment backwards, yielding what the rows after each tile ask."""
        scores = a - row_mass[..., None]
        tops = scores.amax(-2)
        weights = (scores - finite_or_zero(tops)[..., None, :]).exp_() * exact[..., None]
        levels = (weights * delta[..., None]).sum(-2)
        if kept is not None:
            weights = weights * kept
        asked = weights.transpose(-1, -2) @ d_out
        for t in reversed(range(a.shape[1])):
            yield self.top, self.asked, self.level
            self.add_(tops[:, t], asked[:, t], levels[:, t])


def _backward_segment(
    inputs: _Inputs, part: slice, d_out: Tensor, row_mass: Tensor, state, future: _Future
) -> tuple[Tensor, Tensor, Tensor]:
    """Gradients of α q, β k (expanded) and v (expanded) for one segment."""
    tile, length = inputs.tile, part.stop - part.start
    a, f, values = inputs.queries(part), inputs.keys(part), inputs.values(part)
    kept = inputs.kept(part)
    d_out = _pad(d_out[:, :, part].to(inputs.dtype).flatten(0, 1), tile)
    row_mass = _pad(row_mass[:, :, part].flatten(0, 1), tile, torch.inf)
    before, means = _prefix_states(f, values, *state, tile)

    # Rows first: slot weights Σ_j W_ijl and their pull, which also give δ_i = dO_i · out_i.
    own = (a + f - row_mass[..., None]).exp_()
    pull, seen = own * (d_out * values).sum(-1, keepdim=True), own.clone()
    pairs = rectangles(a, f, row_mass, tile)
    for pair in pairs:
        products = pair_products(right(d_out, pair.height), left(values, pair.height))
        right(pull, pair.height).add_(pair.slots * mix_rows(products, pair.shares))
        right(seen, pair.height).add_(pair.slots * pair.shares.sum(-2, keepdim=True))
    tiled = (-1, tile)
    past = a.unflatten(1, tiled) + before[:-1].transpose(0, 1)[..., None, :]
    past = past.sub_(row_mass.unflatten(1, tiled)[..., None]).exp_().flatten(1, 2)
    asked = d_out.unflatten(1, tiled) @ means[:-1].permute(1, 0, 3, 2)
    pull += past * asked.flatten(1, 2)
    seen += past
    # ℓ is rounded at its own size, which may be thousands: make every row sum to 1 again.
    total = seen.sum(-1)
    exact = total.masked_fill(total == 0, 1).reciprocal_()
    for x in (pull, seen, own):
        x *= exact[..., None]
    for pair in pairs:
        pair.slots *= right(exact, pair.height)[..., None]
    if kept is not None:
        pull *= kept
    delta = pull.sum(-1)
    d_a = pull - seen * delta[..., None]

    # Then keys: Σ_i W_ijl (D_il v_j·dO_i − δ_i).
    reach = (d_out * values).sum(-1, keepdim=True)
    d_f = own * ((reach if kept is None else reach * kept) - delta[..., None])
    d_v = (own if kept is None else own * kept).sum(-1, keepdim=True) * d_out
    for pair in pairs:
        height = pair.height
        slots = pair.slots if kept is None else pair.slots * right(kept, height)
        products = pair_products(left(values, height), right(d_out, height))
        level = (pair.slots * right(delta, height)[..., None]).sum(-2, keepdim=True)
        left(d_f, height).add_(pair.shares * (mix_rows(products, slots) - level))
        left(d_v, height).add_(mix_rows(pair_products(pair.shares, slots), right(d_out, height)))
    by_tile = [x.unflatten(1, tiled) for x in (a, row_mass, exact, d_out, delta)]
    later = future.before_tiles(*by_tile, None if kept is None else kept.unflatten(1, tiled))
    tops, asks, levels = (torch.stack(x[::-1], 1) for x in zip(*later, strict=True))
    shares = (f.unflatten(1, tiled) + tops[..., None, :]).exp_()
    pulled = values.unflatten(1, tiled) @ asks.transpose(-1, -2) - levels[..., None, :]
    d_f += (shares * pulled).flatten(1, 2)
    d_v += (shares @ asks).flatten(1, 2)
    return d_a[:, :length], d_f[:, :length], d_v[:, :length]


def _causal_backward(
    d_out, q, k, v, alpha, beta, key_mask, log_mass, mean, slot_dropout, row_mass, normalize_keys
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor]:
    inputs = _Inputs(q, k, v, alpha, beta, key_mask, slot_dropout, normalize_keys)
    d_q, d_k, d_v = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
    d_alpha, d_beta = torch.zeros_like(alpha), torch.zeros_like(beta)
    parts = _segments(q.flatten(0, 1), inputs.tile)
    states = [(inputs.expand(log_mass), inputs.expand(mean))]
    for part in parts[:-1]:
        before, means = _prefix_states(
            inputs.keys(part), inputs.values(part), *states[-1], inputs.tile
        )
        states.append((before[-1], means[-1].clone()))
    first_mass, first_mean = states[0]
    future = _Future(first_mass, first_mean)
    for part, state in zip(reversed(parts), reversed(states), strict=False):
        d_a, d_f, d_values = _backward_segment(inputs, part, d_out, row_mass, state, future)
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


def _causal_shapes(
    q, k, v, alpha, beta, key_mask, log_mass, mean, slot_dropout, normalize_keys, wide
):
    dtype = compute_dtype(q, k, v)
    out = q.new_empty((*q.shape[:3], v.shape[-1]), dtype=dtype if wide else q.dtype)
    return out, q.new_empty(q.shape[:3], dtype=dtype)


def _causal_backward_shapes(
    d_out, q, k, v, alpha, beta, key_mask, log_mass, mean, slot_dropout, row_mass, normalize_keys
):
    inputs = (q, k, v, alpha, beta, log_mass, mean)
    return tuple(torch.empty_like(x) for x in inputs)


causal_backward = register(
    "causal_backward",
    "(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor alpha, Tensor beta, Tensor? key_mask, "
    "Tensor log_mass, Tensor mean, Tensor? slot_dropout, Tensor row_mass, bool normalize_keys)"
    " -> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    _causal_backward,
    _causal_backward_shapes,
)


def _save(ctx, inputs, output):
    *tensors, ctx.normalize_keys, _ = inputs
    ctx.save_for_backward(*tensors, output[1])


def _differentiate(ctx, d_out, _d_row_mass):
    *grads, d_mass, d_mean = causal_backward(d_out, *ctx.saved_tensors, ctx.normalize_keys)
    return *grads, None, d_mass, d_mean, None, None, None


causal_op = register(
    "causal",
    "(Tensor q, Tensor k, Tensor v, Tensor alpha, Tensor beta, Tensor? key_mask, Tensor log_mass, "
    "Tensor mean, Tensor? slot_dropout, bool normalize_keys, bool wide) -> (Tensor, Tensor)",
    _causal,
    _causal_shapes,
    save=_save,
    differentiate=_differentiate,
)
