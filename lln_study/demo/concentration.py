"""Entropy and spectral gap against temperature (Fig. 2 of the paper), and exact retrieval."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch

from lln.records.rows import Row
from lln_study.paper.figures import concentration
from lln_study.paper.figures.inputs import ATTENTIONS

KERNELS = {name: each for name, each in ATTENTIONS.items() if each.kernel in ("softmax", "lln")}


@dataclass(frozen=True)
class Setting(concentration.Setting):
    """Size of the experiment, smaller than that of the figure."""

    temperatures: Sequence[float] = (0.3, 0.5, 0.7, 1.0, 1.5, 2.0)
    draws: int = 3

    def describe(self) -> str:
        """Return the sizes in a line."""
        return f"N={self.tokens} d={self.head_dim} draws={self.draws} seed={self.seed}"


def measure(setting: Setting) -> Iterator[Row]:
    """Yield a row per kernel and temperature: mean and standard deviation over the draws."""
    for row in concentration.rows(setting, KERNELS, ("entropy", "spectral_gap")):
        yield {"kernel": row.pop("attention"), **row}


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
