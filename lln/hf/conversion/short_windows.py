"""Updates in which the near window is short, so that far keys learn what near ones hide."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

import torch

FEW = 16  # tokens of a short window's blocks, and of those before a block


def check_short_windows(share: float) -> None:
    """Raise unless it is a share of updates."""
    if not 0 <= share < 1:
        raise ValueError(f"short_windows={share} is not a share of updates in [0, 1)")


@contextlib.contextmanager
def short_windows(cores: Iterable[Any], share: float, *, seed: int, step: int) -> Iterator[None]:
    """In a share of the updates let near windows end after the last few tokens.

    Keys that leave the window become far keys, so softmax remains what is to be imitated. All
    layers have short windows in the same updates, which ``seed`` and ``step`` decide.
    """
    generator = torch.Generator().manual_seed(seed * 1_000_003 + step)
    drawn = bool(torch.rand((), generator=generator) < share)
    before = [(core, core.near) for core in cores if drawn and getattr(core, "near", None)]
    try:
        for core, near in before:
            core.near = near.within(FEW)
        yield
    finally:
        for core, near in before:
            core.near = near
