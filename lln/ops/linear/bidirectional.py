"""Bidirectional LLN attention on canonical arguments."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from lln.ops.dispatch import choose
from lln.protocols import Call


def bidirectional(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv M D"],
    v: Float[Tensor, "B Hkv M E"],
    *,
    alpha: Float[Tensor, "B H"],
    beta: Float[Tensor, "B Hkv"],
    key_mask: Bool[Tensor, "B M"] | None = None,
    slot_dropout: Float[Tensor, "B H N D"] | None = None,
    impl: str | None = None,
) -> Float[Tensor, "B H N E"]:
    r"""LLN attention in O((N + M) D E) time, eq. (8) of arXiv:2311.13541.

        L_l  = logsumexp_j(beta k_jl)            B_jl = exp(beta k_jl - L_l)
        A_il = softmax_l(alpha q_il + L_l)       out  = A (B^T V)

    Args:
        slot_dropout: Multiplies A: 0 or 1/(1 − p) per entry.
        impl: "triton", "eager" or "reference"; None takes the fastest that accepts the tensors.

    Numerics: equal to eq. (8) exactly; both factors are softmaxes, so nothing overflows.
    """
    needs = frozenset() if slot_dropout is None else frozenset({"dropout"})
    extra = {} if slot_dropout is None else {"slot_dropout": slot_dropout}
    return choose(Call("bidirectional", q, k, v, needs), impl).bidirectional(
        q, k, v, alpha=alpha, beta=beta, key_mask=key_mask, **extra
    )
