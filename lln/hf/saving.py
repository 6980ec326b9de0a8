"""Load a model that was saved after :func:`lln.hf.replace`."""

from __future__ import annotations

from os import PathLike
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModel, PreTrainedModel

from lln.hf.options_json import from_json
from lln.hf.replace import replace

# What from_pretrained is told always: a pickle, or code beside the weights, could do anything.
SAFE = {"use_safetensors": True, "trust_remote_code": False}
# Options that say which files are meant: the config comes from the same place as the weights.
WHERE = ("cache_dir", "local_files_only", "revision", "subfolder", "token", "force_download")


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

    Nothing of the folder is run: weights come from safetensors, never from a pickle, and code that
    config.json names is not loaded.

    Example:
        >>> model.save_pretrained("roberta-lln")
        >>> model = lln.hf.load("roberta-lln", AutoModelForMaskedLM)
    """
    check_safe(folder, options)
    config = options.pop("config", None) or _config(folder, options)
    records = getattr(config, "lln", None)
    if not records:
        raise ValueError(
            f"{folder} was not saved after lln.hf.replace: its config.json has no field 'lln'; "
            f"use {auto_class.__name__}.from_pretrained, then lln.hf.replace"
        )
    for name in ("lln", "attn_implementation"):
        config.__dict__.pop(name, None)
    config._attn_implementation = options.pop("attn_implementation", None)
    model_class = _model_class(auto_class, config)

    def construct(self: Any, config: Any, *args: Any, **kwargs: Any) -> None:
        model_class.__init__(self, config, *args, **kwargs)
        self.__class__ = model_class
        with torch.device("cpu"):  # transformers constructs on no device, where nothing is computed
            for record in records:
                done = replace(
                    self,
                    record["attention"],
                    layers=record["layers"],
                    max_length=record["max_length"],
                    quiet=True,
                    before_rotation=record.get("before_rotation", False),
                    **from_json(record["options"]),
                )
                kept = record.get("softmax_heads", {})
                done.keep_softmax_heads({int(number): heads for number, heads in kept.items()})
        # α and β in half precision are off by up to 0.4 %.
        self._keep_in_fp32_modules_strict = {
            *(self._keep_in_fp32_modules_strict or ()),
            *("lln.statistics", "lln.level.stored", "lln.center.stored"),
        }

    body = {"__init__": construct, "__module__": model_class.__module__}
    with_attention = type(model_class.__name__, (model_class,), body)
    return with_attention.from_pretrained(folder, config=config, **{**options, **SAFE})


def check_safe(folder: str | PathLike[str], options: dict[str, Any]) -> None:
    """Refuse what would run code of the folder, before anything of it is read."""
    for name, value in SAFE.items():
        if options.get(name, value) not in (value, None):
            raise ValueError(
                f"{name}={options[name]} would let files of {folder} run code; lln.hf.load takes "
                "safetensors and models of transformers alone. Load another model yourself, then "
                "call lln.hf.replace"
            )
    if not Path(folder).is_dir() or any(Path(folder).glob("*.safetensors")):
        return
    pickles = sorted(path.name for path in Path(folder).glob("*.bin"))
    if pickles:
        raise ValueError(
            f"{folder} has its weights in {pickles[0]}, a pickle that could run code when opened; "
            "save the model again with model.save_pretrained(folder), which writes safetensors"
        )


def _config(folder: str | PathLike[str], options: dict[str, Any]) -> Any:
    """The config, with those options that belong there, such as ``num_labels``, taken out."""
    where = {key: options[key] for key in WHERE if key in options}
    where["trust_remote_code"] = False
    config = AutoConfig.from_pretrained(folder, **where)
    named = {
        key: options.pop(key)
        for key in list(options)
        if hasattr(config, key) and key not in ("dtype", "attn_implementation")
    }
    return AutoConfig.from_pretrained(folder, **where, **named) if named else config


def _model_class(auto_class: Any, config: Any) -> Any:
    if isinstance(auto_class, type) and issubclass(auto_class, PreTrainedModel):
        return auto_class
    found = auto_class._model_mapping[type(config)]
    if not isinstance(found, (list, tuple)):
        return found
    named = {entry.__name__: entry for entry in found}
    return next((named[name] for name in config.architectures or () if name in named), found[0])
