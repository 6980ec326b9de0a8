"""How far replaced layers and their heads are from the softmax that they replace."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn

from lln.hf.conversion.transfer import transfer
from lln.hf.replace import attention_modules

Batch = Mapping[str, Any]


def layer_errors(model: nn.Module, batches: Sequence[Batch]) -> dict[int, float]:
    """‖core − softmax‖ / ‖softmax‖ of every replaced layer, by its number; nothing learns."""
    return of_layers(head_errors(model, batches))


def head_errors(model: nn.Module, batches: Sequence[Batch]) -> dict[int, list[float]]:
    """‖core_h − softmax_h‖² / ‖softmax‖² of the heads of every replaced layer, mean over batches.

    This is the part of each head in the squared error of its layer.
    """
    places = list(attention_modules(model))
    sums: dict[int, list[list[float]]] = {}
    for row in transfer(model, batches, learning_rate=0):
        sums.setdefault(places.index(row["layer"]), []).append(row["heads"])
    return {
        number: [sum(head) / len(head) for head in zip(*found, strict=True)]
        for number, found in sums.items()
    }


def of_layers(errors: Mapping[int, Sequence[float]]) -> dict[int, float]:
    """The error of every layer from the parts of its heads."""
    return {number: sum(heads) ** 0.5 for number, heads in errors.items()}
