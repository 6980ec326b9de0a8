"""How far a run is, on the terminal."""

from __future__ import annotations

import time
from collections.abc import Mapping
from typing import Any, Protocol

from lln.study.train.config import TrainConfig


class Progress(Protocol):
    """What the loop tells while it runs."""

    def start(self, config: TrainConfig, step: int) -> None: ...
    def at(self, step: int) -> None: ...
    def train(self, row: Mapping[str, Any], tokens_per_second: float | None) -> None: ...
    def evaluation(self, row: Mapping[str, Any]) -> None: ...
    def stop(self) -> None: ...


class Silent:
    """Says nothing."""

    def start(self, config: TrainConfig, step: int) -> None: ...
    def at(self, step: int) -> None: ...
    def train(self, row: Mapping[str, Any], tokens_per_second: float | None) -> None: ...
    def evaluation(self, row: Mapping[str, Any]) -> None: ...
    def stop(self) -> None: ...


class Bar:
    """A progress bar with loss and speed, and a line per evaluation.

    Args:
        label: In front of the bar.
    """

    def __init__(self, label: str, console: Any = None) -> None:
        from rich.console import Console

        self.label, self.console = label, console or Console()
        self._bar: Any = None
        self._task: Any = None
        self._drawn = 0.0

    def start(self, config: TrainConfig, step: int) -> None:
        from rich import progress

        self._bar = progress.Progress(
            progress.TextColumn("{task.description}", style="bold"),
            progress.BarColumn(),
            progress.MofNCompleteColumn(),
            progress.TimeElapsedColumn(),
            progress.TimeRemainingColumn(),
            progress.TextColumn("{task.fields[now]}", style="dim"),
            console=self.console,
            transient=True,
        )
        if step:
            self.console.print(f"{self.label}: continues after step {step:,}")
        self._task = self._bar.add_task(self.label, total=config.steps, completed=step, now="")
        self._bar.start()

    def at(self, step: int) -> None:
        now = time.monotonic()
        if now - self._drawn > 0.2:  # drawing at every step would slow down short ones
            self._drawn = now
            self._bar.update(self._task, completed=step)

    def train(self, row: Mapping[str, Any], tokens_per_second: float | None) -> None:
        speed = "" if tokens_per_second is None else f", {tokens_per_second:,.0f} tokens/s"
        scale = "" if row["loss_scale"] is None else f", loss scale {row['loss_scale']:g}"
        text = f"loss {row['loss']:.3f}{scale}{speed}"
        self._bar.update(self._task, completed=row["step"], now=text)

    def evaluation(self, row: Mapping[str, Any]) -> None:
        shown = {
            name: value
            for name, value in row.items()
            if isinstance(value, float) and name != "seconds"
        }
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in shown.items())
        self.console.print(f"{self.label}: step {row['step']:,}: {numbers}", highlight=False)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
