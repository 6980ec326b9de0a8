"""Milliseconds and megabytes of a call on a CUDA device."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from pathlib import Path

import torch

from lln.device.capture import captured
from lln.device.timing import quantiles
from lln_study.bench.shapes import EAGER, GRAPH, HOST, SERIES

CALLS = {GRAPH: 1, SERIES: 10}
HOST_CALLS = 100  # that the time of the host is taken from
QUANTILES = (0.2, 0.5, 0.8)
LOOP = 20_000  # additions in Python, by which the speed of the host is told


def copy_bandwidth(gigabytes: float = 2.0) -> float:
    """Bytes read and written per second by a device-to-device copy."""
    source = torch.empty(int(gigabytes * 2**30), dtype=torch.uint8, device="cuda").random_()
    target = torch.empty_like(source)
    milliseconds = time_gpu(lambda: target.copy_(source))[1]
    return 2 * source.numel() / (milliseconds * 1e-3)


def time_gpu(run: Callable[[], object], *, budget_ms: int = 60) -> list[float]:
    """Milliseconds at 20, 50 and 80 %, by CUDA events, the cache cleared before every call."""
    from triton.testing import do_bench

    times = do_bench(run, warmup=15, rep=budget_ms, quantiles=list(QUANTILES))
    assert isinstance(times, list)
    return times


def time_host(run: Callable[[], object]) -> list[float]:
    """Milliseconds that Python takes to launch a call, the device idle before each."""
    seconds = []
    for _ in range(HOST_CALLS):
        torch.cuda.synchronize()
        started = time.perf_counter()
        run()
        seconds.append(time.perf_counter() - started)
    torch.cuda.synchronize()
    found = quantiles(seconds)
    return [found.ms_p20, found.ms_p50, found.ms_p80]


def time_launch(run: Callable[[], object], launch: str) -> list[float]:
    """:func:`time_gpu` of one call, launched as :class:`lln_study.bench.shapes.Timed` says."""
    if launch == HOST:
        return time_host(run)
    if launch == EAGER:
        return time_gpu(run)
    return [ms / CALLS[launch] for ms in time_gpu(captured(run, CALLS[launch]))]


def peak_megabytes(run: Callable[[], object]) -> float:
    """Memory allocated at the peak of a call beyond what was there before."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    run()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**20


class Surroundings:
    """What else went on: made before a measurement, asked after it.

    A call from Python takes as long as the host lets it. ``loop_ms`` is a fixed piece of Python
    after the measurement, ``others_busy`` how many cores anything but this process had kept busy
    until then, None where the system does not tell.
    """

    def __init__(self) -> None:
        self._started, self._own, self._all = _now()

    def columns(self) -> dict[str, float | None]:
        """The two columns of a row."""
        ended, own, busy = _now()
        passed = max(ended - self._started, 1e-9)
        others = None
        if self._all is not None and busy is not None:
            others = round(max(0.0, (busy - self._all) - (own - self._own)) / passed, 2)
        return {"others_busy": others, "loop_ms": round(_loop_ms(), 4)}


def _now() -> tuple[float, float, float | None]:
    """Seconds now, seconds of this process on all cores, and those of the whole machine."""
    return time.perf_counter(), time.process_time(), _machine_seconds()


def _machine_seconds(path: Path = Path("/proc/stat")) -> float | None:
    """Seconds that all cores were busy or taken by another machine, since the start of this one."""
    if not path.exists():
        return None
    user, nice, system, _, _, irq, softirq, steal, *_ = map(int, path.read_text().split()[1:11])
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def _loop_ms() -> float:
    """Milliseconds of a loop in Python, the best of three."""
    found = []
    for _ in range(3):
        started = time.perf_counter()
        total = 0
        for number in range(LOOP):
            total += number
        found.append(time.perf_counter() - started)
    return 1e3 * min(found)
