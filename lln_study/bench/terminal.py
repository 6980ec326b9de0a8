"""Where tables of measurements are printed to."""

from __future__ import annotations

from rich.console import Console

WIDTH = 200  # columns, wherever nobody looks at a window: in files and pipes


def wide_console() -> Console:
    """A console that cuts no number off where it writes into a file or a pipe."""
    console = Console()
    return console if console.is_terminal else Console(width=max(WIDTH, console.width))
