"""Causal LLN attention on canonical arguments."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from lln.ops.dispatch import choose
from lln.ops.linear.state import State
from lln.protocols import Call


def causal(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv M D"],
    v: Float[Tensor, "B Hkv M E"],
    *,
    alpha: Float[Tensor, "B H"],
    beta: Float[Tensor, "B Hkv"],
    key_mask: Bool[Tensor, "B M"] | None = None,
    causal_block: int | None = None,
    state: State | None = None,
    slot_dropout: Float[Tensor, "B H N D"] | None = None,
    impl: str | None = None,
) -> Float[Tensor, "B H N E"]:
    r"""Causal LLN attention in O((N + M) D E) time.

    Eq. (8) of arXiv:2311.13541, sums restricted to j <= i + M − N and to the keys of ``state``:
        out_i = sum_j w_ij v_j / sum_j w_ij,     w_ij = sum_l exp(alpha q_il + beta k_jl)

    With ``causal_block`` K, sums are restricted to j // K <= (i + M − N) // K instead: every query
    reads the state of its own block merged with that of the blocks before.

    Args:
        causal_block: K, or None for causal attention token by token.
        state: Keys that came before, from :func:`lln.summarize`; every query sees them. Not with
            ``causal_block``.
        slot_dropout: Multiplies the weight of slot l for query i: 0 or 1/(1 − p) per entry.
        impl: "triton", "eager" or "reference"; None takes the fastest that accepts the tensors.

    Numerics: tokens of a tile meet in fully visible rectangles only, so that a later outlier key
    can never underflow an earlier row. With ``causal_block`` there is a state of D E numbers for
    each block.
    """
    extra = {}
    if slot_dropout is not None:
        extra["slot_dropout"] = slot_dropout
    if state is not None:
        extra["state"] = state
    needs = frozenset({"slot_dropout": "dropout", "state": "state"}[name] for name in extra)
    extra |= {"alpha": alpha, "beta": beta, "key_mask": key_mask}
    if causal_block is None:
        return choose(Call("causal", q, k, v, needs, is_causal=True), impl).causal(q, k, v, **extra)
    call = Call("block_causal", q, k, v, needs, is_causal=True, causal_block=causal_block)
    return choose(call, impl).block_causal(q, k, v, causal_block=causal_block, **extra)
