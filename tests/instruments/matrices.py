"""Attention matrices whose measures are known on paper, and gaussian inputs."""

from __future__ import annotations

import math

import torch
from torch import Tensor


def uniform(size: int) -> Tensor:
    return torch.full((size, size), 1 / size, dtype=torch.float64)


def identity(size: int) -> Tensor:
    return torch.eye(size, dtype=torch.float64)


def cycle(size: int) -> Tensor:
    """The permutation i → i + 1: eigenvalues are all roots of unity."""
    return torch.eye(size, dtype=torch.float64).roll(1, dims=1)


def biased(row: Tensor) -> Tensor:
    """Rank one: every query attends alike."""
    return row.expand(len(row), -1)


def previous_token(size: int) -> Tensor:
    """A head that attends to the token before; the first attends to itself."""
    p = torch.eye(size, dtype=torch.float64).roll(-1, dims=1)
    p[0] = 0
    p[0, 0] = 1
    return p


def softmax(q: Tensor, k: Tensor) -> Tensor:
    return (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).softmax(-1)


def gaussian(tokens: int, width: int, temperature: float = 1.0, heads: int = 1, **options):
    """q, k [1, H, N, D] whose scores have standard deviation 1/temperature."""
    options = {"dtype": torch.float64, **options}
    q = torch.randn(1, heads, tokens, width, **options)
    return q / temperature, torch.randn(1, heads, tokens, width, **options)
