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

import hashlib
import json
import os
import shutil
import warnings
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

FORMAT = "lln checkpoint 1"
MANIFEST, STATE = "manifest.json", "state.json"
MODEL, OPTIMIZER = "model.safetensors", "optimizer.safetensors"


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
        from safetensors.torch import load_file

        return load_file(self.folder / name)


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
    """
    from safetensors.torch import save_file

    target = place(parent, state["step"])
    temporary = parent / f".writing-{target.name}"
    shutil.rmtree(temporary, ignore_errors=True)  # of a run that was killed here
    temporary.mkdir(parents=True)
    if extra is not None:
        extra(temporary)
    for name, tensors in ((MODEL, model), (OPTIMIZER, optimizer)):
        whole = {key: value.contiguous() for key, value in tensors.items()}
        save_file(whole, temporary / name, metadata={"format": "pt"})
    (temporary / STATE).write_text(json.dumps(state, allow_nan=False, indent=1), encoding="utf-8")
    paths = sorted(path for path in temporary.rglob("*") if path.is_file())
    manifest = {
        "format": FORMAT,
        "identity": identity,
        "files": {str(path.relative_to(temporary)): _print_of(path) for path in paths},
    }
    (temporary / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")
    for path in (*paths, temporary / MANIFEST, temporary):
        _to_disk(path)
    shutil.rmtree(target, ignore_errors=True)  # one that was found damaged
    temporary.rename(target)
    _to_disk(parent)
    return target


def newest(parent: Path, identity: str) -> Checkpoint | None:
    """The latest checkpoint that is whole and of this run; those that are not are named."""
    for folder in sorted(parent.glob("step-*"), reverse=True):
        reason = fault(folder, identity)
        if reason is None:
            state = json.loads((folder / STATE).read_text(encoding="utf-8"))
            return Checkpoint(folder, state)
        warnings.warn(
            f"checkpoint {folder} is not used: {reason}; looking for an older one", stacklevel=2
        )
    return None


def fault(folder: Path, identity: str | None = None, *, unread: Collection[str] = ()) -> str | None:
    """Why a checkpoint cannot be used; None if it can.

    Args:
        identity: Of the run it must belong to; None for any.
        unread: Files that the caller does not need, which are not looked at.
    """
    try:
        manifest = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
        files = {
            name: (entry["bytes"], entry["sha256"]) for name, entry in manifest["files"].items()
        }
        kind, owner = manifest["format"], manifest["identity"]
    except FileNotFoundError:
        return f"it has no {MANIFEST}, so it is not one of ours"
    except (OSError, ValueError, TypeError, KeyError, AttributeError):
        return f"its {MANIFEST} cannot be read"
    if kind != FORMAT:
        return f"its format is {kind!r} and not {FORMAT!r}"
    if identity is not None and owner != identity:
        return f"it belongs to another run ({owner}, this one is {identity})"
    missing = {MODEL, OPTIMIZER, STATE} - set(files)
    if missing:
        return f"its {MANIFEST} does not list {', '.join(sorted(missing))}"
    for name, (size, digest) in files.items():
        if name in unread:
            continue
        path = folder / name
        if not path.is_file():
            return f"{name} is missing"
        if path.stat().st_size != size:
            return f"{name} has {path.stat().st_size:,} bytes instead of {size:,}"
        if _print_of(path)["sha256"] != digest:
            return f"{name} was changed: its SHA-256 is not that of the {MANIFEST}"
    return None


def prune(parent: Path, keep: int, best: int | None) -> None:
    """Remove all but the last ``keep`` checkpoints and that of step ``best``."""
    for folder in sorted(parent.glob("step-*"))[:-keep]:
        if best is None or folder.name != f"step-{best:08d}":
            shutil.rmtree(folder)


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
