"""Entropy and spectral gap against temperature (Fig. 2 of the paper), and exact retrieval.

Queries and keys are independent normal vectors of standard deviation τ^(-1/2), so that the scores
have standard deviation 1/τ: τ is the softmax temperature of eq. (5).
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lln.instruments import entropy, spectral_gap
from lln.moments import match_moments
from lln.ops import reference


@dataclass(frozen=True)
class Setting:
    """Size of the experiment; ``draws`` independent inputs per temperature."""

    tokens: int = 512
    head_dim: int = 64
    temperatures: Sequence[float] = (0.3, 0.5, 0.7, 1.0, 1.5, 2.0)
    draws: int = 3
    seed: int = 0

    def describe(self) -> str:
        return f"N={self.tokens} d={self.head_dim} draws={self.draws} seed={self.seed}"


def softmax_matrix(q: Tensor, k: Tensor) -> Tensor:
    """P of eq. (6)."""
    scores = reference.softmax_scores(q, k, scale=1 / math.sqrt(q.shape[-1]))
    return torch.softmax(scores, dim=-1)


def lln_matrix(q: Tensor, k: Tensor, *, method: str | None, normalize_keys: bool = False) -> Tensor:
    """P of eq. (9) with α, β of ``method``, or α = β = 1 for None."""
    alpha, beta = 1.0, 1.0
    if method is not None:
        alpha, beta = match_moments(
            float(q.std()),
            float(k.std()),
            q.shape[-1],
            method=method,
            normalize_keys=normalize_keys,
        )
    heads = q.shape[:2]
    return reference.lln_matrix(
        q,
        k,
        alpha=q.new_full(heads, float(alpha)),
        beta=k.new_full(heads, float(beta)),
        normalize_keys=normalize_keys,
    )


KERNELS: dict[str, Callable[[Tensor, Tensor], Tensor]] = {
    "softmax": softmax_matrix,
    "LLN paper": lambda q, k: lln_matrix(q, k, method="paper"),
    "LLN variance": lambda q, k: lln_matrix(q, k, method="variance"),
    "LLN entropy": lambda q, k: lln_matrix(q, k, method="entropy"),
    "LLN entropy, normalize_keys": lambda q, k: lln_matrix(
        q, k, method="entropy", normalize_keys=True
    ),
    "LLN α = β = 1": lambda q, k: lln_matrix(q, k, method=None),
}


def gaussian_inputs(setting: Setting, temperature: float, draw: int) -> tuple[Tensor, Tensor]:
    """q and k ``[1, 1, N, D]`` in float64; the same normal numbers at every temperature."""
    generator = torch.Generator().manual_seed(setting.seed + draw)
    shape = (1, 1, setting.tokens, setting.head_dim)
    q, k = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return q / math.sqrt(temperature), k / math.sqrt(temperature)


def measure(setting: Setting) -> Iterator[dict[str, Any]]:
    """Yield a row per temperature and kernel: mean and standard deviation over the draws."""
    for temperature in setting.temperatures:
        drawn = [gaussian_inputs(setting, temperature, draw) for draw in range(setting.draws)]
        for kernel, matrix in KERNELS.items():
            matrices = [matrix(q, k) for q, k in drawn]
            bits = torch.cat([entropy(p).flatten() for p in matrices])
            gaps = torch.cat([spectral_gap(p).flatten() for p in matrices])
            yield {
                "kernel": kernel,
                "temperature": temperature,
                "entropy": bits.mean().item(),
                "entropy_sd": _spread(bits),
                "spectral_gap": gaps.mean().item(),
                "spectral_gap_sd": _spread(gaps),
            }


def _spread(values: Tensor) -> float:
    return values.std().item() if len(values) > 1 else 0.0


def retrieval(setting: Setting, *, temperature: float = 1.0) -> list[dict[str, Any]]:
    """A row per kernel for queries that are copies of keys, q_i = k_π(i).

    ``found`` is the share of rows whose largest weight falls on the target, ``weight`` the mean
    weight of the target. A kernel that can look up a token scores 1. LLN cannot: its matrix has
    rank at most D.
    """
    scores: dict[str, list[tuple[float, float]]] = {kernel: [] for kernel in KERNELS}
    for draw in range(setting.draws):
        _, k = gaussian_inputs(setting, temperature, draw)
        generator = torch.Generator().manual_seed(setting.seed + 1000 + draw)
        target = torch.randperm(setting.tokens, generator=generator)
        for kernel, matrix in KERNELS.items():
            p = matrix(k[:, :, target], k)[0, 0]
            found = (p.argmax(dim=-1) == target).double().mean().item()
            weight = p.gather(1, target[:, None]).mean().item()
            scores[kernel].append((found, weight))
    rows = []
    for kernel, pairs in scores.items():
        found, weight = torch.tensor(pairs, dtype=torch.float64).mean(dim=0).tolist()
        rows.append(
            {"kernel": kernel, "temperature": temperature, "found": found, "weight": weight}
        )
    return rows
