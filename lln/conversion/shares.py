"""How much of its attention every head of a converted model gives to near keys."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from lln.instruments.recording.recorder import attention_calls

Row = dict[str, Any]


@torch.no_grad()
def near_shares(model: Any, batches: Iterable[Mapping[str, Tensor]]) -> list[Row]:
    """Measure the mean weight u of the near keys over all real tokens, a row per layer and head.

    Layers without near and far keys under one normaliser, and heads that keep softmax, have no row.
    Rows of a decoder without far keys count as 1.

    Args:
        batches: Arguments of the model by name.

    Returns:
        Rows with ``layer`` (position among the attention calls of a pass), ``module``, ``head`` and
        ``near_share``.
    """
    sums: dict[int, Tensor] = {}
    tokens: dict[int, float] = {}
    names: dict[int, str] = {}
    for batch in batches:
        given = {name: x.to(model.device) for name, x in batch.items()}
        with attention_calls(model, samples=len(given["input_ids"])) as calls:
            model(**given)
        for call in calls:
            share = call.near_share()
            if share is None:
                continue
            counts = call.tokens.sum(1, dtype=torch.float64)
            total = (share.double() * counts[:, None]).sum(0).cpu()
            sums[call.layer] = sums.get(call.layer, 0) + total
            tokens[call.layer] = tokens.get(call.layer, 0) + counts.sum().item()
            names[call.layer] = call.module
    return [
        {"layer": layer, "module": names[layer], "head": head, "near_share": value}
        for layer, total in sums.items()
        for head, value in enumerate((total / tokens[layer]).tolist())
        if not math.isnan(value)  # of a head that keeps softmax
    ]
