"""Rotary positions under linear attention: counted from the first real token of each sample.

Softmax sees rotated queries and keys only by their products, a function of i − j. A feature map
takes every coordinate by itself, so that the scores of LLN depend on i and j: padding on the left
that a model counts changes what every token after it gets.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from jaxtyping import Bool
from torch import Tensor, nn
from transformers import PreTrainedModel

from lln.hf import packing
from lln.hf.masks import may_look, one_row, starts_late
from lln.hf.padding import leading

# What attention modules are handed by models that rotate queries and keys.
ROTATED = {"position_embeddings", "relative_position_embeddings"}
# Mechanisms whose scores are functions of q·k.
RELATIVE = {
    *("softmax", "block_diag", "sliding_window", "knn"),
    *("relu", "quadratic", "quadratic_linear"),
}


def is_rotary(module: nn.Module) -> bool:
    """Whether an attention module rotates its queries and keys by their positions."""
    if getattr(module, "position_embedding_type", "rotary") != "rotary":
        return False
    parts = (type(part).__name__ for part in module.children())
    return bool(ROTATED & set(_parameters(type(module)))) or any("Rotary" in name for name in parts)


def owner_of(model: nn.Module, path: str) -> nn.Module:
    """The innermost model around a layer: the one that makes its positions and masks."""
    names = path.split(".")
    for end in range(len(names), 0, -1):
        part = model.get_submodule(".".join(names[:end]))
        if isinstance(part, PreTrainedModel):
            return part
    return model


def follow_padding(model: nn.Module, paths: Iterable[str]) -> None:
    """Let those who call the layers at these paths complete their inputs; nobody else any more."""
    for part in model.modules():
        for name in ("_lln_inputs", "_lln_end"):
            handle = part.__dict__.pop(name, None)
            if handle is not None:
                handle.remove()
    needs: dict[nn.Module, dict[str, bool]] = {}
    for path in paths:
        layer, owner = model.get_submodule(path), owner_of(model, path)
        if not {"attention_mask", "position_ids"} <= set(_parameters(type(owner))):
            continue
        core = layer._modules.get("lln")
        need = needs.setdefault(owner, {"rotary": False, "causal": False})
        need["causal"] |= bool(getattr(core, "causal", False))
        if core is not None and is_rotary(layer):
            need["rotary"] = core.positions_follow = True  # pyright: ignore
    for owner, need in needs.items():
        hook = functools.partial(complete_inputs, _parameters(type(owner)), need)
        owner.__dict__["_lln_inputs"] = owner.register_forward_pre_hook(hook, with_kwargs=True)
        owner.__dict__["_lln_end"] = owner.register_forward_hook(packing.end, always_call=True)


def complete_inputs(
    names: tuple[str, ...],
    need: dict[str, bool],
    owner: nn.Module,
    args: tuple,
    kwargs: dict[str, Any],
) -> tuple[tuple, dict[str, Any]] | None:
    """Positions, and a mask of packed sequences or of a trace, where the caller gave none."""
    given = {**dict(zip(names, args, strict=False)), **kwargs}
    found = _packed(names, need, owner, given)
    if not found and given.get("position_ids") is None:
        if given.get("attention_mask") is None:
            if need["causal"] and torch.compiler.is_compiling():
                found = _mask_of_a_trace(given)
        elif need["rotary"]:
            found = _positions(given)
    return ((), {**given, **found}) if found else None


def _packed(
    names: tuple[str, ...], need: dict[str, bool], owner: nn.Module, given: dict[str, Any]
) -> dict[str, Any]:
    """Announce packed sequences to the masks of this call; returns what else the call needs.

    A mask of ones keeps transformers from making one per query-key pair of its own.
    """
    tokens, mask, positions = (
        _tokens(given),
        given.get("attention_mask"),
        given.get("position_ids"),
    )
    if tokens is None:
        return {}
    name, rows, length = type(owner).__name__, *tokens.shape[:2]
    found: dict[str, Any] = {}
    sequences = packing.from_lengths(given, rows, length)
    if sequences is not None:
        if mask is not None and not (isinstance(mask, Tensor) and mask.dim() == 2 and mask.all()):
            raise ValueError(
                f"{name} got packed sequences, cu_seq_lens_q, and an attention_mask that hides "
                "tokens; leave the mask out, and the padding"
            )
        if positions is None:
            found["position_ids"] = _from_each_start(name, need, sequences).to(tokens.device)
    elif positions is not None and mask is None and positions.dim() == 2:
        if not may_look(positions):
            return _unseen(name, need)
        sequences = packing.from_positions(positions, is_causal=need["causal"])
    if sequences is None:
        return {}
    if given.get("use_cache") or given.get("past_key_values") is not None:
        raise ValueError(
            f"{name} got packed sequences and a cache: what comes next could belong to any of "
            "them; pass use_cache=False and no past_key_values, or one sequence a row"
        )
    if given.get("encoder_hidden_states") is not None:
        raise ValueError(
            f"{name} got packed sequences and encoder_hidden_states: no token would know which of "
            "them belong to it; pad instead of packing"
        )
    packing.begin(owner, sequences.expand(rows, -1))
    found["attention_mask"] = torch.ones(rows, length, dtype=torch.bool, device=tokens.device)
    return {**found, "use_cache": False} if "use_cache" in names else found


def _from_each_start(name: str, need: dict[str, bool], sequences: Tensor) -> Tensor:
    """Rotary positions that start again with each sequence; others start where a model says."""
    if not need["rotary"]:
        raise ValueError(
            f"{name} got packed sequences, cu_seq_lens_q, without position_ids, and would count on "
            "from one to the next; pass position_ids that start again with each"
        )
    place = torch.arange(sequences.shape[1], device=sequences.device)
    return (place - torch.searchsorted(sequences[0], sequences[0]))[None]


def _unseen(name: str, need: dict[str, bool]) -> dict[str, Any]:
    """Raise in an encoder: the masks of a decoder say the same in its layers."""
    if need["causal"]:
        return {}
    raise ValueError(
        f"{name} is compiled or recorded and got position_ids without attention_mask: nobody can "
        "see whether they start again, as packed sequences do; pass a mask of ones if they do not"
    )


def _mask_of_a_trace(given: dict[str, Any]) -> dict[str, Tensor]:
    """All tokens are real; without a mask transformers looks for packed sequences in positions.

    While tracing it cannot see that there are none, and asks for a mask per query-key pair.
    """
    tokens = _tokens(given)
    if tokens is None or given.get("past_key_values") is not None:
        return {}
    return {"attention_mask": torch.ones(tokens.shape[:2], dtype=torch.bool, device=tokens.device)}


def _positions(given: dict[str, Any]) -> dict[str, Tensor]:
    """Positions from the first real token of each sample, if one starts late."""
    mask, tokens = _padding(given["attention_mask"]), _tokens(given)
    if mask is None or tokens is None or not starts_late(mask):
        return {}
    past = given.get("past_key_values")
    seen = 0 if past is None else past.get_seq_length()
    place = torch.arange(tokens.shape[1], device=tokens.device) + seen
    return {"position_ids": (place - leading(mask.to(tokens.device))[:, None]).clamp(min=0)}


def _tokens(given: dict[str, Any]) -> Tensor | None:
    ids = given.get("input_ids")
    return given.get("inputs_embeds") if ids is None else ids


def _padding(masks: Any) -> Bool[Tensor, "B M"] | None:
    """The padding among the masks that a model was given; None if there is none to see."""
    for mask in masks.values() if isinstance(masks, Mapping) else [masks]:
        if isinstance(mask, Tensor):
            mask = one_row(mask, queries=2)
            if mask.dim() == 2 and mask.shape[1] > 0:
                return mask.to(torch.bool)
    return None


def check_positions(
    module: nn.Module,
    name: str,
    queries: int,
    key_mask: Bool[Tensor, "B M"] | None,
    positions: Tensor | None,
) -> None:
    """Raise where rotary positions count padding on the left, as far as a layer can tell."""
    if key_mask is None or queries != key_mask.shape[1] or not may_look(key_mask):
        return
    if not is_rotary(module) or not starts_late(key_mask):
        return
    if positions is not None:
        if positions.dim() != 2:  # of text, height and width: their makers read the mask
            return
        first = leading(key_mask).clamp(max=queries - 1)[:, None]
        if bool((positions.expand(len(key_mask), -1).gather(1, first) == 0).all()):
            return
    raise ValueError(
        f"{name} rotates queries and keys by their positions, and the input is padded on the left: "
        "if that padding is counted, linear attention answers differently, as its scores are no "
        "function of i - j. Use lln.hf.replace(model, ...), after which positions are counted from "
        "the first real token; or pad on the right, or pass position_ids that start there with 0"
    )


@functools.cache
def _parameters(kind: type[nn.Module]) -> tuple[str, ...]:
    """Names of what a module is called with."""
    return tuple(inspect.signature(kind.forward).parameters)[1:]
