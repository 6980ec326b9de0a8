"""Sweep files: they lie in ``sweeps/`` of the clone."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

FOLDER = Path(__file__).resolve().parents[1] / "sweeps"


def runnable(command: str) -> str:
    """A command of this project with the sweep files it names as they are found from here.

    Example:
        >>> runnable("lln sweep sweeps/vit.json")     # in the clone: as it is
        'lln sweep sweeps/vit.json'
    """

    def found(match: re.Match[str]) -> str:
        return match[0] if Path(match[0]).exists() else shlex.quote(str(FOLDER / match[1]))

    return re.sub(r"\bsweeps/(\w+\.json)", found, command)
