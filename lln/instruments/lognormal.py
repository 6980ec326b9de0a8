"""How close the entries of an attention matrix are to a log-normal law (Prop. 3.1 and 4.1)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lln.instruments.checks import check_stochastic
from lln.ops.common.arguments import check_positive_int

QUANTILES = torch.linspace(0.005, 0.995, 199, dtype=torch.float64)

# Upper 5 % point when mean and variance are estimated from the same data ("case 3" of D'Agostino
# and Stephens, Goodness-of-fit techniques, 1986, table 4.7). The ordinary points assume known
# parameters and would accept almost anything.
ANDERSON_DARLING_5 = 0.752


@dataclass(frozen=True)
class LogNormalFit:
    """A normal law fitted to ln P, and the distance of ln P from it, per leading index.

    ``mu``, ``sigma2``, ``skew`` are moments of ln P over the positive entries; ``entries`` their
    number. ``kolmogorov_smirnov`` is sup|F − F_fit|, comparable between sizes;
    ``anderson_darling`` is Stephens' modified A*², which weighs the tails and grows with the number
    of entries. ``normal_quantiles`` and ``log_quantiles`` are the points of a Q–Q plot.
    """

    mu: Float[Tensor, "*batch"]
    sigma2: Float[Tensor, "*batch"]
    skew: Float[Tensor, "*batch"]
    anderson_darling: Float[Tensor, "*batch"]
    kolmogorov_smirnov: Float[Tensor, "*batch"]
    entries: Float[Tensor, "*batch"]
    normal_quantiles: Float[Tensor, "*batch Q"]
    log_quantiles: Float[Tensor, "*batch Q"]

    @property
    def lilliefors(self) -> Float[Tensor, "*batch"]:
        """D (√n − 0.01 + 0.85/√n): above 0.895 for 5 % of normal samples of any size."""
        root = self.entries.sqrt()
        return self.kolmogorov_smirnov * (root - 0.01 + 0.85 / root)

    @property
    def rejected(self) -> Bool[Tensor, "*batch"]:
        """Whether Anderson–Darling rejects log-normality at 5 %, had the entries been independent.

        They are not, and a whole matrix has so many that any departure is significant: judge the
        size of a departure by ``kolmogorov_smirnov`` and ``skew``.
        """
        return self.anderson_darling > ANDERSON_DARLING_5


def fit_lognormal(p: Float[Tensor, "*batch N M"], *, entries: int | None = None) -> LogNormalFit:
    r"""Fit a log-normal law to the entries of attention matrices and say how well it fits.

    Propositions 3.1 and 4.1 of arXiv:2311.13541v4 claim ln P ~ N(μ, σ²).

    Args:
        entries: Use this many entries drawn at random (fixed seed) instead of all.

    Returns:
        Tensors over the leading indices. Zero entries (masked pairs) are left out. Where fewer than
        3 entries remain or all are equal, skew and distances are NaN.

    Numerics: float64. Distances are taken from the law with the fitted mean and variance, and have
    critical values for that case (:attr:`LogNormalFit.rejected`, ``lilliefors``).

    Example:
        >>> fit = fit_lognormal(torch.randn(64, 64).softmax(-1))
        >>> fit.sigma2                                                       # near 1
    """
    p = check_stochastic(p)
    if entries is not None:
        check_positive_int("entries", entries)
    flat = p.reshape(-1, p.shape[-2] * p.shape[-1]).double().cpu()
    fits = [_describe(row, entries) for row in flat]
    return LogNormalFit(*(_stack(p, [fit[i] for fit in fits]) for i in range(len(fits[0]))))


def _stack(p: Tensor, values: Sequence[Tensor]) -> Tensor:
    stacked = torch.stack(list(values)).to(p.device, p.dtype)
    return stacked.reshape(p.shape[:-2] + stacked.shape[1:])


def _describe(p: Tensor, entries: int | None) -> tuple[Tensor, ...]:
    """The fields of LogNormalFit for one flat list of probabilities."""
    logs = p[p > 0].log()
    if entries is not None and entries < len(logs):
        chosen = torch.randperm(len(logs), generator=torch.Generator().manual_seed(0))
        logs = logs[chosen[:entries]]
    logs = logs.sort().values
    mu, sigma2 = logs.mean(), logs.var(correction=0)
    quantiles = _quantiles(logs)
    count = torch.tensor(float(len(logs)), dtype=torch.float64)
    # equal probabilities may differ in their last bit, which is no spread
    if len(logs) < 3 or sigma2 <= (1e-12 * mu.abs().clamp(min=1)) ** 2:
        nan = torch.tensor(math.nan, dtype=torch.float64)
        return mu, sigma2, nan, nan, nan, count, torch.full_like(quantiles, math.nan), quantiles
    z = (logs - mu) / logs.std()
    skew = ((logs - mu) / sigma2.sqrt()).pow(3).mean()
    expected = mu + sigma2.sqrt() * torch.special.ndtri(QUANTILES)
    return mu, sigma2, skew, _anderson_darling(z), _kolmogorov(z), count, expected, quantiles


def _quantiles(sorted_logs: Tensor) -> Tensor:
    """torch.quantile refuses more than 16 million entries; the data are sorted already."""
    position = QUANTILES * (len(sorted_logs) - 1)
    low = position.floor().long()
    high = (low + 1).clamp(max=len(sorted_logs) - 1)
    return torch.lerp(sorted_logs[low], sorted_logs[high], position - low)


def _anderson_darling(z: Tensor) -> Tensor:
    """A² of sorted standardised values, times Stephens' factor for estimated parameters."""
    n = len(z)
    odd = 2 * torch.arange(1, n + 1, dtype=torch.float64) - 1
    terms = torch.special.log_ndtr(z) + torch.special.log_ndtr(-z).flip(0)
    return (-n - (odd * terms).sum() / n) * (1 + 0.75 / n + 2.25 / n**2)


def _kolmogorov(z: Tensor) -> Tensor:
    n = len(z)
    cdf = torch.special.ndtr(z)
    steps = torch.arange(n + 1, dtype=torch.float64) / n
    return torch.maximum(steps[1:] - cdf, cdf - steps[:-1]).max()
