"""The folder of a run: whose it is, and that one process at a time works in it.

with held(folder):                        others are told who is at work there
    compare(folder, identity, settings)   raises if another run is in it
    ...
    claim(folder, identity, settings)     writes run.json, when the run has shown that it runs
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from lln.records import files

RUN, LOCK = "run.json", ".lock"
_held: dict[Path, int] = {}  # folders that this process holds, and which of its threads


def is_first_process() -> bool:
    """Whether this is the process that writes, of all that ``torchrun`` may have started."""
    return os.environ.get("RANK", "0") == "0"


@contextlib.contextmanager
def held(folder: str | os.PathLike[str] | None) -> Iterator[None]:
    """Keep all others out of a folder for the life of the block.

    The lock is one of the operating system, which ends it with the process, however that may be. Of
    several processes of one run the first holds it for all. A thread that holds a folder may ask
    again. None holds nothing.

    Raises:
        ValueError: Another process, or thread, is at work there.
    """
    path = None if folder is None else Path(folder).resolve()
    if path is None or not is_first_process() or _held.get(path) == threading.get_ident():
        yield
        return
    try:
        with files.held(path / LOCK):
            _held[path] = threading.get_ident()
            try:
                yield
            finally:
                del _held[path]
    except files.InUse as error:
        raise ValueError(
            f"{folder} is in use by {error}; wait until that has ended, or choose another folder"
        ) from None


def holder(folder: Path) -> str | None:
    """Who is at work in a folder, such as "process 12 on host"; None if nobody is."""
    return files.holder(folder / LOCK)


def read(folder: Path) -> dict[str, Any]:
    """What run.json says: ``identity`` and ``configuration``."""
    path = folder / RUN
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        identity, configuration = content["identity"], dict(content["configuration"])
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        raise ValueError(
            f"{path} cannot be read, so nobody knows what run this is; choose another folder, or "
            "remove this one"
        ) from None
    return {"identity": identity, "configuration": configuration}


def compare(folder: Path, identity: str, configuration: Mapping[str, Any]) -> None:
    """Raise a ValueError with what differs if the folder holds another run."""
    if not (folder / RUN).exists():
        return
    there = read(folder)
    if there["identity"] != identity:
        other = there["configuration"]
        keys = [key for key in configuration if configuration[key] != other.get(key)]
        said = ", ".join(f"{key}={other.get(key)!r} and not {configuration[key]!r}" for key in keys)
        raise ValueError(
            f"{folder} holds a run with {said or 'other settings'}; choose another folder, or "
            "remove this one to start again"
        )


def claim(folder: Path, identity: str, configuration: Mapping[str, Any]) -> None:
    """Write run.json."""
    content = {"identity": identity, "configuration": configuration}
    files.write_text(folder / RUN, json.dumps(content, indent=1) + "\n")
