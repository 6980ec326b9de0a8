"""How a command runs: errors in a line, and threads that sleep while they wait."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import typer

INTERRUPTED = 130  # as shells have it: 128 and the number of the signal


@contextlib.contextmanager
def plain_errors(command: str) -> Iterator[None]:
    """Say what the user can mend in a line, without a traceback."""
    try:
        yield
    except (ValueError, TypeError, ImportError, OSError) as error:
        if os.environ.get("LLN_TRACEBACK"):
            raise
        raise SystemExit(f"{command}: {error}") from None
    except KeyboardInterrupt:
        typer.echo(
            f"{command}: interrupted; the same command goes on from the last checkpoint, if there "
            "is one",
            err=True,
        )
        raise typer.Exit(INTERRUPTED) from None


def let_waiting_threads_sleep() -> None:
    """Before torch loads: OpenMP threads that spin at barriers ruin times on a busy machine."""
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
