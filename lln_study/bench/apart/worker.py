"""A process that answers one request after the other, and may die of one.

It is started fresh and imports what its function needs, nothing else: no other library, no pool of
threads and no garbage of this process is there to slow down what it measures. While another
works, it sleeps.
"""

from __future__ import annotations

import pickle
import signal
from collections.abc import Callable
from contextlib import suppress
from multiprocessing import get_context
from typing import Any

from lln.device.processes import main_left_out
from lln_study.bench.apart.groups import end_group, lead_group

STARTS = 4  # of a worker, after which it is given up
SECONDS = 90.0  # that an answer is waited for


class Lost(RuntimeError):
    """A worker died of a request, or was ended since it gave no answer; says which."""


class Worker:
    """``answer(request)`` in another process; to be used in a ``with``.

    After a request that was lost, the next one starts it anew.

    Args:
        answer: An importable function. An exception that it raises is raised by :meth:`ask`.
        begin: Called once in the new process, before the first request.
    """

    def __init__(
        self, answer: Callable[[Any], Any], begin: Callable[[], None] | None = None
    ) -> None:
        self.answer, self.begin = answer, begin
        self._process: Any = None
        self._pipe: Any = None
        self._starts = 0

    def __enter__(self) -> Worker:
        return self

    def __exit__(self, *_: object) -> None:
        self.end()

    def start(self) -> None:
        """Start the process if there is none; several can be started before one is asked."""
        if self._process is not None:
            return
        self._starts += 1
        context = get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(
            target=_serve, args=(theirs, self.answer, self.begin), daemon=True
        )
        with main_left_out():
            self._process.start()
        theirs.close()  # so that its end shows here

    def ask(self, request: Any, *, seconds: float = SECONDS) -> Any:
        """The answer to a request.

        Raises:
            Lost: The process died, or gave no answer within ``seconds``.
        """
        if self._process is None and self._starts >= STARTS:
            raise Lost(f"its process was lost {STARTS} times before and is not started again")
        self.start()
        process = self._process
        assert process is not None
        try:
            self._pipe.send(request)
            if not self._pipe.poll(seconds):
                self.end()
                raise Lost(f"no answer within {seconds:g} seconds")
            outcome, raised = self._pipe.recv()
        except (EOFError, OSError) as error:
            process.join(5)
            self.end()
            raise Lost(f"its process died ({_words(process.exitcode)})") from error
        if raised is not None:
            raise raised
        return outcome

    def end(self) -> None:
        """End the process and whatever it started."""
        if self._process is not None:
            self._pipe.close()
            end_group(self._process)
        self._process = None


def _words(code: int | None) -> str:
    if code is not None and code < 0:
        return signal.Signals(-code).name
    return f"exit code {code}"


def _serve(pipe: Any, answer: Callable[[Any], Any], begin: Callable[[], None] | None) -> None:
    """Answer until the other end is closed."""
    lead_group()
    if begin is not None:
        begin()
    while True:
        with suppress(EOFError):
            request = pipe.recv()
            try:
                reply = answer(request), None
            except Exception as error:
                reply = None, _portable(error)
            pipe.send(reply)
            continue
        return


def _portable(error: Exception) -> Exception:
    """The error, as one that can be sent: without what it was raised from, and its traceback."""
    words = (str(error) or type(error).__name__).splitlines()[0]
    with suppress(Exception):  # its class may want other arguments, or be known there only
        return pickle.loads(pickle.dumps(type(error)(words)))
    return RuntimeError(words)
