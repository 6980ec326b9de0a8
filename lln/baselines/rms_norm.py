"""The norm of TransNormer and TNN."""

from __future__ import annotations

import torch
from torch import Tensor


def simple_rms_norm(x: Tensor, *, eps: float = 1e-8) -> Tensor:
    """x √d / (|x| + ε) over the last axis, without a learned gain."""
    length = torch.linalg.vector_norm(x, dim=-1, keepdim=True)
    return x * (x.shape[-1] ** 0.5 / (length + eps))
