"""The paper's figures, computed: each is a function that yields rows. ``lln figure`` runs them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial

from lln.records.rows import Row
from lln_study.paper.figures import concentration, matching, sums
from lln_study.paper.figures.inputs import ATTENTIONS


@dataclass(frozen=True)
class Figure:
    """What a figure shows, and its rows; a small version with ``quick``."""

    title: str
    rows: Callable[[], Iterator[Row]]
    quick: Callable[[], Iterator[Row]]


_QUICK_CONCENTRATION = concentration.Setting(tokens=64, temperatures=(0.5, 1.0, 2.0), draws=2)
_QUICK_MATCHING = matching.Setting(tokens=64, variances=(0.5, 1.0, 2.0), draws=2)
_QUICK_SUMS = sums.Setting(samples=2000)

FIGURES = {
    "2": Figure(
        "Entropy and spectral gap against temperature",
        concentration.rows,
        partial(concentration.rows, _QUICK_CONCENTRATION),
    ),
    "5a": Figure(
        "Mean and variance of ln P of softmax attention",
        matching.softmax_rows,
        partial(matching.softmax_rows, _QUICK_MATCHING),
    ),
    "5b": Figure(
        "Variance of ln P before and after moment matching",
        matching.matched_rows,
        partial(matching.matched_rows, _QUICK_MATCHING),
    ),
    "6a": Figure(
        "Fenton's law for a sum of log-normal terms",
        sums.moderate_rows,
        partial(sums.moderate_rows, _QUICK_SUMS),
    ),
    "6b": Figure(
        "The same sum in the broad case",
        sums.broad_rows,
        partial(sums.broad_rows, _QUICK_SUMS),
    ),
    "7": Figure(
        "Histogram of ln P before and after moment matching",
        matching.histogram_rows,
        partial(matching.histogram_rows, _QUICK_MATCHING),
    ),
}

__all__ = ["ATTENTIONS", "FIGURES", "Figure"]
