"""The layers of a decoder as an engine needs to know them, and what it cannot serve."""

from __future__ import annotations

import inspect
from dataclasses import dataclass
from typing import Any

from torch import nn

from lln.hf import cores
from lln.hf.positions import is_rotary
from lln.hf.register import MIXED
from lln.hf.replace import attention_modules, window_of
from lln.hf.softmax import softmax_heads_of
from lln.hf.swapped_attention import SwappedAttention
from lln.nn import LLNAttention

# Rotary frequencies that change with the longest stream of a batch: streams would not be alone.
CHANGING = ("dynamic", "longrope")


@dataclass(frozen=True)
class Layers:
    """Attention modules in the order of their caches, and their cores; None for softmax."""

    modules: list[nn.Module]
    cores: list[LLNAttention | None]

    @staticmethod
    def of(model: Any) -> Layers:
        """Find them.

        Raises:
            ValueError: Something cannot be decoded in steps of fixed shapes.
        """
        _check_model(model)
        by_index: dict[int, tuple[str, nn.Module]] = {}
        for path, module in attention_modules(model).items():
            index = getattr(module, "layer_idx", None)
            if index is None or index in by_index:
                raise ValueError(f"{path} has no place of its own in a cache; use model.generate")
            by_index[index] = path, module
        if not by_index or sorted(by_index) != list(range(_depth(model))):
            raise ValueError(
                f"{type(model).__name__} has attention in {len(by_index)} of its {_depth(model)} "
                "layers; models that remember in another way cannot be served, use model.generate"
            )
        found = [by_index[index] for index in sorted(by_index)]
        return Layers([module for _, module in found], [_core(*each) for each in found])

    @property
    def grow(self) -> bool:
        """Whether a layer or a head keeps softmax, so that memory grows with the stream."""
        return any(core is None or softmax_heads_of(core) for core in self.cores)


def longest_stream(model: Any, layers: Layers, given: int | None) -> int | None:
    """The most tokens of a stream; None if nothing limits it."""
    rotary = all(is_rotary(module) for module in layers.modules)
    learned = None if rotary else getattr(model.config, "max_position_embeddings", None)
    if learned is not None and given is not None and given > learned:
        raise ValueError(
            f"max_length={given}, but {type(model).__name__} has learned positions for {learned} "
            "tokens only"
        )
    if given is None and layers.grow:
        raise ValueError(
            "max_length is needed: layers or heads of the model keep softmax, whose keys and "
            "values are allocated for the longest stream, prompt included"
        )
    return learned if given is None else given


def _depth(model: Any) -> int:
    config = model.config.get_text_config(decoder=True)
    return int(config.num_hidden_layers)


def _check_model(model: Any) -> None:
    name, config = type(model).__name__, model.config
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{name} has an encoder; only decoders can be served, use model.generate")
    if "position_ids" not in inspect.signature(type(model).forward).parameters:
        raise ValueError(
            f"{name} takes no position_ids, and its seats are at different positions; use "
            "model.generate"
        )
    kind = (getattr(config, "rope_parameters", None) or {}).get("rope_type")
    if kind in CHANGING:
        raise ValueError(
            f"rope_type={kind!r} changes the rotation of all streams with the longest of them; "
            "use model.generate, or a rope_type that stays: 'default', 'linear', 'yarn', 'llama3'"
        )


def _core(path: str, module: Any) -> LLNAttention | None:
    """The core of a layer, if it can decode from tensors that stay."""
    core = module._modules.get("lln")
    implementation = module.config._attn_implementation
    if getattr(module, "is_kv_shared_layer", False):
        raise ValueError(f"{path} attends to keys of another layer; use model.generate")
    if core is None and not isinstance(module, SwappedAttention):
        if implementation != MIXED:
            raise ValueError(
                f"{path} attends by {implementation!r}, which knows no seats; call "
                f"lln.hf.replace(model, ...) first, or lln.hf.register() and "
                f"model.set_attn_implementation({MIXED!r}) to serve a softmax model as it is"
            )
        if window_of(module):
            raise ValueError(
                f"{path} keeps softmax with a window, {window_of(module)!r}, which is not served; "
                "replace it too, or use model.generate"
            )
        return None
    if not isinstance(core, LLNAttention) or cores.calibration_of(core) is None or not core.causal:
        raise ValueError(
            f"{path} has no causal LLN attention, which alone decodes from a constant state; use "
            "model.generate, with use_cache=False where a mechanism keeps nothing"
        )
    if getattr(core, "lesson", None) is not None:
        raise ValueError(f"{path} is being taught by lln.hf.transfer; serve it afterwards")
    return core
