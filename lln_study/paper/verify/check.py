"""What a check is: a statement, and a function that puts it to the test."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass


@dataclass(frozen=True)
class Evidence:
    """Whether the statement held, and the numbers that say so."""

    holds: bool
    found: str


@dataclass(frozen=True)
class Check:
    """A claim of the paper as this project understands it.

    ``amended`` says what the printed text lacks; the statement is then the corrected one.
    """

    source: str
    statement: str
    test: Callable[[], Evidence]
    amended: str = ""
