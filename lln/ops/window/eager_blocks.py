"""Softmax attention inside blocks of C positions, in plain PyTorch (Fig. 3, right branch).

Positions are those of the keys; query i stands at i + M − N. The probabilities are recomputed in
the backward pass, a group of blocks at a time, so memory stays linear in N.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from lln.ops.common.features import fitting, times_transposed
from lln.ops.common.registration import register, without_autocast
from lln.ops.common.threads import over_heads
from lln.protocols import compute_dtype

# Probabilities held at once: of one head on a CPU; of all on a GPU, which wants few large launches.
_GROUP_ELEMENTS, _GROUP_ELEMENTS_OF_A_GPU = 1 << 18, 1 << 26


@dataclass(frozen=True)
class _Window:
    """A run of whole blocks: rows of the output, and the keys and queries that stand there."""

    rows: slice  # queries
    keys: slice
    before: int  # positions of the first block without a query
    after: int  # positions of the last block without a key or query

    def cut(self, x: Tensor, part: slice, dtype: torch.dtype, block: int) -> Tensor:
        """``[B, H, n, D] -> [B, H, T, C, D]``, zero where nothing stands."""
        before = self.before if part is self.rows else 0
        x = torch.nn.functional.pad(x[:, :, part].to(dtype), (0, 0, before, self.after))
        return x.unflatten(2, (-1, block))

    def join(self, x: Tensor, part: slice) -> Tensor:
        """The inverse of :meth:`cut`."""
        x = x.flatten(2, 3)
        before = self.before if part is self.rows else 0
        return x[:, :, before : x.shape[2] - self.after]


def _windows(q: Tensor, k: Tensor, block: int) -> Iterator[_Window]:
    """Groups of blocks that hold a query and a key, of bounded size."""
    queries, keys = q.shape[2], k.shape[2]
    first = max(keys - queries, 0)  # position of the first query that has a block
    blocks = fitting(q, block * block, _GROUP_ELEMENTS, _GROUP_ELEMENTS_OF_A_GPU)
    start = first // block * block
    while start < keys:
        stop = min(start + blocks * block, keys)
        position = max(start, first)
        yield _Window(
            rows=slice(position + queries - keys, stop + queries - keys),
            keys=slice(start, stop),
            before=position - start,
            after=-(stop - start) % block,
        )
        start = stop


class _Block:
    """One window's operands and probabilities."""

    def __init__(self, window: _Window, q, k, v, key_mask, dropout, block, scale, is_causal):
        self.group = q.shape[1] // max(k.shape[1], 1)
        dtype = compute_dtype(q, k, v)
        self.q = window.cut(q, window.rows, dtype, block) * scale
        if key_mask is None:
            seen = k.new_ones(k.shape[0], window.keys.stop - window.keys.start, dtype=torch.bool)
        else:
            seen = key_mask[:, window.keys]
        hidden = ~seen[:, None, :, None]
        k = k[:, :, window.keys].masked_fill(hidden, 0)
        v = v[:, :, window.keys].masked_fill(hidden, 0)
        everything = slice(0, k.shape[2])
        self.k = self._repeat(window.cut(k, everything, dtype, block))
        self.v = self._repeat(window.cut(v, everything, dtype, block))
        seen = torch.nn.functional.pad(seen, (0, window.after)).unflatten(1, (-1, block))
        seen = seen[:, None, :, None, :]  # [B, 1, T, 1, C]
        if is_causal:
            seen = seen & seen.new_ones(block, block).tril()
        scores = times_transposed(self.q, self.k).masked_fill_(~seen, -torch.inf)
        blind = ~seen.any(-1, keepdim=True)
        self.p = torch.softmax(scores.masked_fill_(blind, 0), dim=-1).masked_fill_(blind, 0)
        self.kept = self.p
        self.dropout = None
        if dropout is not None:
            self.dropout = window.cut(dropout, window.rows, dtype, block)
            self.kept = self.p * self.dropout

    def _repeat(self, x: Tensor) -> Tensor:
        return x if self.group == 1 else x.repeat_interleave(self.group, dim=1)

    def reduce(self, x: Tensor) -> Tensor:
        """Sum the gradients of the query heads that share a key head."""
        return x if self.group == 1 else x.unflatten(1, (-1, self.group)).sum(2)


def _block_diagonal(q, k, v, key_mask, dropout, block, scale, is_causal, wide) -> Tensor:
    dtype = compute_dtype(q, k, v)
    out = q.new_zeros((*q.shape[:3], v.shape[-1]), dtype=dtype if wide else q.dtype)
    for window in _windows(q, k, block):
        tile = _Block(window, q, k, v, key_mask, dropout, block, scale, is_causal)
        out[:, :, window.rows] = window.join(tile.kept @ tile.v, window.rows)
    return out


def _block_diagonal_backward(
    d_out, q, k, v, key_mask, dropout, block, scale, is_causal
) -> tuple[Tensor, Tensor, Tensor]:
    dtype = compute_dtype(q, k, v)
    d_q, d_k, d_v = torch.zeros_like(q), torch.zeros_like(k), torch.zeros_like(v)
    for window in _windows(q, k, block):
        tile = _Block(window, q, k, v, key_mask, dropout, block, scale, is_causal)
        gradient = window.cut(d_out, window.rows, dtype, block)
        d_p = times_transposed(gradient, tile.v)
        if tile.dropout is not None:
            d_p *= tile.dropout
        d_scores = tile.p * (d_p - (d_p * tile.p).sum(-1, keepdim=True))
        keys = slice(0, window.keys.stop - window.keys.start)
        d_q[:, :, window.rows] = window.join(d_scores @ tile.k, window.rows) * scale
        d_k[:, :, window.keys] = window.join(tile.reduce(d_scores.transpose(-1, -2) @ tile.q), keys)
        d_v[:, :, window.keys] = window.join(
            tile.reduce(tile.kept.transpose(-1, -2) @ gradient), keys
        )
    return d_q, d_k, d_v


def _shapes(q, k, v, key_mask, dropout, block, scale, is_causal, wide):
    dtype = compute_dtype(q, k, v)
    return q.new_empty((*q.shape[:3], v.shape[-1]), dtype=dtype if wide else q.dtype)


def _backward_shapes(d_out, q, k, v, key_mask, dropout, block, scale, is_causal):
    return torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)


block_diagonal_backward = register(
    "block_diagonal_backward_eager"
    "(Tensor d_out, Tensor q, Tensor k, Tensor v, Tensor? key_mask, Tensor? dropout, int block, "
    "float scale, bool is_causal) -> (Tensor, Tensor, Tensor)",
    without_autocast(over_heads(_block_diagonal_backward, _backward_shapes)),
    _backward_shapes,
    batched=True,
)


def _save(ctx, inputs, output):
    *tensors, ctx.block, ctx.scale, ctx.is_causal, _ = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx, d_out):
    options = ctx.block, ctx.scale, ctx.is_causal
    return *block_diagonal_backward(d_out, *ctx.saved_tensors, *options), *([None] * 6)


block_diagonal_op = register(
    "block_diagonal_eager"
    "(Tensor q, Tensor k, Tensor v, Tensor? key_mask, Tensor? dropout, int block, float scale, "
    "bool is_causal, bool wide) -> Tensor",
    without_autocast(over_heads(_block_diagonal, _shapes)),
    _shapes,
    save=_save,
    differentiate=_differentiate,
    batched=True,
)
