"""What an attention call may not ask of linear attention, and the message that says so."""

from __future__ import annotations

from collections.abc import Container
from typing import Any

from torch import Tensor, nn

from lln.hf import cores
from lln.hf.cache import state_layer
from lln.hf.cores import calibration_of
from lln.hf.packing import from_positions
from lln.hf.positions import is_rotary

# Arguments of an attention call that change what softmax computes, and that linear attention has no
# place for. tests/hf/test_arguments.py goes over what the models of transformers hand on.
REFUSED = {
    "sliding_window": "a sliding window",
    "softcap": "a cap on the scores",
    "s_aux": "attention sinks",
    "sinks": "attention sinks",
    "position_bias": "a bias per query-key pair",
    "indices": "chosen keys for every query",
    "block_indices": "chosen blocks of keys for every query",
    "cache": "a paged cache",
    "block_table": "a paged cache",
}
# Of these, what transformers' own function for softmax layers would leave out without a word.
LEFT_OUT_BY_SDPA = ("s_aux", "sinks", "indices", "block_indices")


def check_alone(module: nn.Module, core: nn.Module | None, query: Tensor, key: Tensor) -> None:
    """Raise where packed sequences have other keys than their own."""
    if cores.is_cross(module) or key.shape[2] != query.shape[2] or state_layer(key) is not None:
        name = type(module).__name__ if core is None else name_of(module, core)
        raise ValueError(
            f"{name} got packed sequences and {key.shape[2]} keys for {query.shape[2]} queries: "
            "they are served in self-attention without a cache; pass use_cache=False, or pad "
            "instead of packing"
        )


def check_starts(name: str, module: nn.Module, positions: Tensor | None, sequences: Tensor) -> None:
    """Raise where rotary positions go on from one packed sequence to the next."""
    if positions is None or positions.dim() != 2 or not is_rotary(module):
        return
    if from_positions(positions, is_causal=True) is None:
        raise ValueError(
            f"{name} rotates queries and keys by their positions, which go on from one packed "
            "sequence to the next; pass position_ids that start again with each, or use "
            "lln.hf.replace(model, ...), after which they do"
        )


def refuse(layer_name: str, others: dict[str, Any], arguments: Container[str]) -> None:
    """Raise for arguments that would be left out."""
    for argument, value in others.items():
        if value is not None and argument in arguments:
            remedy = (
                "keep the model as it is: softmax layers beside linear ones would leave it out"
                if argument in LEFT_OUT_BY_SDPA
                else "keep softmax in this layer with lln.hf.replace(..., layers=...)"
            )
            raise ValueError(
                f"{layer_name} asks for {REFUSED[argument]}, {argument}={_short(value)}, which "
                "linear attention cannot serve; switch it off in the config or the call, or "
                + remedy
            )


def check_sizes(core: Any, layer_name: str, query: Tensor, key: Tensor) -> None:
    """Raise unless heads and width are those the core was made for: its scales depend on them."""
    made = (core.num_heads, core.num_kv_heads, core.head_dim)
    found = (query.shape[1], key.shape[1], query.shape[3])
    if made != found:
        raise ValueError(
            f"{layer_name} has {found[0]} query heads, {found[1]} key heads of width "
            f"{found[2]}, but its config says {made[0]}, {made[1]}, {made[2]}; keep softmax in "
            "this layer with lln.hf.replace(..., layers=...)"
        )


def name_of(module: nn.Module, core: nn.Module) -> str:
    """What messages call a layer: its place in the model, where that is known."""
    calibration = calibration_of(core)
    return type(module).__name__ if calibration is None else calibration.place.name


def _short(value: object) -> str:
    return f"a tensor {list(value.shape)}" if isinstance(value, Tensor) else repr(value)
