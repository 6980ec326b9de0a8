"""Does a converted decoder still find what it read: generated recall beyond its window."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch

from lln.hf.conversion.retrieval import answers, losses, tasks_for

Row = dict[str, Any]
SEED = 1  # not that of the sequences by which heads are chosen


@torch.no_grad()
def recall_rows(models: Mapping[str, Any], window_of: Any, *, count: int = 8) -> list[Row]:
    """Ask models for what they read further back than a window, a row per model and task.

    Args:
        window_of: The converted model, whose window all of it lies beyond.
        count: Sequences of a task.

    Returns:
        ``model``, ``task``, ``loss`` (−ln p of a token that is asked for, in nats), ``accuracy``,
        ``beyond`` (least distance), ``length``, ``tokens`` that were asked for.
    """
    rows = []
    for task, found in tasks_for(window_of, count=count, seed=SEED).items():
        for name, model in models.items():
            parts = found.one_by_one()
            right = [answers(model, x).argmax(-1).cpu() == x.ids[:, x.asked] for x in parts]
            loss = torch.cat([losses(model, x) for x in parts]).mean().item()
            rows.append(
                {
                    "model": name,
                    "task": task,
                    "loss": loss,
                    "accuracy": torch.cat(right).float().mean().item(),
                    "beyond": found.beyond,
                    "length": found.ids.shape[1],
                    "tokens": found.ids.shape[0] * len(found.asked),
                }
            )
    return rows
