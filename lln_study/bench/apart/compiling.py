"""Compiling kernels in many processes at once; what they compile lies in Triton's cache."""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from dataclasses import replace

from lln_study.bench import decoding
from lln_study.bench.apart.groups import in_processes
from lln_study.bench.cases import TRAINING, Case, call, inputs
from lln_study.bench.check import small

MOST_SECONDS = 75  # that compiling is waited for
HEAVY = ("causal", "near_far")  # in the names of ops whose kernels take longest


def compile_ahead(
    cases: Sequence[Case], processes: int | None = None, seconds: float = MOST_SECONDS
) -> None:
    """Run every case once in several processes: compiling takes most of a first run.

    What cannot run is left to the measurement, which says why.
    """
    in_processes(_run_once, worklist(cases), seconds=seconds, processes=processes)


def worklist(cases: Sequence[Case]) -> list[Case]:
    """What to run, so that no two processes compile the same kernels while others have none.

    First one case of every op, width, dtype and pass, at the size that is checked, the heaviest
    first; their kernels serve most lengths. Then the cases themselves, for what is special there.
    """
    ours = list(dict.fromkeys(_little(case) for case in cases if case.impl in ("triton", "mixed")))
    first = list(dict.fromkeys(small(case) for case in ours))
    order = {case: place for place, case in enumerate(first)}
    return list(
        dict.fromkeys([*sorted(first, key=lambda case: (_lightness(case), order[case])), *ours])
    )


def _little(case: Case) -> Case:
    """A step of decoding has the same kernel after few keys, which fit many times."""
    return replace(case, N=small(case).N) if case.op == "decode" else case


def _lightness(case: Case) -> tuple[bool, bool, bool]:
    is_heavy = any(word in case.op for word in HEAVY)
    return case.dtype != "bfloat16", case.passes != TRAINING, not is_heavy


def _run_once(case: Case) -> None:
    with contextlib.suppress(Exception):
        decode = case.op == "decode"
        run = decoding.build(case).run if decode else call(case, inputs(case))
        run()
