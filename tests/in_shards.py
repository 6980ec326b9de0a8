"""Run pytest in several processes where pytest-xdist is not installed, as on many GPU machines.

    python -m tests.in_shards 8 -m gpu             every eighth test in each of eight processes

The output of a process is shown when it ends; the exit status is 0 if all tests of all passed. When
this is terminated, as by ``timeout``, the processes end with what they know so far.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

SHARD = "LLN_TEST_SHARD"  # "2/8": the third of eight
NO_TESTS = 5  # exit status of pytest where a shard is left without any
RUNNING: list[subprocess.Popen[bytes]] = []


def shard_of(count: int) -> slice:
    """The tests that this process runs of ``count``: all, unless it is a shard."""
    given = os.environ.get(SHARD)
    if given is None:
        return slice(0, count)
    index, shards = map(int, given.split("/"))
    return slice(index, count, shards)


def run(index: int, shards: int, arguments: Sequence[str]) -> int:
    """One process; prints what it printed."""
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", *arguments]
    environment = {**os.environ, SHARD: f"{index}/{shards}"}
    with tempfile.TemporaryFile(mode="w+", encoding="utf-8", errors="replace") as log:
        with subprocess.Popen(
            command, stdout=log, stderr=subprocess.STDOUT, env=environment
        ) as process:
            RUNNING.append(process)
        log.seek(0)
        print(
            f"--- shard {index} of {shards}: exit status {process.returncode}\n{log.read()}",
            flush=True,
        )
    return 0 if process.returncode == NO_TESTS else process.returncode


def interrupt(*_: object) -> None:
    """Have the processes stop after the test they are at, which pytest does when interrupted."""
    for process in RUNNING:
        if process.poll() is None:
            process.send_signal(signal.SIGINT)


def main(arguments: Sequence[str]) -> int:
    shards, rest = int(arguments[0]), arguments[1:]
    with ThreadPoolExecutor(shards) as pool:
        return max(pool.map(lambda index: run(index, shards, rest), range(shards)))


if __name__ == "__main__":
    signal.signal(signal.SIGTERM, interrupt)
    # what a shell starts in the background ignores it, and so would the processes
    signal.signal(signal.SIGINT, signal.default_int_handler)
    sys.exit(main(sys.argv[1:]))
