"""A written file is complete or absent."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from lln.records import files


def test_folders_are_made_and_content_is_replaced(tmp_path):
    path = tmp_path / "new" / "folder" / "row.json"
    assert files.write_text(path, "α") == path
    files.write_text(path, "β")
    assert path.read_text(encoding="utf-8") == "β"
    assert [entry.name for entry in path.parent.iterdir()] == ["row.json"]


@pytest.mark.parametrize("umask", [0o022, 0o002, 0o077])
def test_permissions_are_those_of_any_new_file(tmp_path, umask):
    before = os.umask(umask)
    try:
        written = files.write_text(tmp_path / "row.json", "α")
        (tmp_path / "any").touch()
    finally:
        os.umask(before)
    assert written.stat().st_mode == (tmp_path / "any").stat().st_mode


def test_a_failed_write_leaves_the_old_file_and_no_rest(tmp_path):
    path = tmp_path / "row.json"
    files.write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        files.write_text(path, "\ud800")  # a lone surrogate has no UTF-8 form
    assert path.read_text() == "old"
    assert [entry.name for entry in tmp_path.iterdir()] == ["row.json"]


def test_a_lock_lets_one_in_at_a_time(tmp_path):
    path = tmp_path / "a" / "lock"
    code = (
        "import sys, time; from lln.records import files\n"
        "with files.locked(sys.argv[1]):\n"
        "    print('in', flush=True); time.sleep(0.3); print('out', flush=True)"
    )
    words = [sys.executable, "-c", code, str(path)]
    with (tmp_path / "said").open("w") as said:
        pair = [subprocess.Popen(words, stdout=said) for _ in range(2)]
        assert all(process.wait() == 0 for process in pair)
    assert (tmp_path / "said").read_text().split() == ["in", "out", "in", "out"]


def short_writes(monkeypatch, *, of: int, then: OSError | None = None):
    """Every write takes ``of`` bytes at most; the second one fails, if ``then`` is given."""
    original, calls = os.write, []

    def write(handle, content):
        calls.append(len(content))
        if then is not None and len(calls) == 2:
            raise then
        return original(handle, content[:of])

    monkeypatch.setattr(os, "write", write)
    return calls


def test_what_is_written_in_parts_is_written_as_a_whole(tmp_path, monkeypatch):
    path = tmp_path / "rows"
    path.write_bytes(b"old\n")
    calls = short_writes(monkeypatch, of=3)
    with path.open("ab", buffering=0) as stream:
        files.append(stream.fileno(), b"0123456789\n", sync=True)
    assert path.read_bytes() == b"old\n0123456789\n" and len(calls) == 4


@pytest.mark.parametrize("of", [3, 0], ids=["failing", "nothing"])
def test_what_cannot_be_appended_as_a_whole_is_taken_back(tmp_path, monkeypatch, of):
    path = tmp_path / "rows"
    path.write_bytes(b"old\n")
    short_writes(monkeypatch, of=of, then=OSError(28, "No space left on device"))
    with path.open("ab", buffering=0) as stream, pytest.raises(OSError, match="No space left"):
        files.append(stream.fileno(), b"0123456789\n")
    assert path.read_bytes() == b"old\n"


@pytest.mark.skipif(not Path("/dev/full").exists(), reason="no /dev/full")
def test_a_full_device_is_said():
    with Path("/dev/full").open("ab", 0) as stream, pytest.raises(OSError, match="No space"):
        files.append(stream.fileno(), b"x")
