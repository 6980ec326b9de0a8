"""flash-linear-attention (``fla``) beside ours, where it is installed: never a dependency.

It gets features that are positive already, which ours makes itself, and has no normaliser in the
call that is measured, its fastest one.
"""

from __future__ import annotations

import importlib.util
import math

import torch.nn.functional as F
from torch import Tensor

IMPL, OP = "fla", "causal"


def installed() -> bool:
    """Whether the library can be imported."""
    return importlib.util.find_spec(IMPL) is not None


def prepared(q: Tensor, k: Tensor, v: Tensor) -> list[Tensor]:
    """Features ELU + 1 of q and k, and v; in memory as [B, N, H, D], which it takes as it is."""
    made = (F.elu(q) + 1, F.elu(k) + 1, v)
    return [x.transpose(1, 2).contiguous().transpose(1, 2) for x in made]


def attend(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention; the library's axes are [B, N, H, D]."""
    from fla.ops.linear_attn import (  # pyright: ignore[reportMissingImports]
        fused_chunk_linear_attn,
    )

    rows = (x.transpose(1, 2) for x in (q, k, v))
    return fused_chunk_linear_attn(*rows, normalize=False)[0].transpose(1, 2)


def expected(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """What it defines."""
    return (q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])).tril() @ v
