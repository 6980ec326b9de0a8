"""Files that are either complete or absent, and locks for what several processes write."""

from __future__ import annotations

import contextlib
import errno
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


def write_text(path: str | os.PathLike[str], content: str) -> Path:
    """Write ``content`` to ``path``; a reader sees the old file or the new one, never a part.

    Parent folders are made. The temporary file lies in the same folder, because a move is only
    atomic within one file system; it is removed if writing fails.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle, temporary = tempfile.mkstemp(prefix=f".{target.name}.", dir=target.parent)
    try:
        with os.fdopen(handle, "w", encoding="utf-8") as stream:
            stream.write(content)
            stream.flush()
            os.fsync(stream.fileno())
        Path(temporary).chmod(0o644)
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return target


def append(handle: int, content: bytes, *, sync: bool = False) -> None:
    """Write all of ``content`` to the end of an open file, or raise and leave the file as it was.

    The operating system may write a part and call that a success, as on a disk that is nearly full.

    Args:
        handle: Of a file opened for appending, by one writer at a time.
        sync: Return when it is on the disk.
    """
    before, left = os.fstat(handle).st_size, memoryview(content)
    try:
        while left:
            written = os.write(handle, left)
            if written == 0:
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            left = left[written:]
        if sync:
            os.fsync(handle)
    except BaseException:
        with contextlib.suppress(OSError):  # a device or a pipe; what failed first is raised
            os.ftruncate(handle, before)
        raise


@contextlib.contextmanager
def locked(path: str | os.PathLike[str]) -> Iterator[None]:
    """Let one process at a time into the block; the lock file stays, and ends with its holder.

    Where there are no such locks (Windows) everybody is let in.
    """
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    with target.open("w") as stream:
        try:
            import fcntl
        except ImportError:
            yield
            return
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield
