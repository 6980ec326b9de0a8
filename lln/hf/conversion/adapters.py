"""Adapters (peft) that learn beside those a model may have, and end in its weights."""

from __future__ import annotations

import contextlib
import warnings
from collections.abc import Iterator
from typing import Any

from torch import nn

from lln.hf.conversion.stage import drawn_by

OURS = "lln_recovery"  # an adapter of the user's own is often called "default"


@contextlib.contextmanager
def adapters(model: nn.Module, rank: int, seed: int) -> Iterator[list[nn.Parameter]]:
    """Give all linear layers an adapter inside the block; its parameters.

    At the end they are added to the weights, after an error they are not. Adapters that the model
    had before stay as they were, and active.

    Args:
        rank: 0 for no adapters.
        seed: Of the adapters' first weights.
    """
    if not rank:
        yield []
        return
    try:
        import peft
    except ImportError as error:
        raise ImportError(
            f"lora={rank} needs peft; install it with: pip install 'lln-attention[convert]', or "
            "pass lora=0 to tune all weights"
        ) from error
    _check_layers(model, rank)
    before = {layer: list(layer.active_adapters) for layer in _switched(model).values()}
    config = peft.LoraConfig(r=rank, lora_alpha=2 * rank, target_modules="all-linear")
    device = next(model.parameters()).device
    merge = False
    try:
        with drawn_by(seed, 0, device), warnings.catch_warnings():
            # peft warns of a second adapter, and of weights that are tied to embeddings.
            warnings.simplefilter("ignore")
            peft.inject_adapter_in_model(config, model, adapter_name=OURS)
        for layer, active in before.items():
            layer.set_adapter([*active, OURS] if OURS in getattr(layer, "r", ()) else active)
        model.requires_grad_(False)
        yield [x for name, x in model.named_parameters() if f".{OURS}." in name]
        merge = True
    finally:
        _take_off(model, before, merge=merge)


def _switched(model: nn.Module) -> dict[str, Any]:
    """The modules that peft has put into a model: adapters of layers, and layers beside others."""
    from peft.tuners.tuners_utils import BaseTunerLayer
    from peft.utils.other import AuxiliaryTrainingWrapper

    kinds = (BaseTunerLayer, AuxiliaryTrainingWrapper)
    return {path: module for path, module in model.named_modules() if isinstance(module, kinds)}


def _check_layers(model: nn.Module, rank: int) -> None:
    """Raise for adapters beside which another one cannot learn."""
    from peft.tuners.lora import LoraLayer
    from peft.tuners.tuners_utils import BaseTunerLayer

    for path, layer in _switched(model).items():
        if not isinstance(layer, BaseTunerLayer):
            continue
        plain = isinstance(layer, LoraLayer) and not any(layer.use_dora.values())
        if not plain or layer.merged or layer.disable_adapters:
            reason = (
                "merged or switched off"
                if plain
                else "of a kind that changes with the weights below it"
            )
            raise ValueError(
                f"lora={rank}: {path} has an adapter that is {reason}; make it part of the weights "
                "with merge_and_unload of peft, or pass lora=0"
            )


def _take_off(model: Any, before: dict[Any, list[str]], *, merge: bool) -> None:
    """Remove our adapters, and put layers back that had none."""
    for path, layer in _switched(model).items():
        if OURS in getattr(layer, "r", ()):
            if merge:
                layer.merge(adapter_names=[OURS])
                layer.merged_adapters.remove(OURS)
            if layer not in before:
                model.set_submodule(path, layer.get_base_layer())
                continue
            layer.delete_adapter(OURS)
        layer.set_adapter(before[layer])
    known = model.__dict__.get("peft_config", {})
    known.pop(OURS, None)
    if not known:
        model.__dict__.pop("peft_config", None)
