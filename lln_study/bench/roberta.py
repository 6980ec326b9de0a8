"""A step of training RoBERTa on random tokens, to be timed."""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn


@dataclass(frozen=True)
class Setting:
    """A RoBERTa in training."""

    layers: int = 4
    width: int = 256
    heads: int = 4
    batch: int = 8
    tokens: int = 128
    vocabulary: int = 1000

    def words(self) -> str:
        return (
            f"RoBERTa of {self.layers} layers of {self.width}, {self.heads} heads, "
            f"{self.batch} x {self.tokens} tokens, AdamW, seed=0, default measures"
        )


@dataclass(frozen=True)
class Step:
    model: nn.Module
    update: Callable[[], None]


def training_step(
    attention: str,
    setting: Setting,
    device: str,
    *,
    options: Mapping[str, Any] | None = None,
    dropout: float | None = None,
    autocast: bool = False,
) -> Step:
    """A model and one update of it.

    Args:
        options: Of the mechanism.
        dropout: Everywhere in the model; the default of transformers if None.
        autocast: Forward passes in bfloat16.
    """
    from transformers import RobertaConfig, RobertaForMaskedLM

    from lln import hf

    torch.manual_seed(0)
    sizes: dict[str, Any] = {
        "vocab_size": setting.vocabulary,
        "hidden_size": setting.width,
        "num_hidden_layers": setting.layers,
        "num_attention_heads": setting.heads,
        "intermediate_size": 4 * setting.width,
        "max_position_embeddings": setting.tokens + 2,
    }
    if dropout is not None:
        sizes |= {"hidden_dropout_prob": dropout, "attention_probs_dropout_prob": dropout}
    with torch.device(device):  # where drawing the weights takes no time on a GPU
        model: Any = RobertaForMaskedLM(RobertaConfig(**sizes))
    model.train()
    if attention != "softmax":
        hf.replace(model, attention, quiet=True, **(options or {}))
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(5, setting.vocabulary, (setting.batch, setting.tokens), device=device)

    def update() -> None:
        with torch.autocast(torch.device(device).type, torch.bfloat16, enabled=autocast):
            loss = model(input_ids=ids, labels=ids).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return Step(model, update)


def seconds_of(step: Step, device: str) -> float:
    """How long one update takes, to the end of its work on the device."""
    started = time.perf_counter()
    step.update()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - started
