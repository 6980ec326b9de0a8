"""LLN+Diag on canonical arguments."""

from __future__ import annotations

from jaxtyping import Bool, Float
from torch import Tensor

from lln.ops.dispatch import choose
from lln.protocols import Call


def lln_diag(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv M D"],
    v: Float[Tensor, "B Hkv M E"],
    *,
    alpha: Float[Tensor, "B H"],
    beta: Float[Tensor, "B Hkv"],
    block: int,
    scale: float,
    key_mask: Bool[Tensor, "B M"] | None = None,
    is_causal: bool = False,
    normalize_keys: bool = False,
    mix: Float[Tensor, " H"] | None = None,
    slot_dropout: Float[Tensor, "B H N D"] | None = None,
    probability_dropout: Float[Tensor, "B H N C"] | None = None,
    impl: str | None = None,
) -> Float[Tensor, "B H N E"]:
    """The average of LLN attention and block-diagonal softmax attention (Fig. 3).

    Args:
        mix: Weight of the LLN branch per head; None is the paper's average, 0.5.
        slot_dropout, probability_dropout: As in the two branches.
        impl: "triton", "eager" or "reference"; None takes the fastest that accepts the tensors.

    Numerics: the branches are added in float32 or wider and rounded once.
    """
    extra = {
        name: value
        for name, value in (
            ("mix", mix),
            ("slot_dropout", slot_dropout),
            ("probability_dropout", probability_dropout),
        )
        if value is not None
    }
    needs = frozenset("learned_mix" if name == "mix" else "dropout" for name in extra)
    return choose(Call("lln_diag", q, k, v, needs, is_causal, block), impl).lln_diag(
        q,
        k,
        v,
        alpha=alpha,
        beta=beta,
        block=block,
        scale=scale,
        key_mask=key_mask,
        is_causal=is_causal,
        normalize_keys=normalize_keys,
        **extra,
    )
