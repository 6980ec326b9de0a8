"""Moment matching as a module does it: for its heads, its feature map, with its sharpness."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lln import moments
from lln.moments.calibration import match_heads
from lln.moments.slots import slot_factor
from lln.nn.feature_maps import FAMILY


@dataclass(frozen=True)
class Matching:
    """The heads and the options of moment matching that the three kinds share."""

    num_heads: int
    num_kv_heads: int
    head_dim: int
    method: str | moments.MomentFit = "paper"
    normalize_keys: bool = False
    impl: str | None = None
    feature_map: str = "identity"
    slots: int = 0
    sharpness: float = 1.0

    def __post_init__(self) -> None:
        if not 0 < self.sharpness < math.inf:
            raise ValueError(
                f"sharpness={self.sharpness} must be positive; 1 is the match, less is flatter"
            )
        # An unknown method fails here, and a tabulated one is tabulated before the first batch.
        moments.match_moments(
            1.0, 1.0, self.head_dim, method=self.method, normalize_keys=self.normalize_keys
        )

    def scales(self, variances: Float[Tensor, "2 Hkv"]) -> tuple[Tensor, Tensor]:
        """α ``[H]`` and β ``[Hkv]`` from the rows σ_q² and σ_k²."""
        deviations = variances.sqrt()
        return self.match(deviations[0], deviations[1])

    def match(
        self,
        sigma_q: Float[Tensor, "*B Hkv"],
        sigma_k: Float[Tensor, "*B Hkv"],
    ) -> tuple[Float[Tensor, "*B H"], Float[Tensor, "*B Hkv"]]:
        """α and β for the feature map in use, with ``sharpness``."""
        alpha, beta = match_heads(
            sigma_q,
            sigma_k,
            self.num_heads,
            self.head_dim,
            method=self.method,
            normalize_keys=self.normalize_keys,
            impl=self.impl,
        )
        if not self.slots_matter:
            return self._sharpened(alpha, beta)
        size = self.head_dim, self.slots
        found: Any = slot_factor(FAMILY[self.feature_map], *size, (sigma_q * sigma_k) ** 2)
        factor = (self.sharpness * found).to(alpha)
        group = self.num_heads // self.num_kv_heads
        return alpha * factor.repeat_interleave(group, dim=-1), beta * factor

    @property
    def slots_matter(self) -> bool:
        """Whether the match depends on the number of slots beside that of the features."""
        return self.method == "entropy" and self.feature_map != "identity"

    def _sharpened(self, alpha: Tensor, beta: Tensor) -> tuple[Tensor, Tensor]:
        factor = self.sharpness
        return (alpha, beta) if factor == 1 else (alpha * factor, beta * factor)

    def measure(
        self,
        q: Float[Tensor, "B H N D"],
        k: Float[Tensor, "B Hkv M D"],
        masks: dict[str, Any],
    ) -> tuple[Float[Tensor, "B H"], Float[Tensor, "B Hkv"]]:
        """α and β of every sample and head."""
        if not self.slots_matter:
            alpha, beta = moments.measure_scales(
                q,
                k,
                **masks,
                method=self.method,
                normalize_keys=self.normalize_keys,
                impl=self.impl,
            )
            return self._sharpened(alpha, beta)
        deviations = moments.standard_deviations(q, k, **masks, impl=self.impl)
        return self.match(*deviations)

    @torch.no_grad()
    def pooled_variances(
        self,
        q: Float[Tensor, "B H N D"],
        k: Float[Tensor, "B Hkv M D"],
        *,
        key_mask: Bool[Tensor, "B M"] | None,
        query_mask: Bool[Tensor, "B N"] | None,
    ) -> Float[Tensor, "2 Hkv"]:
        """The rows that :meth:`scales` reads, averaged over samples; NaN without a valid token."""
        sigma_q, sigma_k = moments.standard_deviations(
            q, k, key_mask=key_mask, query_mask=query_mask, impl=self.impl
        )
        rows = [
            _weighted_mean(sigma_q.square(), _valid_tokens(query_mask, q)),
            _weighted_mean(sigma_k.square(), _valid_tokens(key_mask, k)),
        ]
        return torch.stack(rows)


def _valid_tokens(mask: Tensor | None, x: Tensor) -> Float[Tensor, "B 1"]:
    if mask is None:
        return x.new_full((x.shape[0], 1), x.shape[2], dtype=torch.float32)
    return mask.sum(-1, keepdim=True, dtype=torch.float32)


def _weighted_mean(variance: Float[Tensor, "B Hkv"], tokens: Float[Tensor, "B 1"]) -> Tensor:
    """Mean over samples weighted by their valid tokens; a sample without any is skipped."""
    total = torch.where(tokens > 0, variance * tokens, 0).sum(0)
    return total / tokens.sum()
