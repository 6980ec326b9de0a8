"""Peak memory of a call on a CPU, beyond its inputs.

The number comes from the operating system, not from torch: a child process makes the inputs,
resets the kernel's high-water mark of resident memory (VmHWM), makes the call once and reads the
mark again. So scratch buffers inside the math libraries count as well as tensors. The child returns
freed blocks to the system at once (``MALLOC_MMAP_THRESHOLD_``; torch for ARM has mimalloc instead),
otherwise a block freed before the call and reused in it would not be seen. Linux only; elsewhere
the answer is None.
"""

from __future__ import annotations

import dataclasses
import gc
import json
import os
import subprocess
import sys
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, ClassVar, Protocol

MB = 2**20
RETURN_FREED_BLOCKS = {
    "MALLOC_MMAP_THRESHOLD_": "65536",
    "MALLOC_TRIM_THRESHOLD_": "65536",
    "MIMALLOC_PURGE_DELAY": "0",
}
RESET_PEAK = Path("/proc/self/clear_refs")
STATUS = Path("/proc/self/status")


class Named(Protocol):
    """A dataclass that says what it measures."""

    __dataclass_fields__: ClassVar[dict[str, Any]]

    @property
    def name(self) -> str: ...


def peaks(cases: Sequence[Named], *, server: str) -> Generator[float | None, None, None]:
    """Yield the peak of each CPU case in MB (2**20 bytes), measured in one child process.

    ``server`` is the module that runs :func:`serve` for this kind of case.
    """
    if not RESET_PEAK.exists():
        yield from (None for _ in cases)
        return
    child = subprocess.Popen(
        [sys.executable, "-m", server],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, **RETURN_FREED_BLOCKS},
    )
    assert child.stdin is not None and child.stdout is not None
    with child:
        for case in cases:
            child.stdin.write(json.dumps(dataclasses.asdict(case)) + "\n")
            child.stdin.flush()
            answer = child.stdout.readline()
            if not answer:
                raise RuntimeError(
                    f"the process that measures memory ended during {case.name}; "
                    "it may have been killed for lack of memory: choose a smaller N"
                )
            yield json.loads(answer)
        child.stdin.close()


def _resident(field: str) -> int:
    """A memory field of /proc/self/status in bytes."""
    for line in STATUS.read_text().splitlines():
        if line.startswith(field + ":"):
            return int(line.split()[1]) * 1024
    raise KeyError(field)


def resident_peak(run: Callable[[], object]) -> float:
    """MB by which resident memory grows at the peak of a call."""
    gc.collect()
    RESET_PEAK.write_text("5")
    before = _resident("VmRSS")
    run()
    return (_resident("VmHWM") - before) / MB


def serve(measure: Callable[[dict[str, Any]], float]) -> None:
    """Answer each case on standard input, a line of JSON, by its peak."""
    for line in sys.stdin:
        print(json.dumps(measure(json.loads(line))), flush=True)
