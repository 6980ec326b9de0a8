"""Near keys exactly, far keys by LLN, under one normaliser: on canonical arguments."""

from __future__ import annotations

from typing import Any

from jaxtyping import Bool, Float
from torch import Tensor

from lln.ops.dispatch import choose
from lln.ops.window.block_diagonal import block_diagonal
from lln.ops.window.near import Near
from lln.protocols import Call


def near_far(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv M D"],
    v: Float[Tensor, "B Hkv M E"],
    *,
    alpha: Float[Tensor, "B H"],
    beta: Float[Tensor, "B Hkv"],
    gamma: Float[Tensor, "B H"],
    near: Near,
    q_far: Float[Tensor, "B H N S"] | None = None,
    k_far: Float[Tensor, "B Hkv M S"] | None = None,
    key_mask: Bool[Tensor, "B M"] | None = None,
    is_causal: bool = False,
    slot_dropout: Float[Tensor, "B H N S"] | None = None,
    probability_dropout: Float[Tensor, "B H N W"] | None = None,
    impl: str | None = None,
) -> Float[Tensor, "B H N E"]:
    r"""Softmax weights for near keys and LLN weights for far ones, in one row-stochastic matrix.

    Our own step beyond Fig. 3 of arXiv:2311.13541 (docs/equations.md, near and far):
        s_ij = scale q_i·k_j,         near_i = logsumexp_{j near i} s_ij,
        far_i = gamma + logsumexp_l(alpha q_il + L_il),   u_i = sigmoid(near_i − far_i),
        out_i = u_i o_near,i + (1 − u_i) o_far,i

    Near query i of block b: the keys C·b − overlap … C·(b+1) + overlap − 1 (causal: … i), and the
    first ``sinks`` valid keys. Far: the other visible keys.

    Args:
        q_far, k_far: What the LLN branch sees instead of q and k, of any width S.
        slot_dropout, probability_dropout: As in the two branches; the latter has a column for each
            key of a window, W = C + 2 overlap (causal: C + overlap), and one for each sink.
        impl: "triton", "mixed", "eager" or "reference"; None takes the fastest that accepts the
            tensors.

    Numerics: both logarithms are by-products of sums that cannot overflow; computed in float32 or
    wider and rounded once (the kernels round the means of far keys, as values are). Without a near
    key u = 0, without a far one u = 1, without both the output and its gradients are 0.
    """
    dropout = slot_dropout is not None or probability_dropout is not None
    needs = {"dropout"} if dropout else set()
    slots = (q if q_far is None else q_far).shape[-1]
    call = Call("near_far", q, k, v, frozenset(needs), is_causal, *near.window, slots)
    given = {"slot_dropout": slot_dropout, "probability_dropout": probability_dropout}
    return choose(call, impl).near_far(
        q,
        k,
        v,
        q_far=q if q_far is None else q_far,
        k_far=k if k_far is None else k_far,
        alpha=alpha,
        beta=beta,
        gamma=gamma,
        key_mask=key_mask,
        is_causal=is_causal,
        **near.at(q.shape[-1]).options,
        **{name: x for name, x in given.items() if x is not None},
    )


def near(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv M D"],
    v: Float[Tensor, "B Hkv M E"],
    *,
    near: Near,
    key_mask: Bool[Tensor, "B M"] | None = None,
    is_causal: bool = False,
    probability_dropout: Float[Tensor, "B H N W"] | None = None,
    impl: str | None = None,
) -> Float[Tensor, "B H N E"]:
    """Softmax attention over the near keys alone; see :func:`near_far`.

    Without overlap and sinks it is :func:`lln.ops.window.block_diagonal.block_diagonal`.
    """
    near = near.at(q.shape[-1])
    options: dict[str, Any] = {"key_mask": key_mask, "is_causal": is_causal}
    if probability_dropout is not None:
        options["probability_dropout"] = probability_dropout
    if not near.needs:
        return block_diagonal(q, k, v, **near.blocks, **options, impl=impl)
    needs = frozenset({"dropout"} if probability_dropout is not None else ())
    call = Call("near", q, k, v, needs, is_causal, *near.window)
    return choose(call, impl).near(q, k, v, **near.options, **options)
