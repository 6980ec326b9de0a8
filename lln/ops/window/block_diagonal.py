"""Softmax attention inside blocks, on canonical arguments."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from lln.ops.dispatch import choose
from lln.protocols import Call


def block_diagonal(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv M D"],
    v: Float[Tensor, "B Hkv M E"],
    *,
    block: int,
    scale: float,
    key_mask: Bool[Tensor, "B M"] | None = None,
    is_causal: bool = False,
    probability_dropout: Float[Tensor, "B H N C"] | None = None,
    impl: str | None = None,
) -> Float[Tensor, "B H N E"]:
    """Softmax attention, eq. (1), among the positions of one block (Fig. 3, right branch).

    Query i stands at position i + M − N; blocks start at key 0 and the last may be shorter. A query
    without a visible key in its block gives 0.

    Args:
        probability_dropout: Multiplies the probabilities: 0 or 1/(1 − p) per entry.
        impl: "triton", "eager" or "reference"; None takes the fastest that accepts the tensors.
    """
    extra = {} if probability_dropout is None else {"probability_dropout": probability_dropout}
    needs = frozenset({"dropout"} if extra else ())
    return choose(Call("block_diagonal", q, k, v, needs, is_causal, block), impl).block_diagonal(
        q, k, v, block=block, scale=scale, key_mask=key_mask, is_causal=is_causal, **extra
    )
