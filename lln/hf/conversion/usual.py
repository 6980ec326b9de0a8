"""Options of near/far attention that a conversion begins with, for a model at hand."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any

from torch import nn
from transformers import PreTrainedModel

from lln.hf import cores
from lln.hf.positions import owner_of
from lln.hf.replace import attention_modules
from lln.hf.rotation import check_rotation
from lln.nn.feature_maps import LOG_FEATURES
from lln.nn.presets import recommended

#: Options of near/far attention in a converted encoder: 128 near keys for a query, learned slots.
ENCODER: Mapping[str, Any] = MappingProxyType(recommended("convert-encoder"))
#: The same for a decoder: the window reaches back over 128 to 256 keys, and to the first tokens.
DECODER: Mapping[str, Any] = MappingProxyType(
    {**recommended("convert-decoder"), "center_keys": True}
)


def usual_options(model: PreTrainedModel, given: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """Options of near/far attention for a model: ``ENCODER`` or ``DECODER``, 64 slots or 2 D.

    Those that are given stand. Maps of other papers have no ``sharpness``, and of them only "t2r"
    any number of slots. In decoders whose rotation can be taken back the maps see queries and keys
    before it, and keys are not centred: maps of rotated ones fail beyond the length at which they
    learned.
    """
    given = given or {}
    places = attention_modules(model)
    path, module = next(iter(places.items()))
    causal = cores.is_causal(module, owner_of(model, path))
    width = cores.place_of(module, path).head_dim
    usual = {**(DECODER if causal else ENCODER), "slots": max(64, 2 * width)}
    feature_map = given.get("feature_map")
    if feature_map in LOG_FEATURES:
        del usual["sharpness"]
    if feature_map not in (None, "learned", "t2r"):
        del usual["slots"]
    free = causal and feature_map != "identity" and not given.get("center_keys")
    if given.get("before_rotation", free and _can_be_undone(model, places)):
        del usual["center_keys"]
        usual["before_rotation"] = True
    return {**usual, **given}


def _can_be_undone(model: nn.Module, places: Mapping[str, nn.Module]) -> bool:
    """Whether every layer rotates its queries and keys in a way that can be taken back."""
    try:
        for path, layer in places.items():
            check_rotation(layer, owner_of(model, path), path)
    except ValueError:
        return False
    return True
