"""What a worker of ``lln bench gpu`` answers: a check, a row, the bandwidth of a copy.

A call from Python is as fast as its process lets it be. Nothing but torch and lln is imported here
until a request needs it.
"""

from __future__ import annotations

import gc
from dataclasses import dataclass
from typing import Any

import torch

from lln_study.bench import decoding, step
from lln_study.bench.apart.clock import (
    Surroundings,
    copy_bandwidth,
    peak_megabytes,
    time_launch,
)
from lln_study.bench.cases import call, inputs
from lln_study.bench.check import check as check_calls
from lln_study.bench.shapes import HOST, Timed, floor_share

Columns = dict[str, Any]
TIMES = ("ms_p20", "ms_p50", "ms_p80")


@dataclass(frozen=True)
class Check:
    """Compare an implementation with its definition."""

    timed: Timed


@dataclass(frozen=True)
class Measure:
    """Make the row of a case; ``bandwidth`` is that of a copy, in bytes per second."""

    timed: Timed
    bandwidth: float


@dataclass(frozen=True)
class Bandwidth:
    """Measure how fast a copy is."""


def begin() -> None:
    """Get the device ready; what is here by now is no garbage, and is not looked through again."""
    torch.cuda.synchronize()
    gc.collect()
    gc.freeze()


class DeviceLost(RuntimeError):
    """The device refuses whatever this process asks for: the end of the process, and why."""


def answer(request: Check | Measure | Bandwidth) -> Any:
    """Do what is asked, and give the memory back for others to measure with.

    A case that cannot be measured gives a row that says why.

    Raises:
        DeviceLost: Nothing more can be asked of this process.
    """
    try:
        if isinstance(request, Bandwidth):
            return copy_bandwidth()
        if isinstance(request, Check):
            return check(request.timed)
        return measure(request.timed, request.bandwidth)
    except Exception as error:
        words = str(error) or type(error).__name__
        if not _device_answers():
            raise DeviceLost(words) from error
        if isinstance(request, Measure):
            return blank(request.timed, words)
        raise
    finally:
        if torch.cuda.is_available() and _device_answers():
            torch.cuda.empty_cache()


def _device_answers() -> bool:
    try:
        if torch.cuda.is_available():
            torch.cuda.synchronize()
    except RuntimeError:
        return False
    return True


def check(timed: Timed) -> None:
    """Compare the implementation of a case with the float64 definition.

    A step of training has no definition.

    Raises:
        CheckFailed: It computes something else.
    """
    case = timed.case
    if case.op == "decode":
        decoding.check(case)
    elif case.op != step.OP:
        check_calls([case])


def blank(timed: Timed, error: str = "") -> Columns:
    """The row of a case that was not measured, and why."""
    missing = dict.fromkeys((*TIMES, "peak_mb", "floor_share"))
    surroundings = {"others_busy": None, "loop_ms": None}
    row = {**timed.case.row(), "launch": timed.launch, **missing}
    return {**row, "error": error.splitlines()[0][:200] if error else "", **surroundings}


def measure(timed: Timed, bandwidth: float) -> Columns:
    """The row of a case, without the facts of the machine."""
    row, around = blank(timed), Surroundings()
    found = MEASURED.get(timed.case.op, _call)(timed, bandwidth)
    return {**row, **found, **around.columns()}


def _call(timed: Timed, bandwidth: float) -> Columns:
    case = timed.case
    run = call(case, inputs(case))
    peak = peak_megabytes(run)
    times = time_launch(run, timed.launch)
    share = None if timed.launch == HOST else floor_share(case, times[1], bandwidth)
    return {**_times(times), "peak_mb": round(peak, 1), "floor_share": share}


def _decoding(timed: Timed, bandwidth: float) -> Columns:
    made = decoding.build(timed.case)
    times = time_launch(made.run, timed.launch)
    return {**_times(times), "floor_share": _share(made.moved, times, bandwidth)}


def _training(timed: Timed, bandwidth: float) -> Columns:
    return _times(step.milliseconds(timed.case))


MEASURED = {"decode": _decoding, step.OP: _training}


def _times(found: list[float]) -> Columns:
    return {name: round(ms, 5) for name, ms in zip(TIMES, found, strict=True)}


def _share(moved: int, times: list[float], bandwidth: float) -> float:
    return round(moved / (times[1] * 1e-3 * bandwidth), 4)
