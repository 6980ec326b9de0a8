"""Summarize a set of keys, and read the state with queries."""

from __future__ import annotations

import torch
from jaxtyping import Bool, Float
from torch import Tensor

from lln.ops.common.arguments import (
    as_scale,
    check_alike,
    check_floating,
    check_heads,
    check_key_value,
    check_mask,
)
from lln.ops.dispatch import choose
from lln.ops.linear.normalized_keys import normalized_keys
from lln.ops.linear.state import State
from lln.protocols import Call


def summarize(
    k: Float[Tensor, "B Hkv M D"],
    v: Float[Tensor, "B Hkv M E"],
    *,
    beta: float | Tensor,
    key_mask: Bool[Tensor, "B M"] | None = None,
    normalize_keys: bool = False,
    impl: str | None = None,
) -> State:
    r"""The mergeable state of a set of keys in O(M D E) time.

        L_l = logsumexp_j(beta k_jl),     M_l = sum_j exp(beta k_jl - L_l) v_j

    Args:
        k: Keys ``[B, Hkv, M, D]``, any floating dtype.
        v: Values ``[B, Hkv, M, E]``.
        beta: A number, ``[Hkv]`` or ``[B, Hkv]``, from :func:`lln.match_moments`.
        key_mask: True = may be attended; masking a key equals leaving it out.
        normalize_keys: Use ln D + log_softmax_l(beta k_j) as key features: the unbiased variant.
        impl: "triton", "eager" or "reference"; None takes the fastest that accepts the tensors.

    Example:
        >>> state = lln.summarize(k[:, :, :512], v[:, :, :512], beta=2.0)
        >>> state = state.merge(lln.summarize(k[:, :, 512:], v[:, :, 512:], beta=2.0))
        >>> out = lln.read(q, state, alpha=2.0)     # == lln.attention(q, k, v, alpha=2.0, beta=2.0)
    """
    for name, x in (("k", k), ("v", v)):
        check_floating(name, x)
        if x.dim() != 4:
            raise ValueError(
                f"{name} has shape {list(x.shape)}; pass [batch, heads, tokens, width]"
            )
    check_alike("k", k, "v", v)
    check_key_value(k, v)
    check_mask("key_mask", key_mask, k.shape[0], k.shape[2], k)
    scale = as_scale("beta", beta, k.shape[0], k.shape[1], k)
    if normalize_keys:
        k, scale = normalized_keys(k, scale, key_mask), torch.ones_like(scale)
    log_mass, mean = choose(Call("summarize", k, k, v), impl).summarize(
        k, v, beta=scale, key_mask=key_mask
    )
    return State(log_mass, mean)


def read(
    q: Float[Tensor, "B H N D"], state: State, *, alpha: float | Tensor, impl: str | None = None
) -> Float[Tensor, "B H N E"]:
    r"""What queries get from a state, in O(N D E) time.

        A_il = softmax_l(alpha q_il + L_l),     out_i = sum_l A_il M_l

    Args:
        q: Queries ``[B, H, N, D]``, any floating dtype.
        alpha: A number, ``[H]`` or ``[B, H]``, from :func:`lln.match_moments`.
        impl: "triton", "eager" or "reference"; None takes the fastest that accepts the tensors.

    Returns:
        Same dtype as ``q``; 0 for the empty state.
    """
    check_floating("q", q)
    if not isinstance(state, State):
        raise TypeError(f"state is a {type(state).__name__}; pass a State from lln.summarize")
    if q.dim() != 4 or q.shape[0] != state.mean.shape[0]:
        raise ValueError(
            f"q has shape {list(q.shape)}; pass [batch, heads, tokens, width] with the batch size "
            f"{state.mean.shape[0]} of the state"
        )
    check_heads(q, state.log_mass.shape[1], state.log_mass.shape[2])
    if q.device != state.mean.device:
        raise ValueError(f"q is on {q.device} but the state on {state.mean.device}; move one")
    scale = as_scale("alpha", alpha, q.shape[0], q.shape[1], state.mean)
    return choose(Call("read", q, state.mean, state.mean), impl).read(
        q, state.log_mass, state.mean, alpha=scale
    )
