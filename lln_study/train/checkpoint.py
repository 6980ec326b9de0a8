"""Checkpoints: folders that are complete or absent, and are read only if every byte is right.

    checkpoints/step-00000200/
        model.safetensors  config.json ...   a model folder, as transformers and lln.hf.load read it
        optimizer.safetensors                moments of the optimizer, "parameter name/moment"
        state.json                           step, loss scale, best metric, sums of the curve
        manifest.json                        whose it is, and size and SHA-256 of every file

A folder is written under a temporary name, reaches the disk, and is renamed. Tensors are in
safetensors, the rest is JSON: loading runs no code.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import re
import shutil
import warnings
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from lln.records.files import let_others_read

FORMAT = "lln checkpoint 1"
MANIFEST, STATE = "manifest.json", "state.json"
MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"
NAME = re.compile(r"^step-(\d{8,})$")
# What reading a file of JSON and its fields may raise, whatever somebody wrote into it.
UNREADABLE = (
    *(OSError, ValueError, TypeError, KeyError, AttributeError),
    *(OverflowError, RecursionError),
)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint that was verified."""

    folder: Path
    state: dict[str, Any]

    @property
    def step(self) -> int:
        return self.state["step"]

    def tensors(self, name: str) -> dict[str, Tensor]:
        """:data:`MODEL` or :data:`OPTIMIZER`, on the CPU."""
        from safetensors import SafetensorError
        from safetensors.torch import load_file

        try:
            return load_file(self.folder / name)
        except SafetensorError as error:
            raise ValueError(
                f"{self.folder / name} cannot be read: {error}; remove that checkpoint"
            ) from None


def place(parent: Path, step: int) -> Path:
    """The folder of a step."""
    return parent / f"step-{step:08d}"


def write(
    parent: Path,
    *,
    model: Mapping[str, Tensor],
    optimizer: Mapping[str, Tensor],
    state: Mapping[str, Any],
    identity: str,
    extra: Callable[[Path], None] | None = None,
) -> Path:
    """Write the checkpoint of ``state["step"]`` and return its folder.

    Args:
        identity: Of the run; :func:`newest` refuses checkpoints of another.
        extra: Writes more files into the folder, such as config.json and a tokenizer.

    Raises:
        OSError: It could not be written, as on a full disk; nothing is left of it.
    """
    target = place(parent, state["step"])
    temporary = parent / f".writing-{target.name}"
    shutil.rmtree(temporary, ignore_errors=True)  # of a run that was killed here
    try:
        with _as_os_error(target):
            temporary.mkdir(parents=True)
            if extra is not None:
                extra(temporary)
            _write_files(temporary, {MODEL: model, OPTIMIZER: optimizer}, state, identity)
            shutil.rmtree(target, ignore_errors=True)  # one that was found damaged
            temporary.rename(target)
            _to_disk(parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    return target


def _write_files(
    folder: Path,
    tensors: Mapping[str, Mapping[str, Tensor]],
    state: Mapping[str, Any],
    identity: str,
) -> None:
    """Write tensors and state, and the manifest over all that is there; all reaches the disk."""
    from safetensors.torch import save_file

    for name, values in tensors.items():
        whole = {key: value.contiguous() for key, value in values.items()}
        save_file(whole, folder / name, metadata={"format": "pt"})
        let_others_read(folder / name)
    (folder / STATE).write_text(json.dumps(state, allow_nan=False, indent=1), encoding="utf-8")
    paths = sorted(path for path in folder.rglob("*") if path.is_file())
    manifest = {
        "format": FORMAT,
        "identity": identity,
        "files": {str(path.relative_to(folder)): _print_of(path) for path in paths},
    }
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for path in (*paths, folder / MANIFEST, folder):
        _to_disk(path)


@contextlib.contextmanager
def _as_os_error(target: Path) -> Iterator[None]:
    """Failures of the file system as one kind of error; the libraries have kinds of their own."""
    from safetensors import SafetensorError

    try:
        yield
    except Exception as error:
        bare = type(error) is Exception  # what tokenizers raises
        if not bare and not isinstance(error, (OSError, SafetensorError)):
            raise
        raise OSError(
            f"checkpoint {target} cannot be written: {error}; make room on the disk, then the same "
            "call goes on from the checkpoint before it"
        ) from error


def newest(parent: Path, identity: str) -> Checkpoint | None:
    """The latest checkpoint that is whole and of this run; those that are not are named."""
    for step, folder in reversed(_numbered(parent)):
        reason = fault(folder, identity)
        if reason is None:
            state = _state(folder)
            if state is not None and state.get("step") == step:
                return Checkpoint(folder, state)
            reason = f"its {STATE} is not that of step {step}"
        warnings.warn(
            f"checkpoint {folder} is not used: {reason}; looking for an older one", stacklevel=2
        )
    return None


def _numbered(parent: Path) -> list[tuple[int, Path]]:
    """Folders with a name as :func:`place` gives it, in the order of their steps."""
    named = ((NAME.match(path.name), path) for path in parent.glob("step-*") if path.is_dir())
    return sorted((int(match[1]), path) for match, path in named if match)


def _state(folder: Path) -> dict[str, Any] | None:
    try:
        state = json.loads((folder / STATE).read_text(encoding="utf-8"))
    except UNREADABLE:
        return None
    return state if isinstance(state, dict) else None


def fault(folder: Path, identity: str | None = None, *, unread: Collection[str] = ()) -> str | None:
    """Why a checkpoint cannot be used; None if it can.

    Args:
        identity: Of the run it must belong to; None for any.
        unread: Files that the caller does not need, which are not looked at.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = {
            name: (int(entry["bytes"]), str(entry["sha256"]))
            for name, entry in manifest["files"].items()
        }
        kind, owner = manifest["format"], manifest["identity"]
    except FileNotFoundError:
        return f"it has no {MANIFEST}, so it is not one of ours"
    except UNREADABLE:
        return f"its {MANIFEST} cannot be read"
    if kind != FORMAT:
        return f"its format is {kind!r} and not {FORMAT!r}"
    if identity is not None and owner != identity:
        return f"it belongs to another run ({owner}, this one is {identity})"
    missing = {MODEL, OPTIMIZER, STATE} - set(files)
    if missing:
        return f"its {MANIFEST} does not list {', '.join(sorted(missing))}"
    read = {name: entry for name, entry in files.items() if name not in unread}
    differences = (_difference(folder, name, *entry) for name, entry in read.items())
    return next(filter(None, differences), None)


def _difference(folder: Path, name: str, size: int, digest: str) -> str | None:
    """How a file differs from what the manifest says of it; None if it does not."""
    path = folder / name
    try:
        if not path.resolve().is_relative_to(folder.resolve()):
            return f"its {MANIFEST} lists {name}, which is outside of it"
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size:,} bytes instead of {size:,}"
        if _print_of(path)["sha256"] != digest:
            return f"{name} was changed: its SHA-256 is not that of the {MANIFEST}"
    except (OSError, ValueError) as error:  # the latter if a name is none
        return f"{name[:80]!r} cannot be read ({error})"
    return None


def prune(written: Path, keep: int, best: int | None) -> None:
    """Remove checkpoints before the one just written, but for the last ``keep`` and ``best``.

    Only those that the run wrote itself, by their names and manifests. Later ones stay: they are
    damaged, or the run would have continued from them, and count as none that is kept.
    """
    own, parent = _owner(written), written.parent
    folders = [folder for _, folder in _numbered(parent)]
    before = [
        folder
        for folder in folders[: folders.index(written) + 1]
        if not folder.is_symlink() and _owner(folder) == own
    ]
    for folder in before[:-keep]:
        if best is None or folder != place(parent, best):
            shutil.rmtree(folder)


def _owner(folder: Path) -> str | None:
    """The identity of the run that wrote a checkpoint, if that can be read."""
    try:
        return json.loads((folder / MANIFEST).read_text(encoding="utf-8"))["identity"]
    except UNREADABLE:
        return None


def point(link: Path, folder: Path | None) -> None:
    """Let ``link``, such as RUN/best, lead to a checkpoint, replaced at once; None removes it."""
    if link.is_dir() and not link.is_symlink():
        raise ValueError(
            f"{link} is a folder and not the link it was, perhaps since a copy; remove it: the run "
            "makes the link again"
        )
    if folder is None:
        link.unlink(missing_ok=True)
        return
    temporary = link.with_name(f".{link.name}.new")
    temporary.unlink(missing_ok=True)
    try:
        temporary.symlink_to(folder.relative_to(link.parent), target_is_directory=True)
    except OSError:  # a file system without links: the numbered folders are enough
        return
    temporary.replace(link)


def _print_of(path: Path) -> dict[str, Any]:
    digest = hashlib.sha256()
    with path.open("rb") as stream:
        while block := stream.read(1 << 22):
            digest.update(block)
    return {"bytes": path.stat().st_size, "sha256": digest.hexdigest()}


def _to_disk(path: Path) -> None:
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
