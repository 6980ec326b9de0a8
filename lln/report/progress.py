"""How far a run is: a bar on a terminal, lines elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Mapping
from typing import Any, Protocol

LINE_SECONDS = 30.0


class Progress(Protocol):
    """What the loop tells while it runs."""

    def finished(self, step: int) -> None: ...
    def start(self, total: int, step: int) -> None: ...
    def at(self, step: int) -> None: ...
    def train(self, row: Mapping[str, Any], tokens_per_second: float | None) -> None: ...
    def evaluation(self, row: Mapping[str, Any]) -> None: ...
    def stop(self) -> None: ...


class Silent:
    """Says nothing."""

    def finished(self, step: int) -> None: ...
    def start(self, total: int, step: int) -> None: ...
    def at(self, step: int) -> None: ...
    def train(self, row: Mapping[str, Any], tokens_per_second: float | None) -> None: ...
    def evaluation(self, row: Mapping[str, Any]) -> None: ...
    def stop(self) -> None: ...


def shown(label: str) -> Progress:
    """Choose a bar if the output is a terminal, lines if it goes to a file or a pipe."""
    return Bar(label) if sys.stdout.isatty() else Lines(label)


class Lines:
    """A line per evaluation, and one every half minute.

    Args:
        label: In front of every line.
    """

    def __init__(self, label: str) -> None:
        self.label, self.total, self.now = label, 0, ""
        self._said = time.monotonic()

    def say(self, text: str) -> None:
        """Print a line."""
        print(f"{self.label}: {text}", flush=True)

    def finished(self, step: int) -> None:
        self.say(f"finished before, with step {step:,}; nothing is left to train")

    def start(self, total: int, step: int) -> None:
        self.total, self._said = total, time.monotonic()
        if step:
            self.say(f"continues after step {step:,}")

    def at(self, step: int) -> None:
        now = time.monotonic()
        if now - self._said >= LINE_SECONDS:
            self._said = now
            self.say(f"step {step:,} of {self.total:,}{self.now and ', '}{self.now}")

    def train(self, row: Mapping[str, Any], tokens_per_second: float | None) -> None:
        speed = "" if tokens_per_second is None else f", {tokens_per_second:,.0f} tokens/s"
        scale = "" if row["loss_scale"] is None else f", loss scale {row['loss_scale']:g}"
        self.now = f"loss {row['loss']:.3f}{scale}{speed}"

    def evaluation(self, row: Mapping[str, Any]) -> None:
        shown = {
            name: value
            for name, value in row.items()
            if isinstance(value, float) and name != "seconds"
        }
        numbers = ", ".join(f"{name} {value:.4g}" for name, value in shown.items())
        self.say(f"step {row['step']:,}: {numbers}")

    def stop(self) -> None: ...


def counting(console: Any = None, *, transient: bool = False) -> Any:
    """A bar of rich with the number of what is done and the time; ``transient`` lets it vanish."""
    from rich import progress

    return progress.Progress(
        progress.TextColumn("{task.description}", style="bold"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        console=console,
        transient=transient,
    )


def bar(console: Any = None) -> Any:
    """A bar of rich with steps, times and a field ``now``; it vanishes when it is stopped."""
    from rich import progress

    return progress.Progress(
        progress.TextColumn("{task.description}", style="bold"),
        progress.BarColumn(),
        progress.MofNCompleteColumn(),
        progress.TimeElapsedColumn(),
        progress.TimeRemainingColumn(),
        progress.TextColumn("{task.fields[now]}", style="dim"),
        console=console,
        transient=True,
    )


class Bar(Lines):
    """A progress bar with loss and speed, and a line per evaluation."""

    def __init__(self, label: str, console: Any = None) -> None:
        from rich.console import Console

        super().__init__(label)
        self.console = console or Console()
        self._bar: Any = None
        self._task: Any = None
        self._drawn = 0.0

    def say(self, text: str) -> None:
        self.console.print(f"{self.label}: {text}", highlight=False)

    def start(self, total: int, step: int) -> None:
        super().start(total, step)
        self._bar = bar(self.console)
        self._task = self._bar.add_task(self.label, total=total, completed=step, now="")
        self._bar.start()

    def at(self, step: int) -> None:
        now = time.monotonic()
        if now - self._drawn > 0.2:  # drawing at every step would slow down short ones
            self._drawn = now
            self._bar.update(self._task, completed=step)

    def train(self, row: Mapping[str, Any], tokens_per_second: float | None) -> None:
        super().train(row, tokens_per_second)
        self._bar.update(self._task, completed=row["step"], now=self.now)

    def stop(self) -> None:
        if self._bar is not None:
            self._bar.stop()
