"""Files that are either complete or absent, and locks for what several processes write."""

from __future__ import annotations

import contextlib
import errno
import os
import platform
import tempfile
import time
import warnings
from collections.abc import Iterator
from pathlib import Path

# What flock() answers on file systems that cannot lock.
NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.ENOTSUP, errno.EOPNOTSUPP)


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
        let_others_read(temporary)
        Path(temporary).replace(target)
    except BaseException:
        Path(temporary).unlink(missing_ok=True)
        raise
    return target


def let_others_read(path: str | os.PathLike[str]) -> None:
    """Give a file the permissions of any new one, those that the umask leaves.

    Temporary files, and what safetensors writes, are for their owner alone.
    """
    mask = os.umask(0o077)  # there is no other way to ask for it
    os.umask(mask)
    Path(path).chmod(0o666 & ~mask)


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


class InUse(Exception):
    """Somebody holds a lock; the message says who."""


@contextlib.contextmanager
def locked(path: str | os.PathLike[str]) -> Iterator[None]:
    """Let one process at a time into the block; the lock file stays, and ends with its holder.

    Where there are no such locks (Windows, some network file systems) everybody is let in.
    """
    with _opened(path) as handle:
        _lock(handle, wait=True)
        yield


@contextlib.contextmanager
def held(path: str | os.PathLike[str]) -> Iterator[None]:
    """Hold a lock for the life of the block, as :func:`locked`, but wait for nobody.

    Raises:
        InUse: Somebody else holds it; the message has the number of the process and its machine.
    """
    with _opened(path) as handle:
        for _ in range(5):  # somebody may only be looking, see `holder`
            if _lock(handle, wait=False):
                break
            time.sleep(0.05)
        else:
            raise InUse(_said_in(handle))
        os.ftruncate(handle, 0)
        append(handle, f"process {os.getpid()} on {platform.node()}\n".encode())
        yield


def holder(path: str | os.PathLike[str]) -> str | None:
    """Who holds a lock, as :class:`InUse` says it; None if nobody does."""
    if not Path(path).exists():
        return None
    with _opened(path) as handle:
        return None if _lock(handle, wait=False) else _said_in(handle)


def _said_in(handle: int) -> str:
    return os.read(handle, 200).decode(errors="replace").strip() or "another process"


@contextlib.contextmanager
def _opened(path: str | os.PathLike[str]) -> Iterator[int]:
    """Open a lock file without emptying it: another process may hold it."""
    target = Path(path)
    target.parent.mkdir(parents=True, exist_ok=True)
    handle = os.open(target, os.O_RDWR | os.O_CREAT, 0o644)
    try:
        yield handle
    finally:
        os.close(handle)


def _lock(handle: int, *, wait: bool) -> bool:
    """Take the lock; False if somebody else has it, True where there are no locks."""
    try:
        import fcntl
    except ImportError:
        return True
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except BlockingIOError:
        return False
    except OSError as error:
        if error.errno not in NO_LOCKS:
            raise
        warnings.warn(
            "this file system has no locks: see to it that no other process writes there",
            stacklevel=4,
        )
    return True
