"""γ of near and far keys, and the mean of the keys: what a module measures beside α and β."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
from jaxtyping import Bool, Float
from torch import Tensor, nn

from lln.moments.levels import match_level
from lln.moments.output_levels import OutputTerms, output_terms
from lln.nn.feature_maps import LOG_FEATURES, mean_feature
from lln.nn.statistics import Statistics
from lln.nn.stored import Stored, mean_of_finite, per_head
from lln.ops.common.arguments import hide
from lln.ops.window.near import Near
from lln.protocols import compute_dtype


class Level(nn.Module):
    """γ of every head: measured in each sample, averaged over batches, or a constant.

    It follows from α and β, so it is measured after them, and stored as they are. With
    ``learned=True`` a shift is added that is learned from zero.

    Attributes:
        offset: Added to γ, for looking at one branch alone: γ → −∞ leaves the near keys, γ → ∞ the
            far ones (except in rows that have none). No part of the state dict.
    """

    offset: float = 0.0

    def __init__(
        self,
        kind: str,
        near: Near,
        statistics: Statistics,
        *,
        gamma: float | Sequence[float] | Tensor | None,
        learned: bool,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        self.near, self.matching = near, statistics.matching
        heads = self.matching.num_heads
        self.stored = None
        if kind != "sample":
            first = (
                per_head("gamma", gamma, heads) if gamma is not None else self._first(statistics)
            )
            self.stored = Stored(kind, first[None], device=device)
        self.shift = None
        if learned:
            self.shift = nn.Parameter(torch.zeros(heads, device=device, dtype=dtype))

    def _first(self, statistics: Statistics) -> Float[Tensor, " H"]:
        """γ for Gaussian q and k with σ = 1, up to what many slots even out.

        E ln K⁻¹ Σ_jl exp(α q_l + β k_jl) = ln S + (α² + β²)/2, and ln S (E φ)² for whole features.
        """
        heads = self.matching.num_heads
        assert self.near.scale is not None
        exact = self.near.scale**2 * self.matching.head_dim / 2 - math.log(self.matching.slots)
        if self.matching.feature_map in LOG_FEATURES:
            mean = mean_feature(self.matching.feature_map, self.matching.head_dim)
            return torch.tensor(exact - 2 * math.log(mean), device="cpu").expand(heads)
        given = getattr(statistics, "first", None)  # of constants; on no device nothing is known
        if given is None or any(x.is_meta for x in given):
            given = self.matching.scales(torch.ones(3, self.matching.num_kv_heads, device="cpu"))
        alpha, beta = given
        beta = beta.repeat_interleave(len(alpha) // len(beta))
        return exact - (alpha.square() + beta.square()) / 2

    def reset_parameters(self) -> None:
        """Start again."""
        if self.stored is not None:
            self.stored.reset_parameters()
        if self.shift is not None:
            nn.init.zeros_(self.shift)

    def forward(
        self,
        q: Float[Tensor, "B H N D"],
        k: Float[Tensor, "B Hkv M D"],
        *,
        alpha: Float[Tensor, "B H"],
        beta: Float[Tensor, "B Hkv"],
        is_ordered: bool,
        **options: Any,
    ) -> Float[Tensor, "B H"]:
        """γ of one pass; ``is_ordered``: not from the queries at hand. Other options: `measure`."""

        def pooled() -> Tensor:
            return mean_of_finite(self.measure(q, k, alpha=alpha, beta=beta, **options))[None]

        if self.stored is None:
            gamma = self.measure(q, k, alpha=alpha, beta=beta, **options)
        else:
            gamma = self.stored(pooled, is_causal=is_ordered)
        return self.shifted(gamma.to(alpha.dtype).expand(q.shape[0], -1))

    def shifted(self, gamma: Float[Tensor, "*B H"]) -> Float[Tensor, "*B H"]:
        """γ with what is learned and the offset added."""
        gamma = gamma if self.shift is None else gamma + self.shift.to(gamma)
        return gamma + self.offset if self.offset else gamma

    def measure(self, q: Tensor, k: Tensor, **options: Any) -> Float[Tensor, "B H"]:
        """γ of each sample; options are those of :func:`lln.moments.levels.match_level`."""
        return match_level(q, k, near=self.near, **options)

    def output_terms(self, q: Tensor, k: Tensor, v: Tensor, **options: Any) -> OutputTerms:
        """What γ for the closest output follows from; options as in :meth:`measure`."""
        return output_terms(q, k, v, near=self.near, **options)

    def calibrate_(self, q: Tensor, k: Tensor, **options: Any) -> None:
        """Store what these tensors measure."""
        if self.stored is not None:
            self.stored.calibrate_("gamma", mean_of_finite(self.measure(q, k, **options))[None])


class KeyCenter(nn.Module):
    """The mean of the keys: of each sample, or, in causal attention, of earlier batches."""

    def __init__(
        self,
        kind: str,
        num_kv_heads: int,
        head_dim: int,
        *,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.stored = None
        if kind != "sample":
            zeros = torch.zeros(num_kv_heads, head_dim, device="cpu")
            self.stored = Stored(kind, zeros, device=device)

    def reset_parameters(self) -> None:
        """Start again."""
        if self.stored is not None:
            self.stored.reset_parameters()

    def forward(
        self,
        k: Float[Tensor, "B Hkv M D"],
        key_mask: Bool[Tensor, "B M"] | None,
        *,
        is_causal: bool,
    ) -> Float[Tensor, "#B Hkv 1 D"]:
        """What is to be subtracted, in the dtype of the keys; gradients flow to the own mean."""
        own = mean_key(k, key_mask)
        if self.stored is None or not is_causal:
            return own.to(k.dtype)[:, :, None]
        mean = self.stored(lambda: mean_of_finite(own.detach()), is_causal=True)
        return mean.to(k.dtype)[None, :, None]

    def calibrate_(self, k: Tensor, key_mask: Tensor | None) -> None:
        """Store the mean of these keys."""
        if self.stored is not None:
            self.stored.calibrate_("the mean of the keys", mean_of_finite(mean_key(k, key_mask)))


def mean_key(k: Tensor, key_mask: Tensor | None) -> Float[Tensor, "B Hkv D"]:
    """The mean of each sample's valid keys, in the compute dtype; 0 without any."""
    k = hide(k.to(compute_dtype(k)), key_mask)
    if key_mask is None:
        return k.sum(2) / max(k.shape[2], 1)
    return k.sum(2) / key_mask.sum(1).clamp(min=1)[:, None, None]
