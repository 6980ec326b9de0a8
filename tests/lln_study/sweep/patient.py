"""Tasks of a cluster that wait until the sweep has heard that they started."""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from lln_study.sweep.cluster import News, Work, work
from tests.waiting import wait_until


def _word(out: Path, process: int) -> Path:
    return out.with_name("heard") / str(process)


def let_go_on(out: Path, process: int) -> None:
    """Tell a process whose sweep has this folder of rows that the sweep has heard of its start."""
    word = _word(out, process)
    word.parent.mkdir(exist_ok=True)
    word.touch()


def patient_work(
    family: Sequence[Work], environment: Mapping[str, str], version: str
) -> Iterator[News]:
    """What a task does; whoever kills it at its start is never too late."""
    for news in work(family, environment, version):
        yield news
        if news.what == "started":
            word = _word(family[0].place.out, os.getpid())
            wait_until(word.exists)
            word.unlink()
