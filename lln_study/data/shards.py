"""Generated data in shards: parallel, resumable, the same whatever the number of processes.

A shard is a pure function of (seed, number), so that any process may make it and an interrupted run
goes on where it stopped. All of them together become one ``.npy`` file per array.
"""

from __future__ import annotations

import json
import os
import shutil
import zipfile
from collections.abc import Callable, Iterator
from concurrent.futures import as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from lln.device.processes import processes
from lln.records import files

Arrays = dict[str, np.ndarray]
Progress = Callable[[int, int], None]
DONE = "complete.json"


@dataclass(frozen=True)
class Recipe:
    """What is generated.

    Attributes:
        name: Folder that the data get, beside other recipes.
        make: ``make(generator, count)`` returns arrays with ``count`` rows; a function of a module,
            so that other processes can import it.
        count: Rows in all.
        shard: Rows of one shard; part of what the data are, since each has its own random numbers.
    """

    name: str
    make: Callable[[np.random.Generator, int], Arrays]
    count: int
    seed: int = 0
    shard: int = 1000

    @property
    def shards(self) -> int:
        return -(-self.count // self.shard)

    def facts(self) -> dict[str, Any]:
        return {"name": self.name, "count": self.count, "seed": self.seed, "shard": self.shard}

    def make_shard(self, number: int) -> Arrays:
        """Shard ``number``, from random numbers of its own; the last one is cut, not different."""
        generator = np.random.default_rng([self.seed, number])
        rows = min(self.shard, self.count - number * self.shard)
        return {name: array[:rows] for name, array in self.make(generator, self.shard).items()}


def generate(
    recipe: Recipe, folder: Path, *, workers: int | None = None, progress: Progress | None = None
) -> Arrays:
    """The arrays of a recipe, from ``folder`` or made there.

    Args:
        workers: Processes; as many as there are processors by default. 1 works in this one.
        progress: Called with the shards that are done and their number.

    Returns:
        Arrays that are mapped from their files.
    """
    target = folder / recipe.name
    target.mkdir(parents=True, exist_ok=True)
    with _only_one(target):
        if _complete(target) != recipe.facts():
            missing = [n for n in range(recipe.shards) if not _is_whole(_path(target, n))]
            for done, _ in enumerate(_made(recipe, target, missing, workers), start=1):
                if progress is not None:
                    progress(recipe.shards - len(missing) + done, recipe.shards)
            _join(recipe, target)
    return {path.stem: np.load(path, mmap_mode="r") for path in sorted(target.glob("*.npy"))}


@contextmanager
def _only_one(folder: Path) -> Iterator[None]:
    """Let one process make the data; others that want the same wait and then find them."""
    with (folder / ".lock").open("w") as stream:
        try:
            import fcntl
        except ImportError:  # Windows: two at once would do the same work twice
            yield
            return
        fcntl.flock(stream, fcntl.LOCK_EX)
        yield


def _complete(folder: Path) -> dict[str, Any] | None:
    """What the finished files in ``folder`` are, None if they are not finished."""
    try:
        facts = json.loads((folder / DONE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    names = facts.pop("arrays", [])
    whole = names and all(_rows(folder / f"{name}.npy") == facts.get("count") for name in names)
    return facts if whole else None


def _rows(path: Path) -> int | None:
    """Count the rows of an array in a file; None if it is not there or was cut off."""
    try:
        return len(np.load(path, mmap_mode="r"))
    except (OSError, EOFError, ValueError):
        return None


def _path(folder: Path, number: int) -> Path:
    return folder / "shards" / f"{number:05d}.npz"


def _is_whole(path: Path) -> bool:
    """Whether a shard is complete; one that was cut off is made again."""
    try:
        with zipfile.ZipFile(path) as archive:
            return archive.testzip() is None
    except (OSError, zipfile.BadZipFile):
        return False


def _made(recipe: Recipe, folder: Path, numbers: list[int], workers: int | None) -> Iterator[int]:
    """Make the shards, in any order; yields as they are written."""
    workers = min(workers or os.cpu_count() or 1, len(numbers))
    (folder / "shards").mkdir(exist_ok=True)
    if workers <= 1:
        yield from (_write(recipe, folder, number) for number in numbers)
        return
    with processes(workers) as submit:
        waiting = [submit(_write, recipe, folder, number) for number in numbers]
        yield from (future.result() for future in as_completed(waiting))


def _write(recipe: Recipe, folder: Path, number: int) -> int:
    path = _path(folder, number)
    temporary = path.with_suffix(f".{os.getpid()}")
    with temporary.open("wb") as stream:
        arrays: dict[str, Any] = {**recipe.make_shard(number)}
        np.savez(stream, **arrays)
    temporary.replace(path)
    return number


def _join(recipe: Recipe, folder: Path) -> None:
    """One file per array; the shards are removed when all of them are written."""
    (folder / DONE).unlink(missing_ok=True)
    for old in folder.glob("*.npy"):
        old.unlink()
    with np.load(_path(folder, 0)) as first:
        whole = {
            name: np.lib.format.open_memmap(
                folder / f"{name}.npy", "w+", array.dtype, (recipe.count, *array.shape[1:])
            )
            for name, array in first.items()
        }
    for number in range(recipe.shards):
        with np.load(_path(folder, number)) as shard:
            for name, array in whole.items():
                start = number * recipe.shard
                array[start : start + recipe.shard] = shard[name]
    for array in whole.values():
        array.flush()
    facts = {**recipe.facts(), "arrays": sorted(whole)}
    files.write_text(folder / DONE, json.dumps(facts, indent=1) + "\n")
    shutil.rmtree(folder / "shards")
