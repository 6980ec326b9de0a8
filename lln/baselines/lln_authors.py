"""LLN attention as the authors' published code computes it, defects included: for studies only."""

from __future__ import annotations

import math

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lln.baselines.base import Core, Layer
from lln.moments.line import PAPER
from lln.ops.common.arguments import check_mask, check_qkv, no_autocast


class AuthorsLLN(Core):
    r"""The authors' form of eqs. (9) and (10) of arXiv:2311.13541, to learn whether it matters.

        σ_q = std(q), σ_k = std(k): one number each, over samples, heads, tokens and channels
        α = σ̃ / σ_q,  β = σ̃ / σ_k,  σ̃² = (σ_q² σ_k² − b) / 2a,  a and b as published
        φ_q = exp(α q_i − max_l α q_il),  φ_k = exp(β k_j − max_jl β k_jl)
        out_i = Σ_j φ_q·φ_k v_j / (Σ_j φ_q·φ_k + ε)

    Written from these formulas. It is not in :func:`lln.list_mechanisms`, because it keeps none of
    the zoo's promises; "lln" and "lln_diag" are what to use. What is wrong with it, on purpose:

    - A sample's output depends on the other samples, its heads on each other, through σ.
    - Masks are ignored: padding counts as tokens, in σ and as keys. (There, any mask makes it
      causal, and what the mask says is not looked at; here it stays bidirectional.)
    - One maximum for all keys of a head, and ε: rows far below it lose mass, down to zero. With
      ε = 0 they are NaN.
    - a and b fit heads of about 64; α tends to infinity with σ → 0, and σ = 0 gives NaN. There is
      no clamp.
    - Only float16 is computed in float32. bfloat16 stays what it is, σ, α and β included.
    - The blocks of ``diag`` are as long as a head is wide, and in float16 stay there.

    O(N d²) time, O(N d) memory. σ is a constant of the backward pass, the maxima are not.

    Args:
        eps: ε; 1e-8 is the default of their function, 1e-5 what their example passes.
        diag: Average with softmax inside blocks of d tokens, the last block shorter.
    """

    crosses = False

    def __init__(self, layer: Layer, *, eps: float = 1e-8, diag: bool = False) -> None:
        super().__init__(layer)
        if not (math.isfinite(eps) and eps >= 0):
            raise ValueError(f"eps={eps} must be 0 or a small positive number, such as 1e-8")
        self.eps, self.diag = float(eps), bool(diag)

    def forward(
        self,
        q: Float[Tensor, "B H N D"],
        k: Float[Tensor, "B H M D"],
        v: Float[Tensor, "B H M E"],
        key_mask: Bool[Tensor, "B M"] | None = None,
        query_mask: Bool[Tensor, "B N"] | None = None,
    ) -> Float[Tensor, "B H N E"]:
        """Attend to every token, whatever the masks say."""
        check_qkv(q, k, v)
        self._check_inputs(q, k)
        check_mask("key_mask", key_mask, k.shape[0], k.shape[2], k)
        return self.attend(q, k, v, key_mask)

    def attend(self, q: Tensor, k: Tensor, v: Tensor, key_mask: Tensor | None) -> Tensor:
        out = self._linear(q, k, v)
        return 0.5 * (out + self._blocks(q, k, v)) if self.diag else out

    def _linear(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        if q.dtype != torch.float16:
            return self._ratio(q, k, v).to(v.dtype)
        with no_autocast(q):  # which would take the products back to float16
            return self._ratio(q.float(), k.float(), v.float()).to(v.dtype)

    def _ratio(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        alpha, beta = authors_scales(q, k)
        q, k = alpha * q, beta * k
        # by index: compiled, amax would look for a maximum that was rounded among numbers that were
        # not, find none, and divide by their number
        phi_q = torch.exp(q - q.max(-1, keepdim=True).values)
        phi_k = torch.exp(k - k.flatten(-2).max(-1).values[..., None, None])
        mass = phi_q @ phi_k.sum(-2)[..., None]
        return phi_q @ (phi_k.mT @ v) / (mass + self.eps)

    def _blocks(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Softmax among the tokens of a block of d, in the dtype of its input."""
        size = q.shape[-1]
        scale = 1 / math.sqrt(size)
        pieces = zip(*(x.split(size, dim=2) for x in (q, k, v)), strict=True)
        outs = [
            torch.softmax(scale * own @ keys.mT, dim=-1) @ values for own, keys, values in pieces
        ]
        return torch.cat(outs, dim=2).to(v.dtype)


@torch.no_grad()
def authors_scales(
    q: Float[Tensor, "B H N D"], k: Float[Tensor, "B H M D"]
) -> tuple[Float[Tensor, ""], Float[Tensor, ""]]:
    """α and β of eq. (10) from one deviation of all queries and one of all keys."""
    sigma_q, sigma_k = q.std(), k.std()
    sigma = ((sigma_q**2 * sigma_k**2 - PAPER.b) / (2 * PAPER.a)).sqrt()
    return sigma / sigma_q, sigma / sigma_k
