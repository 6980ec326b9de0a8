"""Softmax attention over near keys, with the logarithm of its normaliser (MATHS of near and far).

Query i of block b sees the keys of positions C·b − o … C·(b+1) + o − 1 (causal: C·b − o … i), and
sinks, keys that every query sees. Positions are those of the keys; query i stands at i + M − N.

    s_ij = scale · q_i·k_j,   ℓ_i = logsumexp_j s_ij,   out_i = Σ_j exp(s_ij − ℓ_i) v_j

The probabilities are recomputed in the backward pass, a group of blocks at a time, so memory stays
linear in N.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from lln.ops.common.features import finite_or_zero, fitting, times_transposed
from lln.ops.common.gradients import by_heads, contiguous_like, register_with_gradient
from lln.protocols import compute_dtype

# Probabilities held at once: of one head on a CPU; of all on a GPU, which wants few large launches.
_GROUP_ELEMENTS, _GROUP_ELEMENTS_OF_A_GPU = 1 << 18, 1 << 26


@dataclass(frozen=True)
class Grid:
    """The blocks that hold queries, and the window of keys of each.

    ``origin`` is the position of the first key, if earlier keys of the stream are not here.
    """

    queries: int
    keys: int
    block: int
    overlap: int
    origin: int
    is_causal: bool

    @property
    def start(self) -> int:
        """Where the first block begins, counted in keys; it may be before the first key."""
        position = self.origin + self.keys - self.queries
        return position // self.block * self.block - self.origin

    @property
    def count(self) -> int:
        """The number of blocks."""
        return -(-(self.keys - self.start) // self.block)

    @property
    def width(self) -> int:
        """The number of keys in a window."""
        return self.overlap + self.block + self.right

    @property
    def right(self) -> int:
        """The keys of a window after its block."""
        return 0 if self.is_causal else self.overlap

    def cut_queries(self, x: Tensor) -> Tensor:
        """``[B, H, N, D] -> [B, H, T, C, D]``, zero where no query stands."""
        before = self.keys - self.queries - self.start
        x = _padded(x, before, self.count * self.block - before - self.queries)
        return x.unflatten(2, (self.count, self.block))

    def join_queries(self, x: Tensor) -> Tensor:
        """Undo :meth:`cut_queries`, for ``[B, H, T, C]`` too."""
        before = self.keys - self.queries - self.start
        return x.flatten(2, 3)[:, :, before : before + self.queries]

    def cut_keys(self, x: Tensor, start: int, count: int, value: float = 0.0) -> Tensor:
        """The keys ``start : start + count`` of ``[B, H, M, D]``; ``value`` where none stand."""
        stop = start + count
        first, last = (min(max(edge, 0), self.keys) for edge in (start, stop))
        before = min(max(-start, 0), count)
        return _padded(x[:, :, first:last], before, count - before - (last - first), value)

    def add_keys_(self, total: Tensor, x: Tensor, start: int) -> None:
        """Undo :meth:`cut_keys`: add ``x [B, H, count, D]`` to where it came from."""
        first, stop = max(start, 0), min(start + x.shape[2], self.keys)
        if first < stop:
            total[:, :, first:stop] += x[:, :, first - start : stop - start]

    def windows(self, x: Tensor) -> Tensor:
        """The keys of each block's window, ``[B, H, M, D] -> [B, H, T, W, D]``."""
        long = self.cut_keys(x, self.start - self.overlap, self._covered)
        return long.unfold(2, self.width, self.block).transpose(-1, -2)

    @property
    def _covered(self) -> int:
        return (self.count - 1) * self.block + self.width

    def add_windows_(self, total: Tensor, x: Tensor) -> None:
        """Undo :meth:`windows`: add ``x [B, H, T, W, D]`` to where it came from."""
        block, count = self.block, self.count
        pieces = -(-self.width // block)
        long = total.new_zeros((*x.shape[:2], (count - 1 + pieces) * block, x.shape[-1]))
        for piece in range(pieces):
            part = x[:, :, :, piece * block : (piece + 1) * block]
            rows = long[:, :, piece * block : (piece + count) * block].unflatten(2, (count, block))
            rows[:, :, :, : part.shape[3]] += part
        self.add_keys_(total, long[:, :, : self._covered], self.start - self.overlap)

    def before_window(self, positions: Tensor) -> Tensor:
        """Whether each of ``positions [B, n]`` is left of each window: ``[B, T, n]``."""
        return positions[:, None, :] < self._window_starts(positions)

    def after_window(self, positions: Tensor) -> Tensor:
        """Whether each of ``positions [B, n]`` is right of each window: ``[B, T, n]``."""
        return positions[:, None, :] >= self._window_starts(positions) + self.width

    def _window_starts(self, like: Tensor) -> Tensor:
        blocks = torch.arange(self.count, device=like.device)[:, None]
        return self.start - self.overlap + blocks * self.block


def side_by_side(x: Tensor, heads: int) -> Tensor:
    """Join heads that share a key head: ``[B, H, T, C, …] -> [B, Hkv, T, G·C, …]``."""
    return x.unflatten(1, (heads, -1)).movedim(2, 3).flatten(3, 4)


def apart(x: Tensor, block: int) -> Tensor:
    """Undo :func:`side_by_side`."""
    return x.unflatten(3, (-1, block)).movedim(3, 2).flatten(1, 2)


def _padded(x: Tensor, before: int, after: int, value: float = 0.0) -> Tensor:
    """More tokens on either side of ``[B, H, n, D]``; the same tensor if there are none."""
    return F.pad(x, (0, 0, before, after), value=value) if before or after else x


@dataclass(frozen=True)
class _Call:
    """The tensors of one call, cut into blocks."""

    grid: Grid
    q: Tensor  # [B, H, T, C, D]
    k: Tensor  # [B, Hkv, T, W, D]
    v: Tensor  # [B, Hkv, T, W, E]
    seen: Tensor  # [B, T, W]
    sink_k: Tensor  # [B, Hkv, n, D]
    sink_v: Tensor  # [B, Hkv, n, E]
    sink_seen: Tensor  # [B, T, n]
    dropout: Tensor | None  # [B, H, T, C, W + n]
    scale: float
    masked: bool  # by a key mask
    dtype: torch.dtype

    def parts(self) -> Iterator[slice]:
        """Groups of blocks of bounded size."""
        count, block = self.q.shape[2:4]
        columns = self.grid.width + self.sink_k.shape[2]
        size = fitting(self.q, block * columns, _GROUP_ELEMENTS, _GROUP_ELEMENTS_OF_A_GPU)
        for start in range(0, count, size):
            yield slice(start, min(start + size, count))


def _call(
    q, k, v, sink_k, sink_v, sink_position, key_mask, dropout, block, overlap, scale, origin, causal
) -> _Call:
    grid = Grid(q.shape[2], k.shape[2], block, overlap, origin, causal)
    valid = key_mask
    if valid is None:
        valid = k.new_ones((k.shape[0], k.shape[2]), dtype=torch.bool)
    sink_seen = grid.before_window(sink_position)
    if not causal:
        exists = (sink_position < grid.keys)[:, None, :]
        sink_seen = sink_seen | (grid.after_window(sink_position) & exists)
    return _Call(
        grid,
        grid.cut_queries(q),
        grid.windows(k),
        grid.windows(v),
        grid.windows(valid[:, None, :, None])[:, 0, :, :, 0],
        sink_k,
        sink_v,
        sink_seen,
        None if dropout is None else grid.cut_queries(dropout),
        scale,
        key_mask is not None,
        compute_dtype(q, k, v),
    )


class _Tile:
    """A group of blocks: operands ``[B, Hkv, T, rows, …]``, probabilities and their normaliser.

    Rows are the queries of all heads that share a key head, columns the window and the sinks.
    """

    def __init__(self, call: _Call, part: slice) -> None:
        self.heads = call.k.shape[1]
        self.block = call.grid.block
        self.width = call.grid.width
        dtype, seen = call.dtype, call.seen[:, None, part]  # [B, 1, T, W]
        self.q = self.rows(call.q[:, :, part].to(dtype)) * call.scale
        self.k, self.v = (x[:, :, part].to(dtype) for x in (call.k, call.v))
        if call.masked:  # beyond the ends windows are 0 already
            hidden = ~seen[..., None]
            self.k, self.v = self.k.masked_fill(hidden, 0), self.v.masked_fill(hidden, 0)
        self.sink_k, self.sink_v = (x.to(dtype)[:, :, None] for x in (call.sink_k, call.sink_v))
        self.has_sinks = call.sink_k.shape[2] > 0
        scores = times_transposed(self.q, self.k)
        seen = seen[:, :, :, None, :].expand(-1, -1, -1, self.block, -1)
        if call.grid.is_causal:
            past = seen.new_ones(self.block, self.width).tril(call.grid.overlap)
            seen = seen & past
        if self.has_sinks:
            scores = torch.cat([scores, times_transposed(self.q, self.sink_k)], dim=-1)
            sinks = call.sink_seen[:, None, part, None].expand(-1, -1, -1, self.block, -1)
            seen = torch.cat([seen, sinks], dim=-1)
        group = self.q.shape[3] // self.block
        seen = seen.repeat(1, 1, 1, group, 1)
        scores = scores.masked_fill_(~seen, -torch.inf)
        top = finite_or_zero(scores.amax(-1))
        self.p = scores.sub_(top[..., None]).exp_()
        mass = self.p.sum(-1)
        self.normaliser = top + mass.log()  # −inf where a row sees nothing
        self.p /= mass.masked_fill(mass == 0, 1)[..., None]
        self.dropout = None
        if call.dropout is not None:
            self.dropout = self.rows(call.dropout[:, :, part].to(dtype))

    @property
    def kept(self) -> Tensor:
        """The probabilities after dropout."""
        return self.p if self.dropout is None else self.p * self.dropout

    def rows(self, x: Tensor) -> Tensor:
        """The queries of all heads that share a key head, as rows."""
        return side_by_side(x, self.heads)

    def from_rows(self, x: Tensor) -> Tensor:
        """Undo :meth:`rows`."""
        return apart(x, self.block)


def _near(
    q, k, v, sink_k, sink_v, sink_position, key_mask, dropout, block, overlap, scale, origin, causal
) -> tuple[Tensor, Tensor]:
    dtype = compute_dtype(q, k, v)
    if q.numel() == 0:
        return (
            q.new_empty((*q.shape[:3], v.shape[-1]), dtype=dtype),
            q.new_empty(q.shape[:3], dtype=dtype),
        )
    call = _call(
        *(q, k, v, sink_k, sink_v, sink_position, key_mask, dropout),
        *(block, overlap, scale, origin, causal),
    )
    out = q.new_empty((*call.q.shape[:4], v.shape[-1]), dtype=dtype)
    normaliser = q.new_empty(call.q.shape[:4], dtype=dtype)
    for part in call.parts():
        tile = _Tile(call, part)
        kept, width = tile.kept, tile.width
        total = kept[..., :width] @ tile.v
        if tile.has_sinks:
            total = total + kept[..., width:] @ tile.sink_v
        out[:, :, part] = tile.from_rows(total)
        normaliser[:, :, part] = tile.from_rows(tile.normaliser)
    return call.grid.join_queries(out).contiguous(), call.grid.join_queries(normaliser).contiguous()


def _near_backward(
    d_out, d_normaliser, q, k, v, sink_k, sink_v, sink_position, key_mask, dropout,
    block, overlap, scale, origin, causal,
) -> tuple[Tensor, Tensor, Tensor, Tensor, Tensor]:  # fmt: skip
    dtype = compute_dtype(q, k, v)
    d_keys, d_values = k.new_zeros(k.shape, dtype=dtype), v.new_zeros(v.shape, dtype=dtype)
    d_sink_k, d_sink_v = (x.new_zeros(x.shape, dtype=dtype) for x in (sink_k, sink_v))
    if q.numel() == 0:
        zeros = (d_keys, d_values, d_sink_k, d_sink_v)
        return torch.empty_like(q), *(x.to(k.dtype) for x in zeros)
    call = _call(
        *(q, k, v, sink_k, sink_v, sink_position, key_mask, dropout),
        *(block, overlap, scale, origin, causal),
    )
    d_out = call.grid.cut_queries(d_out)
    d_normaliser = call.grid.cut_queries(d_normaliser[..., None])
    d_q = q.new_empty(call.q.shape, dtype=dtype)
    d_k, d_v = (x.new_empty(x.shape, dtype=dtype) for x in (call.k, call.v))
    for part in call.parts():
        tile = _Tile(call, part)
        width, gradient = tile.width, tile.rows(d_out[:, :, part].to(dtype))
        d_p = times_transposed(gradient, tile.v)
        if tile.has_sinks:
            d_p = torch.cat([d_p, times_transposed(gradient, tile.sink_v)], dim=-1)
        if tile.dropout is not None:
            d_p *= tile.dropout
        level = (d_p * tile.p).sum(-1, keepdim=True) - tile.rows(d_normaliser[:, :, part])
        d_scores, kept = tile.p * (d_p - level), tile.kept
        d_rows = d_scores[..., :width] @ tile.k
        if tile.has_sinks:
            d_rows = d_rows + d_scores[..., width:] @ tile.sink_k
            d_sink_k += (d_scores[..., width:].transpose(-1, -2) @ tile.q).sum(2)
            d_sink_v += (kept[..., width:].transpose(-1, -2) @ gradient).sum(2)
        d_q[:, :, part] = tile.from_rows(d_rows) * scale
        d_k[:, :, part] = d_scores[..., :width].transpose(-1, -2) @ tile.q
        d_v[:, :, part] = kept[..., :width].transpose(-1, -2) @ gradient
    call.grid.add_windows_(d_keys, d_k)
    call.grid.add_windows_(d_values, d_v)
    d_queries = call.grid.join_queries(d_q).to(q.dtype).contiguous()
    return d_queries, *(x.to(k.dtype) for x in (d_keys, d_values, d_sink_k, d_sink_v))


def _shapes(
    q, k, v, sink_k, sink_v, sink_position, key_mask, dropout, block, overlap, scale, origin, causal
):
    dtype = compute_dtype(q, k, v)
    out = q.new_empty((*q.shape[:3], v.shape[-1]), dtype=dtype)
    return out, q.new_empty(q.shape[:3], dtype=dtype)


near_op, near_backward = register_with_gradient(
    "near_eager("
    "Tensor q, Tensor k, Tensor v, Tensor sink_k, Tensor sink_v, Tensor sink_position, "
    "Tensor? key_mask, Tensor? dropout, int block, int overlap, float scale, int origin, "
    "bool causal) -> (Tensor out, Tensor normaliser)",
    forward=_near,
    shapes=_shapes,
    backward=_near_backward,
    gradients=("q", "k", "v", "sink_k", "sink_v"),
    like=contiguous_like,
    outputs=2,
    around=by_heads,
    batched=True,
)
