"""A written file is complete or absent."""

from __future__ import annotations

import subprocess
import sys

import pytest

from lln import files


def test_folders_are_made_and_content_is_replaced(tmp_path):
    path = tmp_path / "new" / "folder" / "row.json"
    assert files.write_text(path, "α") == path
    files.write_text(path, "β")
    assert path.read_text(encoding="utf-8") == "β"
    assert [entry.name for entry in path.parent.iterdir()] == ["row.json"]


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
        "import sys, time; from lln import files\n"
        "with files.locked(sys.argv[1]):\n"
        "    print('in', flush=True); time.sleep(0.3); print('out', flush=True)"
    )
    words = [sys.executable, "-c", code, str(path)]
    with (tmp_path / "said").open("w") as said:
        pair = [subprocess.Popen(words, stdout=said) for _ in range(2)]
        assert all(process.wait() == 0 for process in pair)
    assert (tmp_path / "said").read_text().split() == ["in", "out", "in", "out"]
