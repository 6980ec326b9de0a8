"""Shards: together every test once, exit statuses joined, output shown."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from tests import in_shards
from tests.waiting import HANGS, wait_until

ROOT = Path(__file__).parents[1]


def test_every_test_is_in_one_shard(monkeypatch):
    names, seen = list(range(11)), []
    for index in range(4):
        monkeypatch.setenv(in_shards.SHARD, f"{index}/4")
        seen += names[in_shards.shard_of(len(names))]
    assert sorted(seen) == names
    monkeypatch.delenv(in_shards.SHARD)
    assert names[in_shards.shard_of(len(names))] == names


@pytest.mark.slow
@pytest.mark.parametrize("broken", [False, True])
def test_one_failure_fails_the_run_and_is_shown(tmp_path, monkeypatch, capfd, broken):
    lines = [f"def test_{index}(): assert {not (broken and index == 2)}" for index in range(3)]
    (tmp_path / "test_few.py").write_text("\n".join(lines))
    (tmp_path / "conftest.py").write_text(
        f"import sys; sys.path.insert(0, {str(ROOT)!r})\n"
        "from tests.in_shards import shard_of\n"
        "def pytest_collection_modifyitems(items): items[:] = items[shard_of(len(items))]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["in_shards"])
    assert in_shards.main(["4", "-q", str(tmp_path)]) == (1 if broken else 0)
    printed = capfd.readouterr().out
    assert printed.count("--- shard") == 4
    assert ("FAILED" in printed) == broken


@pytest.mark.slow
def test_what_is_known_is_told_when_it_is_terminated(tmp_path):
    """After the first test of a shard; the second waits for a file that never comes."""
    (tmp_path / "test_waits.py").write_text(
        "import pathlib, time\n\n\n"
        "def test_passes():\n    pass\n\n\n"
        "def test_waits():\n"
        f"    pathlib.Path({str(tmp_path / 'waiting')!r}).touch()\n"
        f"    time.sleep({HANGS})\n"
    )
    command = [sys.executable, "-m", "tests.in_shards", "1", "-q", str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, cwd=ROOT) as process:
        wait_until(lambda: (tmp_path / "waiting").exists(), process)
        process.terminate()
        told, _ = process.communicate(timeout=HANGS)
    assert process.returncode != 0
    assert "exit status 2" in told and "1 passed" in told and "KeyboardInterrupt" in told
