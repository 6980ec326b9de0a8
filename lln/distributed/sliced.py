"""LLN attention over slices of a sequence, one on each process of a group."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh

from lln.distributed.agreement import agreed
from lln.distributed.exchange import Exchange, taking_part
from lln.distributed.scales import measured_scales
from lln.distributed.windows import Reach, attend_far, attend_near
from lln.ops.causal.causal import causal
from lln.ops.common.arguments import (
    as_level,
    as_scale,
    autocast,
    check_mask,
    check_pair,
    check_qkv,
    explain_sdpa_arguments,
    read_features,
)
from lln.ops.common.parts import blend
from lln.ops.dispatch import choose
from lln.ops.linear.normalized_keys import normalized_keys
from lln.ops.linear.state import State
from lln.ops.window.block_diagonal import block_diagonal
from lln.ops.window.eager_near_far import combine
from lln.ops.window.near import Near, read_mix, read_near
from lln.protocols import Call, compute_dtype

if TYPE_CHECKING:
    from lln.moments import MomentFit


NEEDS_GAMMA = (
    "near with joint=True needs gamma where a sequence is split over processes; take it from "
    "lln.moments.match_level on a sequence that one process can hold, the same on all processes"
)

# What all processes must have alike.
SHARED = (
    *("the batch", "the number of query heads", "the number of key heads"),
    *("the width of q and k", "the width of v", "the dtype", "the width of the features"),
    *("is_causal", "near", "mix", "method"),
    *("normalize_keys", "alpha", "beta", "gamma"),
)


@explain_sdpa_arguments
def attention(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv M D"],
    v: Float[Tensor, "B Hkv M E"],
    *,
    group: dist.ProcessGroup | DeviceMesh | None,
    alpha: float | Tensor | None = None,
    beta: float | Tensor | None = None,
    key_mask: Bool[Tensor, "B M"] | None = None,
    query_mask: Bool[Tensor, "B N"] | None = None,
    is_causal: bool = False,
    near: int | Near | None = None,
    mix: str | float | Tensor = "average",
    gamma: float | Tensor | None = None,
    features: tuple[Float[Tensor, "B H N S"], Float[Tensor, "B Hkv M S"]] | None = None,
    method: str | MomentFit = "paper",
    normalize_keys: bool = False,
    impl: str | None = None,
) -> Float[Tensor, "B H N E"]:
    r"""LLN attention over a sequence that is split over the processes of a group.

    Process r of the group passes slice r of the sequence and receives that slice of what
    :func:`lln.attention` gives for the whole: with the states S_r of the slices, a query reads
        S_0 ∪ S_1 ∪ …            bidirectional,
        S_0 ∪ … ∪ S_{r−1} ∪ {keys j <= i of slice r}        causal.

    Every process of the group must make the call, and take part in the backward pass: where
    gradients are computed the output has one, also on a process whose q, k and v need none.

    Args:
        q: Queries of its slice, ``[B, H, N, D]``, any floating dtype.
        k: Keys of its slice, ``[B, Hkv, M, D]``.
        v: Values of its slice, ``[B, Hkv, M, E]``.
        group: Processes in the order of their slices, or a mesh of one dimension, such as
            ``mesh["context"]``; None is all of them. Slices may differ in length; batch, heads,
            widths and options may not. What is wrong on one process is an error on all of them, at
            the cost of an exchange of 37 numbers, for which the host waits.
        alpha, beta: As in :func:`lln.attention`, equal on all processes. Left out, they are
            measured on the whole sequence, at the cost of a second exchange of 6 numbers per head.
        key_mask, query_mask: Those of the slice.
        near: As in :func:`lln.attention`, without first keys that all see. Slices must be multiples
            of its blocks, and at least as long as its windows reach beyond them.
        mix, method, normalize_keys: As in :func:`lln.attention`.
        gamma: As in :func:`lln.attention`, equal on all processes; one normaliser needs it.
        features: As in :func:`lln.attention`, those of the slice, ``[B, H, N, S]`` and
            ``[B, Hkv, M, S]``.
        impl: "triton", "eager" or None; only plain PyTorch, "eager", for one normaliser and
            for windows that are wider than their block.

    Returns:
        The slice of the output, same dtype as ``q``. Gradients of q, k, v are complete; those of
        tensors that all processes share (alpha, beta, as all weights of the model) are each
        process's part of a sum, as data-parallel training expects them.

    Numerics: states are merged in float32 or wider. In half precision the two branches of LLN+Diag
    are rounded before they are averaged.

    Example:
        >>> dist.init_process_group("nccl")                       # one slice per GPU
        >>> out = lln.distributed.attention(q, k, v, group=None, near=64)
    """
    group = _read_group(group)
    with agreed(group, SHARED) as shared:
        q, k, v = autocast(q, k, v)
        check_qkv(q, k, v)
        check_mask("key_mask", key_mask, k.shape[0], k.shape[2], k)
        check_mask("query_mask", query_mask, q.shape[0], q.shape[2], q)
        check_pair(alpha, beta, is_causal)
        q_features, k_features = read_features(q, k, features, alpha)
        near = read_near(near, q.shape[-1], mix, gamma)
        weight = read_mix(mix, q.shape[1], q)
        _check_possible(impl, near)
        _check_slice(q, k, is_causal, near)
        level = None
        if near is not None and near.joint:
            if gamma is None:
                raise ValueError(NEEDS_GAMMA)
            level = as_level("gamma", gamma, q.shape[0], q.shape[1], q)
        if alpha is not None and beta is not None:
            alpha = as_scale("alpha", alpha, q.shape[0], q.shape[1], q)
            beta = as_scale("beta", beta, k.shape[0], k.shape[1], k)
        sizes = (*q.shape[:2], k.shape[1], q.shape[3], v.shape[3])
        slots = None if k_features is None else k_features.shape[3]
        told = (compute_dtype(q, k, v), slots, is_causal, near, mix, method, normalize_keys)
        values = (*sizes, *told, alpha, beta, level)
        shared.update(zip(SHARED, values, strict=True))
    if alpha is None or beta is None:
        alpha, beta = measured_scales(
            q, k, key_mask, query_mask, group, method, normalize_keys, impl
        )
    alpha = as_scale("alpha", alpha, q.shape[0], q.shape[1], q)
    beta = as_scale("beta", beta, k.shape[0], k.shape[1], k)
    seen = (q, k) if q_features is None or k_features is None else (q_features, k_features)
    if normalize_keys:
        seen, beta = (seen[0], normalized_keys(seen[1], beta, key_mask)), torch.ones_like(beta)
    options: dict[str, Any] = {"alpha": alpha, "beta": beta, "key_mask": key_mask}
    if near is None:
        return _linear(*seen, v, group, is_causal, impl, **options)
    if level is not None:
        reach = Reach(q, k, v, near, group, key_mask, is_causal)
        local = attend_near(reach, near, is_causal)
        if seen[1] is not k:
            reach = Reach(*seen, v, near, group, key_mask, is_causal)
        linear = attend_far(*seen, v, reach, near, group, is_causal, **options)
        return combine(local, linear, level).to(q.dtype)
    linear = _linear(*seen, v, group, is_causal, impl, **options)
    if near.needs:
        reach = Reach(q, k, v, near, group, key_mask, is_causal)
        local, _ = attend_near(reach, near, is_causal)
    else:
        local = block_diagonal(
            q, k, v, **near.blocks, key_mask=key_mask, is_causal=is_causal, impl=impl
        )
    return blend(linear, local, weight, q.dtype)


def _linear(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    group: Any,
    is_causal: bool,
    impl: str | None,
    *,
    alpha: Tensor,
    beta: Tensor,
    key_mask: Tensor | None,
) -> Tensor:
    """The LLN branch: summarize the slice, exchange, and attend to what this process sees."""
    keys = {"beta": beta, "key_mask": key_mask}
    log_mass, mean = choose(Call("summarize", k, k, v), impl).summarize(k, v, **keys)
    seen: tuple[Tensor, Tensor] = Exchange.apply(  # type: ignore[assignment]
        taking_part(log_mass), mean, group, is_causal
    )
    if is_causal:
        return causal(q, k, v, alpha=alpha, state=State(*seen), impl=impl, **keys)
    return choose(Call("read", q, seen[1], seen[1]), impl).read(q, *seen, alpha=alpha)


def _read_group(group: Any) -> Any:
    """Return the processes of a group or of a mesh."""
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "no process group; call torch.distributed.init_process_group first, e.g. in a script "
            "that is started by torchrun"
        )
    if isinstance(group, DeviceMesh):
        if group.ndim != 1:
            names = group.mesh_dim_names or ()
            raise ValueError(
                f"group is a mesh of {group.ndim} dimensions {names}; pass the one that splits the "
                'tokens, e.g. mesh["context"]'
            )
        group = group.get_group()
    if dist.get_rank(group) < 0:
        raise ValueError("this process is not a member of group; only members may make the call")
    return group


def _check_possible(impl: str | None, near: Near | None) -> None:
    if impl == "reference":
        raise ValueError("impl='reference' has no states to exchange; pass 'triton' or 'eager'")
    if near is not None:
        near.check_split()
    if near is not None and not near.is_plain and impl not in (None, "eager"):
        raise ValueError(
            f"impl={impl!r} cannot run here: one normaliser for both branches, and windows "
            "wider than their block, are plain PyTorch for a split sequence; pass 'eager' or leave "
            "impl out"
        )


def _check_slice(q: Tensor, k: Tensor, is_causal: bool, near: Near | None) -> None:
    queries, keys = q.shape[2], k.shape[2]
    if (is_causal or near is not None) and queries != keys:
        option = "is_causal=True" if is_causal else f"near={near}"
        raise ValueError(
            f"q has {queries} tokens but k has {keys} on this process; {option} needs the queries "
            "and keys of the same slice"
        )
    if near is not None:
        near.check_slice(queries)
