"""Efficient attention: a softmax over features for queries, over tokens for keys."""

from __future__ import annotations

from torch import Tensor

from lln.baselines.base import Core, masked_softmax


class Efficient(Core):
    r"""Efficient attention (Shen et al. 2021, arXiv:1812.01243).

        out = ρ_q(Q) (ρ_k(K)ᵀ V),  ρ_q = softmax over the d features,  ρ_k = softmax over tokens

    O(N d²) time, O(N d) memory. The closest sibling of LLN, which adds ln Σ_j exp(k_jl) to the
    logits of ρ_q and scales both.
    """

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        seen = None if key_mask is None else key_mask[:, None, None, :]
        return q.softmax(-1) @ (masked_softmax(k.mT, seen) @ v)
