"""What the paper's figures are computed on: Gaussian queries and keys, and the attentions compared.

Queries and keys have standard deviation τ^(-1/2) each, so that the scores qᵀk/√D have standard
deviation 1/τ: τ is the temperature of eq. (5).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from lln.instruments import measure
from lln.instruments.heads import build_head
from lln.moments import match_moments
from lln.ops.linear.normalized_keys import normalized_keys


@dataclass(frozen=True)
class Attention:
    """A curve of a figure: a kernel of :mod:`lln.instruments` and, for LLN, how it is calibrated.

    ``method`` None leaves α = β = 1. ``scale_free`` kernels do not change when q and k are scaled.
    """

    kernel: str
    method: str | None = None
    normalize_keys: bool = False
    scale_free: bool = False

    def scales(self, q: Tensor, k: Tensor) -> tuple[float, float]:
        """α, β for these inputs; 1, 1 without a method."""
        if self.method is None:
            return 1.0, 1.0
        sigmas = (q.std(correction=0).item(), k.std(correction=0).item())
        return match_moments(
            *sigmas, q.shape[-1], method=self.method, normalize_keys=self.normalize_keys
        )

    def measure(self, q: Tensor, k: Tensor, measures: tuple[str, ...]) -> dict[str, float]:
        """The wanted measures of this attention on one head, exact."""
        options: dict[str, Any] = {}
        if self.kernel == "lln":
            alpha, beta = self.scales(q, k)
            options = {"alpha": alpha, "beta": beta, "normalize_keys": self.normalize_keys}
        found = measure(q, k, kernel=self.kernel, measures=measures, **options)
        return {name: getattr(found, name).item() for name in measures}

    def matrix(self, q: Tensor, k: Tensor) -> Tensor:
        """P [N, N] of one head."""
        alpha, beta = self.scales(q, k)
        if self.normalize_keys:
            k, beta = normalized_keys(k.double(), k.new_tensor([[beta]])), 1.0
        head = build_head(self.kernel, q[0, 0], k[0, 0], (alpha, beta), is_causal=False)
        return head.rows(torch.arange(head.queries))


ATTENTIONS = {
    "softmax": Attention("softmax"),
    "LLN paper": Attention("lln", "paper"),
    "LLN variance": Attention("lln", "variance"),
    "LLN entropy": Attention("lln", "entropy"),
    "LLN entropy, normalize_keys": Attention("lln", "entropy", normalize_keys=True),
    "LLN α = β = 1": Attention("lln"),
    "(qᵀk)²": Attention("quadratic", scale_free=True),
    "ReLU(qᵀk)": Attention("relu", scale_free=True),
    "φ = x²": Attention("quadratic_linear", scale_free=True),
    "φ = ReLU": Attention("relu_linear", scale_free=True),
}


def gaussian(
    tokens: int, head_dim: int, *, seed: int, score_variance: float = 1.0
) -> tuple[Tensor, Tensor]:
    """q, k [1, 1, N, D] in float64, σ_q² = σ_k² = √score_variance; the numbers follow ``seed``."""
    generator = torch.Generator().manual_seed(seed)
    shape = (1, 1, tokens, head_dim)
    q, k = (torch.randn(shape, generator=generator, dtype=torch.float64) for _ in range(2))
    return q * score_variance**0.25, k * score_variance**0.25


def spread(name: str, values: list[float]) -> dict[str, float]:
    """Mean and standard deviation over draws, as two columns of a row."""
    over = torch.tensor(values, dtype=torch.float64)
    deviation = over.std().item() if len(values) > 1 else 0.0
    return {name: over.mean().item(), f"{name}_sd": deviation}
