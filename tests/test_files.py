"""A written file is complete or absent."""

from __future__ import annotations

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
