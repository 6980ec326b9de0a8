"""Sweep files: in a clone they lie in ``sweeps/``, in an installed wheel in ``lln/sweeps/``."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

PACKAGE = Path(__file__).resolve().parents[1]


def sweeps() -> Path:
    """The folder of the sweep files that came with this installation."""
    inside = PACKAGE / "sweeps"
    return inside if inside.is_dir() else PACKAGE.parent / "sweeps"


def runnable(command: str) -> str:
    """A command of this project with the sweep files it names as they are found from here.

    Example:
        >>> runnable("lln sweep sweeps/vit.json")     # in a clone: as it is
        'lln sweep sweeps/vit.json'
    """

    def found(match: re.Match[str]) -> str:
        path = sweeps() / match[1]
        return match[0] if Path(match[0]).exists() else shlex.quote(str(path))

    return re.sub(r"\bsweeps/(\w+\.json)", found, command)
