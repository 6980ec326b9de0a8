"""Peak memory of the cases on a CPU, measured in a process that runs this module."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from typing import Any

from lln.device import memory
from lln_study.bench.cases import Case, call, inputs


def peaks(cases: Sequence[Case]) -> Iterator[float | None]:
    """Yield the peak of each CPU case in MB (2**20 bytes); None where it cannot be read."""
    return memory.peaks(cases, server="lln_study.bench.memory")


def _measure(fields: dict[str, Any]) -> float:
    case = Case(**fields)
    small = dataclasses.replace(case, N=64)
    call(small, inputs(small))()  # loads code and starts threads, which would count otherwise
    return memory.resident_peak(call(case, inputs(case)))


if __name__ == "__main__":
    memory.serve(_measure)
