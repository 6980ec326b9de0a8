"""``--set KEY=VALUE`` of commands that take options of a mechanism."""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import typer


def value_of(text: str) -> Any:
    """JSON, or the words as they are: ``32``, ``true``, ``[1, 2]``, ``entropy``."""
    try:
        return json.loads(text)
    except ValueError:
        return text


def mechanism_options(pairs: Iterable[str] | None, flag: str = "--set") -> dict[str, Any]:
    """``["near=32", "method=entropy"]`` as a dictionary; values are JSON or words.

    "recommended" stands for all of :func:`lln.nn.recommended`, for encoders.

    Args:
        flag: Of the command line that they come from.
    """
    found: dict[str, Any] = {}
    for pair in pairs or ():
        if pair == "recommended":
            from lln.nn import recommended

            found.update(recommended("encoder"))
            continue
        key, sign, value = pair.partition("=")
        if not sign or not key:
            raise typer.BadParameter(
                f"{flag} {pair!r} is not KEY=VALUE, such as near=32, nor 'recommended'"
            )
        found[key] = value_of(value)
    return found
