"""The paper's theorems and the limits of LLN, on the measures of matrices."""

from __future__ import annotations

import itertools
import math

import pytest
import torch

from lln.instruments import entropy, mutual_information, row_variance, spectral_gap
from lln.ops import reference
from tests.instruments.matrices import gaussian, softmax

WIDTH, TOKENS = 16, 200
TEMPERATURES = torch.logspace(-1, 1.3, 20, dtype=torch.float64)
ROUNDING = 1e-8  # of differences, where a row is one-hot and nothing moves


def score_laws() -> dict[str, torch.Tensor]:
    """A row of scores from each of five laws; the theorems do not name one."""
    normal, uniform = torch.randn(TOKENS).double(), torch.rand(TOKENS).double()
    return {
        "normal": normal,
        "uniform": uniform,
        "exponential": -uniform.log(),
        "two-valued": (uniform < 0.1).double(),
        "heavy-tailed": normal / uniform,
    }


def slopes(measure, x: torch.Tensor) -> torch.Tensor:
    """d/dτ of the measure of softmax(x / τ) at every temperature, by differences."""
    step = 1e-5 * TEMPERATURES
    high, low = (
        measure((x / tau[:, None, None]).softmax(-1))
        for tau in (TEMPERATURES + step, TEMPERATURES - step)
    )
    return (high - low) / (2 * step)


@pytest.mark.parametrize("law", ["normal", "uniform", "exponential", "two-valued", "heavy-tailed"])
def test_entropy_increases_with_temperature(law):
    """Theorem 3.2; dH/dτ = Σ p (x − μ)² / (τ³ ln 2), where the paper's formula lacks ln 2."""
    x = score_laws()[law]
    p = (x / TEMPERATURES[:, None]).softmax(-1)
    spread = (p * x.square()).sum(-1) - (p * x).sum(-1).square()
    found = slopes(entropy, x)
    assert (found > -ROUNDING).all()
    assert torch.allclose(found, spread / TEMPERATURES**3 / math.log(2), rtol=1e-6, atol=ROUNDING)


@pytest.mark.parametrize("law", ["normal", "uniform", "exponential", "two-valued", "heavy-tailed"])
def test_the_variance_of_a_row_decreases_with_temperature(law):
    """Theorem 3.4, and its derivative by Theorem A.3."""
    x = score_laws()[law]
    p = (x / TEMPERATURES[:, None]).softmax(-1)
    centred = x - (p * x).sum(-1, keepdim=True)
    formula = -2 / (TOKENS * TEMPERATURES**2) * (p.square() * centred).sum(-1)
    found = slopes(row_variance, x)
    assert (found < ROUNDING).all()
    assert torch.allclose(found, formula, rtol=1e-6, atol=ROUNDING)


def test_bias_towards_a_column_raises_the_gap_at_any_temperature():
    """Section 3.2.2: rows get more concentrated, and the gap rises all the same."""
    p = softmax(*gaussian(TOKENS, 64, temperature=0.3))[0, 0]
    target = torch.zeros(TOKENS, dtype=torch.float64)
    target[7] = 1
    mixed = [(1 - w) * p + w * target for w in (0.0, 0.3, 0.6, 0.9)]
    gaps = [spectral_gap(each).item() for each in mixed]
    assert all(more > less for less, more in itertools.pairwise(gaps))
    assert row_variance(mixed[-1]) > row_variance(mixed[0])


def test_lln_tells_few_keys_apart():
    """Rank ≤ D, at most log₂ D bits about the query, at most D keys with over half of a row."""
    q, k = gaussian(TOKENS, WIDTH)
    for scale in (2.0, 5.0, 20.0, 100.0):
        scales = q.new_full((1, 1), scale)
        p = reference.lln_matrix(q, k, alpha=scales, beta=scales)[0, 0]
        assert torch.linalg.matrix_rank(p) <= WIDTH
        assert mutual_information(p) <= math.log2(WIDTH)
        assert len((p > 0.5).nonzero()[:, 1].unique()) <= WIDTH
    sharp = softmax(10 * q, k)[0, 0]
    assert torch.linalg.matrix_rank(softmax(q, k)[0, 0]) > WIDTH
    assert mutual_information(sharp) > math.log2(WIDTH)
    assert len((sharp > 0.5).nonzero()[:, 1].unique()) > WIDTH
