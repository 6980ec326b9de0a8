"""The paper's calibration: σ_lln² = a·σ̃² + b, a straight line fitted to Gaussian inputs."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

from lln.ops.common.arguments import check_positive_int


@dataclass(frozen=True)
class MomentFit:
    """A line σ_lln² = a·σ̃² + b (eq. 33) and where its two numbers come from.

    Raises:
        ValueError: ``a`` is not positive, or ``b`` not negative: eq. (10) would then have no
            solution for small inputs.
    """

    a: float
    b: float
    source: str

    def __post_init__(self) -> None:
        remedy = "fit over a wider range, lln.moments.fit_line(head_dim, (0, 20)), or use PAPER"
        if not (math.isfinite(self.a) and self.a > 0):
            raise ValueError(f"a={self.a} must be positive and finite; {remedy}")
        if not (math.isfinite(self.b) and self.b < 0):
            raise ValueError(f"b={self.b} must be negative and finite; {remedy}")


PAPER = MomentFit(
    a=0.14855178144710912,
    b=-0.35487039130661086,
    source="constants published with arXiv:2311.13541, for every head size",
)


def fit_line(
    head_dim: int,
    sigma2_range: tuple[float, float] = (0.0, 20.0),
    *,
    seed: int = 0,
    tokens: int = 1024,
    points: int = 41,
    normalize_keys: bool = False,
) -> MomentFit:
    """Fit a line for one head size by the paper's own procedure (A.7).

    Eq. (34): σ_lln² = a·σ̃² + b. Gaussian q and k with σ_q² = σ_k² = σ̃²/2 go through LLN attention
    with alpha = beta = 1; the variance of ln P over all entries is measured at evenly spaced σ̃²
    and regressed on σ̃² by least squares.

    Args:
        sigma2_range: Smallest and largest σ̃². The paper says [1, 4]; its published constants
            come out, approximately, for 0 to 20 at head_dim=64.
        tokens: Size of the attention matrix; the result depends on it weakly.
        points: How many values of σ̃² are measured.
        normalize_keys: Fit the variant whose key features are log_softmax_l(beta k_j).

    Returns:
        A fit to be passed as ``method``, e.g. to :func:`lln.match_moments`.

    Numerics: float64; q and k are drawn once and scaled, so that the noise of neighbouring points
    is common to them. The curve is convex: a line is right at two points of its range.

    Example:
        >>> fit = fit_line(16)                             # MomentFit(a=0.212..., b=-0.349..., ...)
        >>> alpha, beta = match_moments(1.0, 1.0, 16, method=fit)
    """
    for name, value in (("head_dim", head_dim), ("tokens", tokens), ("points", points)):
        check_positive_int(name, value)
    low, high = _checked_range(sigma2_range)
    if tokens < 2 or points < 2:
        raise ValueError(f"tokens={tokens} and points={points} must both be at least 2")
    draw = np.random.default_rng(seed)
    q, k = draw.standard_normal((2, tokens, head_dim))
    sigma2 = np.linspace(low, high, points)
    variance = [
        _log_variance(math.sqrt(s / 2) * q, math.sqrt(s / 2) * k, normalize_keys) for s in sigma2
    ]
    a, b = np.polyfit(sigma2, variance, 1)
    source = (
        f"lln.moments.fit_line(head_dim={head_dim}, sigma2_range=({low:g}, {high:g}), seed={seed}, "
        f"tokens={tokens}, points={points}, normalize_keys={normalize_keys})"
    )
    return MomentFit(float(a), float(b), source)


def _checked_range(sigma2_range: tuple[float, float]) -> tuple[float, float]:
    low, high = (float(end) for end in sigma2_range)
    if not 0 <= low < high <= 1000:  # also refuses NaN
        raise ValueError(
            f"sigma2_range={sigma2_range} must be (low, high) with 0 <= low < high <= 1000, "
            "e.g. (0, 20)"
        )
    return low, high


def _log_variance(q: np.ndarray, k: np.ndarray, normalize_keys: bool) -> float:
    """Variance of all entries of ln P, eq. (9) with alpha = beta = 1."""
    top_q, top_k = q.max(1, keepdims=True), k.max(1, keepdims=True)
    features = np.exp(k - top_k)
    if normalize_keys:
        features /= features.sum(1, keepdims=True)
        top_k = np.zeros_like(top_k)
    # top_q cancels in the ratio; sums stay in range because sigma2_range is bounded
    log_score = np.log(np.exp(q - top_q) @ features.T) + top_k.T
    top = log_score.max(1, keepdims=True)
    log_mass = np.log(np.exp(log_score - top).sum(1, keepdims=True)) + top
    return float((log_score - log_mass).var())
