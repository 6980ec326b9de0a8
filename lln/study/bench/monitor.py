"""``lln bench monitor``: what watching attention adds to training, in one run."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from torch import nn

from lln.instruments import monitor
from lln.records import machine
from lln.study.bench import sweep
from lln.study.bench.timing import quantiles

SUBJECT = "monitor"
DEFAULT_RATE = 100  # of lln.instruments.monitor: every that many steps
ATTENTIONS = ("softmax", "lln_diag")


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


def run(
    folder: Path, *, device: str = "cpu", steps: int = 30, console: Console | None = None
) -> Path:
    """Time ordinary and watched steps in turn; write ``monitor_hardware_date.json``."""
    console = console or Console()
    rows = [measure(name, Setting(), device=device, steps=steps) for name in ATTENTIONS]
    for row in rows:
        console.print(
            f"{row['mechanism']}: {row['step_ms']:.1f} ms a step, {row['watched_ms']:.1f} ms a "
            f"watched one, {row['share']:.2%} of the time at every={DEFAULT_RATE}"
        )
    path = sweep.save_json({"rows": rows}, folder, subject=SUBJECT, device=device)
    console.print(f"wrote {path}")
    return path


def measure(attention: str, setting: Setting, *, device: str, steps: int) -> sweep.Row:
    """A row: medians of both kinds of step, and the share of the time the difference takes."""
    step = training_step(attention, setting, device)
    ordinary: list[float] = []
    watched: list[float] = []
    with monitor(step.model, every=2, first_step=0) as seen:
        for number in range(2 * steps + 2):
            seconds = _seconds(step, device)
            if number >= 2:  # the first two warm up
                (watched if number % 2 == 0 else ordinary).append(seconds)
        assert any("layer" in row for row in seen)
    plain, measured = quantiles(ordinary).ms_p50, quantiles(watched).ms_p50
    return {
        "mechanism": attention,
        "step_ms": round(plain, 3),
        "watched_ms": round(measured, 3),
        "share": round((measured - plain) / (DEFAULT_RATE * plain), 5),
        "steps": steps,
        **machine.facts(device),
        "configuration": f"{setting.words()}; {machine.conditions()}",
    }


@dataclass(frozen=True)
class _Step:
    model: nn.Module
    update: Callable[[], None]


def training_step(attention: str, setting: Setting, device: str) -> _Step:
    """A model and one update of it."""
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
    model: Any = RobertaForMaskedLM(RobertaConfig(**sizes))
    model.to(device).train()
    if attention != "softmax":
        hf.replace(model, attention, quiet=True)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(5, setting.vocabulary, (setting.batch, setting.tokens), device=device)

    def update() -> None:
        model(input_ids=ids, labels=ids).loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    return _Step(model, update)


def _seconds(step: _Step, device: str) -> float:
    started = time.perf_counter()
    step.update()
    if device.startswith("cuda"):
        torch.cuda.synchronize()
    return time.perf_counter() - started
