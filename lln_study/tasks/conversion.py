"""Conversions of trained models in sweeps: the fields are those of ``lln convert``."""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any

from lln.conversion.row import digest_of
from lln.conversion.settings import Settings
from lln.hf import CacheShare
from lln.records.rows import Row, find_row
from lln_study.tasks.experiment import InSweeps, Key

IN_SWEEPS = InSweeps(needs=("model",))
GIVEN = ("out", "results", "device")  # by the sweep
PATHS = ("model", "data", "held_out")  # below the folder of the data


def configure(**changes: Any) -> Settings:
    """What ``lln convert`` does without options, some of it changed by name.

    Example:
        >>> configure(model="SmolLM2", data="wiki_train.jsonl.xz", keep=5, options={"slots": 128})
    """
    known = [each.name for each in fields(Settings) if each.name not in GIVEN]
    unknown = [name for name in changes if name not in known]
    if unknown:
        raise ValueError(f"a conversion has no field {unknown[0]!r}; choose from {known}")
    if isinstance(share := changes.get("keep"), Mapping):
        changes["keep"] = CacheShare(**share)
    paths = {name: Path(changes[name]) for name in PATHS if changes.get(name) is not None}
    return Settings(**{"data": None, "out": Path(), **changes, **paths})


def reads(config: Settings) -> dict[str, Any]:
    """Model and text are read by the conversion itself."""
    return {}


def load(source: str | os.PathLike[str] | None = None) -> Path:
    """Give the folder in which models and texts lie: that of the data, else the current one."""
    return Path(source or os.environ.get("LLN_DATA", "."))


def key(config: Settings, data: Path) -> Key:
    """Name the row of a conversion before it was made."""
    return digest_of(config.decisive()), config.seed


def run(config: Settings, data: Path, *, folder: Path, tensorboard: bool = False) -> Row:
    """Convert, or go on; the model lies in ``folder`` until a sweep removes it."""
    from lln.conversion.run import convert_and_judge

    rows = folder / "conversion.jsonl"
    row = find_row(rows, *key(config, data))
    if row is None:
        paths = {name: data / getattr(config, name) for name in PATHS if getattr(config, name)}
        own = replace(config, **paths, out=folder / config.model.name, results=folder)
        convert_and_judge(own)
        row = find_row(rows, *key(config, data))
    if row is None:
        raise RuntimeError(f"{config.model} was converted, but not all of it could be measured")
    return row
