"""What is measured of every head, and what theory predicts for it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch
from torch import Tensor

from lln import moments
from lln.instruments import fit_lognormal, log_variance, measure
from lln.instruments.recording.attention_call import MEASURABLE, AttentionCall
from lln.ops.reference import repeat_heads
from lln.records.rows import Row, number

MEASURES = (
    "entropy",
    "spectral_gap",
    "temperature",
    "effective_tokens",
    "column_bias",
    "mutual_information",
)
MATRIX_MEASURES = (
    *("top_key", "mu", "sigma2", "skew", "kolmogorov_smirnov"),
    *("mu_predicted", "mu_fenton", "sigma2_predicted", "sigma2_product"),
)
TEMPERATURES = (0.15, 0.2, 0.3, 0.4, 0.55, 0.75, 1.0, 1.5, 2.5)
EXCESS_GAP = 0.1  # above the gap of an unbiased head at the same temperature
COLUMN_BIAS = 0.5  # bits; at low temperature the gap alone varies much from text to text
SINK = 0.25  # mean attention on one key, of a causal head


def head_rows(calls: Sequence[AttentionCall]) -> Iterator[list[Row]]:
    """Yield the rows of each layer: means over the sequences, None where not measured."""
    unbiased: dict[tuple[int, int], Tensor] = {}
    for call in calls:
        table = {name: call.q.new_full(call.q.shape[:2], math.nan) for name in MATRIX_MEASURES}
        if call.kernel in MEASURABLE and not call.unreadable:
            table = _matrix_measures(call)
        table |= call.measured(MEASURES)
        means = {name: values.nanmean(0) for name, values in table.items()}
        means |= _gap_of_unbiased(call, means["temperature"], unbiased)
        keys = round(call.keys.sum(-1, dtype=torch.float32).mean().item())
        place = {"layer": call.layer, "module": call.module, "kernel": call.kernel}
        place |= {"causal": call.is_causal, "tokens": keys}
        rows = [
            {**place, "head": head, **{name: number(v[head].item()) for name, v in means.items()}}
            for head in range(call.heads)
        ]
        yield [row | {"biased": is_biased(row)} for row in rows]


def is_biased(row: Row) -> bool | None:
    """Whether a head prefers keys whatever the query; None where it was not measured.

    A gap well above that of a head without bias at the same temperature, with a mean row that is
    not uniform; or, where causality makes the gap meaningless, much attention on one key.
    """
    if row["causal"]:
        return None if row["top_key"] is None else row["top_key"] > SINK
    if row["spectral_gap"] is None or row["gap_unbiased"] is None:
        return None
    excess = row["spectral_gap"] - row["gap_unbiased"]
    return excess > EXCESS_GAP and row["column_bias"] >= COLUMN_BIAS


def _matrix_measures(call: AttentionCall) -> dict[str, Tensor]:
    """Measure the law of ln P beside its prediction, [S, H] each; one matrix is held at a time."""
    found = []
    variance = moments.score_variance(
        call.q, repeat_heads(call.k, call.heads), key_mask=call.keys, query_mask=call.tokens
    )
    sigma_q, sigma_k = call.deviations()
    for sample in range(call.q.shape[0]):
        p = alike_rows(call.matrix(sample), call.is_causal)
        fit = fit_lognormal(p)
        product = (sigma_q[sample] * sigma_k[sample]).square()
        sigma2 = variance[sample] if call.kernel == "softmax" else _lln_variance(call, sample)
        mu, mu_fenton = predicted_mean(p, sigma2)
        values = (p.mean(-2).amax(-1), fit.mu, log_variance(p), fit.skew, fit.kolmogorov_smirnov)
        found.append(torch.stack([*values, mu, mu_fenton, sigma2, product]))
    stacked = torch.stack(found, dim=1)  # [quantity, S, H]
    return dict(zip(MATRIX_MEASURES, stacked, strict=True))


def alike_rows(p: Tensor, is_causal: bool) -> Tensor:
    """Return all rows, or of a causal matrix the second half, which see about equally many keys."""
    return p[..., p.shape[-2] // 2 :, :] if is_causal else p


def predicted_mean(p: Tensor, sigma2: Tensor) -> tuple[Tensor, Tensor]:
    r"""Mean of ln P for scores of variance σ², by Prop. 3.1 and by Fenton's sum (A.5).

        μ = −ln n − σ²/2,      μ = −ln n − (σ² − σ_Σ²)/2,  σ_Σ² = ln((e^σ² − 1)/n + 1)
    with n the number of keys a query sees; over rows of unequal n, the mean over their entries.
    """
    seen = (p > 0).sum(-1).to(sigma2.dtype)
    log_seen = (seen * seen.log()).sum(-1) / seen.sum(-1)
    wide = sigma2.double()
    of_the_sum = torch.log1p(torch.expm1(wide) / seen.mean(-1)).to(sigma2.dtype)
    return -log_seen - sigma2 / 2, -log_seen - (sigma2 - of_the_sum) / 2


def _lln_variance(call: AttentionCall, sample: int) -> Tensor:
    """Prop. 4.1 with the published line: a (α²σ_q² + β²σ_k²) + b."""
    assert call.alpha is not None and call.beta is not None
    sigma_q, sigma_k = (sigma[sample] for sigma in call.deviations())
    beta = repeat_heads(call.beta[sample, None], call.heads)[0]
    spread = (call.alpha[sample] * sigma_q).square() + (beta * sigma_k).square()
    return moments.PAPER.a * spread + moments.PAPER.b


def _gap_of_unbiased(
    call: AttentionCall, temperature: Tensor, known: dict[tuple[int, int], Tensor]
) -> dict[str, Tensor]:
    """The gap of softmax attention on Gaussian inputs of the same size and temperature."""
    if call.is_causal or call.q.shape[2] != call.k.shape[2]:
        return {"gap_unbiased": torch.full_like(temperature, math.nan)}
    size = (call.q.shape[2], call.q.shape[3])
    if size not in known:
        known[size] = gaussian_gaps(*size)
    place = temperature.clamp(TEMPERATURES[0], TEMPERATURES[-1]).cpu()
    grid = torch.tensor(TEMPERATURES)
    right = torch.searchsorted(grid, place).clamp(1, len(grid) - 1)
    step = (place.log() - grid[right - 1].log()) / (grid[right].log() - grid[right - 1].log())
    gaps = torch.lerp(known[size][right - 1], known[size][right], step)
    return {"gap_unbiased": gaps.where(temperature.cpu().isfinite(), math.nan)}


def gaussian_gaps(tokens: int, head_dim: int, *, draws: int = 2) -> Tensor:
    """Mean spectral gap at each of TEMPERATURES, for independent Gaussian queries and keys."""
    generator = torch.Generator().manual_seed(0)
    q, k = torch.randn(2, 1, draws, tokens, head_dim, generator=generator)
    gaps = [
        measure(q / temperature, k, measures=("spectral_gap",)).spectral_gap.mean()
        for temperature in TEMPERATURES
    ]
    return torch.stack(gaps)
