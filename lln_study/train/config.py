"""What the training loop needs to know, the same for every task."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from lln.records.spelling import as_stored

PRECISIONS = ("fp32", "bf16", "fp16")
SCHEDULES = ("linear", "cosine", "constant")
# Fields that change how a run is carried out or watched, and of what it computes the rounding.
MANNER = frozenset(
    {
        *("accumulation", "compile", "graph", "checkpointing", "shard"),
        *("save_every", "log_every", "keep", "monitor_every", "measures"),
    }
)


@dataclass(frozen=True)
class TrainConfig:
    """A run of :func:`lln_study.train.loop.train`; what only one task needs is in its settings.

    Attributes:
        attention, options: A mechanism of the zoo ("softmax" is torch's SDPA) and its options.
        batch_size: Rows of a step over all processes and all micro-batches.
        accumulation: Micro-batches into which every process cuts its part of a step.
        warmup: Steps during which the rate rises linearly from 0.
        schedule: How it falls to 0 from there: "linear", "cosine"; "constant" stays.
        clip: Largest norm of the gradient; 0 = no limit.
        precision: "bf16" and "fp16" compute under autocast, weights and optimizer stay in float32.
        graph: On one GPU, replay updates from CUDA graphs where they can be recorded.
        checkpointing: Compute activations twice instead of keeping them.
        shard: With several processes, FSDP2 instead of DDP.
        eval_every: Steps between evaluations, the first before training unless α and β are to
            come from its batches; 0 = only at the end.
        patience: Stop after so many evaluations without improvement; 0 = never.
        save_every: Steps between checkpoints; 0 = only at the end.
        keep: Checkpoints that are kept beside the best one; 0 = none is written.
        monitor_every: Steps between measurements of attention; 0 = never.
        measures: What is measured then; the defaults of :func:`lln.instruments.monitor` if empty.
        seed: Of weights, data order, masking and dropout.
    """

    attention: str = "lln_diag"
    options: Mapping[str, Any] = field(default_factory=dict)
    steps: int = 1000
    batch_size: int = 32
    accumulation: int = 1
    learning_rate: float = 5e-4
    warmup: int = 100
    schedule: str = "linear"
    weight_decay: float = 0.01
    betas: tuple[float, float] = (0.9, 0.98)
    epsilon: float = 1e-6
    clip: float = 1.0
    precision: str = "fp32"
    compile: bool = False
    graph: bool = True
    checkpointing: bool = False
    shard: bool = False
    eval_every: int = 0
    patience: int = 0
    save_every: int = 0
    log_every: int = 50
    keep: int = 2
    monitor_every: int = 0
    measures: tuple[str, ...] = ()
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("steps", "batch_size", "accumulation", "log_every"):
            check_whole(name, getattr(self, name), least=1)
        for name in ("warmup", "eval_every", "patience", "save_every", "keep", "monitor_every"):
            check_whole(name, getattr(self, name))
        check_number("learning_rate", self.learning_rate, "positive", lambda x: x > 0)
        check_number("epsilon", self.epsilon, "positive", lambda x: x > 0)
        check_number("clip", self.clip, "0 (no limit) or more", lambda x: x >= 0)
        check_number("weight_decay", self.weight_decay, "0 or more", lambda x: x >= 0)
        for beta in self.betas:
            check_number("betas", beta, "0 or more and less than 1", lambda x: 0 <= x < 1)
        _choose("precision", self.precision, PRECISIONS)
        _choose("schedule", self.schedule, SCHEDULES)
        whole = self.batch_size % self.accumulation == 0
        _check("accumulation", self.accumulation, whole, f"a divisor of {self.batch_size=}")

    def as_dict(self) -> dict[str, Any]:
        """All fields, as JSON holds them."""
        return json.loads(json.dumps(dataclasses.asdict(self), default=str))

    def digest(self, settings: Mapping[str, Any] | None = None) -> str:
        """12 letters that name what is computed: equal for runs that differ in the seed only.

        Args:
            settings: Those of the task.
        """
        fields = {**self.as_dict(), **(settings or {})}
        decisive = {key: fields[key] for key in fields if key not in MANNER and key != "seed"}
        text = json.dumps(as_stored(decisive), sort_keys=True, default=str)
        return hashlib.sha256(text.encode()).hexdigest()[:12]

    def rate(self, step: int) -> float:
        """The learning rate of the update after ``step`` updates."""
        if step < self.warmup:
            return self.learning_rate * (step + 1) / self.warmup
        left = (self.steps - step) / max(self.steps - self.warmup, 1)
        factor = {
            "constant": 1.0,
            "linear": left,
            "cosine": 0.5 * (1 - math.cos(math.pi * left)),
        }[self.schedule]
        return self.learning_rate * factor


def check_whole(name: str, value: object, least: int = 0) -> None:
    """Refuse what is not a whole number, or less than ``least``."""
    wanted = f"at least {least}" if least else "0 or more"
    _check(name, value, isinstance(value, int) and value >= least, f"a whole number, {wanted}")


def check_number(name: str, value: Any, wanted: str, holds: Callable[[float], bool]) -> None:
    """Refuse what is not a finite number, or not as ``wanted``."""
    finite = isinstance(value, (int, float)) and math.isfinite(value)
    _check(name, value, finite and holds(value), f"finite and {wanted}")


def _check(name: str, value: object, holds: bool, wanted: str) -> None:
    if not holds:
        raise ValueError(f"{name}={value} is not possible; it must be {wanted}")


def _choose(name: str, value: str, known: tuple[str, ...]) -> None:
    if value not in known:
        raise ValueError(f"{name}={value!r} is unknown; choose from {', '.join(known)}")
