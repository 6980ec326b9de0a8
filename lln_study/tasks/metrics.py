"""Metrics of classification and regression, by scikit-learn and SciPy."""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np


def compute(names: Sequence[str], labels: np.ndarray, predictions: np.ndarray) -> dict[str, float]:
    """The metrics asked for, each between −1 and 1.

    Args:
        names: Of "accuracy", "f1" (of class 1), "matthews", "pearson", "spearman".
        predictions: Classes, or numbers for the last two.

    Example:
        >>> compute(["accuracy"], np.array([0, 1, 1]), np.array([0, 1, 0]))
        {'accuracy': 0.6666666666666666}
    """
    try:
        from scipy import stats
        from sklearn import metrics
    except ImportError as error:
        raise ImportError("metrics need: pip install 'lln-attention[train]'") from error

    known = {
        "accuracy": metrics.accuracy_score,
        "f1": lambda y, p: metrics.f1_score(y, p, zero_division=0),  # pyright: ignore[reportArgumentType]
        "matthews": metrics.matthews_corrcoef,
        "pearson": lambda y, p: _correlation(stats.pearsonr, y, p),
        "spearman": lambda y, p: _correlation(stats.spearmanr, y, p),
    }
    for name in names:
        if name not in known:
            raise ValueError(f"metric {name!r} is unknown; choose from {', '.join(known)}")
    return {name: float(known[name](labels, predictions)) for name in names}


def _correlation(function, labels: np.ndarray, predictions: np.ndarray) -> float:
    """0 where it is undefined: predictions that are all the same tell nothing."""
    if not np.isfinite(predictions).all() or np.ptp(predictions) == 0 or np.ptp(labels) == 0:
        return 0.0
    value = float(function(labels, predictions)[0])
    return value if math.isfinite(value) else 0.0
