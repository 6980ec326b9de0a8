"""Labels that are checked before anything trains on them.

A class that does not exist is not always an error of torch: -100 is left out of the loss without a
word, and a fraction becomes the class below it.
"""

from __future__ import annotations

from pathlib import Path

import numpy as np

from lln.texts.damage import DamagedData


def class_of(value: object, classes: int) -> int:
    """A label as it stands in a file, as a class; ValueError says why it is none."""
    number = _number(value)
    if not 0 <= number < classes or number != int(number):
        raise ValueError(f"label {value!r:.40} is none of the classes 0 to {classes - 1}")
    return int(number)


def score_of(value: object, largest: float) -> float:
    """A label that is a number from 0 to ``largest``; ValueError says why it is none."""
    number = _number(value)
    if not 0 <= number <= largest:
        raise ValueError(f"label {value!r:.40} is no number from 0 to {largest:g}")
    return number


def _number(value: object) -> float:
    try:
        return float(value)  # type: ignore[arg-type]
    except (TypeError, ValueError, OverflowError):
        raise ValueError(f"label {value!r:.40} is no number") from None


def check_classes(labels: np.ndarray, classes: int, path: Path, what: str = "label") -> np.ndarray:
    """Whole numbers from 0 to ``classes - 1`` as int64; the first that is none is named."""
    if labels.ndim != 1 or labels.dtype.kind not in "biuf":
        raise DamagedData(
            f"{path} has {what}s of shape {list(labels.shape)} and type {labels.dtype}, "
            "not a row of numbers"
        )
    wrong = ~((labels >= 0) & (labels < classes) & (np.floor(labels) == labels))
    if wrong.any():
        first = int(np.argmax(wrong))
        raise DamagedData(
            f"{path}, record {first}: {what} {labels[first]} is none of 0 to {classes - 1} "
            f"({int(wrong.sum()):,} of {len(labels):,} are not); mend the file"
        )
    return labels.astype(np.int64)
