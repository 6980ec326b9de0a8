"""How far the stages of a conversion are, and how long they still take."""

from __future__ import annotations

import sys
import time
from typing import Any

from lln.report.progress import LINE_SECONDS, bar


def duration(seconds: float) -> str:
    """Say a time in words: "40 s", "12 min", "3.5 h"."""
    if seconds < 100:
        return f"{seconds:.0f} s"
    return f"{seconds / 60:.0f} min" if seconds < 6000 else f"{seconds / 3600:.1f} h"


class Told:
    """Shows updates of a stage: a bar on a terminal, a line every half minute elsewhere."""

    def __init__(self) -> None:
        self.stage = ""
        self._start = self._said = 0.0
        self._first = 0
        self._bar: Any = None
        self._task: Any = None

    def __call__(self, stage: str, step: int, total: int, value: float) -> None:
        """Take the arguments of ``progress`` of :func:`lln.hf.convert`."""
        now = time.monotonic()
        if stage != self.stage:
            self.stage, self._start, self._said, self._first = stage, now, now, step
            self._begin(total)
            if step > 1:
                print(f"{stage}: goes on after update {step - 1:,}", flush=True)
        what = "error" if stage == "transfer" else "loss"
        if self._bar is not None:
            self._bar.update(self._task, completed=step, now=f"{what} {value:.4f}")
        elif now - self._said >= LINE_SECONDS:
            self._said = now
            left = (now - self._start) / max(step - self._first, 1) * (total - step)
            line = f"{stage}: {step:,} of {total:,} updates, {what} {value:.4f}"
            print(f"{line}, {duration(left)} left", flush=True)
        if step == total:
            self.stop()

    def _begin(self, total: int) -> None:
        self.stop()
        if not sys.stdout.isatty():
            return
        self._bar = bar()
        self._task = self._bar.add_task(self.stage, total=total, now="")
        self._bar.start()

    def stop(self) -> None:
        """Take the bar away."""
        if self._bar is not None:
            self._bar.stop()
            self._bar = None
