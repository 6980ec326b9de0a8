"""Damaged data: named before training begins, left out only if the user says so."""

from __future__ import annotations

import warnings
from collections.abc import Sequence

ON_DAMAGED = ("stop", "skip")
SHOWN = 5


class DamagedData(ValueError):
    """Files that cannot be read, or hold something else than they should."""


def check_policy(on_damaged: str) -> None:
    """Fail early on a word that is no policy."""
    if on_damaged not in ON_DAMAGED:
        raise ValueError(f"on_damaged={on_damaged!r} is unknown; choose from stop, skip")


def settle(damaged: Sequence[str], total: int, what: str, on_damaged: str) -> None:
    """Stop or warn because of ``damaged``, a line for each; quiet if there are none.

    Args:
        total: How many there are of ``what``, damaged ones included.
    """
    if not damaged:
        return
    named = "; ".join(damaged[:SHOWN]) + ("; …" if len(damaged) > SHOWN else "")
    text = f"{len(damaged):,} of {total:,} {what} cannot be used: {named}"
    if on_damaged == "stop" or len(damaged) == total:
        remedy = "" if len(damaged) == total else "; pass --on-damaged skip to train on the rest"
        raise DamagedData(text + remedy)
    warnings.warn(text + "; they are left out", stacklevel=3)
