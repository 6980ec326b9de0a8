"""What the processes of a group exchange: states of their slices, and the keys at their edges."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from lln.ops.linear.eager_state import merge, merge_all, merge_backward


class Exchange(torch.autograd.Function):
    """Exchange the state of each slice for that of all slices, or of those before it.

    The formulas stand in :mod:`lln.ops.linear.eager_state`.
    """

    @staticmethod
    def forward(
        ctx: Any, log_mass: Tensor, mean: Tensor, group: Any, only_before: bool
    ) -> tuple[Tensor, Tensor]:
        states = gather(_pack(log_mass, mean), group)
        ctx.rank, ctx.group, ctx.only_before = dist.get_rank(group), group, only_before
        if only_before:
            ctx.save_for_backward(states)
            return merge_all(*_unpack(states[: ctx.rank]))
        seen = merge_all(*_unpack(states))
        ctx.save_for_backward(log_mass, mean, *seen)
        return seen

    @staticmethod
    def backward(ctx: Any, *d_seen: Tensor) -> tuple[Tensor, Tensor, None, None]:
        d_packed = _pack(*d_seen)
        if not ctx.only_before:
            saved = ctx.saved_tensors
            dist.all_reduce(d_packed, group=ctx.group)
            return *merge_backward(*_unpack(d_packed), saved[:2], saved[2:]), None, None
        (states,) = ctx.saved_tensors
        d_states = gather(d_packed, ctx.group)
        own = _unpack(states[ctx.rank])
        seen = merge_all(*_unpack(states[: ctx.rank + 1]))
        d_log_mass, d_mean = torch.zeros_like(own[0]), torch.zeros_like(own[1])
        for later in range(ctx.rank + 1, len(states)):
            share = merge_backward(*_unpack(d_states[later]), own, seen)
            d_log_mass, d_mean = d_log_mass + share[0], d_mean + share[1]
            seen = merge(*seen, *_unpack(states[later]))
        return d_log_mass, d_mean, None, None


class ExchangeOutside(torch.autograd.Function):
    """Exchange states for that of the keys of other slices which no window of this one reaches.

    Each process gives the states of its slice, of the slice without its last keys and of the slice
    without its first keys, ``[3, B, Hkv, D]``: the next process has the last ones in its windows,
    the one before it the first ones. Where windows end with the slice, one state is enough.
    """

    @staticmethod
    def forward(
        ctx: Any, log_mass: Tensor, mean: Tensor, group: Any, only_before: bool
    ) -> tuple[Tensor, Tensor]:
        states = gather(_pack(log_mass, mean), group)  # [R, 3, B, Hkv, D, 1 + E]
        ctx.rank, ctx.group, ctx.only_before = dist.get_rank(group), group, only_before
        ctx.save_for_backward(states)
        return merge_all(*_unpack(_outside(states, ctx.rank, only_before)))

    @staticmethod
    def backward(ctx: Any, *d_seen: Tensor) -> tuple[Tensor, Tensor, None, None]:
        (states,) = ctx.saved_tensors
        d_states = gather(_pack(*d_seen), ctx.group)
        own = _unpack(states[ctx.rank])
        d_own = torch.zeros_like(own[0]), torch.zeros_like(own[1])
        for other in range(ctx.rank + 1 if ctx.only_before else 0, len(states)):
            if other == ctx.rank:
                continue
            seen = merge_all(*_unpack(_outside(states, other, ctx.only_before)))
            part = _part(ctx.rank, other, states.shape[1])
            share = merge_backward(*_unpack(d_states[other]), (own[0][part], own[1][part]), seen)
            d_own[0][part] += share[0]
            d_own[1][part] += share[1]
        return *d_own, None, None


def _outside(states: Tensor, rank: int, only_before: bool) -> Tensor:
    """The states ``[R', B, Hkv, D, 1 + E]`` of the keys that no window of ``rank`` reaches."""
    count = rank if only_before else len(states)
    slices = [s for s in range(count) if s != rank]
    if not slices:
        return states[:0, 0]
    return torch.stack([states[s, _part(s, rank, states.shape[1])] for s in slices])


def _part(owner: int, reader: int, parts: int) -> int:
    """Which of its states a process has for another: 0 whole, 1 without last, 2 without first."""
    if parts == 1 or abs(owner - reader) > 1:
        return 0
    return 1 if owner < reader else 2


class ExchangeEdges(torch.autograd.Function):
    """Exchange the first and last tokens of each slice for those next to it.

    Returns the last tokens of the slice before and the first of the one after; zeros at the ends.
    """

    @staticmethod
    def forward(ctx: Any, first: Tensor, last: Tensor, group: Any) -> tuple[Tensor, Tensor]:
        ctx.group = group
        every = gather(torch.stack([first, last]), group)
        return _of_neighbours(every, dist.get_rank(group))

    @staticmethod
    def backward(ctx: Any, *d_beside: Tensor) -> tuple[Tensor, Tensor, None]:
        # The process before asks for the first tokens, which it had on its right.
        every = gather(torch.stack(d_beside), ctx.group)
        return *_of_neighbours(every, dist.get_rank(ctx.group)), None


def _of_neighbours(every: Tensor, rank: int) -> tuple[Tensor, Tensor]:
    """The last tokens of the slice before and the first of the slice after."""
    nothing = torch.zeros_like(every[0, 0])
    before = every[rank - 1, 1] if rank > 0 else nothing
    after = every[rank + 1, 0] if rank + 1 < len(every) else nothing
    return before, after


def _pack(log_mass: Tensor, mean: Tensor) -> Tensor:
    return torch.cat([log_mass[..., None], mean], dim=-1)


def _unpack(packed: Tensor) -> tuple[Tensor, Tensor]:
    return packed[..., 0], packed[..., 1:]


def taking_part(x: Tensor) -> Tensor:
    """Return a tensor that has a gradient wherever gradients are computed.

    Whether others need one is not known here: with it this process takes part in the backward pass
    of an exchange even if nothing on it does, and nobody waits for it in vain.
    """
    needed = torch.is_grad_enabled() and not x.requires_grad
    return x.detach().requires_grad_() if needed else x


def gather(x: Tensor, group: Any) -> Tensor:
    """The tensors of all processes, stacked in the order of their slices."""
    every = x.new_empty((dist.get_world_size(group), *x.shape))
    dist.all_gather(list(every), x.contiguous(), group=group)
    return every
