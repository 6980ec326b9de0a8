"""The attention kernels that :func:`lln.instruments.measure` knows, as logarithms.

A *linear* kernel is κ(q, k) = φ(q)ᵀφ(k) with φ elementwise and non-negative: its matrix has rank
at most D and is measured in linear time. A *quadratic* kernel is a function of the score qᵀk/√D.
The paper's Fig. 2 does not define its kernels; these readings reproduce it (docs/equations.md).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Kernel:
    """Either ``log_feature``, ln φ(x) of a linear kernel, or ``log_score``, ln κ(s)."""

    formula: str
    log_feature: Callable[[Tensor], Tensor] | None = None
    log_score: Callable[[Tensor], Tensor] | None = None


def _identity(x: Tensor) -> Tensor:
    return x


def _log_relu(x: Tensor) -> Tensor:
    return x.clamp(min=0).log()


def _log_square(x: Tensor) -> Tensor:
    return 2 * x.abs().log()


def _log_elu_plus_one(x: Tensor) -> Tensor:
    """ln(elu(x) + 1) = x below zero and ln(1 + x) above."""
    return x.clamp(max=0) + torch.log1p(x.clamp(min=0))


KERNELS = {
    "softmax": Kernel("exp(qᵀk/√D)", log_score=_identity),
    "lln": Kernel("Σ_l exp(α q_l + β k_l)", log_feature=_identity),
    "relu": Kernel("max(qᵀk, 0)", log_score=_log_relu),
    "quadratic": Kernel("(qᵀk)²", log_score=_log_square),
    "relu_linear": Kernel("ReLU(q)ᵀReLU(k)", log_feature=_log_relu),
    "quadratic_linear": Kernel("(q²)ᵀ(k²)", log_feature=_log_square),
    "elu": Kernel("(elu(q) + 1)ᵀ(elu(k) + 1)", log_feature=_log_elu_plus_one),
}


def find_kernel(name: str) -> Kernel:
    """The kernel called ``name``, or an error that lists the names."""
    if name not in KERNELS:
        raise ValueError(f"kernel={name!r} is unknown; choose one of {', '.join(KERNELS)}")
    return KERNELS[name]
