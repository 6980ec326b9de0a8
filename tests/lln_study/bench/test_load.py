"""``lln bench --load``: busy processes that compute, and that are gone afterwards."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lln_study.bench.load import busy_processes
from tests.waiting import HANGS, wait_until

needs_proc = pytest.mark.skipif(not Path("/proc/self/stat").exists(), reason="needs /proc")


def _fields_of(pid):
    return Path(f"/proc/{pid}/stat").read_text().rsplit(")", 1)[1].split()


def _seconds_of(pid):
    used, by_system = _fields_of(pid)[11:13]
    return (int(used) + int(by_system)) / os.sysconf("SC_CLK_TCK")


def _alive(pid):
    try:
        return _fields_of(pid)[0] != "Z"  # dead, and nobody has asked how it ended
    except (FileNotFoundError, ProcessLookupError):
        return False


@needs_proc
def test_they_compute_and_end_with_the_block():
    with busy_processes(2) as started:
        wait_until(lambda: min(_seconds_of(p.pid) for p in started) >= 0.1)
        assert all(p.poll() is None for p in started)
    assert all(p.poll() is not None for p in started)


def test_none_is_none():
    with busy_processes(0) as started:
        assert started == []


KILLED = """
import os
from lln_study.bench.load import busy_processes
with busy_processes(1) as (process,):
    print(process.pid, flush=True)
    os._exit(9)
"""


@needs_proc
def test_they_do_not_outlive_a_killed_benchmark():
    done = subprocess.run(
        [sys.executable, "-c", KILLED], capture_output=True, text=True, timeout=HANGS
    )
    pid = int(done.stdout)
    wait_until(lambda: not _alive(pid))
