"""Performer: positive orthogonal random features of the softmax kernel."""

from __future__ import annotations

import math

import torch
from jaxtyping import Float
from torch import Tensor

from lln.baselines.base import Layer
from lln.baselines.linear import PositiveCore
from lln.ops.common.arguments import check_positive_int


class Performer(PositiveCore):
    r"""FAVOR+ (Choromanski et al. 2021, arXiv:2009.14794).

        φ(x) = m^{-1/2} [exp(Ω x' − |x'|²/2 − c) + ε],  x' = x d^{-1/4}

    with orthogonal rows of Ω whose lengths are those of Gaussian vectors, so that
    E φ(q)ᵀφ(k) = exp(qᵀk/√d) up to c and ε. O(N m d) time, O(N m) memory.

    Args:
        num_features: m; ⌊d ln d⌋ by default.
        eps: The floor ε under every feature. It pulls the weights towards uniform.
        seed: Of Ω, which is drawn once, per layer; :meth:`redraw_` draws another.
        calibrate: Choose the power of φ by entropy, see :class:`PositiveCore`.

    Numerics: c is the maximum of Ωx' per query, and over the *valid* keys of a sample and head.
    Public versions take it over padding as well, or over the whole batch. There is no causal form
    here: the maximum would look at later keys.
    """

    projection: Tensor

    def __init__(
        self,
        layer: Layer,
        *,
        num_features: int | None = None,
        eps: float = 1e-4,
        seed: int = 0,
        calibrate: bool = False,
    ) -> None:
        super().__init__(layer, calibrate=calibrate)
        width = layer.head_dim
        count = max(1, int(width * math.log(width))) if num_features is None else num_features
        check_positive_int("num_features", count)
        self.eps = eps
        projection = orthogonal_gaussian(count, width, layer.generator(seed))
        self.register_buffer("projection", projection)

    @torch.no_grad()
    def redraw_(self, seed: int) -> Performer:
        """Replace Ω, as the paper does now and then while training. Returns the module."""
        count, width = self.projection.shape
        self.projection.copy_(orthogonal_gaussian(count, width, self.layer.generator(seed)))
        return self

    def features(self, q: Tensor, k: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        log_q, log_k = self._shifted(q, k, key_mask)
        scale = self.projection.shape[0] ** -0.5
        return scale * (log_q.exp() + self.eps), scale * (log_k.exp() + self.eps)

    def log_features(self, q: Tensor, k: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        log_q, log_k = self._shifted(q, k, key_mask)
        floor = log_q.new_full((), self.eps).log()
        return torch.logaddexp(log_q, floor), torch.logaddexp(log_k, floor)

    def _shifted(self, q: Tensor, k: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """Ωx' − |x'|²/2 − c of queries and keys."""
        log_q, half_q = self._exponent(q)
        log_k, half_k = self._exponent(k)
        shift_q = log_q.detach().amax(-1, keepdim=True)
        seen = log_k.detach()
        if key_mask is not None:
            seen = seen.masked_fill(~key_mask[:, None, :, None], -torch.inf)
        shift_k = seen.amax((-2, -1), keepdim=True).nan_to_num(neginf=0.0)
        return log_q - half_q - shift_q, log_k - half_k - shift_k

    def _exponent(self, x: Tensor) -> tuple[Tensor, Tensor]:
        x = x * x.shape[-1] ** -0.25
        return x @ self.projection.to(x).mT, x.square().sum(-1, keepdim=True) / 2


def orthogonal_gaussian(
    count: int, width: int, generator: torch.Generator
) -> Float[Tensor, "count width"]:
    """Rows as long as Gaussian vectors, orthogonal within blocks of ``width`` rows."""
    blocks = [
        torch.linalg.qr(torch.randn(width, width, generator=generator)).Q.mT
        for _ in range(-(-count // width))
    ]
    lengths = torch.randn(count, width, generator=generator).norm(dim=1)
    return lengths[:, None] * torch.cat(blocks)[:count]
