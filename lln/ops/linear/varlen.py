"""Packed sequences on canonical arguments and the checks of the packing."""

from __future__ import annotations

from itertools import pairwise

import torch
from jaxtyping import Bool, Float, Int
from torch import Tensor

from lln.ops.common.arguments import check_alike, check_floating, may_look_at
from lln.ops.dispatch import choose
from lln.protocols import Call


def varlen(
    q: Float[Tensor, "T H D"],
    k: Float[Tensor, "Tk Hkv D"],
    v: Float[Tensor, "Tk Hkv E"],
    cu_q: Int[Tensor, " S1"],
    cu_k: Int[Tensor, " S1"],
    *,
    alpha: Float[Tensor, "S H"],
    beta: Float[Tensor, "S Hkv"],
    key_mask: Bool[Tensor, " Tk"] | None = None,
    block: int | None = None,
    scale: float = 1.0,
    is_causal: bool = False,
    impl: str | None = None,
) -> Float[Tensor, "T H E"]:
    """LLN attention, eq. (8), of each packed sequence by itself; LLN+Diag with ``block``."""
    call = Call("varlen", q, k, v, is_causal=is_causal, block=block)
    return choose(call, impl).varlen(
        q,
        k,
        v,
        cu_q,
        cu_k,
        alpha=alpha,
        beta=beta,
        key_mask=key_mask,
        block=block,
        scale=scale,
        is_causal=is_causal,
    )


def check_packed(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cu_q: Tensor,
    cu_k: Tensor,
    key_mask: Tensor | None,
    query_mask: Tensor | None,
) -> None:
    """Check packed tensors ``[T, H, D]`` and the offsets that cut them."""
    check_packed_qkv(q, k, v)
    _check_offsets("cu_seqlens_q", cu_q, q.shape[0])
    _check_offsets("cu_seqlens_k", cu_k, k.shape[0])
    if len(cu_q) != len(cu_k):
        raise ValueError(
            f"cu_seqlens_q has {len(cu_q)} entries but cu_seqlens_k has {len(cu_k)}; "
            "both have one more than there are sequences"
        )
    for name, mask, tokens in (
        ("key_mask", key_mask, k.shape[0]),
        ("query_mask", query_mask, q.shape[0]),
    ):
        if mask is None:
            continue
        if not isinstance(mask, Tensor) or mask.dtype != torch.bool:
            kind = getattr(mask, "dtype", type(mask).__name__)
            raise TypeError(f"{name} is {kind}; pass a bool tensor [{tokens}]")
        if mask.shape != (tokens,):
            raise ValueError(f"{name} has shape {list(mask.shape)}; pass [tokens] = [{tokens}]")


def check_packed_qkv(q: Tensor, k: Tensor, v: Tensor) -> None:
    """Check packed tensors ``[T, H, D]``: one dtype and device, H a multiple of the key heads."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        check_floating(name, x)
        if x.dim() != 3:
            raise ValueError(
                f"{name} has shape {list(x.shape)}; pass packed [tokens, heads, width], "
                "or use lln.attention for [batch, heads, tokens, width]"
            )
        check_alike("q", q, name, x)
    if k.shape[:2] != v.shape[:2]:
        raise ValueError(
            f"k has shape {list(k.shape)} but v has {list(v.shape)}; tokens and heads must be equal"
        )
    if k.shape[1] == 0 or q.shape[1] % k.shape[1]:
        raise ValueError(
            f"q has {q.shape[1]} heads, which is not a multiple of the {k.shape[1]} key heads"
        )
    if q.shape[2] != k.shape[2]:
        raise ValueError(f"q has width {q.shape[2]} but k has {k.shape[2]}; they must be equal")


def _check_offsets(name: str, cu: object, tokens: int) -> None:
    if not isinstance(cu, Tensor):
        raise TypeError(f"{name} is a {type(cu).__name__}; pass torch.tensor([0, ..., {tokens}])")
    if cu.dtype not in (torch.int32, torch.int64):
        raise TypeError(f"{name} has dtype {cu.dtype}; pass int32 or int64")
    if cu.dim() != 1 or len(cu) == 0:
        raise ValueError(
            f"{name} has shape {list(cu.shape)}; pass [sequences + 1] offsets from 0 to {tokens}"
        )
    if not may_look_at(cu):
        return
    values = cu.tolist()
    if values[0] != 0 or values[-1] != tokens or any(b < a for a, b in pairwise(values)):
        raise ValueError(
            f"{name}={values} must start at 0, never decrease and end at the {tokens} tokens"
        )
