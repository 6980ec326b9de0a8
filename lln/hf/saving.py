"""Load a model that was saved after :func:`lln.hf.replace`."""

from __future__ import annotations

from os import PathLike
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, PreTrainedModel

from lln.hf.replace import from_json, replace


def load(
    folder: str | PathLike[str], auto_class: Any = AutoModel, **options: Any
) -> PreTrainedModel:
    """``auto_class.from_pretrained(folder)`` with the attention the model was saved with.

    The choice, its layers and options come from config.json; α, β, statistics and learned factors
    from the weights. A plain ``from_pretrained`` stops with an error on such a folder; with
    ``attn_implementation="sdpa"`` it loads the model with softmax.

    Args:
        folder: Written by ``model.save_pretrained(folder)``.
        auto_class: AutoModelForMaskedLM or the like, or a model class.
        options: Those of ``from_pretrained``, such as ``dtype`` and ``device_map``.

    Example:
        >>> model.save_pretrained("roberta-lln")
        >>> model = lln.hf.load("roberta-lln", AutoModelForMaskedLM)
    """
    config = options.pop("config", None) or _config(folder, options)
    records = getattr(config, "lln", None)
    if not records:
        raise ValueError(
            f"{folder} was not saved after lln.hf.replace: its config.json has no field 'lln'; "
            f"use {auto_class.__name__}.from_pretrained, then lln.hf.replace"
        )
    for name in ("lln", "attn_implementation"):
        config.__dict__.pop(name, None)
    config._attn_implementation = options.pop("attn_implementation", None) or "sdpa"
    model_class = _model_class(auto_class, config)

    def construct(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, config, *args, **kwargs)
        self.__class__ = model_class
        with torch.device("cpu"):  # transformers constructs on no device, where nothing is computed
            for record in records:
                replace(
                    self,
                    record["attention"],
                    layers=record["layers"],
                    max_length=record["max_length"],
                    quiet=True,
                    **from_json(record["options"]),
                )
        # α and β in half precision are off by up to 0.4 %.
        self._keep_in_fp32_modules_strict = {
            *(self._keep_in_fp32_modules_strict or ()),
            "lln.statistics",
        }

    body = {"__init__": construct, "__module__": model_class.__module__}
    with_attention = type(model_class.__name__, (model_class,), body)
    return with_attention.from_pretrained(folder, config=config, **options)


def _config(folder: str | PathLike[str], options: dict[str, Any]) -> Any:
    """The config, with those options that belong there, such as ``num_labels``, taken out."""
    config = AutoConfig.from_pretrained(folder)
    named = {
        key: options.pop(key)
        for key in list(options)
        if hasattr(config, key) and key not in ("dtype", "attn_implementation")
    }
    return AutoConfig.from_pretrained(folder, **named) if named else config


def _model_class(auto_class: Any, config: Any) -> Any:
    if isinstance(auto_class, type) and issubclass(auto_class, PreTrainedModel):
        return auto_class
    found = auto_class._model_mapping[type(config)]
    if not isinstance(found, (list, tuple)):
        return found
    named = {entry.__name__: entry for entry in found}
    return next((named[name] for name in config.architectures or () if name in named), found[0])
