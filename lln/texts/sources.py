"""The user's files, read so that no file can hang a run or fill its memory.

Only regular files are opened: a pipe would wait forever. What is packed may unpack to a limit;
text archives shrink to a fifth or a tenth, and what shrinks to a hundredth was made for harm.
Lines end at line feeds alone, as JSON lines do: other characters that Unicode calls line ends
may stand in a text.
"""

from __future__ import annotations

import contextlib
import io
import lzma
import os
import zipfile
import zlib
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO, TextIO

import numpy as np

from lln.texts.damage import DamagedData

ALWAYS_ALLOWED = 2**30  # bytes that any packed file may hold
BLOCK = 2**20
MOST_TIMES = 100  # times its own size that a larger one may


def check_regular(path: str | os.PathLike[str]) -> Path:
    """The path of a file that can be read to its end; refuses pipes, devices and folders."""
    path = Path(path)
    if not path.is_file():
        kind = "is no regular file" if path.exists() else "does not exist"
        raise DamagedData(f"{path} {kind}; put a file there, or leave it out")
    return path


def open_bytes(path: str | os.PathLike[str]) -> BinaryIO:
    """A file, unpacked on the way if its name ends in .xz."""
    path = check_regular(path)
    return io.BufferedReader(_Unpacked(path), BLOCK) if path.suffix == ".xz" else path.open("rb")


def open_text(path: str | os.PathLike[str], encoding: str = "utf-8") -> TextIO:
    """A file as text, unpacked on the way if its name ends in .xz."""
    return io.TextIOWrapper(open_bytes(path), encoding=encoding)


def read_bytes(path: str | os.PathLike[str]) -> bytes:
    """All of a file, unpacked if its name ends in .xz."""
    with open_bytes(path) as stream:
        return stream.read()


def lines(path: str | os.PathLike[str]) -> Iterator[tuple[int, bytes]]:
    """The lines of a file with their numbers, without those that are blank."""
    with open_bytes(path) as stream:
        for number, line in enumerate(stream, start=1):
            if line.strip():
                yield number, line


def text_of(row: dict[str, Any], field: str) -> str:
    """A text of an object; ValueError says what it has instead."""
    if field not in row:
        raise ValueError(f'has no field "{field}", but {", ".join(map(repr, row)) or "none"}')
    text = row[field]
    if not isinstance(text, str):
        raise ValueError(f"has {text!r:.40} as {field!r}, which is no text")
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise ValueError(f"has half a character in {field!r} ({error.reason})") from None
    return text


@contextlib.contextmanager
def open_npz(path: str | os.PathLike[str]) -> Iterator[Any]:
    """The arrays of an .npz file by name; a name that is not there is a KeyError."""
    path = check_regular(path)
    try:
        with zipfile.ZipFile(path) as archive:
            check_size(path, sum(part.file_size for part in archive.infolist()))
        with path.open("rb") as stream, np.load(stream, allow_pickle=False) as arrays:
            yield arrays
    except DamagedData:
        raise
    except (OSError, EOFError, ValueError, MemoryError, zlib.error, zipfile.BadZipFile) as error:
        raise DamagedData(f"{path} cannot be read: {error}; copy it again") from None


def check_size(path: Path, size: int) -> None:
    """Refuse an archive of parts that have ``size`` bytes together, if that is too much."""
    if size > (limit := _limit(path)):
        raise _too_large(path, limit)


def _limit(path: Path) -> int:
    return max(ALWAYS_ALLOWED, MOST_TIMES * path.stat().st_size)


def _too_large(path: Path, limit: int) -> DamagedData:
    return DamagedData(
        f"{path} has {path.stat().st_size:,} bytes and unpacks to more than {limit:,}, which no "
        "data do; if these are right, unpack the file and remove the packed one"
    )


class _Unpacked(io.RawIOBase):
    """An .xz file whose content is counted as it comes."""

    def __init__(self, path: Path) -> None:
        self.path, self.limit, self.count = path, _limit(path), 0
        self.file = lzma.LZMAFile(path)  # noqa: SIM115 — closed with this one

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        try:
            block = self.file.read(len(buffer))
        except (lzma.LZMAError, EOFError) as error:
            raise DamagedData(
                f"{self.path} cannot be read: {error}; it is damaged, or not what its name says. "
                "Copy it again, or leave it out"
            ) from None
        self.count += len(block)
        if self.count > self.limit:
            raise _too_large(self.path, self.limit)
        buffer[: len(block)] = block
        return len(block)

    def close(self) -> None:
        self.file.close()
        super().close()
