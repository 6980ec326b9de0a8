"""Attention put together from its parts where no kernel does it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lln.ops.linear.eager_state import merge
from lln.protocols import compute_dtype

if TYPE_CHECKING:
    from lln.ops.linear.state import State


def blend(
    linear: Float[Tensor, "B H N E"],
    local: Float[Tensor, "B H N E"],
    mix: Float[Tensor, " H"] | None,
    dtype: torch.dtype,
) -> Float[Tensor, "B H N E"]:
    """mix · linear + (1 − mix) · local, rounded once to ``dtype``; the average without ``mix``."""
    if mix is None and linear.dtype == local.dtype == dtype:
        return torch.lerp(local, linear, 0.5)  # computed in float32, whatever it reads
    wide = compute_dtype(linear, local)
    weight = 0.5 if mix is None else mix.to(wide)[:, None, None]
    return torch.lerp(local.to(wide), linear.to(wide), weight).to(dtype)


def early_and_blind(q: Tensor, k: Tensor) -> tuple[int, int]:
    """Count the keys before the first query, and the queries before the first key.

    Query i of causal attention stands at key i + M − N: there are never both.
    """
    surplus = k.shape[2] - q.shape[2]
    return max(surplus, 0), max(-surplus, 0)


def causal_by_parts(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv M D"],
    v: Float[Tensor, "B Hkv M E"],
    key_mask: Bool[Tensor, "B M"] | None,
    state: State | None,
    slot_dropout: Float[Tensor, "B H N D"] | None = None,
    *,
    summarize: Callable[..., tuple[Tensor, Tensor]],
    attend: Callable[..., Tensor],
    read: Callable[..., Tensor],
) -> Float[Tensor, "B H N E"]:
    """Let query i see keys j ≤ i + M − N, and the keys of ``state`` before them.

    Keys before the first query join the state; queries before the first key read the state alone;
    what is left is a square problem.

    Args:
        summarize: ``(k, v, key_mask)`` to a state (L, M).
        attend: ``(q, k, v, key_mask, slot_dropout, state)`` of the square problem to its output;
            ``state`` is (L, M), or None if there is nothing before it.
        read: ``(q, L, M, slot_dropout)`` to the output of queries that see a state alone.
    """
    given = None if state is None else (state.log_mass, state.mean)
    early, blind = early_and_blind(q, k)
    if early:
        mask = None if key_mask is None else key_mask[:, :early]
        prefix = summarize(k[:, :, :early], v[:, :, :early], mask)
        given = prefix if given is None else merge(*given, *prefix)
        k, v = k[:, :, early:], v[:, :, early:]
        key_mask = None if key_mask is None else key_mask[:, early:]
    if not blind:
        return attend(q, k, v, key_mask, slot_dropout, given)
    drops = (None, None)
    if slot_dropout is not None:
        drops = slot_dropout[:, :, :blind], slot_dropout[:, :, blind:]
    out = attend(q[:, :, blind:], k, v, key_mask, drops[1], given)
    if given is None:
        first = out.new_zeros((*out.shape[:2], blind, out.shape[-1]))
    else:
        first = read(q[:, :, :blind], *given, drops[0])
    return torch.cat([first, out], dim=2)
