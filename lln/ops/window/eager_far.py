"""LLN attention over the keys outside of each block's window, with its normaliser.

Block b reads the state of the keys left of C·b − o merged with that of the keys from C·(b+1) + o on
(causal: the former alone). Nothing is subtracted: prefix states run from the left, suffix states
from the right. With o = −C and causal, block b reads all keys up to its own end: causal blocks.

    ℓ_i = logsumexp_l(α q_il + L_bl),   out_i = Σ_l exp(α q_il + L_bl − ℓ_i) M_bl

Every weight of a key in the backward pass is exp(β k_jl − m_l) ≤ 1, m_l the least L_bl of the
blocks that see the key. Saved are the inputs only; the states, C tokens apart, are made again.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lln.ops.causal.segments import prefix_states
from lln.ops.common.features import (
    Scratch,
    finite_or_zero,
    fitting,
    key_features,
    key_gradients,
    times_transposed,
)
from lln.ops.common.gradients import by_heads, contiguous_like, register_with_gradient
from lln.ops.linear.eager_state import merge, summarize
from lln.ops.window.eager_near import Grid, apart, side_by_side
from lln.protocols import compute_dtype

# Slot weights held at once: of one head on a CPU, of all on a GPU.
_GROUP_ELEMENTS, _GROUP_ELEMENTS_OF_A_GPU = 1 << 17, 1 << 26


@dataclass(frozen=True)
class _Keys:
    """Features β k (−inf if masked) and values of all keys ``[B, Hkv, M, …]``, and their grid."""

    grid: Grid
    features: Tensor
    values: Tensor

    @property
    def left(self) -> int:
        """Where the first window begins: the keys before it are seen by every block."""
        return self.grid.start - self.grid.overlap

    @property
    def right(self) -> int:
        """Where the first window ends."""
        return self.grid.start + self.grid.block + self.grid.overlap

    def chunks(self, start: int) -> tuple[Tensor, Tensor]:
        """The chunks of C keys between two windows' edges, ``[B·Hkv, (T − 1) · C, …]``."""
        count = (self.grid.count - 1) * self.grid.block
        features = self.grid.cut_keys(self.features, start, count, -torch.inf)
        return features.flatten(0, 1), self.grid.cut_keys(self.values, start, count).flatten(0, 1)


def _keys(q, k, v, beta, key_mask, block, overlap, origin, causal) -> _Keys:
    dtype = compute_dtype(q, k, v)
    features = key_features(k, beta, key_mask, Scratch(k, dtype))
    values = v.to(dtype)
    if key_mask is not None:
        values = values.masked_fill(~key_mask[:, None, :, None], 0)
    return _Keys(Grid(q.shape[2], k.shape[2], block, overlap, origin, causal), features, values)


def _states(keys: _Keys, log_mass: Tensor, mean: Tensor) -> tuple[Tensor, Tensor]:
    """What each block sees: L ``[T, B·Hkv, D]`` and M ``[T, B·Hkv, D, E]``."""
    grid = keys.grid
    first = log_mass.flatten(0, 1), mean.flatten(0, 1)
    if keys.left > 0:
        early = keys.features[:, :, : keys.left].flatten(0, 1)
        values = keys.values[:, :, : keys.left].flatten(0, 1)
        before, means = prefix_states(early, values, *first, early.shape[1])
        first = before[-1], means[-1]
    if grid.count == 1:
        return first[0][None], first[1][None]
    prefix = prefix_states(*keys.chunks(keys.left), *first, grid.block)
    if grid.is_causal:
        return prefix
    empty = torch.full_like(first[0], -torch.inf), torch.zeros_like(first[1])
    features, values = keys.chunks(keys.right)
    masses, means = prefix_states(features.flip(1), values.flip(1), *empty, grid.block)
    return merge(*prefix, masses.flip(0), means.flip(0))


class _Rows:
    """The queries of a group of blocks and their slot weights, ``[B, Hkv, T, G·C, D]``."""

    def __init__(self, q: Tensor, alpha: Tensor, log_mass: Tensor, dropout: Tensor | None) -> None:
        self.heads, self.block = log_mass.shape[1], q.shape[3]
        self.q = self.group(q.to(log_mass.dtype))
        self.alpha = self.group(alpha[:, :, None, None].expand(q.shape[:4]))[..., None]
        scores = self.alpha * self.q + log_mass[..., None, :]
        self.normaliser = torch.logsumexp(scores, dim=-1)
        self.weights = scores.sub_(finite_or_zero(self.normaliser)[..., None]).exp_()
        self.dropout = None if dropout is None else self.group(dropout.to(log_mass.dtype))

    @property
    def kept(self) -> Tensor:
        """The slot weights after dropout."""
        return self.weights if self.dropout is None else self.weights * self.dropout

    def group(self, x: Tensor) -> Tensor:
        """The queries of all heads that share a key head, as rows."""
        return side_by_side(x, self.heads)

    def ungroup(self, x: Tensor) -> Tensor:
        """Undo :meth:`group`."""
        return apart(x, self.block)


def _by_head(x: Tensor, batch: int) -> Tensor:
    """``[T, B·Hkv, …] -> [B, Hkv, T, …]``."""
    return x.unflatten(1, (batch, -1)).movedim(0, 2)


def _groups(q: Tensor) -> Iterator[slice]:
    """Groups of the blocks of ``q [B, H, T, C, D]`` of bounded size."""
    size = fitting(q, q.shape[3] * q.shape[4], _GROUP_ELEMENTS, _GROUP_ELEMENTS_OF_A_GPU)
    for start in range(0, q.shape[2], size):
        yield slice(start, min(start + size, q.shape[2]))


def _far(
    q, k, v, alpha, beta, log_mass, mean, key_mask, dropout,
    block, overlap, origin, causal,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    dtype = compute_dtype(q, k, v)
    if q.numel() == 0:
        out = q.new_empty((*q.shape[:3], v.shape[-1]), dtype=dtype)
        return out, q.new_empty(q.shape[:3], dtype=dtype)
    keys = _keys(q, k, v, beta, key_mask, block, overlap, origin, causal)
    masses, means = (_by_head(x, q.shape[0]) for x in _states(keys, log_mass, mean))
    queries = keys.grid.cut_queries(q)
    dropped = None if dropout is None else keys.grid.cut_queries(dropout)
    out = q.new_empty((*queries.shape[:4], v.shape[-1]), dtype=dtype)
    normaliser = q.new_empty(queries.shape[:4], dtype=dtype)
    for part in _groups(queries):
        kept = None if dropped is None else dropped[:, :, part]
        rows = _Rows(queries[:, :, part], alpha, masses[:, :, part], kept)
        out[:, :, part] = rows.ungroup(rows.kept @ means[:, :, part])
        normaliser[:, :, part] = rows.ungroup(rows.normaliser)
    return keys.grid.join_queries(out).contiguous(), keys.grid.join_queries(normaliser).contiguous()


def _asked_by_later(masses: Tensor, d_means: Tensor, level: Tensor) -> tuple[Tensor, ...]:
    """Sums over the blocks from each on, [T, X, …]: of exp(m − L_b) dM_b and of exp(m − L_b) c_b.

    m is the least L_b among them, +inf if none has a key.
    """
    known = masses.masked_fill(masses == -torch.inf, torch.inf)
    least = known.flip(0).cummin(0).values.flip(0)
    nothing = least == torch.inf
    finite = least.masked_fill(nothing, 0)
    own = (finite - known).exp_()
    fade = (finite[:-1] - least[1:]).exp_()  # exp(−inf) where no later block has a key
    asked, levels = d_means.mul_(own[..., None]), level * own
    for t in reversed(range(len(fade))):
        asked[t].addcmul_(asked[t + 1], fade[t][..., None])
        levels[t].addcmul_(levels[t + 1], fade[t])
    return least, asked, levels


def _pull(
    features: Tensor, values: Tensor, least: Tensor, asked: Tensor, level: Tensor
) -> tuple[Tensor, Tensor]:
    """Gradients of features ``[…, C, D]`` and values of keys that the same blocks see."""
    weights = (features - least[..., None, :]).exp_()
    d_values = weights @ asked
    d_features = weights.mul_(times_transposed(values, asked).add_(level[..., None, :]))
    return d_features, d_values


def _far_backward(
    d_out, d_normaliser, q, k, v, alpha, beta, log_mass, mean, key_mask, dropout,
    block, overlap, origin, causal,
) -> tuple[Tensor, ...]:  # fmt: skip
    inputs = (q, k, v, alpha, beta, log_mass, mean)
    if q.numel() == 0:
        return tuple(torch.zeros_like(x) for x in inputs)
    keys = _keys(q, k, v, beta, key_mask, block, overlap, origin, causal)
    states = _states(keys, log_mass, mean)
    d_q, d_alpha, d_masses, d_means = _row_side(
        d_out, d_normaliser, q, alpha, *states, dropout, keys.grid
    )
    level = d_masses.sub_((d_means * states[1]).sum(-1))
    asked = _asked_by_later(states[0], d_means.clone(), level)
    d_features, d_values = torch.zeros_like(keys.features), torch.zeros_like(keys.values)
    _add_chunks_(d_features, d_values, keys, keys.left, [x[1:] for x in asked])
    if keys.left > 0:
        early = slice(0, keys.left)
        first = [x[0].unflatten(0, q.shape[:1] + k.shape[1:2]) for x in asked]
        d_early = _pull(keys.features[:, :, early], keys.values[:, :, early], *first)
        d_features[:, :, early] += d_early[0]
        d_values[:, :, early] += d_early[1]
    if not causal:
        flipped = _asked_by_later(states[0].flip(0), d_means.flip(0), level.flip(0))
        _add_chunks_(d_features, d_values, keys, keys.right, [x.flip(0)[:-1] for x in flipped])
    least, asks, levels = (x[0].unflatten(0, log_mass.shape[:2]) for x in asked)
    weight = (log_mass - least).exp_()
    d_log_mass = weight * ((mean * asks).sum(-1) + levels)
    d_k, d_beta = key_gradients(d_features, keys.features, k, beta)
    found = (d_q, d_k, d_values, d_alpha, d_beta, d_log_mass, weight[..., None] * asks)
    return tuple(x.to(given.dtype).contiguous() for x, given in zip(found, inputs, strict=True))


def _row_side(
    d_out, d_normaliser, q, alpha, masses, means, dropout, grid: Grid
) -> tuple[Tensor, ...]:
    """Gradients of q, α, and of each block's L and M ``[T, B·Hkv, …]``."""
    dtype, batch = means.dtype, q.shape[0]
    by_head = _by_head(masses, batch), _by_head(means, batch)
    queries, dropped = grid.cut_queries(q), None
    if dropout is not None:
        dropped = grid.cut_queries(dropout)
    d_out, d_normaliser = grid.cut_queries(d_out), grid.cut_queries(d_normaliser[..., None])
    d_q, d_alpha = torch.empty_like(queries), torch.zeros_like(alpha)
    d_masses, d_means = (torch.empty_like(x) for x in by_head)
    for part in _groups(queries):
        kept = None if dropped is None else dropped[:, :, part]
        rows = _Rows(queries[:, :, part], alpha, by_head[0][:, :, part], kept)
        gradient = rows.group(d_out[:, :, part].to(dtype))
        d_slots = times_transposed(gradient, by_head[1][:, :, part])
        d_scores = d_slots.mul_(rows.kept)
        level = d_scores.sum(-1, keepdim=True) - rows.group(d_normaliser[:, :, part])
        d_scores -= rows.weights * level
        d_masses[:, :, part] = d_scores.sum(3)
        d_means[:, :, part] = rows.kept.transpose(-1, -2) @ gradient
        d_alpha += rows.ungroup((d_scores * rows.q).sum(-1)).sum((2, 3))
        d_q[:, :, part] = rows.ungroup(d_scores * rows.alpha)
    d_q = grid.join_queries(d_q).contiguous()
    return d_q, d_alpha, *(x.movedim(2, 0).flatten(1, 2).contiguous() for x in (d_masses, d_means))


def _add_chunks_(
    d_features: Tensor, d_values: Tensor, keys: _Keys, start: int, asked: list[Tensor]
) -> None:
    """Add what the blocks ask of the chunks of keys from ``start`` on, ``asked [T − 1, X, …]``."""
    grid = keys.grid
    if grid.count == 1:
        return
    features, values = (x.unflatten(1, (-1, grid.block)) for x in keys.chunks(start))
    found = _pull(features, values, *(x.transpose(0, 1) for x in asked))
    for total, x in zip((d_features, d_values), found, strict=True):
        grid.add_keys_(total, x.flatten(1, 2).unflatten(0, total.shape[:2]), start)


def _shapes(
    q, k, v, alpha, beta, log_mass, mean, key_mask, dropout,
    block, overlap, origin, causal,
):  # fmt: skip
    dtype = compute_dtype(q, k, v)
    out = q.new_empty((*q.shape[:3], v.shape[-1]), dtype=dtype)
    return out, q.new_empty(q.shape[:3], dtype=dtype)


far_op, far_backward = register_with_gradient(
    "far_eager("
    "Tensor q, Tensor k, Tensor v, Tensor alpha, Tensor beta, Tensor log_mass, Tensor mean, "
    "Tensor? key_mask, Tensor? dropout, int block, int overlap, int origin, "
    "bool causal) -> (Tensor out, Tensor normaliser)",
    forward=_far,
    shapes=_shapes,
    backward=_far_backward,
    gradients=("q", "k", "v", "alpha", "beta", "log_mass", "mean"),
    like=contiguous_like,
    outputs=2,
    around=by_heads,
    batched=True,
)


def block_causal(
    q,
    k,
    v,
    *,
    alpha,
    beta,
    causal_block,
    key_mask=None,
    slot_dropout=None,
    wide=False,
) -> Tensor:
    """Causal LLN attention whose queries see all of their block: the prefix state it ends.

    Far keys end where a window begins: that of a block with an overlap of −K begins at its end.
    """
    before = summarize(k[:, :, :0], v[:, :, :0], beta=beta)
    out, _ = far_op(
        *(q, k, v, alpha, beta, *before, key_mask, slot_dropout),
        *(causal_block, -causal_block, 0, True),
    )
    return out if wide else out.to(q.dtype)
