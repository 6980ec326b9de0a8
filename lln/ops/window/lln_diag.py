"""LLN+Diag on canonical arguments."""

from __future__ import annotations

from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor

from lln.ops import triton
from lln.ops.dispatch import choose
from lln.ops.taps.convolution import MOST_TAPS, convolve_tokens
from lln.ops.window.near import Near
from lln.protocols import Call

#: What an implementation must have for an option that is given.
NEEDS = {
    "mix": "learned_mix",
    "q_far": "features",
    "k_far": "features",
    "slot_dropout": "dropout",
    "probability_dropout": "dropout",
}


def lln_diag(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv M D"],
    v: Float[Tensor, "B Hkv M E"],
    *,
    alpha: Float[Tensor, "B H"],
    beta: Float[Tensor, "B Hkv"],
    near: Near,
    key_mask: Bool[Tensor, "B M"] | None = None,
    is_causal: bool = False,
    causal_block: int | None = None,
    mix: Float[Tensor, " H"] | None = None,
    q_far: Float[Tensor, "B H N S"] | None = None,
    k_far: Float[Tensor, "B Hkv M S"] | None = None,
    conv: Float[Tensor, "Hkv K"] | None = None,
    slot_dropout: Float[Tensor, "B H N S"] | None = None,
    probability_dropout: Float[Tensor, "B H N W"] | None = None,
    impl: str | None = None,
) -> Float[Tensor, "B H N E"]:
    """The average of LLN attention and block-diagonal softmax attention (Fig. 3).

    Args:
        causal_block: Let causal queries see all of their block of this many positions, a multiple
            of the near field's; without overlap and sinks.
        mix: Weight of the LLN branch per head; None is the paper's average, 0.5.
        q_far, k_far: What the LLN branch sees instead of q and k, of any width S.
        conv: Filters of the values over their tokens, whose result is added to the output as
            :func:`lln.ops.taps.convolution.convolve_tokens` does; as many queries as keys.
        slot_dropout, probability_dropout: As in the two branches.
        impl: "triton", "eager" or "reference"; None takes the fastest that accepts the tensors.

    Numerics: the branches are added in float32 or wider and rounded once.
    """
    given = {
        "mix": mix,
        "q_far": q_far,
        "k_far": k_far,
        "slot_dropout": slot_dropout,
        "probability_dropout": probability_dropout,
        "causal_block": causal_block,
    }
    extra: dict[str, Any] = {name: value for name, value in given.items() if value is not None}
    needs = near.needs.union(NEEDS[name] for name in extra if name in NEEDS)
    seen = q if q_far is None else q_far, k if k_far is None else k_far
    call = Call("lln_diag", *seen, v, needs, is_causal, *near.window, causal_block=causal_block)
    chosen = choose(call, impl)
    fused = conv is not None and chosen is triton and not is_causal and conv.shape[1] <= MOST_TAPS
    if fused:
        extra["conv"] = conv
    out = chosen.lln_diag(
        q,
        k,
        v,
        alpha=alpha,
        beta=beta,
        key_mask=key_mask,
        is_causal=is_causal,
        **near.at(q.shape[-1]).options,
        **extra,
    )
    if conv is None or fused:
        return out
    return convolve_tokens(v, conv, causal=is_causal, onto=out, key_mask=key_mask, impl=impl)
