"""Make ``curves.json``, the table behind "variance" and "entropy".

Run it by ``python -m lln.moments.tabulate``.

Every number comes from :mod:`lln.moments.quadrature`; nothing is random. At each of a dozen head
sizes (the Chebyshev points of ln(D − 1), not integers) the curve is inverted at the Chebyshev
points of x(y), see :mod:`lln.moments.curves`, and interpolated; then the coefficients are
interpolated across head sizes. One core needs about half an hour, nearly all of them for the
entropy with normalised keys.
"""

from __future__ import annotations

import json
import math
import sys
from collections.abc import Callable
from pathlib import Path

import numpy as np
from numpy.polynomial import chebyshev
from numpy.typing import NDArray

from lln.moments import quadrature
from lln.moments.curves import HEAD_DIMS, METHODS, TABLE, Shape, head_position, shape, table_key

DEGREE = 22  # of the polynomial in x(y)
HEAD_SIZES = 12
DECIMALS = 9


def concentration(
    sigma2: float, head_dim: float, *, method: str, normalize_keys: bool = False
) -> float:
    """The σ_sm² of the softmax attention that LLN with σ̃² = ``sigma2`` matches by ``method``."""
    if method == "variance":
        return quadrature.row_variance(sigma2, head_dim, normalize_keys=normalize_keys)
    return 2 * quadrature.row_divergence(sigma2, head_dim, normalize_keys=normalize_keys)


def solve(function: Callable[[float], float], value: float, guess: float) -> float:
    """x with function(x) = value for an increasing function: secant steps in the logarithms."""

    def error(log_x: float) -> float:
        return math.log(function(math.exp(log_x)) / value)

    tolerance = 1e-8 + 5e-10 / value  # quadrature rounds at about 1e-10, absolute
    previous = math.log(guess)
    error_before = error(previous)
    current = previous - 0.7 * error_before
    for _ in range(20):
        error_now = error(current)
        change = error_now - error_before
        if abs(error_now) < tolerance or change == 0:
            return math.exp(current)
        step = error_now * (current - previous) / change
        previous, error_before = current, error_now
        current -= min(max(step, -1.0), 1.0)
    raise RuntimeError(f"no σ̃² found for value={value}, guess={guess}")


def column(method: str, head_dim: float, normalize_keys: bool) -> NDArray[np.float64]:
    """Chebyshev coefficients of ln(σ̃² / (limit · y^power)) in z, for one head size."""
    known: Shape = shape(method, head_dim, normalize_keys)
    eta = known.top / (1 - known.top / known.bound)
    end = math.log1p((known.stretch * eta) ** known.power)
    z = -np.cos(np.pi * np.arange(DEGREE + 1) / DEGREE)
    values = np.zeros(DEGREE + 1)  # exactly 0 at the first point, y = 0
    for i in range(1, DEGREE + 1):
        y = known.target(float(end * (z[i] + 1) / 2))
        start = known.limit * y**known.power
        sigma2 = solve(
            lambda x: concentration(x, head_dim, method=method, normalize_keys=normalize_keys),
            y,
            start * math.exp(values[i - 1]),
        )
        values[i] = math.log(sigma2 / start)
    return np.asarray(chebyshev.chebfit(z, values, DEGREE), dtype=np.float64)


def tabulate(method: str, normalize_keys: bool) -> list[list[float]]:
    """Coefficients [power of ln(D − 1)][power of z], both in Chebyshev polynomials."""
    w = np.cos(np.pi * (np.arange(HEAD_SIZES) + 0.5) / HEAD_SIZES)
    low, high = (math.log(d - 1) for d in HEAD_DIMS)
    head_dims = 1 + np.exp(low + (high - low) * (w + 1) / 2)
    assert np.allclose([head_position(d) for d in head_dims], w)
    columns = []
    for d in head_dims:
        columns.append(column(method, float(d), normalize_keys))
        print(f"{table_key(method, normalize_keys)}: head_dim {d:.2f}", file=sys.stderr, flush=True)
    table = chebyshev.chebfit(w, np.stack(columns), HEAD_SIZES - 1)
    return [[round(float(c), DECIMALS) for c in row] for row in table]


def main() -> None:
    curves = {
        table_key(method, normalize_keys): tabulate(method, normalize_keys)
        for normalize_keys in (False, True)
        for method in METHODS
    }
    text = json.dumps({"made_by": "python -m lln.moments.tabulate", "curves": curves}, indent=0)
    path = Path(__file__).with_name(TABLE)
    path.write_text(text.replace(",\n", ", ").replace("], [", "],\n[") + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
