"""What every part of the package agrees on: the letters for axes and the record of a call.

Axes, one legend for the whole project:
    B batch, H query heads, Hkv key heads (H is a multiple of Hkv), N queries, M keys,
    D query/key width, E value width, C block or chunk, T packed tokens, S packed sequences.
Public tensors are ``[B, H, N, D]`` as in ``scaled_dot_product_attention``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
from torch import Tensor

HALF = (torch.float16, torch.bfloat16)
FLOATING = (*HALF, torch.float32, torch.float64)


def compute_dtype(*tensors: Tensor) -> torch.dtype:
    """Accumulate in float32 whatever the input, float64 if any input is float64."""
    wide = any(tensor.dtype == torch.float64 for tensor in tensors)
    return torch.float64 if wide else torch.float32


@dataclass(frozen=True)
class Call:
    """What an implementation is asked to do, for :func:`lln.which` and for refusals.

    ``needs`` names features beyond the plain op: ``"dropout"``, ``"learned_mix"``, ``"state"``.
    """

    op: str
    q: Tensor
    k: Tensor
    v: Tensor
    needs: frozenset[str] = field(default_factory=frozenset)
