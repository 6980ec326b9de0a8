"""Options that name a place: a file where a folder is wanted is refused before any work."""

from __future__ import annotations

from typing import Any

import typer


def folder(text: str) -> Any:
    """An option for a folder, which may be new."""
    return typer.Option(file_okay=False, help=text)


def file(text: str) -> Any:
    """An option for a file, which may be new."""
    return typer.Option(dir_okay=False, help=text)
