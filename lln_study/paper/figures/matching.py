"""Fig. 5a, 5b and 7: the law of ln P for softmax and LLN, predicted and measured."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lln.instruments import fit_lognormal, log_variance
from lln.records.rows import Row
from lln_study.paper.figures.inputs import ATTENTIONS, gaussian, spread

MATCHED = ("softmax", "LLN paper", "LLN variance", "LLN entropy", "LLN α = β = 1")
HISTOGRAM = ("softmax", "LLN paper", "LLN variance", "LLN α = β = 1")
BINS = 80


@dataclass(frozen=True)
class Setting:
    """Size of the computation; ``variances`` are those of the scores, σ_sm²."""

    tokens: int = 512
    head_dim: int = 64
    variances: Sequence[float] = (0.25, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, 8.0, 12.0, 16.0)
    draws: int = 8
    seed: int = 0

    def columns(self) -> Row:
        sizes = {"tokens": self.tokens, "head_dim": self.head_dim}
        return sizes | {"draws": self.draws, "seed": self.seed}

    def inputs(self, variance: float, draw: int) -> tuple[Tensor, Tensor]:
        return gaussian(self.tokens, self.head_dim, seed=self.seed + draw, score_variance=variance)


def softmax_rows(setting: Setting | None = None) -> Iterator[Row]:
    """Fig. 5a: mean and variance of ln P of softmax attention beside Proposition 3.1.

    Two variances: within the rows and of all entries. The theory's σ_sm² is σ_q²σ_k² of each draw,
    so that the chance of a draw does not count as an error of the theory.
    """
    setting = setting or Setting()
    for variance in setting.variances:
        found: dict[str, list[float]] = {name: [] for name in SOFTMAX_COLUMNS}
        for draw in range(setting.draws):
            for name, value in _softmax_statistics(*setting.inputs(variance, draw)).items():
                found[name].append(value)
        row: Row = {"score_variance": variance}
        for name, values in found.items():
            row |= spread(name, values)
        yield row | setting.columns()


SOFTMAX_COLUMNS = (
    "variance_within_rows",
    "variance_all",
    "variance_predicted",
    "mean",
    "mean_predicted",
    "kolmogorov_smirnov",
)


def _softmax_statistics(q: Tensor, k: Tensor) -> dict[str, float]:
    p = ATTENTIONS["softmax"].matrix(q, k)
    fit = fit_lognormal(p)
    predicted = (q.var(correction=0) * k.var(correction=0)).item()
    measured = (log_variance(p), fit.sigma2, predicted, fit.mu)
    mean = -math.log(p.shape[-1]) - predicted / 2
    values = (*measured, mean, fit.kolmogorov_smirnov)
    return dict(zip(SOFTMAX_COLUMNS, map(float, values), strict=True))


def matched_rows(setting: Setting | None = None) -> Iterator[Row]:
    """Fig. 5b: variance of ln P of LLN before and after matching, beside softmax attention."""
    setting = setting or Setting()
    for name in MATCHED:
        for variance in setting.variances:
            found = {"variance_within_rows": [], "variance_all": []}
            for draw in range(setting.draws):
                p = ATTENTIONS[name].matrix(*setting.inputs(variance, draw))
                found["variance_within_rows"].append(log_variance(p).item())
                found["variance_all"].append(log_variance(p, within_rows=False).item())
            row: Row = {"attention": name, "score_variance": variance}
            for quantity, values in found.items():
                row |= spread(quantity, values)
            yield row | setting.columns()


def histogram_rows(setting: Setting | None = None) -> Iterator[Row]:
    """Fig. 7: histogram of ln P at σ_sm² = 1, beside the normal law with its mean and variance."""
    setting = setting or Setting(draws=4)
    matrices = {name: _matrices(setting, name) for name in HISTOGRAM}
    tails = torch.tensor([0.0005, 0.9995], dtype=torch.float64)
    ends = torch.stack([p.log().flatten().quantile(tails) for p in matrices.values()])
    edges = torch.linspace(ends.min(), ends.max(), BINS + 1, dtype=torch.float64)
    for name, p in matrices.items():
        law = _law(p)
        density = torch.histogram(p.log().flatten(), edges, density=True).hist
        for left, right, height in zip(edges[:-1], edges[1:], density, strict=True):
            centre = (left + right).item() / 2
            place = {"attention": name, "log_p": centre, "density": height.item()}
            place |= {"normal_density": _normal_density(centre, law["mu"], law["sigma2"])}
            yield place | law | setting.columns()


def _matrices(setting: Setting, name: str) -> Tensor:
    draws = range(setting.draws)
    return torch.stack([ATTENTIONS[name].matrix(*setting.inputs(1.0, draw)) for draw in draws])


def _law(p: Tensor) -> dict[str, float]:
    """Moments of ln P and its distance from a normal law, means over the draws."""
    fit = fit_lognormal(p)
    names = ("mu", "sigma2", "skew", "kolmogorov_smirnov")
    return {name: getattr(fit, name).mean().item() for name in names}


def _normal_density(x: float, mean: float, variance: float) -> float:
    return math.exp(-((x - mean) ** 2) / variance / 2) / math.sqrt(2 * math.pi * variance)
