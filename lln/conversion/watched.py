"""A loop whose progress is shown as that of training is."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol, TypeVar

from lln.report.progress import shown

T = TypeVar("T")
Item = TypeVar("Item", covariant=True)


class Counted(Protocol[Item]):
    """Items of which it is known how many there are."""

    def __len__(self) -> int: ...
    def __iter__(self) -> Iterator[Item]: ...


def watched(items: Counted[T], label: str = "") -> Iterator[T]:
    """Yield the items, and show under ``label`` how many are done; nothing without a label."""
    if not label or not len(items):
        yield from items
        return
    progress = shown(label)
    progress.start(len(items), 0)
    try:
        for done, item in enumerate(items, start=1):
            yield item
            progress.at(done)
    finally:
        progress.stop()
