"""From the cache of one prompt to a row of the tensors of :class:`SeatLayer`."""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from lln.hf.cache import StateLayer
from lln.hf.open_window import OpenWindow
from lln.hf.softmax import softmax_heads_of
from lln.nn import LLNAttention
from lln.ops.linear.state import State, summarize


def tensors_of(layer: Any, core: LLNAttention | None, length: int) -> dict[str, Tensor]:
    """The memory of a cache layer that has read one prompt without padding.

    Args:
        layer: A :class:`StateLayer`, or any that keeps all keys.
        core: Of the layer; None where it keeps softmax.
        length: Places for the keys of layers and heads with softmax.

    Returns:
        Tensors of one row. ``log_mass`` and ``mean``: the state. ``near_k``, ``near_v``: the ring
        of near keys. ``near_features``: what LLN sees of them, where keys leave a window that
        overlaps. ``pending_…``: the state of those that leave with the open block. ``sink_k``,
        ``sink_v``. ``last``: values before a convolution. ``kept_k``, ``kept_v``: keys of softmax.
    """
    if core is None:
        return {"kept_k": _room(layer.keys, length), "kept_v": _room(layer.values, length)}
    assert isinstance(layer, StateLayer) and layer.state is not None
    found = {"log_mass": layer.state.log_mass, "mean": layer.state.mean}
    if layer.block is not None:
        found.update(near_k=layer.block.k, near_v=layer.block.v)
    elif layer.window is not None:
        found.update(_of_window(layer.window, layer.tokens, core))
    if layer.last is not None:
        found["last"] = layer.last
    if softmax_heads_of(core):
        assert layer.kept is not None
        found.update(kept_k=_room(layer.kept.k, length), kept_v=_room(layer.kept.v, length))
    return found


def empty_like(tensors: dict[str, Tensor], seats: int) -> dict[str, Tensor]:
    """Memory of nothing, for so many seats."""
    return {
        name: x.new_full((seats, *x.shape[1:]), -torch.inf if name.endswith("log_mass") else 0)
        for name, x in tensors.items()
    }


def _of_window(window: OpenWindow, tokens: int, core: LLNAttention) -> dict[str, Tensor]:
    """Turn a window, which begins where its block's does, into a ring."""
    local = core.local
    assert local is not None
    width = local.block + local.overlap
    first = tokens // local.block * local.block - local.overlap
    found = {
        name: x.roll(first % width, 2) for name, x in (("near_k", window.k), ("near_v", window.v))
    }
    if local.sinks:
        found.update(sink_k=window.sink_k, sink_v=window.sink_v)
    if local.joint:
        if local.overlap and core.has_features:
            found["near_features"] = window.k_far.roll(first % width, 2)
        waiting = _pending(window, tokens, first, core)
        found.update(pending_log_mass=waiting.log_mass, pending_mean=waiting.mean)
    return found


def _pending(window: OpenWindow, tokens: int, first: int, core: LLNAttention) -> State:
    """The state of the keys that the steps of the open block have folded so far."""
    local = core.local
    assert local is not None
    position = first + torch.arange(window.k.shape[2], device=window.k.device)
    gone = (position >= local.sinks) & (position < tokens - local.overlap)
    return summarize(
        window.k_far,
        window.v,
        beta=core.far_beta(core.scales()[1]),
        key_mask=gone[None],
        impl=core.impl,
    )


def _room(x: Tensor, length: int) -> Tensor:
    """Keys with zeros up to so many places behind them."""
    return F.pad(x, (0, 0, 0, length - x.shape[2]))
