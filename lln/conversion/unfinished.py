"""A conversion that may be killed: what is kept of it, and a folder that appears as a whole."""

from __future__ import annotations

import contextlib
import hashlib
import json
import shutil
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from lln.records import files
from lln.records.rows import Row, RowFile, number, read_rows

PROGRESS = ".progress"
BLOCK = 2**22  # bytes of a file that are read at once
EVERY = 50  # updates between two writes of the seconds, as of the stages


class Unfinished:
    """Progress of a conversion in ``OUT/.progress``: settings, scores of stages, their seconds.

    Args:
        out: Folder of the converted model, not there yet or begun by the same settings.
        settings: What decides the result, with a digest of each content that a path may hide.

    Raises:
        ValueError: ``out`` holds something else.
    """

    def __init__(self, out: Path, settings: Mapping[str, Any]) -> None:
        self.out, self.folder = out, out / PROGRESS
        kept = self.folder / "settings.json"
        settings = json.loads(json.dumps(settings, default=str))
        if out.exists() and not out.is_dir():
            raise ValueError(f"--out {out} is a file; pass a folder that is not there yet")
        others = (
            [path.name for path in out.iterdir() if path != self.folder] if out.exists() else ()
        )
        if others:
            raise ValueError(
                f"--out {out} has files already, such as {min(others)}; pass a folder that is not "
                "there yet, or remove it"
            )
        self.resumed = kept.exists()
        if self.resumed:
            _check_same(json.loads(kept.read_text(encoding="utf-8")), settings, out)
        else:
            files.write_text(kept, json.dumps(settings, indent=1))
        scores, seconds = self.folder / "scores.jsonl", self.folder / "seconds.json"
        self._scores: list[Row] = read_rows(scores) if scores.exists() else []
        self.seconds: dict[str, float] = (
            json.loads(seconds.read_text(encoding="utf-8")) if seconds.exists() else {}
        )
        self._calls, self._since = 0, time.perf_counter()

    @contextlib.contextmanager
    def held(self) -> Iterator[None]:
        """Let no other process convert into the same folder inside the block."""
        try:
            with files.held(self.folder / "lock"):
                yield
        except files.InUse as error:
            raise ValueError(f"{self.out} is being written by {error}; wait for it") from None

    def once(self, measure: Callable[[Any], Row]) -> Callable[[Any], Row]:
        """Return ``measure`` whose n-th call is answered from disk if it was made before."""

        def remembered(model: Any) -> Row:
            self._calls += 1
            if self._calls > len(self._scores):
                self._scores.append(without_nan(measure(model)))
                with contextlib.closing(RowFile(self.folder / "scores.jsonl")) as rows:
                    rows.write(self._scores[-1:])
            self._since = time.perf_counter()
            return self._scores[self._calls - 1]

        return remembered

    def took(self, stage: str, step: int, total: int) -> None:
        """Count the seconds of a stage; those of updates that are repeated after a kill do not."""
        if step % EVERY == 0 or step == total:
            now = time.perf_counter()
            self.seconds[stage] = self.seconds.get(stage, 0.0) + now - self._since
            self._since = now
            files.write_text(self.folder / "seconds.json", json.dumps(self.seconds))

    @contextlib.contextmanager
    def published(self) -> Iterator[Path]:
        """A folder beside ``out`` that takes its place after the block; progress goes then."""
        part, old = (self.out.with_name(f".{self.out.name}.{word}") for word in ("part", "old"))
        for rest in (part, old):
            shutil.rmtree(rest, ignore_errors=True)
        part.mkdir(parents=True)
        try:
            yield part
        except BaseException:
            shutil.rmtree(part, ignore_errors=True)
            raise
        self.out.replace(old)
        part.replace(self.out)
        shutil.rmtree(old, ignore_errors=True)


def digest_of_weights(folder: Path) -> str:
    """A digest of the files that make a model: another one in the same place has another."""
    return digest(_blocks([folder / "config.json", *sorted(folder.glob("*.safetensors"))]))


def digest(parts: Iterable[bytes]) -> str:
    """The first digits of SHA-256 of all parts, one after the other."""
    found = hashlib.sha256()
    for part in parts:
        found.update(part)
    return found.hexdigest()[:16]


def _blocks(paths: Iterable[Path]) -> Iterator[bytes]:
    for path in paths:
        yield path.name.encode()
        with path.open("rb") as stream:
            while block := stream.read(BLOCK):
                yield block


def without_nan(value: Any) -> Any:
    """The same with None for NaN and infinity, which JSON does not know."""
    if isinstance(value, Mapping):
        return {str(key): without_nan(each) for key, each in value.items()}
    if isinstance(value, (list, tuple)):
        return [without_nan(each) for each in value]
    if isinstance(value, float):
        return number(value)
    return value


def _check_same(before: Mapping[str, Any], now: Mapping[str, Any], out: Path) -> None:
    for name in {**before, **now}:
        if before.get(name) != now.get(name):
            raise ValueError(
                f"{out} has a conversion that was begun with {name}={before.get(name)}, not "
                f"{now.get(name)}; go on with that, remove {out / PROGRESS}, or pass another --out"
            )
