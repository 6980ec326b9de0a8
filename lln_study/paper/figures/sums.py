"""Fig. 6a and 6b: the variance of the logarithm of a sum of log-normal numbers, and Fenton's law.

S = Σ_l exp(x_l) with D independent x_l ~ N(0, σ²), the numerator of LLN attention. Fenton (1960)
takes ln S for normal and matches the first two moments of S, eq. (28):
    Var[ln S] ≈ ln((e^σ² − 1)/D + 1).
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lln.records.rows import Row


@dataclass(frozen=True)
class Setting:
    """Size of the simulation: ``samples`` sums for each number of terms and variance."""

    terms: Sequence[int] = (16, 64, 256)
    moderate: Sequence[float] = (0.2, 0.4, 0.6, 0.8, 1.0, 1.2, 1.6, 2.0, 3.0, 4.0)
    broad: Sequence[float] = (1.0, 2.0, 4.0, 6.0, 8.0, 10.0, 12.0, 14.0, 16.0, 18.0, 20.0)
    linear_from: float = 8.0
    samples: int = 100_000
    seed: int = 0

    def columns(self) -> Row:
        return {"samples": self.samples, "seed": self.seed}


def fenton(variance: float, terms: int) -> float:
    """Var[ln S] by eq. (28)."""
    return math.log(math.expm1(variance) / terms + 1)


def moderate_rows(setting: Setting | None = None) -> Iterator[Row]:
    """Fig. 6a: simulated variance beside Fenton's, within the paper's range [0.2, 1.2] and past it.

    ``variance_se`` is the standard error of the simulated variance.
    """
    setting = setting or Setting()
    for terms in setting.terms:
        for variance, (found, error) in _simulate(setting, terms, setting.moderate):
            predicted = fenton(variance, terms)
            row = {"terms": terms, "input_variance": variance, "variance": found}
            row |= {"variance_se": error, "fenton": predicted, "error": predicted / found - 1}
            yield row | setting.columns()


def broad_rows(setting: Setting | None = None) -> Iterator[Row]:
    """Fig. 6b: in the broad case the variance grows linearly; the line is fitted to the end."""
    setting = setting or Setting()
    for terms in setting.terms:
        simulated = list(_simulate(setting, terms, setting.broad))
        slope, intercept = _line([(x, y) for x, (y, _) in simulated if x >= setting.linear_from])
        for variance, (found, error) in simulated:
            row = {"terms": terms, "input_variance": variance, "variance": found}
            row |= {"variance_se": error, "line": slope * variance + intercept}
            row |= {"slope": slope, "intercept": intercept, "fitted_from": setting.linear_from}
            yield row | setting.columns()


def _simulate(
    setting: Setting, terms: int, variances: Sequence[float]
) -> Iterator[tuple[float, tuple[float, float]]]:
    """Var[ln S] and its standard error per input variance; the same normal numbers for all."""
    for variance in variances:
        generator = torch.Generator().manual_seed(setting.seed)
        parts = []
        for size in _blocks(setting.samples, terms):
            normal = torch.randn(size, terms, generator=generator, dtype=torch.float32)
            parts.append(torch.logsumexp(normal * math.sqrt(variance), dim=-1).double())
        yield variance, _variance(torch.cat(parts))


def _blocks(samples: int, terms: int) -> Iterator[int]:
    size = max(1, 2**22 // terms)
    yield from [size] * (samples // size)
    if samples % size:
        yield samples % size


def _variance(x: Tensor) -> tuple[float, float]:
    squares = (x - x.mean()).square()
    return squares.mean().item(), (squares.std() / math.sqrt(len(x))).item()


def _line(points: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """Fit a line by least squares; return slope and intercept."""
    x, y = torch.tensor(points, dtype=torch.float64).T
    slope = ((x - x.mean()) * (y - y.mean())).sum() / (x - x.mean()).square().sum()
    return slope.item(), (y.mean() - slope * x.mean()).item()
