"""What a task has to say to the training loop, and what the loop says about a run."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn


class Task:
    """What is learned. Subclasses define the methods that raise here.

    Attributes:
        name: Subject of the result row.
        metric, better: Which number of :meth:`evaluate` chooses the best checkpoint, and whether
            "lower" or "higher" is better.
        settings: What else decides the result beside the TrainConfig (recipe, data, length), in
            JSON values; part of the digest and of the row.
        tokens: Of a row, for tokens per second; 0 = not counted.
        keeps_best: Whether the best weights stay in memory, so that they can be tested although no
            checkpoint has them.
    """

    name: str = ""
    metric: str = "loss"
    better: str = "lower"
    settings: Mapping[str, Any] = {}
    tokens: int = 0
    keeps_best: bool = False

    def prepare(self, device: torch.device) -> None:
        """Load data, onto the device if that is faster; called once, before everything else."""

    def build(self) -> nn.Module:
        """The model, from the seed alone: use :func:`lln.records.seeds.seeded`."""
        raise NotImplementedError

    def batch(self, step: int, rows: slice) -> Mapping[str, Tensor]:
        """Rows of the global batch of a step; a pure function of seed, step and row.

        On any device: the loop moves the tensors.
        """
        raise NotImplementedError

    def loss(self, model: nn.Module, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
        """Sum of the losses and number of terms, as 0-d tensors; the loop divides.

        It divides by the number in the whole global batch, so that accumulation and any number of
        processes give the gradient of one big batch. This function is what ``compile`` compiles.
        """
        raise NotImplementedError

    def is_ready(self, model: nn.Module) -> bool:
        """Whether a model can be evaluated before its first update."""
        return True

    def evaluate(self, model: nn.Module, split: str) -> dict[str, float]:
        """Metrics on "valid" (while training) or "test"; every process computes all of them."""
        raise NotImplementedError

    def save(self, model: nn.Module, folder: Path) -> None:
        """Add to a checkpoint what makes its folder loadable: config.json, a tokenizer."""


@dataclass
class Summary:
    """How a run went.

    Attributes:
        steps, resumed: Updates in all, and those of earlier calls.
        metrics: Of the last evaluation on "valid".
        test: Those on "test" with the last weights, if that was asked for.
        best: Value of the task's metric in the best evaluation, and its step.
        seconds: Of training; evaluation, checkpoints and the first updates (compilation) not
            counted, the latter being ``first_seconds``.
        skipped: Updates that were left out, because the gradient was NaN or infinite.
        diverged: Whether it was given up because they followed each other, or half of all updates
            were such, or the last evaluation has a number that is not finite.
        model: Trained, on its device, in evaluation mode.
        test_best: Loads the weights of the best evaluation into ``model`` and gives their metrics
            on "test"; a ValueError if they are gone.
    """

    steps: int
    resumed: int
    metrics: dict[str, float]
    test: dict[str, float]
    best: tuple[float, int] | None
    loss: float | None
    parameters: int
    seconds: float
    first_seconds: float
    step_ms: float | None
    tokens_per_second: float | None
    peak_mb: float | None
    processes: int
    skipped: int
    diverged: bool
    device: str
    model: nn.Module = field(repr=False)
    test_best: Callable[[], dict[str, float]] = field(repr=False)

    @property
    def was_finished(self) -> bool:
        """Whether an earlier call had done all updates, and may have written the result."""
        return self.resumed == self.steps

    def row(self) -> dict[str, Any]:
        """Columns of a result row; metrics of the evaluation keep their names."""
        best = {} if self.best is None else {"best": self.best[0], "best_step": self.best[1]}
        return {
            **self.metrics,
            **best,
            **{f"test_{name}": value for name, value in self.test.items()},
            "train_loss": self.loss,
            "steps": self.steps,
            "parameters": self.parameters,
            "step_ms": self.step_ms,
            "tokens_per_second": self.tokens_per_second,
            "peak_mb": self.peak_mb,
            "processes": self.processes,
            "train_seconds": round(self.seconds, 2),
            "first_seconds": round(self.first_seconds, 2),
            "skipped": self.skipped,
            "diverged": self.diverged,
        }
