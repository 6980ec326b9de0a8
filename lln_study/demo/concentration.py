"""Entropy and spectral gap against temperature (Fig. 2 of the paper), and exact retrieval.

Inputs and attentions are those of the paper's figures: see :mod:`lln_study.paper.figures.inputs`.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from lln.records.rows import Row
from lln_study.paper.figures.inputs import ATTENTIONS, gaussian, spread

KERNELS = {name: each for name, each in ATTENTIONS.items() if each.kernel in ("softmax", "lln")}
MEASURES = ("entropy", "spectral_gap")


@dataclass(frozen=True)
class Setting:
    """Size of the experiment; ``draws`` independent inputs per temperature."""

    tokens: int = 512
    head_dim: int = 64
    temperatures: Sequence[float] = (0.3, 0.5, 0.7, 1.0, 1.5, 2.0)
    draws: int = 3
    seed: int = 0

    def describe(self) -> str:
        """Return the sizes in a line."""
        return f"N={self.tokens} d={self.head_dim} draws={self.draws} seed={self.seed}"

    def inputs(self, temperature: float, draw: int) -> tuple[Tensor, Tensor]:
        """Draw q and k ``[1, 1, N, D]``: the same normal numbers at every temperature."""
        size, seed = (self.tokens, self.head_dim), self.seed + draw
        return gaussian(*size, seed=seed, score_variance=temperature**-2)


def measure(setting: Setting) -> Iterator[Row]:
    """Yield a row per temperature and kernel: mean and standard deviation over the draws."""
    for temperature in setting.temperatures:
        drawn = [setting.inputs(temperature, draw) for draw in range(setting.draws)]
        for kernel, attention in KERNELS.items():
            found = [attention.measure(q, k, MEASURES) for q, k in drawn]
            row: Row = {"kernel": kernel, "temperature": temperature}
            for name in MEASURES:
                row |= spread(name, [each[name] for each in found])
            yield row


def retrieval(setting: Setting, *, temperature: float = 1.0) -> list[Row]:
    """Return a row per kernel for queries that are copies of keys, q_i = k_π(i).

    ``found`` is the share of rows whose largest weight falls on the target, ``weight`` the mean
    weight of the target. A kernel that can look up a token scores 1. LLN cannot: its matrix has
    rank at most D.
    """
    scores: dict[str, list[tuple[float, float]]] = {kernel: [] for kernel in KERNELS}
    for draw in range(setting.draws):
        _, k = setting.inputs(temperature, draw)
        generator = torch.Generator().manual_seed(setting.seed + 1000 + draw)
        target = torch.randperm(setting.tokens, generator=generator)
        for kernel, attention in KERNELS.items():
            p = attention.matrix(k[:, :, target], k)
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
