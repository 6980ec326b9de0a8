"""The output of LLN attention for one draw: its branches, put together, and the convolution."""

from __future__ import annotations

import functools
from typing import Any

from jaxtyping import Float
from torch import Tensor

from lln.nn.draw import Draw, features_by_name
from lln.ops.causal.causal import causal
from lln.ops.linear.bidirectional import bidirectional
from lln.ops.taps.convolution import add_shared, convolve_tokens
from lln.ops.window.lln_diag import lln_diag
from lln.ops.window.near import Near
from lln.ops.window.near_far import near_far


def attend_drawn(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv M D"],
    v: Float[Tensor, "B Hkv M E"],
    draw: Draw,
    *,
    near: Near | None,
    causal_block: int | None,
    conv: Float[Tensor, "Hkv K"] | None,
    impl: str | None,
) -> Float[Tensor, "B H N E"]:
    """LLN, or both of its branches, and what the filters ``conv`` make of the values.

    Args:
        q: Queries ``[B, H, N, D]``, any floating dtype.
        k: Keys ``[B, Hkv, M, D]``, centred if the draw has a centre.
        v: Values ``[B, Hkv, M, E]``.
    """
    blocks = causal_block if draw.is_causal else None
    options: dict[str, Any] = {"causal_block": blocks, "impl": impl}
    if conv is not None:
        _check_neighbours(q.shape[2], k.shape[2], conv.shape[1], draw.is_causal)
    if near is None or draw.gamma is not None:
        out = _linear_or_joint(q, k, v, draw, near, **options)
    elif q.shape[2] == k.shape[2]:
        return _averaged(q, k, v, draw, near, conv, **options)
    else:
        out = _averaged(q, k, v, draw, near, None, **options)
    return out if conv is None else _convolved(out, conv, v, draw, impl)


def _averaged(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    draw: Draw,
    near: Near,
    conv: Tensor | None,
    *,
    causal_block: int | None,
    impl: str | None,
) -> Float[Tensor, "B H N E"]:
    """Both branches by one op, and the convolution with them if its filters are given."""
    return lln_diag(
        q,
        k,
        v,
        alpha=draw.alpha,
        beta=draw.beta,
        near=near,
        key_mask=draw.key_mask,
        is_causal=draw.is_causal,
        causal_block=causal_block,
        mix=draw.mix,
        conv=conv,
        slot_dropout=draw.slot_dropout,
        probability_dropout=draw.probability_dropout,
        impl=impl,
        **features_by_name(draw.far),
    )


def _linear_or_joint(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    draw: Draw,
    near: Near | None,
    *,
    causal_block: int | None,
    impl: str | None,
) -> Float[Tensor, "B H N E"]:
    """LLN alone, or near and far keys under one normaliser."""
    linear = {"alpha": draw.alpha, "beta": draw.beta, "slot_dropout": draw.slot_dropout}
    shared = {"key_mask": draw.key_mask, "impl": impl}
    op = functools.partial(causal, causal_block=causal_block) if draw.is_causal else bidirectional
    far = features_by_name(draw.far)
    seen = far.get("q_far", q), far.get("k_far", k)
    if near is None:
        return op(*seen, v, **linear, **shared)
    joint = {"gamma": draw.gamma, "near": near, "is_causal": draw.is_causal}
    joint["probability_dropout"] = draw.probability_dropout
    return near_far(q, k, v, **joint, **far, **linear, **shared)


def _convolved(
    out: Tensor, conv: Tensor, v: Tensor, draw: Draw, impl: str | None
) -> Float[Tensor, "B H N E"]:
    """Add what the filters do; causal queries are those of the last keys."""
    queries, keys, taps = out.shape[2], v.shape[2], conv.shape[1]
    options: dict[str, Any] = {"causal": draw.is_causal, "impl": impl}
    if queries == keys:
        return convolve_tokens(v, conv, onto=out, key_mask=draw.key_mask, **options)
    first = max(0, keys - queries - taps + 1)
    mask = None if draw.key_mask is None else draw.key_mask[:, first:]
    added = convolve_tokens(v[:, :, first:], conv, key_mask=mask, **options)
    return add_shared(out, added[:, :, added.shape[2] - queries :])


def _check_neighbours(queries: int, keys: int, taps: int, is_causal: bool) -> None:
    if queries > keys or (queries < keys and not is_causal):
        raise ValueError(
            f"conv={taps} looks at neighbours of a token: it cannot serve {queries} "
            f"queries of {keys} keys; leave conv out"
        )
