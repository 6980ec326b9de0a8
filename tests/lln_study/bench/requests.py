"""What workers of the tests answer; importable from a new process."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from pathlib import Path


def answer(request):
    """Do as told: a row, an error, a death, or nothing for a long time."""
    kind, value = request
    if kind == "die":
        os._exit(value)
    if kind == "raise":
        raise LookupError(f"{value}\nand a second line")
    if kind == "odd":
        raise Odd(1, 2)
    if kind == "sleep":
        time.sleep(value)
    return kind, value, os.getpid()


class Odd(Exception):
    """One that cannot be made from its words."""

    def __init__(self, first, second):
        super().__init__(f"{first} and {second}")


def note(item):
    """Leave a file with this process's number, or start a child that outlives it."""
    folder, name = item
    if name == "compiler":
        child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
        Path(folder, "child").write_text(str(child.pid))
        child.wait()
    if name == "dies":
        os._exit(1)
    Path(folder, name).write_text(str(os.getpid()))
