"""Attention with a kernel that factors, κ(q, k) = φ_q(q)ᵀφ_k(k): what linear mechanisms share."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from jaxtyping import Bool, Float
from torch import Tensor

from lln.baselines.base import Core, Layer
from lln.moments import match_features, softmax_entropy
from lln.ops.linear.bidirectional import bidirectional

CHUNK = 64  # of the causal form


class LinearCore(Core):
    r"""out_i = φ_q(q_i)ᵀS / φ_q(q_i)ᵀz,  S = Σ_j φ_k(k_j) v_jᵀ,  z = Σ_j φ_k(k_j).

    A subclass gives the features; masked keys have none. O(N f d) time, O(N f + f d) memory for f
    features. A query whose kernel vanishes at every key gives 0.

    Args:
        causal: S and z are sums over j ≤ i, taken chunk by chunk.
    """

    def __init__(self, layer: Layer, *, causal: bool = False) -> None:
        super().__init__(layer)
        self.causal = causal

    def features(self, q: Tensor, k: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """φ_q(q) and φ_k(k), ``[B, H, N, f]`` and ``[B, H, M, f]``."""
        raise NotImplementedError

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        phi_q, phi_k = self.features(q, k, key_mask)
        if key_mask is not None:
            phi_k = phi_k.masked_fill(~key_mask[:, None, :, None], 0)
        if self.causal:
            if q.shape[2] != k.shape[2]:
                raise ValueError(
                    f"causal=True needs as many queries as keys, not {q.shape[2]} and {k.shape[2]}"
                )
            return self.ratio(*causal_sums(phi_q, phi_k, v), self._count(k, key_mask))
        numerator, denominator = phi_q @ (phi_k.mT @ v), phi_q @ phi_k.sum(2)[..., None]
        return self.ratio(numerator, denominator, self._count(k, key_mask))

    def ratio(self, numerator: Tensor, denominator: Tensor, count: Tensor) -> Tensor:
        """The output from Σ κ v, Σ κ and the number of visible keys."""
        return divide(numerator, denominator)

    def _count(self, k: Tensor, key_mask: Tensor | None) -> Float[Tensor, "#B 1 #N 1"]:
        """How many keys a query sees."""
        seen = k.new_ones(1, k.shape[2]) if key_mask is None else key_mask.to(k.dtype)
        seen = seen[:, None, :, None]
        return seen.cumsum(2) if self.causal else seen.sum(2, keepdim=True)


class PositiveCore(LinearCore):
    r"""Linear attention with positive features, which have a temperature: φ_c(x) = φ(x)^c.

    Args:
        causal: As in :class:`LinearCore`.
        calibrate: Choose c of every sample and head such that the rows have on average the entropy
            of softmax attention with the same q and k (:func:`lln.moments.match_features`), in
            linear time and as a constant of the backward pass; False is c = 1. For self-attention
            that is not causal: c depends on all tokens, so the future would leak into the past.
    """

    def __init__(self, layer: Layer, *, causal: bool = False, calibrate: bool = False) -> None:
        super().__init__(layer, causal=causal)
        if causal and calibrate:
            raise ValueError(
                "calibrate=True cannot serve causal attention: the entropy of the whole sequence "
                "would leak the future into every output; leave calibrate out, or use 'lln' with "
                "statistics='running', which scales by averages over past batches"
            )
        self.calibrate = calibrate
        self.crosses = not calibrate

    def log_features(self, q: Tensor, k: Tensor, key_mask: Tensor | None) -> tuple[Tensor, Tensor]:
        """ln φ_q(q) and ln φ_k(k), up to a constant, ``[B, H, N, f]`` and ``[B, H, M, f]``."""
        raise NotImplementedError

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        if not self.calibrate:
            return super().attend(q, k, v, key_mask)
        log_q, log_k = self.log_features(q, k, key_mask)
        c = match_features(
            log_q,
            log_k,
            softmax_entropy(q, k, key_mask=key_mask, query_mask=key_mask),
            key_mask=key_mask,
            query_mask=key_mask,
        )
        return bidirectional(log_q, log_k, v, alpha=c, beta=c, key_mask=key_mask)

    def _check_inputs(self, q: Tensor, k: Tensor) -> None:
        if self.calibrate and q.shape[2] != k.shape[2]:
            raise ValueError(
                f"q has {q.shape[2]} tokens but k has {k.shape[2]}; calibrate=True measures over "
                "all queries, so that in a decoder each would see the ones after it, and is for "
                "self-attention only: leave calibrate out"
            )
        super()._check_inputs(q, k)


def divide(
    numerator: Float[Tensor, "B H N E"],
    denominator: Float[Tensor, "B H N 1"],
) -> Float[Tensor, "B H N E"]:
    """The ratio, 0 where the denominator is; exact otherwise, no eps."""
    empty: Bool[Tensor, "B H N 1"] = denominator == 0
    return (numerator / denominator.masked_fill(empty, 1)).masked_fill(empty, 0)


def causal_sums(
    phi_q: Float[Tensor, "B H N f"], phi_k: Float[Tensor, "B H N f"], v: Float[Tensor, "B H N E"]
) -> tuple[Float[Tensor, "B H N E"], Float[Tensor, "B H N 1"]]:
    """Numerator and denominator over j ≤ i: chunks before by their sums, the own one by pairs."""
    tokens = v.shape[2]
    v = torch.cat([v, torch.ones_like(v[..., :1])], dim=-1)  # the denominator rides along
    phi_q, phi_k, v = (
        F.pad(x, (0, 0, 0, -tokens % CHUNK)).unflatten(2, (-1, CHUNK)) for x in (phi_q, phi_k, v)
    )
    sums = phi_k.mT @ v  # [B, H, chunks, f, E + 1]
    before = sums.cumsum(2) - sums
    both = phi_q @ before + (phi_q @ phi_k.mT).tril() @ v
    both = both.flatten(2, 3)[:, :, :tokens]
    return both[..., :-1], both[..., -1:]
