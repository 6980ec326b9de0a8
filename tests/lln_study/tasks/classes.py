"""Tiny data for classification tasks, made in memory."""

from __future__ import annotations

import numpy as np

from lln_study.data.arena.datasets import LRAData, Split
from lln_study.data.images import Images


def sequences(*, paired: bool = False, length: int = 30) -> LRAData:
    """Is token 3 more frequent than usual? Rows are 2 shorter than the length, and padded."""
    generator = np.random.default_rng(0)

    def split(count: int) -> Split:
        tokens = generator.integers(1, 9, (count, length)).astype(np.uint8)
        tokens[:, -4:] = 0
        labels = ((tokens == 3).sum(1) > 3).astype(np.int64)
        if not paired:
            return Split(tokens, labels)
        pairs = generator.integers(count, size=(count, 2))
        return Split(tokens, (labels[pairs[:, 0]] == labels[pairs[:, 1]]).astype(np.int64), pairs)

    splits = {"train": split(48), "valid": split(20), "test": split(24)}
    return LRAData("text", splits, length + 2, 9, 2, "toy")


def pictures(count: int = 60, side: int = 8) -> Images:
    """Dark and bright images."""
    generator = np.random.default_rng(0)
    labels = np.arange(count) % 2
    noise = generator.integers(0, 100, (count, side, side, 3))
    pixels = (noise + 100 * labels[:, None, None, None]).astype(np.uint8)
    return Images(pixels, labels.astype(np.int64), np.arange(count) // 2, ("dark", "light"), "toy")
