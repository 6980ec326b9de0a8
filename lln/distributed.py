"""Sequence parallelism: every process holds a slice of the sequence, and only states travel.

A slice is summarised by its :class:`lln.State`, D·(E + 1) numbers per head. Processes exchange
these once in the forward pass and their gradients once in the backward pass: the traffic does not
depend on the length of the sequence. Blocks of the diagonal branch never cross a slice.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from jaxtyping import Bool, Float
from torch import Tensor

from lln.functional import check_pair, explain_sdpa_arguments
from lln.moments import standard_deviations
from lln.moments.calibration import match_heads
from lln.ops.arguments import as_scale, autocast, check_mask, check_positive_int, check_qkv
from lln.ops.block_diagonal import block_diagonal
from lln.ops.causal import causal
from lln.ops.dispatch import choose
from lln.ops.eager.features import finite_or_zero
from lln.ops.eager.parts import blend
from lln.ops.eager.state import merge
from lln.ops.local import read_local
from lln.ops.state import State
from lln.protocols import Call, compute_dtype

if TYPE_CHECKING:
    from lln.moments import MomentFit


@explain_sdpa_arguments
def attention(
    q: Float[Tensor, "B H N D"],
    k: Float[Tensor, "B Hkv M D"],
    v: Float[Tensor, "B Hkv M E"],
    *,
    group: dist.ProcessGroup | None,
    alpha: float | Tensor | None = None,
    beta: float | Tensor | None = None,
    key_mask: Bool[Tensor, "B M"] | None = None,
    query_mask: Bool[Tensor, "B N"] | None = None,
    is_causal: bool = False,
    diag_block: int | None = None,
    scale: float | None = None,
    method: str | MomentFit = "paper",
    normalize_keys: bool = False,
    impl: str | None = None,
) -> Float[Tensor, "B H N E"]:
    r"""LLN attention over a sequence that is split over the processes of a group.

    Process r of the group passes slice r of the sequence and receives that slice of what
    :func:`lln.attention` gives for the whole: with the states S_r of the slices, a query reads
        S_0 ∪ S_1 ∪ …            bidirectional,
        S_0 ∪ … ∪ S_{r−1} ∪ {keys j <= i of slice r}        causal.

    Every process of the group must make the call, and take part in the backward pass.

    Args:
        group: Processes in the order of their slices; None is all of them. Slices may differ in
            length; batch, heads and widths may not.
        alpha, beta: As in :func:`lln.attention`, equal on all processes. Left out, they are
            measured on the whole sequence, at the cost of a second exchange of 6 numbers per head.
        key_mask, query_mask: Those of the slice.
        diag_block: Average with softmax attention inside blocks: LLN+Diag. Slices must be multiples
            of it.
        scale, method, normalize_keys, impl: As in :func:`lln.attention`.

    Returns:
        The slice of the output, same dtype as ``q``. Gradients of q, k, v are complete; those of
        tensors that all processes share (alpha, beta, as all weights of the model) are each
        process's part of a sum, as data-parallel training expects them.

    Numerics: states are merged in float32 or wider. In half precision the two branches of LLN+Diag
    are rounded before they are averaged.

    Example:
        >>> dist.init_process_group("nccl")                       # one slice per GPU
        >>> out = lln.distributed.attention(q, k, v, group=None, diag_block=64)
    """
    q, k, v = autocast(q, k, v)
    check_qkv(q, k, v)
    check_mask("key_mask", key_mask, k.shape[0], k.shape[2], k)
    check_mask("query_mask", query_mask, q.shape[0], q.shape[2], q)
    check_pair(alpha, beta, is_causal)
    near = read_local(head_dim=q.shape[-1], diag_block=diag_block, scale=scale)
    _check_group(group)
    if impl == "reference":
        raise ValueError("impl='reference' has no states to exchange; pass 'triton' or 'eager'")
    _check_slice(q, k, is_causal, diag_block)
    if alpha is None or beta is None:
        alpha, beta = _measured_scales(
            q, k, key_mask, query_mask, group, method, normalize_keys, impl
        )
    scales = {
        "alpha": as_scale("alpha", alpha, q.shape[0], q.shape[1], q),
        "beta": as_scale("beta", beta, k.shape[0], k.shape[1], k),
    }
    options = {"key_mask": key_mask, "normalize_keys": normalize_keys}
    linear = _linear(q, k, v, group, is_causal, impl, **scales, **options)
    if near is None:
        return linear
    local = block_diagonal(
        q,
        k,
        v,
        block=near.block,
        scale=near.scale,
        key_mask=key_mask,
        is_causal=is_causal,
        impl=impl,
    )
    return blend(linear, local, None, q.dtype)


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
    normalize_keys: bool,
) -> Tensor:
    """The LLN branch: summarize the slice, exchange, and attend to what this process sees."""
    keys = {"beta": beta, "key_mask": key_mask, "normalize_keys": normalize_keys}
    own = choose(Call("summarize", k, k, v), impl).summarize(k, v, **keys)
    seen: tuple[Tensor, Tensor] = _Exchange.apply(*own, group, is_causal)  # type: ignore[assignment]
    if is_causal:
        return causal(q, k, v, alpha=alpha, state=State(*seen), impl=impl, **keys)
    return choose(Call("read", q, seen[1], seen[1]), impl).read(q, *seen, alpha=alpha)


class _Exchange(torch.autograd.Function):
    """Exchange the state of each slice for that of all slices, or of those before it.

    With weights w_s = exp(L_s − L) the union is L = logsumexp_s L_s, M = Σ_s w_s M_s, and
        dM_s = w_s dM,     dL_s = w_s (dL + dM·(M_s − M)).
    """

    @staticmethod
    def forward(
        ctx: Any, log_mass: Tensor, mean: Tensor, group: Any, only_before: bool
    ) -> tuple[Tensor, Tensor]:
        states = _gather(_pack(log_mass, mean), group)
        ctx.rank, ctx.group, ctx.only_before = dist.get_rank(group), group, only_before
        if only_before:
            ctx.save_for_backward(states)
            return _union(states[: ctx.rank])
        seen = _union(states)
        ctx.save_for_backward(log_mass, mean, *seen)
        return seen

    @staticmethod
    def backward(ctx: Any, *d_seen: Tensor) -> tuple[Tensor, Tensor, None, None]:
        d_packed = _pack(*d_seen)
        if not ctx.only_before:
            log_mass, mean, *seen = ctx.saved_tensors
            dist.all_reduce(d_packed, group=ctx.group)
            return *_share((log_mass, mean), seen, d_packed), None, None
        (states,) = ctx.saved_tensors
        d_states = _gather(d_packed, ctx.group)
        own = _unpack(states[ctx.rank])
        seen = _union(states[: ctx.rank + 1])
        d_log_mass, d_mean = torch.zeros_like(own[0]), torch.zeros_like(own[1])
        for later in range(ctx.rank + 1, len(states)):
            share = _share(own, seen, d_states[later])
            d_log_mass, d_mean = d_log_mass + share[0], d_mean + share[1]
            seen = merge(*seen, *_unpack(states[later]))
        return d_log_mass, d_mean, None, None


def _share(own: Any, seen: Any, d_seen: Tensor) -> tuple[Tensor, Tensor]:
    """The gradient of one state of a union from that of the union."""
    d_log_mass, d_mean = _unpack(d_seen)
    weight = (own[0] - finite_or_zero(seen[0])).exp()
    d_weight = d_log_mass + (d_mean * (own[1] - seen[1])).sum(-1)
    return weight * d_weight, weight[..., None] * d_mean


def _union(states: Tensor) -> tuple[Tensor, Tensor]:
    """The state of several sets of keys ``[R, B, Hkv, D, 1 + E]``; empty if there are none."""
    log_masses, means = _unpack(states)
    log_mass = log_masses.logsumexp(0)
    weights = (log_masses - finite_or_zero(log_mass)).exp()
    return log_mass, (weights[..., None] * means).sum(0)


def _pack(log_mass: Tensor, mean: Tensor) -> Tensor:
    return torch.cat([log_mass[..., None], mean], dim=-1)


def _unpack(packed: Tensor) -> tuple[Tensor, Tensor]:
    return packed[..., 0], packed[..., 1:]


def _gather(x: Tensor, group: Any) -> Tensor:
    """The tensors of all processes, stacked in the order of their slices."""
    every = x.new_empty((dist.get_world_size(group), *x.shape))
    dist.all_gather(list(every), x.contiguous(), group=group)
    return every


def _measured_scales(
    q: Tensor,
    k: Tensor,
    key_mask: Tensor | None,
    query_mask: Tensor | None,
    group: Any,
    method: str | MomentFit,
    normalize_keys: bool,
    impl: str | None,
) -> tuple[Tensor, Tensor]:
    """alpha and beta of the whole sequence, as constants of the backward pass."""
    key_heads = k.shape[1]
    sigma_q, sigma_k = standard_deviations(
        q, k, key_mask=key_mask, query_mask=query_mask, impl=impl
    )
    own = [
        *_count_and_mean(q.detach(), query_mask, key_heads),
        sigma_q,
        *_count_and_mean(k.detach(), key_mask, key_heads),
        sigma_k,
    ]
    slices = _gather(torch.stack([x.double() for x in own], dim=-1), group)
    sigma_q, sigma_k = (
        _pooled(*part.unbind(-1)).to(sigma_q.dtype) for part in slices.split(3, dim=-1)
    )
    return match_heads(
        sigma_q,
        sigma_k,
        q.shape[1],
        q.shape[-1],
        method=method,
        normalize_keys=normalize_keys,
        impl=impl,
    )


def _count_and_mean(x: Tensor, mask: Tensor | None, key_heads: int) -> tuple[Tensor, Tensor]:
    """Number and mean of the elements of valid tokens, per sample and key head."""
    elements = x.shape[1] // key_heads * x.shape[3]
    if mask is None:
        count = x.new_full((x.shape[0], 1), x.shape[2] * elements, dtype=torch.float64)
    else:
        x = x.masked_fill(~mask[:, None, :, None], 0)
        count = mask.sum(1, keepdim=True).double() * elements
    total = x.sum((2, 3), dtype=compute_dtype(x)).unflatten(1, (key_heads, -1)).sum(-1)
    return count.expand(-1, key_heads), total / count.clamp(min=1)


def _pooled(count: Tensor, mean: Tensor, sigma: Tensor) -> Tensor:
    """The standard deviation of the union of samples with these counts, means and deviations."""
    whole = count.sum(0).clamp(min=1)
    centre = (count * mean).sum(0) / whole
    return ((count * (sigma**2 + (mean - centre) ** 2)).sum(0) / whole).sqrt()


def _check_group(group: Any) -> None:
    if not (dist.is_available() and dist.is_initialized()):
        raise RuntimeError(
            "no process group; call torch.distributed.init_process_group first, e.g. in a script "
            "that is started by torchrun"
        )
    if dist.get_rank(group) < 0:
        raise ValueError("this process is not a member of group; only members may make the call")


def _check_slice(q: Tensor, k: Tensor, is_causal: bool, diag_block: int | None) -> None:
    queries, keys = q.shape[2], k.shape[2]
    if (is_causal or diag_block is not None) and queries != keys:
        option = "is_causal=True" if is_causal else f"diag_block={diag_block}"
        raise ValueError(
            f"q has {queries} tokens but k has {keys} on this process; {option} needs the queries "
            "and keys of the same slice"
        )
    if diag_block is None:
        return
    check_positive_int("diag_block", diag_block)
    if queries % diag_block:
        raise ValueError(
            f"this process holds {queries} tokens, not a multiple of diag_block={diag_block}, so "
            "that a block would lie on two processes; split the sequence at multiples of "
            f"{diag_block}, and pad its end with key_mask"
        )
