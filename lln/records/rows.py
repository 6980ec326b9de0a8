"""Rows that survive the process that wrote them: one JSON object per line, appended and flushed.

A process that is killed can leave a line that ends in the middle, and only as the last one. The
reader leaves it out, and a writer that continues the file removes it.
"""

from __future__ import annotations

import json
import math
import os
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

from lln.records import files

Row = dict[str, Any]
T = TypeVar("T")


def read_rows(path: str | os.PathLike[str]) -> list[Row]:
    """Read the complete rows of a file; a torn last line is left out.

    Raises:
        ValueError: A line in the middle is not a JSON object; the message has its number.

    Example:
        >>> bits = [row["entropy"] for row in read_rows("runs/a.jsonl") if row.get("layer") == 0]
    """
    *lines, _torn = Path(path).read_bytes().split(b"\n")
    rows = []
    for number, line in enumerate(lines, start=1):
        try:
            rows.append(parse_row(line))
        except ValueError:
            raise ValueError(
                f"{path}, line {number} is not a JSON object: {line[:60]!r}; "
                "the file was edited or is not one of rows"
            ) from None
    return rows


def parse_row(line: bytes) -> Row:
    """Return a line of JSON as an object; ValueError says what it is instead."""
    try:
        row = json.loads(line)
    except RecursionError:
        raise ValueError("is nested too deeply") from None
    if not isinstance(row, dict):
        raise ValueError("is no object")
    return row


class RowFile:
    """Appends rows to a file; each :meth:`write` is written as a whole, or fails."""

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self._remove_torn_line()
        self._stream = self.path.open("ab", buffering=0)

    def write(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Append rows; NaN and infinity, which JSON does not know, are refused.

        Raises:
            OSError: They could not be written, as on a full disk; the file has no part of them.
        """
        text = "".join(json.dumps(row, allow_nan=False) + "\n" for row in rows)
        files.append(self._stream.fileno(), text.encode())

    def close(self) -> None:
        self._stream.close()

    def _remove_torn_line(self) -> None:
        if not self.path.exists():
            return
        with self.path.open("rb+") as stream:
            content = stream.read()
            stream.truncate(content.rfind(b"\n") + 1)


def number(value: float) -> float | None:
    """Return None instead of NaN and infinity: not measured, or without a finite value."""
    return value if math.isfinite(value) else None


def append_row(path: str | os.PathLike[str], row: Mapping[str, Any], *, once: bool = False) -> None:
    """Add a row to a file that several processes may append to at once.

    The line is written under a lock, and on the disk when this returns. A line that another process
    left torn is removed first.

    Args:
        once: Unless the file has a row of the same configuration and seed.

    Raises:
        OSError: The row could not be written as a whole; the file has no part of it.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    line = (json.dumps(row, allow_nan=False) + "\n").encode()
    with files.locked(target.with_name(f".{target.name}.lock")):
        if once and has_row(target, *key_of(row)):
            return
        handle = os.open(target, os.O_RDWR | os.O_CREAT | os.O_APPEND, 0o644)
        try:
            content = target.read_bytes()
            os.ftruncate(handle, content.rfind(b"\n") + 1)
            files.append(handle, line, sync=True)
        finally:
            os.close(handle)


def key_of(row: Mapping[str, Any]) -> tuple[Any, Any]:
    """What names a row in its file; a row that somebody else has written may have no such names."""
    return row.get("digest"), row.get("seed")


def has_row(path: str | os.PathLike[str], digest: str, seed: int) -> bool:
    """Whether a configuration has its row already."""
    return find_row(path, digest, seed) is not None


def find_row(path: str | os.PathLike[str], digest: str, seed: int) -> Row | None:
    """The last row of a configuration, if it has one already."""
    rows = read_rows(path) if Path(path).exists() else []
    return next((row for row in reversed(rows) if key_of(row) == (digest, seed)), None)


def thinned(values: Sequence[T], points: int) -> list[T]:
    """Keep at most so many of the values, evenly spread, with the first and the last."""
    if len(values) <= points:
        return list(values)
    return [values[round(i * (len(values) - 1) / (points - 1))] for i in range(points)]
