"""Shards: together every test once, exit statuses joined, output shown."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from tests import in_shards


def test_every_test_is_in_one_shard(monkeypatch):
    names, seen = list(range(11)), []
    for index in range(4):
        monkeypatch.setenv(in_shards.SHARD, f"{index}/4")
        seen += names[in_shards.shard_of(len(names))]
    assert sorted(seen) == names
    monkeypatch.delenv(in_shards.SHARD)
    assert names[in_shards.shard_of(len(names))] == names


@pytest.mark.parametrize("broken", [False, True])
def test_one_failure_fails_the_run_and_is_shown(tmp_path, monkeypatch, capfd, broken):
    lines = [f"def test_{index}(): assert {not (broken and index == 2)}" for index in range(3)]
    (tmp_path / "test_few.py").write_text("\n".join(lines))
    root = Path(__file__).parents[1]
    (tmp_path / "conftest.py").write_text(
        f"import sys; sys.path.insert(0, {str(root)!r})\n"
        "from tests.in_shards import shard_of\n"
        "def pytest_collection_modifyitems(items): items[:] = items[shard_of(len(items))]\n"
    )
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["in_shards"])
    assert in_shards.main(["4", "-q", str(tmp_path)]) == (1 if broken else 0)
    printed = capfd.readouterr().out
    assert printed.count("--- shard") == 4
    assert ("FAILED" in printed) == broken
