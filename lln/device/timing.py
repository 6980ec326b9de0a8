"""How long a call takes: quantiles over repeated calls, in one process, after a warm-up."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass

import torch

MIN_SAMPLES = 3


@dataclass(frozen=True)
class Timing:
    """Milliseconds per call at three quantiles, and how many calls they rest on."""

    ms_p20: float
    ms_p50: float
    ms_p80: float
    samples: int


def quantiles(seconds: list[float]) -> Timing:
    """Quantiles of a list of durations, linearly interpolated."""
    ordered = torch.tensor(seconds, dtype=torch.float64) * 1e3
    p20, p50, p80 = torch.quantile(ordered, torch.tensor([0.2, 0.5, 0.8]).double()).tolist()
    return Timing(p20, p50, p80, len(seconds))


def time_call(run: Callable[[], object], *, min_seconds: float = 1.0) -> Timing:
    """Call ``run`` once to warm up, then for ``min_seconds`` and at least three times."""
    run()
    seconds: list[float] = []
    while sum(seconds) < min_seconds or len(seconds) < MIN_SAMPLES:
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    return quantiles(seconds)
