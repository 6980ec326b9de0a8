"""Small seeded inputs for the module tests."""

from __future__ import annotations

import torch
from torch import Tensor


def qkv(
    *shape: int, kv_heads: int | None = None, keys: int | None = None, seed: int = 0, **options
) -> tuple[Tensor, Tensor, Tensor]:
    """q ``[B, H, N, D]``, k and v ``[B, Hkv, M, D]``, gaussian with a scale of its own per head."""
    batch, heads, tokens, width = shape
    generator = torch.Generator().manual_seed(seed)
    kv_shape = (batch, kv_heads or heads, keys or tokens, width)

    def tensor(size: tuple[int, ...]) -> Tensor:
        scale = torch.linspace(0.5, 1.5, size[1])[None, :, None, None]
        return (torch.randn(size, generator=generator) * scale).to(**options)

    return tensor(shape), tensor(kv_shape), tensor(kv_shape)


def embeddings(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def padding(lengths: list[int], tokens: int) -> Tensor:
    """True at valid tokens."""
    return torch.arange(tokens) < torch.tensor(lengths)[:, None]
