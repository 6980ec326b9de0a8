"""Propositions 3.1 and 4.1, Fenton's law and the published line: laws of ln P and their range."""

from __future__ import annotations

import torch

from lln.instruments import fit_lognormal, lln_temperature, log_variance, temperature
from lln.moments import PAPER, fit_line, measure_scales
from lln.records.rows import Row
from lln_study.paper.figures import matching, sums
from lln_study.paper.figures.inputs import ATTENTIONS, gaussian
from lln_study.paper.verify.check import Check, Evidence

MODERATE = matching.Setting(variances=(0.5, 1.0, 2.0, 4.0), draws=2)
LARGE = matching.Setting(variances=(16.0,), draws=2)


def _errors(row: Row) -> tuple[float, float]:
    variance = abs(row["variance_within_rows"] / row["variance_predicted"] - 1)
    return variance, abs(row["mean"] / row["mean_predicted"] - 1)


def softmax_is_lognormal() -> Evidence:
    rows = list(matching.softmax_rows(MODERATE))
    variance = max(_errors(row)[0] for row in rows)
    mean = max(_errors(row)[1] for row in rows)
    distance = max(row["kolmogorov_smirnov"] for row in rows)
    return Evidence(
        variance < 0.01 and mean < 0.01 and distance < 0.01,
        f"σ² ≤ 4, N = 512, D = 64: variance within rows off by {variance:.2%}, mean by {mean:.2%}, "
        f"KS distance {distance:.3f}",
    )


def softmax_law_breaks() -> Evidence:
    row = next(matching.softmax_rows(LARGE))
    mean = _errors(row)[1]
    pooled = row["variance_all"] / row["variance_predicted"] - 1
    return Evidence(
        mean > 0.05 and pooled > 0.05,
        f"σ² = 16 (2 ln N = 12.5): mean off by {mean:.1%}, variance of all entries by {pooled:.1%}",
    )


def _lln_variance(sigma2: float) -> float:
    """Within-row Var[ln P] of LLN with α²σ_q² = β²σ_k² = σ̃²/2, N = 512, D = 64."""
    values = []
    for seed in range(3):
        q, k = gaussian(512, 64, seed=seed, score_variance=(sigma2 / 2) ** 2)
        values.append(log_variance(ATTENTIONS["LLN α = β = 1"].matrix(q, k)).item())
    return sum(values) / len(values)


def lln_variance_is_linear() -> Evidence:
    x = torch.tensor([15.0, 20.0, 25.0, 30.0, 35.0, 40.0], dtype=torch.float64)
    y = torch.tensor([_lln_variance(s) for s in x.tolist()], dtype=torch.float64)
    design = torch.stack([x, torch.ones_like(x)], dim=1)
    line = torch.linalg.lstsq(design, y[:, None]).solution[:, 0]
    residual = (y - design @ line).abs().max() / y.max()
    small = _lln_variance(1.0)
    predicted = (line[0] + line[1]).item()
    return Evidence(
        residual.item() < 0.01 and predicted < 0 < small,
        f"σ̃² in 15 … 40: within {residual:.1%} of a line (a = {line[0]:.3f}, b = {line[1]:.2f}); "
        f"at σ̃² = 1 it would give {predicted:.2f}, measured {small:.3f}",
    )


def lln_is_skewed() -> Evidence:
    q, k = gaussian(512, 64, seed=0)
    softmax, lln = (
        fit_lognormal(ATTENTIONS[name].matrix(q, k)) for name in ("softmax", "LLN variance")
    )
    near, skewed = bool(lln.kolmogorov_smirnov < 0.06), bool(lln.skew > 0.4)
    return Evidence(
        near and skewed and bool(softmax.skew.abs() < 0.1),
        f"KS distance {lln.kolmogorov_smirnov:.3f} and skew {lln.skew:.2f} at equal variance "
        f"(softmax: {softmax.kolmogorov_smirnov:.3f}, {softmax.skew:.2f})",
    )


def fenton_range() -> Evidence:
    setting = sums.Setting(terms=(64,), moderate=(0.4, 1.2, 2.0, 4.0), samples=200_000)
    error = {row["input_variance"]: row["error"] for row in sums.moderate_rows(setting)}
    return Evidence(
        abs(error[0.4]) < 0.01 and 0.04 < error[1.2] < 0.08 and error[4.0] > 1,
        "D = 64: " + ", ".join(f"{value:+.1%} at σ² = {x:g}" for x, value in error.items()),
    )


def matching_returns_the_temperature() -> Evidence:
    q, k = gaussian(256, 64, seed=0, score_variance=2.0)
    alpha, beta = measure_scales(q, k)
    ours = lln_temperature(q, k, alpha=alpha, beta=beta, fit=PAPER).item()
    theirs = temperature(q, k).item()
    return Evidence(
        abs(ours / theirs - 1) < 1e-6, f"τ_lln = {ours:.6f}, τ_sm = {theirs:.6f} with (10) in (11)"
    )


def published_constants() -> Evidence:
    wide, narrow = (fit_line(64, ends) for ends in ((0.0, 20.0), (1.0, 4.0)))
    near = abs(wide.a / PAPER.a - 1) < 0.15
    far = abs(narrow.a / PAPER.a - 1) > 0.3
    return Evidence(
        near and far,
        f"slope {PAPER.a:.3f} published, {wide.a:.3f} fitted over σ̃² in 0 … 20, "
        f"{narrow.a:.3f} over 1 … 4; intercepts {PAPER.b:.3f}, {wide.b:.3f}, {narrow.b:.3f}",
    )


CHECKS = [
    Check(
        "Proposition 3.1",
        "ln P of softmax attention is close to N(−ln N − σ²/2, σ²) for moderate σ²",
        softmax_is_lognormal,
    ),
    Check(
        "Proposition 3.1",
        "it breaks when σ² comes near 2 ln N",
        softmax_law_breaks,
        "the paper says 'moderate' without a number",
    ),
    Check(
        "Proposition 4.1",
        "Var[ln P] of LLN is linear in σ̃² in the broad case, and not below it",
        lln_variance_is_linear,
        "the line is negative for small σ̃²",
    ),
    Check(
        "Proposition 4.1",
        "ln P of LLN is nearly normal, but skewed to the right",
        lln_is_skewed,
        "matching two moments of ln P leaves a third",
    ),
    Check(
        "A.6, eq. (28)",
        "Fenton's law is good to 6 % up to σ² = 1.2 and wrong by more than 100 % at 4",
        fenton_range,
        "a tool for the moderate case only",
    ),
    Check(
        "eq. (5), (10), (11)",
        "moment matching gives LLN the temperature of softmax attention",
        matching_returns_the_temperature,
    ),
    Check(
        "A.7",
        "the published line is the fit over σ̃² from about 0 to 20",
        published_constants,
        "the text says [1, 4]",
    ),
]
