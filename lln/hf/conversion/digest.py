"""What a conversion is of, in short: the content of models and batches."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor
from transformers import PreTrainedModel

# Fields of a config that say where a model lay and what wrote it, not what it computes.
ORIGIN = ("_name_or_path", "transformers_version", "architectures")


def digest_of_model(model: PreTrainedModel) -> str:
    """The content of a model, 16 digits: its config, all weights and buffers.

    Reading 135M weights takes about a second. Where the model lay does not count.
    """
    config = {key: x for key, x in model.config.to_dict().items() if key not in ORIGIN}
    found = _begin([type(model).__name__, config])
    for name, x in (*model.named_parameters(), *model.named_buffers()):
        _add(found, name, x)
    return found.hexdigest()


def digest_of_batches(batches: Iterable[Mapping[str, Any]]) -> str:
    """The content of batches, 16 digits: their names, tensors and other values."""
    found = _begin([])
    for batch in batches:
        for name in sorted(batch):
            _add(found, name, batch[name])
    return found.hexdigest()


def _begin(said: Any) -> Any:
    text = json.dumps(said, sort_keys=True, default=str)
    return hashlib.blake2b(text.encode(), digest_size=8)


def _add(found: Any, name: str, value: Any) -> None:
    if not isinstance(value, Tensor):
        found.update(f"{name} {value!r}".encode())
        return
    found.update(f"{name} {value.dtype} {list(value.shape)}".encode())
    found.update(value.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy())
