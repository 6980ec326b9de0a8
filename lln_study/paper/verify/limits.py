"""What LLN attention is exactly, and what it cannot be: rank, information, retrieval."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from lln.instruments import measure, mutual_information, second_eigenvalue
from lln.ops import reference
from lln_study.paper.figures.inputs import ATTENTIONS, gaussian
from lln_study.paper.verify.check import Check, Evidence

WIDTH = 16


def _lln(scale: float, *, tokens: int = 200, seed: int = 0) -> Tensor:
    """P of LLN with α = β = scale on standard normal inputs of width 16, by definition."""
    q, k = gaussian(tokens, WIDTH, seed=seed)
    scales = q.new_full((1, 1), scale)
    return reference.lln_matrix(q, k, alpha=scales, beta=scales)[0, 0]


def two_softmaxes_are_exact() -> Evidence:
    q, k = gaussian(200, WIDTH, seed=0)
    scales = q.new_full((1, 1), 2.0)
    a_bt = torch.softmax(2 * q + torch.logsumexp(2 * k, 2, keepdim=True), dim=-1) @ torch.softmax(
        2 * k, dim=2
    ).transpose(-1, -2)
    error = (a_bt - reference.lln_matrix(q, k, alpha=scales, beta=scales)).abs().max().item()
    return Evidence(error < 1e-14, f"P = A Bᵀ with two softmaxes equals eq. (9) to {error:.0e}")


def linear_time_gap() -> Evidence:
    q, k = gaussian(300, WIDTH, seed=0)
    gap = measure(q, k, kernel="lln", alpha=2.0, beta=2.0, measures=["spectral_gap"]).spectral_gap
    scales = q.new_full((1, 1), 2.0)
    dense = 1 - second_eigenvalue(reference.lln_matrix(q, k, alpha=scales, beta=scales))
    error = (gap - dense).abs().max().item()
    return Evidence(error < 1e-8, f"gap from a {WIDTH}×{WIDTH} matrix equals N×N to {error:.0e}")


def rank_is_bounded() -> Evidence:
    lln = int(torch.linalg.matrix_rank(_lln(2.0)))
    q, k = gaussian(200, WIDTH, seed=0)
    softmax = int(torch.linalg.matrix_rank(ATTENTIONS["softmax"].matrix(q, k)))
    return Evidence(
        lln <= WIDTH < softmax, f"N = 200, D = {WIDTH}: rank {lln} (softmax: {softmax})"
    )


def information_is_bounded() -> Evidence:
    lln = max(mutual_information(_lln(scale)).item() for scale in (2.0, 5.0, 20.0, 100.0))
    q, k = gaussian(200, WIDTH, seed=0, score_variance=100.0)
    softmax = mutual_information(ATTENTIONS["softmax"].matrix(q, k)).item()
    limit = math.log2(WIDTH)
    return Evidence(
        lln <= limit < softmax,
        f"D = {WIDTH}: at most {lln:.2f} of log₂ D = {limit:.0f} bits (softmax: {softmax:.2f})",
    )


def few_tokens_dominate() -> Evidence:
    counts = [len((_lln(s) > 0.5).nonzero()[:, 1].unique()) for s in (5.0, 20.0, 100.0)]
    q, k = gaussian(200, WIDTH, seed=0, score_variance=100.0)
    p = ATTENTIONS["softmax"].matrix(q, k)
    softmax = len((p > 0.5).nonzero()[:, 1].unique())
    return Evidence(
        max(counts) <= WIDTH < softmax,
        f"N = 200, D = {WIDTH}: {max(counts)} keys hold over half of some row (softmax: {softmax})",
    )


def retrieval_fails() -> Evidence:
    _, k = gaussian(512, 64, seed=0)
    target = torch.randperm(512, generator=torch.Generator().manual_seed(1))
    found = {}
    for name in ("softmax", "LLN paper", "LLN entropy", "LLN entropy, normalize_keys"):
        p = ATTENTIONS[name].matrix(k[:, :, target], k)
        found[name] = (p.argmax(-1) == target).double().mean().item()
    best = max(value for name, value in found.items() if name != "softmax")
    return Evidence(
        found["softmax"] == 1 and best < 0.9 and found["LLN paper"] < 0.5,
        "queries that are copies of keys, N = 512, D = 64, τ = 1; targets found: "
        + ", ".join(f"{name} {value:.0%}" for name, value in found.items()),
    )


CHECKS = [
    Check(
        "eq. (8), (9)",
        "LLN attention is a product of two softmaxes: nothing can overflow",
        two_softmaxes_are_exact,
        "not in the paper",
    ),
    Check(
        "section 3.2.2",
        "the spectrum of LLN attention follows from a D×D matrix",
        linear_time_gap,
        "not in the paper",
    ),
    Check("limits", "rank(P) ≤ D for LLN", rank_is_bounded, "not in the paper"),
    Check(
        "limits",
        "LLN's keys tell at most log₂ D bits about the query",
        information_is_bounded,
        "not in the paper",
    ),
    Check(
        "limits",
        "at most D keys can hold more than half of any row of LLN",
        few_tokens_dominate,
        "not in the paper",
    ),
    Check(
        "limits",
        "LLN emulates concentration, not lookup: it misses exact copies that softmax finds",
        retrieval_fails,
        "not in the paper",
    ),
]
