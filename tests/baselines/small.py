"""Mechanisms of a size for tests: every special structure is there, several times over."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

import lln
from lln.baselines.base import TokenMixer

SMALL: dict[str, dict[str, Any]] = {
    "block_diag": {"block": 8},
    "flash": {"chunk": 16, "query_dim": 8},
    "knn": {"neighbours": 5},
    "landmarks": {"landmarks": 8},
    "linformer": {"rank": 8},
    "lln_diag": {"near": 8},
    "longformer": {"window": 8, "global_tokens": 2},
    "nystromformer": {"landmarks": 8, "kernel_size": 5},
    "performer": {"num_features": 32},
    "rebased": {"feature_dim": 4},
    "reformer": {"chunk": 8, "rounds": 3},
    "rfa": {"num_features": 16},
    "skyformer": {"landmarks": 8},
    "sliding_window": {"window": 8},
    "tnn": {"position_dim": 8, "position_layers": 2},
    "transformer_ls": {"landmarks": 4, "window": 4},
    "transnormer_t1": {"block": 8},
    "transnormer_t2": {"block": 8},
}
DIM, HEADS, MAX_LENGTH = 32, 2, 257
TOKENS = 13  # of the formulas, which are loops


def make(name: str, **options: Any) -> TokenMixer:
    """A small mechanism in evaluation mode."""
    sizes = {"dim": DIM, "num_heads": HEADS, "max_length": MAX_LENGTH}
    return lln.create(name, **{**sizes, **SMALL.get(name, {}), **options}).eval()


def padded(tokens: int, *, batch: int = 2, dtype=torch.float32) -> tuple[Tensor, Tensor]:
    """x and a mask: the first sample is whole, the others are cut and end in padding."""
    x = torch.randn(batch, tokens, DIM, dtype=dtype)
    lengths = torch.tensor([tokens] + [max(tokens * 3 // 5, 1)] * (batch - 1))
    return x, torch.arange(tokens) < lengths[:, None]


def for_compiler(name: str, device: str) -> tuple[TokenMixer, Tensor, Tensor]:
    """A mechanism, x with scores that are not all alike, and a mask.

    Windows are wide: a wrong gradient of overlapping ones showed from 32 tokens on.
    """
    wide = {"window": 32} if "window" in SMALL.get(name, {}) else {}
    x, mask = padded(100)
    return make(name, **wide).to(device), 3 * x.to(device), mask.to(device)


def heads(tokens: int, *, batch: int = 2, width: int = 16, dtype=torch.float64) -> list[Tensor]:
    """q, k, v for a core."""
    return [torch.randn(batch, HEADS, tokens, width, dtype=dtype) for _ in range(3)]


def mask_of(tokens: int = TOKENS) -> Tensor:
    """A whole sample, and one with hidden tokens at the end and in the middle."""
    mask = torch.ones(2, tokens, dtype=torch.bool)
    mask[1, tokens - 3 :] = False
    mask[1, 4] = False
    return mask
