"""Who measures what: a process for CUDA graphs, one for calls from Python, and two for others.

One of them works at a time. Before the first row of an implementation it is checked; what is wrong
is never measured.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from typing import Any

from lln.records.rows import Row
from lln_study.bench import peers, step
from lln_study.bench.apart import measuring
from lln_study.bench.apart.worker import SECONDS, Lost, Worker
from lln_study.bench.check import CheckFailed, small
from lln_study.bench.shapes import EAGER, HOST, Timed

LEAST = 2.0  # seconds that an answer is waited for, however late it is
GRAPHS, PYTHON, LIBRARIES, TRAINING = "graphs", "python", "libraries", "training"


def place(timed: Timed) -> str:
    """The process that measures a case: rivals of one launch share theirs with us."""
    if timed.case.impl == peers.IMPL:
        return LIBRARIES
    if timed.case.op == step.OP:
        return TRAINING
    return PYTHON if timed.launch in (EAGER, HOST) else GRAPHS


class Session:
    """Workers for some cases, all started at once; to be used in a ``with``.

    Args:
        make: What makes a worker, for tests.
        watch: Is told what is measured, and what is left out.
        left: Seconds that the session may still take; an answer is not waited for any longer.
    """

    def __init__(
        self,
        cases: Sequence[Timed],
        watch: Callable[[str], None],
        make: Callable[[], Worker] | None = None,
        left: Callable[[], float] = lambda: math.inf,
    ) -> None:
        self.cases, self.watch, self._left = list(cases), watch, left
        make = make or (lambda: Worker(measuring.answer, measuring.begin))
        self.workers = {name: make() for name in (GRAPHS, *map(place, cases))}
        self.checked = 0
        self._verdicts: dict[object, str] = {}  # why an implementation is not measured, or ""
        self._left_out: set[str] = set()
        self._stack = ExitStack()

    def __enter__(self) -> Session:
        for worker in self.workers.values():
            self._stack.enter_context(worker).start()
        return self

    def __exit__(self, *details: object) -> None:
        self._stack.close()

    def bandwidth(self) -> float:
        """Bytes per second of a copy on the device."""
        return self._ask(self.workers[GRAPHS], measuring.Bandwidth())

    def _ask(self, worker: Worker, request: Any) -> Any:
        return worker.ask(request, seconds=max(LEAST, min(SECONDS, self._left())))

    def rows(self, bandwidth: float) -> Iterator[Row]:
        """A row per case, in order; another library that is wrong has none.

        Raises:
            CheckFailed: One of our implementations is wrong.
        """
        for timed in self.cases:
            reason = self._verdict(timed)
            if timed.case.impl in self._left_out:
                continue
            self.watch(f"{timed.case.name} B={timed.case.B} D={timed.case.D} {timed.launch}")
            yield measuring.blank(timed, reason) if reason else self._measured(timed, bandwidth)

    def _verdict(self, timed: Timed) -> str:
        """Why a case cannot be measured, or nothing; each implementation is checked once."""
        key = small(timed.case)
        if key not in self._verdicts:
            self._verdicts[key] = self._checked(timed)
        return self._verdicts[key]

    def _checked(self, timed: Timed) -> str:
        impl, where = timed.case.impl, place(timed)
        if impl in self._left_out or timed.case.op == step.OP:
            return ""
        # Calls from Python stay alone in their process: the definition is computed elsewhere.
        worker = self.workers[GRAPHS if where == PYTHON else where]
        try:
            self._ask(worker, measuring.Check(timed))
        except Exception as error:
            if isinstance(error, measuring.DeviceLost):
                worker.end()  # the next request starts it anew
            if impl == peers.IMPL:  # it is not ours to fix
                self.watch(f"{impl} is left out: {error}")
                self._left_out.add(impl)
            elif isinstance(error, CheckFailed):
                raise
            return f"its check: {error}"
        self.checked += 1
        return ""

    def _measured(self, timed: Timed, bandwidth: float) -> Row:
        worker = self.workers[place(timed)]
        try:
            return self._ask(worker, measuring.Measure(timed, bandwidth))
        except Lost as error:
            return measuring.blank(timed, str(error))
        except measuring.DeviceLost as error:
            worker.end()
            return measuring.blank(timed, str(error))
